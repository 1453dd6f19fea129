/* Forward: o = sum exp(s - m) v, l = sum exp(s - m), m = max s of the rows of a strip over the keys of a panel, merged into what is
 * there of other keys.
 *
 *   keys [panel of SCALARS][key_steps][SCALARS]    values [v_dim / SCALARS][value_steps][SCALARS]   packed once, for all strips and heads
 *   queries [key_steps][lanes]    scores [KEY_BLOCK][lanes]    o [v_dim][lanes]                     of one strip, in the core's own cache
 *
 * Online softmax (arXiv:1805.02867, 2205.14135) a block of keys at a time. Lanes are rows: maxima, sums and rescaling are
 * lane-wise. Each block's product starts from zero and is added once, so that long sums stay exact.
 *
 * A step is a column of q and k, or a key of the weights and v. For bfloat16, where there is an instruction (pairs.h), it is two of them:
 * then q is multiplied by its factor only as a score, and weights are rounded to bfloat16 before they meet v; their sum is not. */
#ifndef RINGMPI_FORWARD_H
#define RINGMPI_FORWARD_H

#include "merge.h"
#include "pack.h"
#include "products.h"
#include "score.h"

#ifndef KEY_BLOCK
#define KEY_BLOCK 256 /* SCALARS divides it */
#endif
#define STRIP (VECTORS * LANES)

/* Rows that are needed soon and lie far apart, where no processor foresees them. They are brought near a few at a time, while products
 * keep the core busy: all at once, they would wait for each other, and what the core does meanwhile for them. */
typedef struct { uintptr_t row; int64_t token, bytes, left, at_a_time; } errand;

typedef struct {
  real *keys, *values, *queries, *scores, *o, *m, *l, *fetched;
  integer *lo, *hi;
  span span;
  errand fetch_q, fetch_o; /* of the next strip; of this one */
  int64_t panel, v_dim, key_steps, value_steps; /* keys and v_dim padded to SCALARS */
  int64_t of, storage;                          /* REALS or PAIRS */
} forward_space;

/* A thread's own pieces lie behind the panel that all share. */
static int64_t forward_layout(const call *c, team t, char *base, forward_space *f) {
  arena a = {base, 0};
  f->of = DOTS && c->storage == AS_BFLOAT ? PAIRS : REALS, f->storage = f->of == PAIRS ? AS_PAIRS : c->storage;
  f->panel = round_up(c->part.panel1 - c->part.panel0, SCALARS), f->v_dim = round_up(c->v_dim, SCALARS);
  f->key_steps = packed_columns(c->head_dim, f->storage), f->value_steps = packed_columns(f->panel, f->storage);
  f->keys = TAKE(&a, f->panel * f->key_steps, real);
  f->values = TAKE(&a, f->value_steps * f->v_dim, real);
  for (int64_t rank = 0; rank < t.places; rank++) {
    arena own = a;
    f->queries = TAKE(&own, STRIP * f->key_steps, real);
    f->scores = TAKE(&own, STRIP * KEY_BLOCK, real);
    f->o = TAKE(&own, STRIP * f->v_dim, real);
    f->m = TAKE(&own, STRIP, real), f->l = TAKE(&own, STRIP, real);
    f->lo = TAKE(&own, STRIP, integer), f->hi = TAKE(&own, STRIP, integer);
    f->fetched = TAKE(&own, fetched_reals(c), real);
    if (rank == t.rank && base) return own.used;
    a.used = own.used;
  }
  return a.used;
}

