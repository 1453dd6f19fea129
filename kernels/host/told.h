/* What the caller tells, and how it becomes a call. Mirrored in library.py.
 *
 * Of an array it tells what NumPy itself says of it: the address of its PyArrayInterface
 * (https://numpy.org/doc/stable/reference/arrays.interface.html, "C-struct access"). */
#ifndef RINGMPI_TOLD_H
#define RINGMPI_TOLD_H

#include "call.h"

typedef struct {
  int two, axes;
  char kind;
  int number_bytes, flags;
  const intptr_t *shape, *strides;
  char *data;
  void *names;
} description;

/* NULL: there is none. */
typedef struct {
  const description *q, *k, *v, *dout, *lse, *delta, *dq, *dk, *dv;
  const description *lo, *hi, *seen;                 /* (1 or batch, rows); seen (1 or batch, keys) */
  const description *alibi;                          /* (heads) */
  double scale, softcap;
  int64_t storage, distance, query_step, key_step, threads;
} request;

typedef struct { const description *o, *m, *l; } described_partial;
typedef struct { described_partial whole; int64_t batch0, row0, head0; } described_place;

/* Of (batch, tokens, heads, columns). */
ALWAYS array by_token(const description *x) {
  return x ? (array){x->data, x->strides[0], x->strides[1], x->strides[2], x->strides[3]} : (array){0};
}
/* Of (batch, heads, rows). */
ALWAYS array by_row(const description *x) { return x ? (array){x->data, x->strides[0], x->strides[2], x->strides[1], 0} : (array){0}; }

ALWAYS const void *numbers(const description *x) { return x ? x->data : NULL; }
/* Numbers from one batch entry to the next: none where all have the same. */
ALWAYS int64_t of_batch(const description *x) { return x && x->shape[0] > 1 ? x->shape[1] : 0; }

ALWAYS partial partial_of(const described_partial *p) { return (partial){by_token(p->o), by_row(p->m), by_row(p->l)}; }
ALWAYS place place_of(const described_place *p) { return (place){partial_of(&p->whole), p->batch0, p->row0, p->head0}; }

static call call_of(const request *r, const part *p, char *workspace) {
  return (call){
    .q = by_token(r->q), .k = by_token(r->k), .v = by_token(r->v), .dout = by_token(r->dout), .lse = by_row(r->lse), .delta = by_row(r->delta),
    .dq = by_token(r->dq), .dk = by_token(r->dk), .dv = by_token(r->dv),
    .rows = r->q->shape[1], .keys = r->k->shape[1], .heads = r->q->shape[2], .kv_heads = r->k->shape[2],
    .head_dim = r->q->shape[3], .v_dim = r->v->shape[3], .storage = r->storage,
    .lo = numbers(r->lo), .hi = numbers(r->hi), .bounds_batch = of_batch(r->lo), .seen = numbers(r->seen), .seen_batch = of_batch(r->seen),
    .scale = r->scale, .softcap = r->softcap, .alibi = numbers(r->alibi),
    .distance = r->distance, .query_step = r->query_step, .key_step = r->key_step, .threads = r->threads,
    .workspace = workspace, .part = *p};
}

#endif
