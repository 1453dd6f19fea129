/* What is done row by row beside the tile: a partial that is there already is merged, one is finished, delta. Columns are contiguous. */
#ifndef RINGMPI_ROWS_H
#define RINGMPI_ROWS_H

#include "merge.h"
#include "told.h"

typedef struct { int64_t batch, rows, heads, v_dim; int threads; } extent;

ALWAYS extent extent_of(const description *o, int threads) { return (extent){o->shape[0], o->shape[1], o->shape[2], o->shape[3], threads}; }

typedef void on_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i);

static void each_row(on_row *work, const void *job, const extent *of) {
  const int64_t rows = of->batch * of->rows;
#ifdef _OPENMP
#pragma omp parallel for num_threads(of->threads) if (of->threads > 1)
#endif
  for (int64_t r = 0; r < rows; r++) {
    const int64_t b = r / of->rows, i = r % of->rows;
    for (int64_t h = 0; h < of->heads; h++) work(job, of, b, h, i);
  }
}

/* A partial is merged into a place in another. */
typedef struct { place into; partial other; } merging;

static void merge_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i) {
  const merging *g = job;
  const partial *to = &g->into.whole;
  const int64_t b0 = g->into.batch0 + b, h0 = g->into.head0 + h, i0 = g->into.row0 + i;
  real *m = row_of(&to->m, b0, h0, i0), *l = row_of(&to->l, b0, h0, i0), *restrict o = row_of(&to->o, b0, h0, i0);
  const real *restrict o2 = row_of(&g->other.o, b, h, i);
  const joint j = join(*m, *l, *row_of(&g->other.m, b, h, i), *row_of(&g->other.l, b, h, i));
  if (j.how == SET) memcpy(o, o2, of->v_dim * sizeof(real));
  if (j.how == ADD) for (int64_t d = 0; d < of->v_dim; d++) o[d] = o[d] * j.mine + o2[d] * j.its;
  *m = j.m, *l = j.l;
}

/* out = o / l in the memory of o, lse = m + log l; a row over no keys gives 0, whatever its o holds, and -inf. */
typedef struct { partial total; array lse; } finishing;

static void finish_row(const void *job, const extent *of, int64_t b, int64_t h, int64_t i) {
  const finishing *g = job;
  const real m = *row_of(&g->total.m, b, h, i), sum = *row_of(&g->total.l, b, h, i), l = sum > 0 ? sum : 1;
  real *o = row_of(&g->total.o, b, h, i);
  if (sum == 0 && m == -(real)__builtin_inf()) memset(o, 0, of->v_dim * sizeof(real));
  for (int64_t d = 0; d < of->v_dim; d++) o[d] /= l;
  *row_of(&g->lse, b, h, i) = (real)((double)m + __builtin_log((double)l));
}

/* delta = sum(dout * out), lane by lane. */
typedef struct { array dout, out, delta; } dotting;

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