static void pack_panel(const call *c, team t, forward_space *f, int64_t b, int64_t kv) {
  const uint8_t *all = c->seen ? c->seen + b * c->seen_batch + c->part.panel0 : NULL;
  const source k = source_of_keys(c, &c->k, f->storage, b, kv, f->fetched), v = source_of_values(c, &c->v, f->storage, b, kv, f->fetched);
  for (int64_t j = t.rank * SCALARS; j < f->panel; j += t.size * SCALARS) {
    const uint8_t *seen = all ? all + j : NULL;
    bunch rows = fetch(&k, c->part.panel0 + j, c->part.panel1, seen);
    across(&rows, SCALARS, f->key_steps, SCALARS, (factors){0}, f->keys + j * f->key_steps);
    rows = fetch(&v, c->part.panel0 + j, c->part.panel1, seen);
    for (int64_t d = 0; d < c->v_dim; d += SCALARS) {
      real *to = f->values + d * f->value_steps + packed_columns(j, f->storage) * SCALARS;
      if (f->of == REALS) along(&rows, SCALARS, d, c->v_dim, SCALARS, NULL, to);
      else for (int i = 0; i < SCALARS; i += 2) zip(rows.row[i], rows.row[i + 1], d, c->v_dim, SCALARS, to + i / 2 * SCALARS);
    }
  }
}

/* What scores of unscaled queries are multiplied by: a factor, and the rest of it beyond the precision of real. */
ALWAYS vector scaled(vector s, const call *c) {
  const real by = (real)query_factor(c), rest = (real)(query_factor(c) - (double)by);
  return s * by + s * rest;
}

/* Of as many rows, in the time that so many bunches of keys take. */
ALWAYS errand errand_for(const char *row, int64_t token, int64_t bytes, int64_t rows, int64_t bunches) {
  return (errand){(uintptr_t)row, token, bytes, rows, 1 + rows / most(1, bunches)};
}
ALWAYS void run_errand(errand *e, const int written) {
  for (int64_t i = least(e->left, e->at_a_time); i > 0; i--, e->left--, e->row += (uintptr_t)e->token)
    for (int64_t at = 0; at < e->bytes; at += 64) __builtin_prefetch((const void *)(e->row + (uintptr_t)at), written);
}

/* Scores of the keys j .. j + n of the panel. */
ALWAYS void score(const int of, const int N, const call *c, forward_space *f, int64_t head, int64_t row, int64_t j, int64_t n) {
  const int64_t lanes = N * LANES;
  for (int64_t p = 0; p < n; p += SCALARS) {
    vector s[SCALARS * VECTORS];
    real *to = f->scores + p * lanes;
    run_errand(&f->fetch_q, 0), run_errand(&f->fetch_o, 1);
    product(of, SCALARS, N, f->keys + (j + p) * f->key_steps, 1, SCALARS, f->queries, lanes, f->key_steps, s);
    UNROLL for (int i = 0; i < SCALARS * N; i++) store(to + i * LANES, of == PAIRS ? scaled(s[i], c) : s[i]);
    if (__builtin_expect(bends(c), 0)) bend(c, head, row, j + p, N, to, NULL, lanes);
    if (__builtin_expect(!all_see(&f->span, j + p), 0)) hide(N, f->lo, f->hi, j + p, to, lanes);
  }
}

/* The greatest score of each lane, those before included. */
ALWAYS void greatest(const int N, const real *scores, int64_t n, vector *m) {
  vector top[VECTORS];
  UNROLL for (int v = 0; v < N; v++) top[v] = m[v];
  for (int64_t p = 0; p < n; p += SCALARS)
    UNROLL for (int i = 0; i < SCALARS * N; i++) top[i % N] = larger(top[i % N], load(scores + (p * N + i) * LANES));
  UNROLL for (int v = 0; v < N; v++) m[v] = top[v];
}

