/* Packing: rows of q, k, v or dout as the products read them.
 *
 *   across   out[column][w]          w rows side by side as lanes or scalars: a transpose
 *   along    out[panel][row][w]      w columns at a time
 *
 * Rows may be stored as float, double, half or bfloat16, in any strides; rows that do not exist or that nothing sees are
 * zeros, whatever is stored there, for 0 * NaN would be NaN. */
#ifndef RINGMPI_PACK_H
#define RINGMPI_PACK_H

#include "call.h"

typedef real block_row __attribute__((vector_size(SCALARS * sizeof(real)), aligned(1), may_alias));

#if defined __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define IN_REGISTERS
#endif
#endif
/* Rows of SCALARS x SCALARS blocks: two side by side where a register holds both. */
enum { BLOCKS = SCALARS == 4 && VECTOR_BYTES == 32 && sizeof(real) == 4 ? 2 : 1, WIDE = BLOCKS * SCALARS };
typedef real two_blocks __attribute__((vector_size(2 * SCALARS * sizeof(real)), aligned(1), may_alias));
typedef real wide_row __attribute__((vector_size(WIDE * sizeof(real)), aligned(1), may_alias));

/* Rows times a factor each, and times `rest` more: q's one factor has a rest, to be taken beyond the precision of real. */
typedef struct { const real *by; real rest; } factors;

/* SCALARS rows, fetched. */
typedef struct { const real *row[SCALARS]; } bunch;

/* Where rows are fetched from: rows of one head, which of them exist, and space for those that must be converted. */
typedef struct {
  const char *data;
  int64_t token, column, stored, columns, storage, direct; /* columns as they are stored, and as reals or pairs */
  real *zeros, *converted; /* `columns` each; SCALARS times that */
} source;

ALWAYS int64_t source_reals(int64_t columns) { return (SCALARS + 1) * round_up(columns, SCALARS); }
ALWAYS int64_t fetched_reals(const call *c) { return source_reals(c->head_dim) + source_reals(c->v_dim); }

/* How many reals, or pairs, the columns of a row make. */
ALWAYS int64_t packed_columns(int64_t stored, int64_t storage) { return storage == AS_PAIRS ? (stored + 1) / 2 : stored; }

static source source_of(const array *a, int64_t storage, int64_t b, int64_t h, int64_t stored, real *space) {
  const int64_t columns = packed_columns(stored, storage), beside = storage == AS_PAIRS && stored % 2 == 0 ? 2 : (int64_t)sizeof(real);
  source s = {head_of(a, b, h), a->token, a->column, stored, columns, storage, 0, space, space + round_up(columns, SCALARS)};
  s.direct = (storage == AS_REAL || beside == 2) && a->column == beside && ((uintptr_t)s.data | (uintptr_t)a->token) % sizeof(real) == 0;
  memset(s.zeros, 0, columns * sizeof(real));
  return s;
}

/* A head's q or k, and its v or dout; in a space for fetched_reals they do not disturb each other. */
ALWAYS source source_of_keys(const call *c, const array *a, int64_t storage, int64_t b, int64_t h, real *space) {
  return source_of(a, storage, b, h, c->head_dim, space);
}
ALWAYS source source_of_values(const call *c, const array *a, int64_t storage, int64_t b, int64_t h, real *space) {
  return source_of(a, storage, b, h, c->v_dim, space + source_reals(c->head_dim));
}

ALWAYS float from_half(uint16_t h) {
  union { uint32_t bits; float value; } x = {(uint32_t)(h & 0x7fff) << 13};
  x.value *= 0x1p112f; /* exponents of half start 112 higher; exact, denormals too */
  if ((h & 0x7c00) == 0x7c00) x.bits |= 0x7f800000u;
  x.bits |= (uint32_t)(h & 0x8000) << 16;
  return x.value;
}

ALWAYS float from_bfloat(uint16_t h) {
  union { uint32_t bits; float value; } x = {(uint32_t)h << 16};
  return x.value;
}

/* With `step` a constant where columns are contiguous, the loops become vector code. */
ALWAYS void convert_row(const char *from, int64_t step, int64_t columns, int64_t storage, real *to) {
  uint16_t h;
  if (storage == AS_HALF)
    for (int64_t t = 0; t < columns; t++) memcpy(&h, from + t * step, 2), to[t] = (real)from_half(h);
  else if (storage == AS_BFLOAT)
    for (int64_t t = 0; t < columns; t++) memcpy(&h, from + t * step, 2), to[t] = (real)from_bfloat(h);
  else if (storage == AS_PAIRS)
    for (int64_t t = 0; t < columns; t++) memcpy((char *)to + 2 * t, from + t * step, 2);
  else
    for (int64_t t = 0; t < columns; t++) memcpy(to + t, from + t * step, sizeof(real));
}

APART void convert(const source *s, const char *from, real *to) {
  if (s->stored % 2) to[s->columns - 1] = 0; /* of the last pair only one column is stored */
  if (s->column == 2 && s->storage != AS_REAL) convert_row(from, 2, s->stored, s->storage, to);
  else convert_row(from, s->column, s->stored, s->storage, to);
}

/* Rows of one head lie far apart, where no processor foresees them. A prefetch beyond the last row reads nothing. */
ALWAYS void foresee(const char *row, int64_t token, int64_t bytes) {
  const uintptr_t ahead = (uintptr_t)row + 2 * SCALARS * (uintptr_t)token;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const void *)(ahead + at));
}

