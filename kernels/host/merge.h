/* Merging partials: both come to the larger maximum (arXiv:1805.02867), in place. Merging an empty one changes nothing, merging into one copies. */
#ifndef RINGMPI_MERGE_H
#define RINGMPI_MERGE_H

#include "call.h"

/* o, m, l of `into`, from batch entry batch0, row row0 and head head0 on, absorb those of `other`: (batch, rows, heads, v_dim) and
 * (batch, heads, rows), columns contiguous. */
typedef struct { array o, m, l; } partial;
typedef struct { partial into, other; int64_t batch0, row0, head0, batch, rows, heads, v_dim, threads; } merging;

ALWAYS real *mine_of(const merging *g, const array *a, int64_t b, int64_t h, int64_t i) {
  return row_of(a, g->batch0 + b, g->head0 + h, g->row0 + i);
}

static void merge_row(const merging *g, int64_t b, int64_t h, int64_t i) {
  real *m = mine_of(g, &g->into.m, b, h, i), *l = mine_of(g, &g->into.l, b, h, i), *restrict o = mine_of(g, &g->into.o, b, h, i);
  const real m2 = *row_of(&g->other.m, b, h, i), l2 = *row_of(&g->other.l, b, h, i), *restrict o2 = row_of(&g->other.o, b, h, i);
  const real none = -(real)__builtin_inf(), top = *m < m2 || m2 != m2 ? m2 : *m;
  if (m2 == none && l2 == 0) return;
  if (*m == none && *l == 0) {
    memcpy(o, o2, g->v_dim * sizeof(real)), *m = m2, *l = l2;
    return;
  }
  const real mine = *m == top || top == none ? 1 : (real)__builtin_exp((double)*m - (double)top);
  const real its = m2 == top || top == none ? 1 : (real)__builtin_exp((double)m2 - (double)top);
  for (int64_t d = 0; d < g->v_dim; d++) o[d] = o[d] * mine + o2[d] * its;
  *l = *l * mine + l2 * its;
  *m = top;
}

static void merge_all(const merging *g) {
  const int64_t rows = g->batch * g->rows;
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)g->threads) if (g->threads > 1)
#endif
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < g->heads; h++) merge_row(g, r / g->rows, h, r % g->rows);
}

#endif