/* Scores become weights exp(s - m), m given as its base, as reals or pairs; returns their sums, of what is not rounded yet. */
ALWAYS void weigh(const int of, const int N, real *restrict scores, int64_t n, const vector *base, vector *sum) {
  vector at[VECTORS], total[VECTORS];
  UNROLL for (int v = 0; v < N; v++) at[v] = base[v], total[v] = (vector){0};
  for (int64_t p = 0; p < n; p += SCALARS) {
    vector w[SCALARS * VECTORS];
    UNROLL for (int i = 0; i < SCALARS * N; i++) {
      if (i % SIDE_BY_SIDE == 0) {
        UNROLL for (int k = i; k < i + SIDE_BY_SIDE; k++) w[k] = exponent(load(scores + (p * N + k) * LANES), at[k % N]);
        exp2_each(SIDE_BY_SIDE, w + i);
      }
      total[i % N] += w[i];
      if (of == REALS) store(scores + (p * N + i) * LANES, w[i]);
      else if (i / N % 2) store(scores + (p / 2 * N + i / N / 2 * N + i % N) * LANES, pair_of(w[i - N], w[i]));
    }
  }
  UNROLL for (int v = 0; v < N; v++) sum[v] = total[v];
}

/* o = rescale * o + weights * the values of the keys j .. j + n. */
ALWAYS void add_values(const int of, const int N, const forward_space *f, int64_t j, int64_t n, const vector *rescale) {
  const int64_t first = packed_columns(j, f->storage), steps = packed_columns(n, f->storage);
  for (int64_t d = 0; d < f->v_dim; d += SCALARS) {
    vector s[SCALARS * VECTORS];
    real *o = f->o + d * N * LANES;
    product(of, SCALARS, N, f->values + d * f->value_steps + first * SCALARS, 1, SCALARS, f->scores, N * LANES, steps, s);
    UNROLL for (int i = 0; i < SCALARS * N; i++) store(o + i * LANES, load(o + i * LANES) * rescale[i % N] + s[i]);
  }
}

/* These passes over a block of keys for strips of 1, 2 and 3 vectors, each on its own: what lives beside a product takes its registers. */
typedef struct {
  void (*score)(const call *, forward_space *, int64_t, int64_t, int64_t, int64_t);
  void (*greatest)(const real *, int64_t, vector *);
  void (*weigh)(real *, int64_t, const vector *, vector *);
  void (*add_values)(const forward_space *, int64_t, int64_t, const vector *);
} passes;

#define PASSES(of, OF, N)                                                                                              \
  APART void score_##of##N(const call *c, forward_space *f, int64_t head, int64_t row, int64_t j, int64_t n) {         \
    score(OF, N, c, f, head, row, j, n);                                                                               \
  }                                                                                                                    \
  APART void weigh_##of##N(real *scores, int64_t n, const vector *base, vector *sum) {                                 \
    weigh(OF, N, scores, n, base, sum);                                                                                \
  }                                                                                                                    \
  APART void add_values_##of##N(const forward_space *f, int64_t j, int64_t n, const vector *rescale) {                 \
    add_values(OF, N, f, j, n, rescale);                                                                               \
  }
#define GREATEST(N) APART void greatest##N(const real *scores, int64_t n, vector *m) { greatest(N, scores, n, m); }
#define PASS(of, N) {score_##of##N, greatest##N, weigh_##of##N, add_values_##of##N}
GREATEST(1) GREATEST(2) GREATEST(3)
PASSES(reals, REALS, 1) PASSES(reals, REALS, 2) PASSES(reals, REALS, 3)
PASSES(pairs, PAIRS, 1) PASSES(pairs, PAIRS, 2) PASSES(pairs, PAIRS, 3)

static passes passes_of(int64_t of, int N) {
  static const passes reals[] = {{0}, PASS(reals, 1), PASS(reals, 2), PASS(reals, 3)};
  static const passes pairs[] = {{0}, PASS(pairs, 1), PASS(pairs, 2), PASS(pairs, 3)};
  return DOTS && of == PAIRS ? pairs[N] : reals[N];
}

