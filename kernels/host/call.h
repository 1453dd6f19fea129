/* What the library is asked to do: the arrays of one pair of runs, and which part of it to compute.
 *
 *   q, dout, dq   (batch, rows, heads, head_dim or v_dim)     k, v, dk, dv   (batch, keys, kv_heads, ...)
 *   lse, delta    (batch, heads, rows), reals */
#ifndef RINGMPI_CALL_H
#define RINGMPI_CALL_H

#include "vector.h"
#ifdef _OPENMP
#include <omp.h>
#endif

/* Strides are bytes. Inputs may have any; outputs have contiguous columns. */
typedef struct { char *data; int64_t batch, token, head, column; } array;

/* o (batch, rows, heads, v_dim), m and l (batch, heads, rows); and some rows of it, by the first of them. */
typedef struct { array o, m, l; } partial;
typedef struct { partial whole; int64_t batch0, row0, head0; } place;

enum { AS_REAL, AS_HALF, AS_BFLOAT, AS_PAIRS };      /* how inputs are stored; AS_PAIRS: bfloat16 that is packed as it is */
enum { PACK_KEYS = 1, PACK_QUERIES = 2 };            /* what the workspace does not hold yet */

/* The query heads group0 .. group1 - 1 of each K/V head kv0 .. kv1 - 1 of the batch entries batch0 .. batch1 - 1, for the strips of
 * rows strip0 .. strip1 - 1 and the keys key0 .. key1 - 1 of the panel panel0 .. panel1 - 1. */
typedef struct {
  int64_t batch0, batch1, kv0, kv1, group0, group1, strip0, strip1, panel0, panel1, key0, key1;
  int64_t pack, alone;                               /* alone: each head is the work of one thread; else all share each head */
} part;

typedef struct {
  array q, k, v, dout, lse, delta, dq, dk, dv;
  int64_t rows, keys, heads, kv_heads, head_dim, v_dim, storage;
  const int32_t *lo, *hi;                            /* (1 or batch, rows): keys lo .. hi - 1; NULL: all */
  int64_t bounds_batch;                              /* numbers from one batch entry's bounds to the next's: rows, or 0 */
  const uint8_t *seen;                               /* (1 or batch, keys): whether any row sees the key; NULL: all are seen */
  int64_t seen_batch;
  double scale, softcap;                             /* softcap 0: none */
  const double *alibi;                               /* (heads), or NULL */
  int64_t distance, query_step, key_step;            /* diagonal of row i less position of key j: distance + i query_step - j key_step */
  int64_t threads;
  char *workspace;
  part part;                                         /* what this call computes */
  place into;                                        /* and what its o, m, l are merged into */
} call;

/* The threads that share a head; `places` is how many were asked for, which space and chunks are made for: OpenMP may give fewer.
 * Work is dealt out by number, never by speed, and the order of additions does not depend on how many there are: results have the
 * same bits for any team. */
typedef struct { int rank, size, places; } team;
ALWAYS team one_alone(void) { return (team){0, 1, 1}; }
ALWAYS team all_of(const call *c) { return (team){0, (int)c->threads, (int)c->threads}; }

ALWAYS void wait_for(team t) {
  (void)t;
#ifdef _OPENMP
  if (t.size > 1) {
#pragma omp barrier
  }
#endif
}

/* Pieces of one allocation, each aligned to 64 bytes. Without a base they are only counted. */
typedef struct { char *base; int64_t used; } arena;

ALWAYS void *take(arena *a, int64_t count, int64_t size) {
  char *piece = a->base ? a->base + a->used : NULL;
  a->used += round_up(count * size, 64);
  return piece;
}
#define TAKE(arena, count, type) ((type *)take(arena, count, sizeof(type)))

/* Rows are taken in strips of VECTORS vectors of lanes; the last strips may have one less, so that none is nearly empty. */
ALWAYS int64_t vectors_of(int64_t rows) { return (rows + LANES - 1) / LANES; }
ALWAYS int64_t strips_of(int64_t rows) { return (vectors_of(rows) + VECTORS - 1) / VECTORS; }
ALWAYS int64_t first_row(int64_t rows, int64_t strip) {
  int64_t wide = vectors_of(rows) - (VECTORS - 1) * strips_of(rows);
  return LANES * most(0, least(VECTORS * strip, (VECTORS - 1) * strip + wide));
}

ALWAYS int64_t group_of(const call *c) { return c->heads / c->kv_heads; }
ALWAYS char *head_of(const array *a, int64_t b, int64_t h) { return a->data + b * a->batch + h * a->head; }
ALWAYS real *row_of(const array *a, int64_t b, int64_t h, int64_t i) { return (real *)(head_of(a, b, h) + i * a->token); }

/* `work` for every (batch entry, K/V head) of the call: each by one thread, or all threads together on each. */
typedef void work(const call *c, team t, char *space, int64_t b, int64_t kv);

static void deal(const call *c, work *work, int64_t bytes) {
  int64_t heads = c->part.kv1 - c->part.kv0, items = (c->part.batch1 - c->part.batch0) * heads;
#ifdef _OPENMP
#pragma omp parallel num_threads((int)c->threads) if (c->threads > 1)
#endif
  {
    team all = one_alone();
#ifdef _OPENMP
    all = (team){omp_get_thread_num(), omp_get_num_threads(), (int)c->threads};
#endif
    if (c->part.alone)
      for (int64_t i = all.rank; i < items; i += all.size) {
        /* What is packed for a head may serve more calls: then its space is its own, whichever thread computes it. */
        const int64_t slot = items > c->threads ? all.rank : i;
        work(c, one_alone(), c->workspace + slot * bytes, c->part.batch0 + i / heads, c->part.kv0 + i % heads);
      }
    else
      for (int64_t i = 0; i < items; i++) {
        if (i) wait_for(all);
        work(c, all, c->workspace, c->part.batch0 + i / heads, c->part.kv0 + i % heads);
      }
  }
}

#endif
