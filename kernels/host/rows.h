/* What is done row by row beside the tile: partials merge, a partial is finished, delta. Columns are contiguous. */
#ifndef RINGMPI_ROWS_H
#define RINGMPI_ROWS_H

#include "call.h"

/* o (batch, rows, heads, v_dim), m and l (batch, heads, rows). */
typedef struct { array o, m, l; } partial;
typedef struct { int64_t batch, rows, heads, v_dim, threads; } extent;

typedef void on_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i);

static void each_row(on_row *work, const void *job, const extent *of) {
  const int64_t rows = of->batch * of->rows;
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)of->threads) if (of->threads > 1)
#endif
  for (int64_t r = 0; r < rows; r++) {
    const int64_t b = r / of->rows, i = r % of->rows;
    for (int64_t h = 0; h < of->heads; h++) work(job, of, b, h, i);
  }
}

/* `into`, from batch entry batch0, row row0 and head head0 on, absorbs `other`: both come to the larger maximum (arXiv:1805.02867).
 * Merging an empty one changes nothing, merging into one copies. */
typedef struct { partial into, other; int64_t batch0, row0, head0; extent of; } merging;

static void merge_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i) {
  const merging *g = job;
  const int64_t b0 = g->batch0 + b, h0 = g->head0 + h, i0 = g->row0 + i;
  real *m = row_of(&g->into.m, b0, h0, i0), *l = row_of(&g->into.l, b0, h0, i0), *restrict o = row_of(&g->into.o, b0, h0, i0);
  const real m2 = *row_of(&g->other.m, b, h, i), l2 = *row_of(&g->other.l, b, h, i), *restrict o2 = row_of(&g->other.o, b, h, i);
  const real none = -(real)__builtin_inf(), top = *m < m2 || m2 != m2 ? m2 : *m;
  if (m2 == none && l2 == 0) return;
  if (*m == none && *l == 0) {
    memcpy(o, o2, of->v_dim * sizeof(real)), *m = m2, *l = l2;
    return;
  }
  const real mine = *m == top || top == none ? 1 : (real)__builtin_exp((double)*m - (double)top);
  const real its = m2 == top || top == none ? 1 : (real)__builtin_exp((double)m2 - (double)top);
  for (int64_t d = 0; d < of->v_dim; d++) o[d] = o[d] * mine + o2[d] * its;
  *l = *l * mine + l2 * its;
  *m = top;
}

/* out = o / l, lse = m + log l; a row over no keys gives 0 and -inf. */
typedef struct { partial total; array out, lse; extent of; } finishing;

static void finish_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i) {
  const finishing *g = job;
  const real *restrict o = row_of(&g->total.o, b, h, i), sum = *row_of(&g->total.l, b, h, i), l = sum > 0 ? sum : 1;
  real *restrict out = row_of(&g->out, b, h, i);
  for (int64_t d = 0; d < of->v_dim; d++) out[d] = o[d] / l;
  *row_of(&g->lse, b, h, i) = (real)((double)*row_of(&g->total.m, b, h, i) + __builtin_log((double)l));
}

/* delta = sum(dout * out), lane by lane. */
typedef struct { array dout, out, delta; extent of; } dotting;

static void dot_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i) {
  const dotting *g = job;
  const real *x = row_of(&g->dout, b, h, i), *y = row_of(&g->out, b, h, i);
  vector sums = {0};
  real sum = 0;
  int64_t d = 0;
  for (; d + LANES <= of->v_dim; d += LANES) sums += *(const loose_vector *)(x + d) * *(const loose_vector *)(y + d);
  for (; d < of->v_dim; d++) sum += x[d] * y[d];
  for (int64_t lane = 0; lane < LANES; lane++) sum += sums[lane];
  *row_of(&g->delta, b, h, i) = sum;
}

#endif