/* One strip of N vectors of rows against the panel. o and l are relative to `base`, which stands for m. */
static void attend(const int N, const call *c, forward_space *f, int64_t head, int64_t row) {
  const vector none = every(-(real)__builtin_inf());
  vector m[VECTORS], l[VECTORS], base[VECTORS], before[VECTORS], rescale[VECTORS], sum[VECTORS];
  for (int v = 0; v < N; v++) m[v] = base[v] = none, l[v] = (vector){0};
  memset(f->o, 0, f->v_dim * N * LANES * sizeof(real));
  const int64_t first = f->span.first / SCALARS * SCALARS, end = round_up(f->span.end, SCALARS);
  const int64_t block = even_part(end - first, KEY_BLOCK, SCALARS);
  const passes pass = passes_of(f->of, N);
  for (int64_t j = first; j < end; j += block) {
    const int64_t n = least(end - j, block);
    for (int v = 0; v < N; v++) before[v] = m[v];
    pass.score(c, f, head, row, j, n);
    pass.greatest(f->scores, n, m);
    for (int v = 0; v < N; v++) {
      const vector at = keep(m[v] == none, (vector){0}, base_of(m[v]));
      rescale[v] = keep(before[v] == none, (vector){0}, exp2_lanes(exponent_between(base[v], at)));
      base[v] = at;
    }
    pass.weigh(f->scores, n, base, sum);
    pass.add_values(f, j, n, rescale);
    for (int v = 0; v < N; v++) l[v] = l[v] * rescale[v] + sum[v];
  }
  for (int v = 0; v < N; v++) store(f->m + v * LANES, m[v]), store(f->l + v * LANES, l[v]);
}

/* What brings o and l from their base, which was rounded, to m itself. */
ALWAYS real from_base(real m) { return m > -(real)__builtin_inf() ? (real)__builtin_exp2(-rounding(m)) : 1; }

/* Where one of the outputs has rows of a head from `row` on, and the next of them. Asked once a strip: it takes divisions. */
typedef struct { char *first; int64_t token; } rows_out;

ALWAYS rows_out output(const call *c, const array *a, int64_t b, int64_t head, int64_t row) {
  const int64_t here = c->into.row0 + row - first_row(c->rows, c->part.strip0);
  const int64_t first_head = c->part.kv0 * group_of(c) + c->part.group0;
  return (rows_out){(char *)row_of(a, c->into.batch0 + b - c->part.batch0, c->into.head0 + head - first_head, here), a->token};
}
ALWAYS real *row_in(rows_out out, int64_t r) { return (real *)(out.first + r * out.token); }

/* What becomes of the rows of a strip: each row's `how`, what its own o and what the strip's is multiplied by. */
typedef struct { int how[STRIP + SCALARS]; real mine[STRIP + SCALARS], its[STRIP + SCALARS]; } joints;

/* The strip's rows of o, transposed back. `fresh`: all of them are set. */
ALWAYS void give_rows(const int fresh, const forward_space *f, rows_out o, const joints *j, int64_t count, int64_t columns, int64_t lanes) {
  for (int64_t r = 0; r < count; r += SCALARS) {
    const block_row its = *(block_row *)(j->its + r);
    int64_t d = 0;
    for (; d + WIDE <= columns && r + SCALARS <= count; d += WIDE) {
      wide_row x[SCALARS];
      UNROLL for (int i = 0; i < SCALARS; i++) {
        const real *from = f->o + (d + i) * lanes + r;
        x[i] = beside(*(block_row *)from * its, *(block_row *)(from + (WIDE - SCALARS) * lanes) * its);
      }
      transpose(x);
      UNROLL for (int i = 0; i < SCALARS; i++) {
        wide_row *to = (wide_row *)(row_in(o, r + i) + d);
        if (fresh || j->how[r + i] == SET) *to = x[i];
        else if (j->how[r + i] == ADD) *to = *to * j->mine[r + i] + x[i];
      }
    }
    for (; d < columns; d++)
      for (int64_t i = r; i < least(r + SCALARS, count); i++) {
        real *to = row_in(o, i) + d, x = f->o[d * lanes + i] * j->its[i];
        if (j->how[i] == SET) *to = x;
        else if (j->how[i] == ADD) *to = *to * j->mine[i] + x;
      }
  }
}

