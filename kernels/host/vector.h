/* Vectors of the number type, in GCC/Clang vector extensions: one source for AVX-512, AVX2, NEON and plain C.
 *
 * `real` is float or double (-DREAL), `integer` the integer of its size, `vector` VECTOR_BYTES of reals. In the products
 * of attention the lanes are query rows (or columns of a gradient), so nothing here ever shuffles lanes. */
#ifndef RINGMPI_VECTOR_H
#define RINGMPI_VECTOR_H

#include <stdint.h>
#include <string.h>
#if defined __SSE2__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

#ifndef REAL
#define REAL float
#endif
#define ALWAYS static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

/* Register blocks: SCALARS x VECTORS for products whose lanes are rows, STEPS x COLUMNS for those whose lanes are columns.
 * They fill the registers: 24 accumulators of 32, or 12 of 16, beside the operands. */
#ifndef VECTOR_BYTES
#if defined __AVX512F__
#define VECTOR_BYTES 64
#elif defined __AVX2__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif
#if defined __AVX512F__ || defined __aarch64__ || VECTOR_BYTES == 64
#define SCALARS 8
#define STEPS 12
#else
#define SCALARS 4
#define STEPS 6
#endif
enum { VECTORS = 3, COLUMNS = 2 };

typedef REAL real;
typedef __typeof__(_Generic((real)0, float: (int32_t)0, double: (int64_t)0)) integer;
#define IS_DOUBLE (sizeof(real) == 8)
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(real)))
typedef real vector __attribute__((vector_size(VECTOR_BYTES)));
typedef real vector_in_memory __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef real loose_vector __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef integer lane_mask __attribute__((vector_size(VECTOR_BYTES)));
typedef integer mask_in_memory __attribute__((vector_size(VECTOR_BYTES), may_alias));

ALWAYS vector load(const real *p) { return *(const vector_in_memory *)p; }
ALWAYS void store(real *p, vector x) { *(vector_in_memory *)p = x; }
ALWAYS vector every(real x) { return (vector){0} + x; }
ALWAYS vector keep(lane_mask where, vector x, vector otherwise) {
  return (vector)(((lane_mask)x & where) | ((lane_mask)otherwise & ~where));
}

/* a > b ? a : b, which is b when either is NaN (NEON: NaN when either is). */
ALWAYS vector larger(vector a, vector b) {
#define AS(single, both) (IS_DOUBLE ? (vector)(both) : (vector)(single))
#if defined __AVX512F__ && VECTOR_BYTES == 64
  return AS(_mm512_max_ps((__m512)a, (__m512)b), _mm512_max_pd((__m512d)a, (__m512d)b));
#elif defined __AVX2__ && VECTOR_BYTES == 32
  return AS(_mm256_max_ps((__m256)a, (__m256)b), _mm256_max_pd((__m256d)a, (__m256d)b));
#elif defined __SSE2__ && VECTOR_BYTES == 16
  return AS(_mm_max_ps((__m128)a, (__m128)b), _mm_max_pd((__m128d)a, (__m128d)b));
#elif defined __aarch64__ && VECTOR_BYTES == 16
  return AS(vmaxq_f32((float32x4_t)a, (float32x4_t)b), vmaxq_f64((float64x2_t)a, (float64x2_t)b));
#else
  return keep(a > b, a, b);
#endif
}

/* a * b - c in one rounding, where vectors can (FUSED); asked for by name, since no compiler promises to contract. */
#if (defined __AVX512F__ && VECTOR_BYTES == 64) || (defined __FMA__ && VECTOR_BYTES == 32) || (defined __aarch64__ && VECTOR_BYTES == 16)
#define FUSED 1
#else
#define FUSED 0
#endif
ALWAYS vector product_less(vector a, vector b, vector c) {
#if defined __AVX512F__ && VECTOR_BYTES == 64
  return AS(_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c), _mm512_fmsub_pd((__m512d)a, (__m512d)b, (__m512d)c));
#elif defined __FMA__ && VECTOR_BYTES == 32
  return AS(_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c), _mm256_fmsub_pd((__m256d)a, (__m256d)b, (__m256d)c));
#elif defined __aarch64__ && VECTOR_BYTES == 16
  return AS(vfmaq_f32((float32x4_t)-c, (float32x4_t)a, (float32x4_t)b), vfmaq_f64((float64x2_t)-c, (float64x2_t)a, (float64x2_t)b));
#else
  return a * b - c;
#endif
}
#undef AS

/* c += a * b, for a scalar a: in place, and so no register is lost to a copy where 16 are all there are. Otherwise the compiler's own
 * choice, whose operands HOLD keeps in registers: it would rather read them from memory at every use, and two loads a cycle then
 * feed fewer multiply-adds than two a cycle.
 * AT_ONCE steps of a product have no branch between them: a core whose other thread is busy starts half as many instructions, and
 * then those of the loop are missed by the multiply-adds (0.75 of a loop of nothing else became 0.89, Zen 3). */
#if defined __FMA__ && VECTOR_BYTES == 32
#define AT_ONCE 8
#define MULTIPLY_ADD(c, a, b)                                                                                          \
  if (IS_DOUBLE) __asm__("vfmadd231pd %1, %2, %0" : "+x"(c) : "x"((a) - (vector){0}), "x"(b));                         \
  else __asm__("vfmadd231ps %1, %2, %0" : "+x"(c) : "x"((a) - (vector){0}), "x"(b))
#define HOLD(x) (void)0
#else
#define AT_ONCE 1
#define MULTIPLY_ADD(c, a, b) (c) += (a) * (b)
#if defined __AVX512F__ || (defined __SSE2__ && VECTOR_BYTES == 16)
#define HOLD(x) __asm__("" : "+v"(x))
#elif defined __aarch64__ && VECTOR_BYTES == 16
#define HOLD(x) __asm__("" : "+w"(x))
#else
#define HOLD(x) (void)0
#endif
#endif

/* Has memory brought near that is written soon: rows of one head lie far apart, where no processor foresees them. Asking for what
 * is not there does nothing, and so the address is a number. */
ALWAYS void ask_for(const real *p, int64_t at, int64_t count) {
  const uintptr_t from = (uintptr_t)p + (uintptr_t)at * sizeof(real);
  for (int64_t x = 0; x < count * (int64_t)sizeof(real); x += 64) __builtin_prefetch((const void *)(from + (uintptr_t)x), 1);
}

ALWAYS int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* Of n in as few parts of at most `most` as there may be, the length of one: a multiple of `unit`, as `most` is. None is much shorter. */
ALWAYS int64_t even_part(int64_t n, int64_t most, int64_t unit) {
  const int64_t parts = (n + most - 1) / most;
  return parts ? round_up((n + parts - 1) / parts, unit) : unit;
}
ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
