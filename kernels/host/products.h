/* The inner products: a block of accumulators in registers, fed by broadcast scalars and vectors.
 *
 * All matrix work of attention is this one loop. Scalars are keys or value columns and lanes query rows (SCALARS x VECTORS),
 * or scalars are rows or keys and lanes columns of a gradient (STEPS x COLUMNS). Numbers are reals, or pairs of bfloat16. */
#ifndef RINGMPI_PRODUCTS_H
#define RINGMPI_PRODUCTS_H

#include "pairs.h"

enum { REALS, PAIRS };

/* One step: c[i][v] += a[i * a_row] * b[v * LANES ..]. One flat loop over the accumulators: compilers unroll innermost loops before
 * they split arrays into registers, so a nest of loops would leave c in memory. */
ALWAYS void step(const int of, const int M, const int N, const real *restrict a, int64_t a_row, const real *restrict b, vector *c) {
  vector lanes[4];
  UNROLL for (int v = 0; v < N; v++) {
    lanes[v] = load(b + v * LANES);
    HOLD(lanes[v]);
  }
  UNROLL for (int i = 0; i < M * N; i++) {
    if (of == PAIRS) c[i] = dot_add(c[i], a + i / N * a_row, lanes[i % N]);
    else MULTIPLY_ADD(c[i], a[i / N * a_row], lanes[i % N]);
  }
}

/* c[i][v] = sum over t < steps of a[i * a_row + t * a_step] * b[t * b_step + v * LANES ..]. */
ALWAYS void product(const int of, const int M, const int N, const real *restrict a, int64_t a_row, int64_t a_step,
                    const real *restrict b, int64_t b_step, int64_t steps, vector *c) {
  UNROLL for (int i = 0; i < M * N; i++) c[i] = (vector){0};
  int64_t t = 0;
  for (; AT_ONCE > 1 && t + AT_ONCE <= steps; t += AT_ONCE)
    UNROLL for (int u = 0; u < AT_ONCE; u++) step(of, M, N, a + (t + u) * a_step, a_row, b + (t + u) * b_step, c);
  for (; t < steps; t++) step(of, M, N, a + t * a_step, a_row, b + t * b_step, c);
}

/* out[i][..] += factor * c[i][..], of which `rows` x `columns` exist; out has any alignment. */
ALWAYS void add_to(const int M, const int N, const vector *c, real *out, int64_t out_row, int64_t rows, int64_t columns, real factor) {
  if (__builtin_expect(rows >= M && columns >= N * LANES, 1)) {
    UNROLL for (int i = 0; i < M * N; i++) {
      loose_vector *to = (loose_vector *)(out + i / N * out_row + i % N * LANES);
      *to += factor * c[i];
    }
    return;
  }
  real all[M * N * LANES];
  UNROLL for (int i = 0; i < M * N; i++) memcpy(all + i * LANES, &c[i], sizeof(vector));
  for (int64_t i = 0; i < least(M, rows); i++)
    for (int64_t x = 0; x < least(N * LANES, columns); x++) out[i * out_row + x] += factor * all[i * N * LANES + x];
}

#endif