/* The strip's o, m and l are merged into its rows. */
static void give(const call *c, forward_space *f, int64_t b, int64_t head, int64_t row, int64_t end, int64_t lanes) {
  const partial *to = &c->into.whole;
  const rows_out o = output(c, &to->o, b, head, row), m = output(c, &to->m, b, head, row), l = output(c, &to->l, b, head, row);
  const int64_t count = end - row;
  joints all;
  int fresh = 1;
  for (int64_t r = 0; r < count; r++) {
    const real by = from_base(f->m[r]), sum = f->l[r] * by;
    const joint j = join(*row_in(m, r), *row_in(l, r), sum != sum ? sum : f->m[r], sum); /* maxima of lanes lose a NaN, sums do not */
    all.how[r] = j.how, all.mine[r] = j.mine, all.its[r] = j.its * by;
    *row_in(m, r) = j.m, *row_in(l, r) = j.l;
    fresh &= j.how == SET;
  }
  if (fresh) give_rows(1, f, o, &all, count, c->v_dim, lanes);
  else give_rows(0, f, o, &all, count, c->v_dim, lanes);
}

/* A strip of a head. */
typedef struct { int64_t head, strip; } turn;

static void forward_strip(const call *c, forward_space *f, int64_t b, turn now, turn next) {
  const int64_t row = first_row(c->rows, now.strip), lanes = first_row(c->rows, now.strip + 1) - row, end = least(row + lanes, c->rows);
  real by[SCALARS];
  for (int i = 0; i < SCALARS; i++) by[i] = (real)query_factor(c);
  const factors of_q = {f->of == REALS ? by : NULL, (real)(query_factor(c) - (double)by[0])};
  const source q = source_of_keys(c, &c->q, f->storage, b, now.head, f->fetched);
  for (int64_t r = 0; r < lanes; r += SCALARS) {
    bunch rows = fetch(&q, row + r, end, NULL);
    across(&rows, least(SCALARS, lanes - r), f->key_steps, lanes, of_q, f->queries + r);
  }
  f->span = limits(c, b, row, lanes, f->lo, f->hi);
  const rows_out o = output(c, &c->into.whole.o, b, now.head, row);
  const int64_t bunches = (f->span.end - f->span.first) / SCALARS, then = first_row(c->rows, next.strip);
  f->fetch_o = errand_for(o.first, o.token, c->v_dim * (int64_t)sizeof(real), end - row, bunches);
  f->fetch_q = errand_for(head_of(&c->q, b, next.head) + then * q.token, q.token, q.stored * q.column,
                          q.column <= (int64_t)sizeof(real) ? least(lanes, c->rows - then) : 0, bunches);
  attend((int)(lanes / LANES), c, f, now.head, row);
  give(c, f, b, now.head, row, end, lanes);
}

ALWAYS turn turn_of(const call *c, int64_t kv, int64_t i) {
  const int64_t strips = c->part.strip1 - c->part.strip0;
  return (turn){kv * group_of(c) + c->part.group0 + i / strips, c->part.strip0 + i % strips};
}

static void forward_head(const call *c, team t, char *space, int64_t b, int64_t kv) {
  forward_space f;
  forward_layout(c, t, space, &f);
  if (c->part.pack & PACK_KEYS) {
    pack_panel(c, t, &f, b, kv);
    wait_for(t);
  }
  const int64_t turns = (c->part.group1 - c->part.group0) * (c->part.strip1 - c->part.strip0);
  for (int64_t i = t.rank; i < turns; i += t.size)
    forward_strip(c, &f, b, turn_of(c, kv, i), turn_of(c, kv, least(i + t.size, turns - 1)));
}

#endif
