/* Pairs of bfloat16 in the place of a float: a product takes half as many steps, each of which adds two exact products to a float.
 *
 * A pair is two columns of q and k, or two keys of the weights and v, the first in its low half. AVX512-BF16 and Arm's BF16 have an
 * instruction for such a step (DOTS; it may take denormals for zeros). -DEMULATED_DOTS does it by two multiply-adds, to test all else. */
#ifndef RINGMPI_PAIRS_H
#define RINGMPI_PAIRS_H

#include "vector.h"

#if (defined __AVX512BF16__ && VECTOR_BYTES == 64) || defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC || defined EMULATED_DOTS
#define DOTS (!IS_DOUBLE)
#else
#define DOTS 0
#endif

typedef uint16_t bfloat_bits __attribute__((may_alias));

/* c += the dot products of a pair with each pair of b. */
ALWAYS vector dot_add(vector c, const real *pair, vector b) {
  int32_t bits;
  memcpy(&bits, pair, sizeof bits);
#if defined __AVX512BF16__ && VECTOR_BYTES == 64
  return (vector)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)b);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  return (vector)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)vdupq_n_s32(bits), (bfloat16x8_t)b);
#else
  const lane_mask a = (lane_mask){0} + (integer)bits, high = (lane_mask){0} - 0x10000;
  c += (vector)(a & high) * (vector)((lane_mask)b & high);
  return c + (vector)(a << 16) * (vector)((lane_mask)b << 16);
#endif
}

/* Weights of two keys as pairs, rounded to nearest, to even where both are. */
ALWAYS vector pair_of(vector first, vector second) {
  const lane_mask low = (lane_mask)first, high = (lane_mask)second;
  const lane_mask one = low + 0x7fff + (low >> 16 & 1), two = high + 0x7fff + (high >> 16 & 1);
  return (vector)((one >> 16 & 0xffff) | (two & -0x10000));
}

/* out[x] = the pair of column first + x of two rows, for x < w; columns that do not exist are zeros. */
ALWAYS void zip(const real *row, const real *next, int64_t first, int64_t columns, int64_t w, real *out) {
  const bfloat_bits *low = (const bfloat_bits *)row, *high = (const bfloat_bits *)next;
  for (int64_t x = first; x < first + w; x++) {
    const uint32_t pair = x < columns ? low[x] | (uint32_t)high[x] << 16 : 0;
    memcpy(out++, &pair, sizeof pair);
  }
}

#endif
