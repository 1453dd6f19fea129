/* The tile's contract in C: exact attention of a pair of runs, forward and backward, for one number type (-DREAL).
 *
 *   vector.h    lanes and register blocks       call.h       what is asked; threads; space
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
EXPORT int64_t forward_space_of(const call *c) {
  forward_space f;
  return c->part.alone ? c->threads * forward_layout(c, one_alone(), NULL, &f) : forward_layout(c, all_of(c), NULL, &f);
}

EXPORT int64_t backward_space_of(const call *c) {
  backward_space s;
  return c->part.alone ? c->threads * backward_layout(c, one_alone(), NULL, &s) : backward_layout(c, all_of(c), NULL, &s);
}

EXPORT void forward(const call *c) {
  forward_space f;
  deal(c, forward_head, c->part.alone ? forward_layout(c, one_alone(), NULL, &f) : 0);
}

EXPORT void backward(const call *c) {
  backward_space s;
  deal(c, backward_head, c->part.alone ? backward_layout(c, one_alone(), NULL, &s) : 0);
}

EXPORT void merge(const merging *g) { each_row(merge_row, g, &g->of); }
EXPORT void finish(const finishing *g) { each_row(finish_row, g, &g->of); }
EXPORT void delta(const dotting *g) { each_row(dot_row, g, &g->of); }

/* How rows are cut: the caller cuts calls at the same places. */
EXPORT int64_t strips(int64_t rows) { return strips_of(rows); }
EXPORT int64_t strip_row(int64_t rows, int64_t strip) { return first_row(rows, strip); }
EXPORT int64_t block_of_keys(int64_t panel) { return gradient_block(panel); }
EXPORT int64_t constant(int64_t which) {
  const int64_t all[] = {sizeof(call), sizeof(merging), sizeof(finishing), sizeof(dotting), sizeof(real),
                         VECTOR_BYTES, BLOCK_STRIPS, GRADIENT_KEYS, DOTS};
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
