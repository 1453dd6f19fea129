/* Scores: which keys the rows of a strip see, softcap and ALiBi. */
#ifndef RINGMPI_SCORE_H
#define RINGMPI_SCORE_H

#include "call.h"
#include "exp2.h"

/* The keys that the rows of a strip see, counted from the first key of the panel: [lo, hi) of each lane; the least lo and
 * greatest hi of those that see any; and the keys that all lanes see. A lane without a row does as the last row. */
typedef struct { int64_t first, end, all_from, all_to; } span;

static span limits(const call *c, int64_t b, int64_t row, int64_t lanes, integer *lo, integer *hi) {
  const int64_t first = c->part.panel0, keys = c->part.panel1 - first;
  span s = {keys, 0, 0, keys};
  for (int64_t r = 0; r < lanes; r++) {
    int64_t i = b * c->bounds_batch + least(row + r, c->rows - 1);
    int64_t from = c->lo ? least(most(c->lo[i] - first, 0), keys) : 0, to = c->lo ? least(most(c->hi[i] - first, 0), keys) : keys;
    lo[r] = (integer)from, hi[r] = (integer)to;
    if (from < to) s.first = least(s.first, from), s.end = most(s.end, to);
    s.all_from = most(s.all_from, from), s.all_to = least(s.all_to, to);
  }
  return s;
}

ALWAYS int all_see(const span *s, int64_t key) { return s->all_from <= key && key + SCALARS <= s->all_to; }

/* Scores of SCALARS keys from `key` on x `vectors` of rows: -inf where a row does not see a key. */
APART void hide(int64_t vectors, const integer *lo, const integer *hi, int64_t key, real *s, int64_t s_key) {
  for (int64_t v = 0; v < vectors; v++) {
    lane_mask from = (lane_mask)*(const mask_in_memory *)(lo + v * LANES), to = (lane_mask)*(const mask_in_memory *)(hi + v * LANES);
    for (int64_t j = 0; j < SCALARS; j++) {
      lane_mask at = (lane_mask){0} + (integer)(key + j);
      real *here = s + j * s_key + v * LANES;
      store(here, keep((from <= at) & (at < to), load(here), every(-(real)__builtin_inf())));
    }
  }
}

/* What q is multiplied by when it is packed: all that is linear in the score. */
ALWAYS double query_factor(const call *c) { return c->softcap ? c->scale / c->softcap : c->scale; }
ALWAYS int bends(const call *c) { return c->softcap || c->alibi; }

/* What is not linear: softcap tanh(s), less ALiBi's slope |distance|, for SCALARS keys from `key` of the panel on
 * and `vectors` of rows from `row` on; slope (if asked for) becomes 1 - tanh^2. */
APART void bend(const call *c, int64_t head, int64_t row, int64_t key, int64_t vectors, real *s, real *slope, int64_t s_key) {
  const real cap = (real)c->softcap, fall = c->alibi ? (real)c->alibi[head] : 0;
  for (int64_t j = 0; j < SCALARS; j++)
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t at = j * s_key + v * LANES;
      vector x = load(s + at), away;
      if (c->softcap) {
        vector t = tanh_lanes(x);
        x = cap * t;
        if (slope) store(slope + at, 1 - t * t);
      }
      if (c->alibi) {
        const int64_t from = c->distance + (row + v * LANES) * c->query_step - (c->part.panel0 + key + j) * c->key_step;
        for (int64_t r = 0; r < LANES; r++) away[r] = (real)(from + r * c->query_step);
        x -= fall * larger(-away, away);
      }
      store(s + at, x);
    }
}

#endif
