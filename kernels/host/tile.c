/* The tile's contract in C: exact attention of a pair of runs, forward and backward, for one number type (-DREAL).
 *
 *   vector.h    lanes and register blocks       call.h       what is asked; threads; space        told.h   how it is told
 *   pairs.h     bfloat16 two at a time          pack.h       rows as the products read them
 *   products.h  the one inner loop              merge.h      two partials of a row become one
 *   exp2.h      2^x and tanh                    forward.h    o, m, l of strips of rows
 *   score.h     who sees what; softcap, ALiBi   backward.h   dq, dk, dv       rows.h   merge, finish, delta
 *
 * Loading the library runs nothing; threads start at the first call that asks for more than one. */
#include "backward.h"
#include "forward.h"
#include "rows.h"

#define EXPORT __attribute__((visibility("default")))

/* Bytes of workspace that a call needs. */
EXPORT int64_t forward_space_of(const request *r, const part *p) {
  const call c = call_of(r, p, NULL);
  forward_space f;
  return p->alone ? c.threads * forward_layout(&c, one_alone(), NULL, &f) : forward_layout(&c, all_of(&c), NULL, &f);
}

EXPORT int64_t backward_space_of(const request *r, const part *p) {
  const call c = call_of(r, p, NULL);
  backward_space s;
  return p->alone ? c.threads * backward_layout(&c, one_alone(), NULL, &s) : backward_layout(&c, all_of(&c), NULL, &s);
}

EXPORT void forward(const request *r, char *workspace, const part *p, const described_place *into) {
  call c = call_of(r, p, workspace);
  c.into = place_of(into);
  forward_space f;
  deal(&c, forward_head, p->alone ? forward_layout(&c, one_alone(), NULL, &f) : 0);
}

EXPORT void backward(const request *r, char *workspace, const part *p) {
  const call c = call_of(r, p, workspace);
  backward_space s;
  deal(&c, backward_head, p->alone ? backward_layout(&c, one_alone(), NULL, &s) : 0);
}

EXPORT void merge(const described_place *into, const described_partial *other, int threads) {
  const extent of = extent_of(other->o, threads);
  each_row(merge_row, &(merging){place_of(into), partial_of(other)}, &of);
}
EXPORT void finish(const described_partial *total, const description *lse, int threads) {
  const extent of = extent_of(total->o, threads);
  each_row(finish_row, &(finishing){partial_of(total), by_row(lse)}, &of);
}
EXPORT void delta(const description *dout, const description *out, const description *sums, int threads) {
  const extent of = extent_of(out, threads);
  each_row(dot_row, &(dotting){by_token(dout), by_token(out), by_row(sums)}, &of);
}

/* How rows are cut: the caller cuts calls at the same places. */
EXPORT int64_t strips(int64_t rows) { return strips_of(rows); }
EXPORT int64_t strip_row(int64_t rows, int64_t strip) { return first_row(rows, strip); }
EXPORT int64_t block_of_keys(int64_t panel) { return gradient_block(panel); }
EXPORT int64_t constant(int64_t which) {
  const int64_t all[] = {sizeof(request), sizeof(part), sizeof(described_place), sizeof(real), BLOCK_STRIPS, GRADIENT_KEYS, DOTS};
  return all[which];
}
EXPORT const char *isa(void) {
#if defined __AVX512F__ && VECTOR_BYTES == 64
  return "AVX-512";
#elif defined __AVX2__ && VECTOR_BYTES == 32
  return "AVX2";
#elif defined __aarch64__
  return "NEON";
#else
  return "plain";
#endif
}
EXPORT int64_t threaded(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