/* SCALARS rows from `first` on; those beyond `end`, or not `present`, are zeros. */
ALWAYS bunch fetch(const source *s, int64_t first, int64_t end, const uint8_t *present) {
  bunch out;
  for (int64_t i = 0; i < SCALARS; i++) {
    int64_t r = first + i;
    const char *from = s->data + r * s->token;
    real *to = s->converted + i * round_up(s->columns, SCALARS);
    if (r >= end || (present && !present[i])) out.row[i] = s->zeros;
    else if (s->direct) out.row[i] = (const real *)from, foresee(from, s->token, s->columns * (int64_t)sizeof(real));
    else convert(s, from, to), out.row[i] = to;
  }
  return out;
}

/* A row of each of the blocks, of which there may be only one. */
ALWAYS wide_row beside(block_row first, block_row second) {
#if defined IN_REGISTERS && SCALARS == 4
  two_blocks both = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  block_row both[] = {first, second};
#endif
  return BLOCKS == 2 ? *(wide_row *)&both : *(wide_row *)&first;
}

/* The blocks of some rows transposed in registers, by halves, quarters and eighths. */
ALWAYS void transpose(wide_row wide[SCALARS]) {
  block_row *x = (block_row *)wide;
#define SWAP(row, x, s, low, high)                                                                                     \
  UNROLL for (int i = 0; i < SCALARS; i++) if (!(i & s)) {                                                             \
    row a = x[i], b = x[i + s];                                                                                        \
    x[i] = __builtin_shufflevector low;                                                                                \
    x[i + s] = __builtin_shufflevector high;                                                                           \
  }
#if defined IN_REGISTERS && SCALARS == 8
  SWAP(block_row, x, 4, (a, b, 0, 1, 2, 3, 8, 9, 10, 11), (a, b, 4, 5, 6, 7, 12, 13, 14, 15))
  SWAP(block_row, x, 2, (a, b, 0, 1, 8, 9, 4, 5, 12, 13), (a, b, 2, 3, 10, 11, 6, 7, 14, 15))
  SWAP(block_row, x, 1, (a, b, 0, 8, 2, 10, 4, 12, 6, 14), (a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#elif defined IN_REGISTERS
  if (BLOCKS == 2) {
    two_blocks *both = (two_blocks *)wide;
    SWAP(two_blocks, both, 2, (a, b, 0, 1, 8, 9, 4, 5, 12, 13), (a, b, 2, 3, 10, 11, 6, 7, 14, 15))
    SWAP(two_blocks, both, 1, (a, b, 0, 8, 2, 10, 4, 12, 6, 14), (a, b, 1, 9, 3, 11, 5, 13, 7, 15))
  } else {
    SWAP(block_row, x, 2, (a, b, 0, 1, 4, 5), (a, b, 2, 3, 6, 7))
    SWAP(block_row, x, 1, (a, b, 0, 4, 2, 6), (a, b, 1, 5, 3, 7))
  }
#else
  for (int k = 0; k < BLOCKS; k++)
    for (int i = 0; i < SCALARS; i++)
      for (int j = 0; j < i; j++) {
        real t = wide[i][k * SCALARS + j];
        wide[i][k * SCALARS + j] = wide[j][k * SCALARS + i];
        wide[j][k * SCALARS + i] = t;
      }
#endif
#undef SWAP
}

/* out[column * w + i] = row i's column, times its factor where there are factors, for the first `n` rows of the bunch. */
ALWAYS void across(const bunch *rows, int64_t n, int64_t columns, int64_t w, factors f, real *out) {
  int64_t t = 0;
  for (; n == SCALARS && t + WIDE <= columns; t += WIDE) {
    wide_row x[SCALARS];
    UNROLL for (int i = 0; i < SCALARS; i++) {
      x[i] = *(const wide_row *)(rows->row[i] + t);
      if (f.by) x[i] = f.rest != 0 ? x[i] * f.by[i] + x[i] * f.rest : x[i] * f.by[i];
    }
    transpose(x);
    UNROLL for (int i = 0; i < WIDE; i++) *(block_row *)(out + (t + i) * w) = ((block_row *)&x[i % SCALARS])[i / SCALARS];
  }
  for (; t < columns; t++)
    for (int64_t i = 0; i < n; i++) {
      real x = rows->row[i][t];
      out[t * w + i] = !f.by ? x : f.rest != 0 ? x * f.by[i] + x * f.rest : x * f.by[i];
    }
}

/* out[i * w + x] = column first + x of row i of the first `n`, times its factor where there are factors; columns that do not exist
 * are zeros. w is a number of whole vectors, or SCALARS. */
ALWAYS void along(const bunch *rows, int64_t n, int64_t first, int64_t columns, const int w, const real *by, real *out) {
  const int64_t left = columns - first;
  for (int64_t i = 0; i < n; i++) {
    const real f = by ? by[i] : 1, *from = rows->row[i] + first;
    if (left >= w && w % LANES == 0)
      UNROLL for (int x = 0; x < w; x += LANES) *(loose_vector *)(out + i * w + x) = f * *(const loose_vector *)(from + x);
    else if (left >= w)
      *(block_row *)(out + i * w) = f * *(const block_row *)from;
    else
      for (int64_t x = 0; x < w; x++) out[i * w + x] = x < left ? f * from[x] : 0;
  }
}

#endif
