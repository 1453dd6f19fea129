/* Two partials of a row, over disjoint keys, become one: both come to the larger maximum (arXiv:1805.02867).
 *
 * Merging an empty one (m = -inf, l = 0) changes nothing, merging into one sets it. */
#ifndef RINGMPI_MERGE_H
#define RINGMPI_MERGE_H

#include "call.h"

enum { KEEP, SET, ADD };
/* What becomes of a row's o: kept, set to the other's, or o * mine + the other's * its; and its new m and l. */
typedef struct { int how; real mine, its, m, l; } joint;

ALWAYS joint join(real m, real l, real m2, real l2) {
  const real none = -(real)__builtin_inf(), top = m < m2 || m2 != m2 ? m2 : m;
  if (m2 == none && l2 == 0) return (joint){KEEP, 1, 0, m, l};
  if (m == none && l == 0) return (joint){SET, 0, 1, m2, l2};
  const real mine = m == top || top == none ? 1 : (real)__builtin_exp((double)m - (double)top);
  const real its = m2 == top || top == none ? 1 : (real)__builtin_exp((double)m2 - (double)top);
  return (joint){ADD, mine, its, top, l * mine + l2 * its};
}

#endif
