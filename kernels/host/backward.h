/* Backward: p rebuilt from lse, then dv += p^T dout, ds = p (dout v^T - delta), dq += scale ds k, dk += scale ds^T q
 * (arXiv:2205.14135, algorithm 4).
 *
 *   keys, values [panel of SCALARS][dim][SCALARS]   key_columns [panel of columns][keys][columns]    packed once per panel
 *   queries, douts [strip][dim][lanes]   query_columns, dout_columns [panel of columns][rows][columns]   once per chunk of rows
 *   p, ds [block of strips][GRADIENT_KEYS + STEPS][P_KEY]                                             of one block of keys
 *
 * A team computes p and ds of a chunk of rows, strip by strip; waits; then adds to the gradients, each row of dq and each key of
 * dk and dv by one of the team, block by block in order: no race, and the same bits for every number of threads. */
#ifndef RINGMPI_BACKWARD_H
#define RINGMPI_BACKWARD_H

#include "pack.h"
#include "products.h"
#include "score.h"

#ifndef GRADIENT_KEYS
#define GRADIENT_KEYS 120
#endif
#define KEYS_UNIT (SCALARS == 8 ? 24 : 12) /* SCALARS and STEPS divide it, and it GRADIENT_KEYS */
#ifndef BLOCK_ROWS
#define BLOCK_ROWS 192
#endif
#define STRIP (VECTORS * LANES)
#define PANEL (COLUMNS * LANES)
#define BLOCK_STRIPS (BLOCK_ROWS / STRIP)
/* From one key of p and ds to the next: an odd number of cache lines, or all keys of a row would lie in a quarter of the cache's sets. */
#define P_KEY (BLOCK_ROWS + 64 / (int64_t)sizeof(real))
#define BLOCK ((GRADIENT_KEYS + STEPS) * P_KEY)

typedef struct {
  real *keys, *values, *key_columns;
  real *queries, *douts, *query_columns, *dout_columns, *lse, *delta;
  real *p, *ds, *slope, *fetched;
  integer *lo, *hi;
  span *spans;
  int64_t panel, rows; /* keys of the panel and rows of the chunk, padded */
  int64_t row, strip, strips; /* the chunk: its first row, first strip, and strips */
} backward_space;

/* How many keys of a panel are taken at a time. Calls begin at these borders, so that sums do not depend on how the work is cut. */
ALWAYS int64_t gradient_block(int64_t panel) { return even_part(panel, GRADIENT_KEYS, KEYS_UNIT); }
ALWAYS int64_t chunk_strips(team t) { return t.places * BLOCK_STRIPS; }

static int64_t backward_layout(const call *c, team t, char *base, backward_space *s) {
  arena a = {base, 0};
  const int64_t d = c->head_dim, dv = c->v_dim;
  s->panel = round_up(c->part.panel1 - c->part.panel0, SCALARS), s->rows = chunk_strips(t) * STRIP;
  s->keys = TAKE(&a, s->panel * d, real), s->values = TAKE(&a, s->panel * dv, real);
  s->key_columns = TAKE(&a, s->panel * round_up(d, LANES), real);
  s->queries = TAKE(&a, s->rows * d, real), s->douts = TAKE(&a, s->rows * dv, real);
  s->query_columns = TAKE(&a, s->rows * round_up(d, LANES), real);
  s->dout_columns = TAKE(&a, s->rows * round_up(dv, LANES), real);
  s->lse = TAKE(&a, s->rows, real), s->delta = TAKE(&a, s->rows, real);
  s->lo = TAKE(&a, s->rows, integer), s->hi = TAKE(&a, s->rows, integer);
  s->spans = TAKE(&a, chunk_strips(t), span);
  s->p = TAKE(&a, t.places * BLOCK, real), s->ds = TAKE(&a, t.places * BLOCK, real);
  s->slope = TAKE(&a, c->softcap ? t.places * BLOCK : 0, real);
  for (int64_t rank = 0; rank < t.places; rank++) {
    real *fetched = TAKE(&a, fetched_reals(c), real);
    if (rank == t.rank) s->fetched = fetched;
  }
  return a.used;
}

/* Columns first .. of a gradient: PANEL at a time, the last LANES where no more are left. */
ALWAYS int64_t panel_width(int64_t columns, int64_t first) { return columns - first > LANES ? PANEL : LANES; }

ALWAYS void columns_of(const bunch *rows, int64_t n, int64_t columns, int64_t row, int64_t all, const real *by, real *out) {
  for (int64_t t = 0; t < columns; t += PANEL)
    if (panel_width(columns, t) == PANEL) along(rows, n, t, columns, PANEL, by, out + t * all + row * PANEL);
    else along(rows, n, t, columns, LANES, by, out + t * all + row * LANES);
}

static void pack_keys(const call *c, team t, backward_space *s, int64_t b, int64_t kv) {
  const uint8_t *all = c->seen ? c->seen + b * c->seen_batch + c->part.panel0 : NULL;
  const source k = source_of_keys(c, &c->k, c->storage, b, kv, s->fetched);
  const source v = source_of_values(c, &c->v, c->storage, b, kv, s->fetched);
  for (int64_t j = t.rank * SCALARS; j < s->panel; j += t.size * SCALARS) {
    const uint8_t *seen = all ? all + j : NULL;
    bunch rows = fetch(&k, c->part.panel0 + j, c->part.panel1, seen);
    across(&rows, SCALARS, c->head_dim, SCALARS, (factors){0}, s->keys + j * c->head_dim);
    columns_of(&rows, SCALARS, c->head_dim, j, s->panel, NULL, s->key_columns);
    rows = fetch(&v, c->part.panel0 + j, c->part.panel1, seen);
    across(&rows, SCALARS, c->v_dim, SCALARS, (factors){0}, s->values + j * c->v_dim);
  }
}

/* The base of lse, delta, and which rows of a strip see any key; the others weigh nothing: lse = +inf. What rounding the base
 * lost is a factor of dout and delta. */
static void pack_rows(const call *c, backward_space *s, int64_t b, int64_t head, int64_t row, int64_t lanes, uint8_t *sees, real *by) {
  for (int64_t r = 0; r < lanes; r++) {
    const int64_t i = row + r, at = b * c->bounds_batch + i, here = i - s->row;
    const real lse = i < c->rows ? *row_of(&c->lse, b, head, i) : 0;
    sees[r] = i < c->rows && (!c->lo || c->lo[at] < c->hi[at]) && lse != -(real)__builtin_inf();
    by[r] = sees[r] ? (real)__builtin_exp2(-rounding(lse)) : 1;
    s->lse[here] = sees[r] ? lse * (real)(LOG2E / PER_BASE) : (real)__builtin_inf();
    s->delta[here] = sees[r] ? *row_of(&c->delta, b, head, i) * by[r] : 0;
  }
}

static void pack_strip(const call *c, backward_space *s, int64_t b, int64_t head, int64_t strip) {
  const int64_t row = first_row(c->rows, strip), lanes = first_row(c->rows, strip + 1) - row, here = row - s->row;
  uint8_t sees[STRIP + SCALARS];
  real by[STRIP + SCALARS], q_by[SCALARS];
  for (int i = 0; i < SCALARS; i++) q_by[i] = (real)query_factor(c), by[lanes + i] = 1;
  const factors of_q = {q_by, (real)(query_factor(c) - (double)q_by[0])};
  pack_rows(c, s, b, head, row, lanes, sees, by);
  const source q = source_of_keys(c, &c->q, c->storage, b, head, s->fetched);
  const source dout = source_of_values(c, &c->dout, c->storage, b, head, s->fetched);
  for (int64_t r = 0; r < lanes; r += SCALARS) {
    const int64_t n = least(SCALARS, lanes - r);
    bunch rows = fetch(&q, row + r, row + r + n, sees + r);
    across(&rows, n, c->head_dim, lanes, of_q, s->queries + here * c->head_dim + r);
    columns_of(&rows, n, c->head_dim, here + r, s->rows, NULL, s->query_columns);
    rows = fetch(&dout, row + r, row + r + n, sees + r);
    across(&rows, n, c->v_dim, lanes, (factors){by + r, 0}, s->douts + here * c->v_dim + r);
    columns_of(&rows, n, c->v_dim, here + r, s->rows, by + r, s->dout_columns);
  }
  s->spans[strip - s->strip] = limits(c, b, row, lanes, s->lo + here, s->hi + here);
}

/* The keys of a strip among the n from j of the panel on: [from, to), counted from j, whole bunches of SCALARS. */
typedef struct { int64_t from, to; } range;

ALWAYS range within(const span *s, int64_t j, int64_t n) {
  const int64_t from = most(0, s->first / SCALARS * SCALARS - j), to = least(n, round_up(s->end, SCALARS) - j);
  return from < to ? (range){from, to} : (range){0, 0};
}

/* p = exp(s - lse) and ds = p (dp - delta), times the softcap's slope. On its own, as `weigh` is. */
APART void rebuild(int64_t vectors, real *restrict p, real *restrict ds, const real *restrict lse, const real *restrict delta, const real *slope) {
  for (int64_t j = 0; j < SCALARS; j += SIDE_BY_SIDE)
    for (int64_t v = 0; v < vectors; v++) {
      const vector base = load(lse + v * LANES), less = load(delta + v * LANES);
      vector weight[SIDE_BY_SIDE];
      UNROLL for (int i = 0; i < SIDE_BY_SIDE; i++) weight[i] = exponent(load(p + (j + i) * P_KEY + v * LANES), base);
      exp2_each(SIDE_BY_SIDE, weight);
      UNROLL for (int i = 0; i < SIDE_BY_SIDE; i++) {
        const int64_t at = (j + i) * P_KEY + v * LANES;
        const vector d = weight[i] * (load(ds + at) - less);
        store(p + at, weight[i]);
        store(ds + at, slope ? d * load(slope + at) : d);
      }
    }
}

ALWAYS void clear(real *p, real *ds, int64_t from, int64_t to, int64_t lanes) {
  for (int64_t i = from; i < to; i++)
    memset(p + i * P_KEY, 0, lanes * sizeof(real)), memset(ds + i * P_KEY, 0, lanes * sizeof(real));
}

/* p and ds of one strip for the n keys from j on; zeros where the strip sees none. All scores first: one panel at a time stays
 * in the first cache. */
ALWAYS void weights(const int N, const call *c, backward_space *s, int64_t head, int64_t strip, int64_t j, int64_t n) {
  const int64_t row = first_row(c->rows, strip), here = row - s->row, block = (strip - s->strip) / BLOCK_STRIPS;
  const int64_t at = block * BLOCK + row - first_row(c->rows, s->strip + block * BLOCK_STRIPS), lanes = N * LANES;
  const span *span = &s->spans[strip - s->strip];
  const range keys = within(span, j, n);
  real *p = s->p + at, *ds = s->ds + at, *slope = c->softcap ? s->slope + at : NULL;
  clear(p, ds, 0, keys.from, lanes);
  clear(p, ds, keys.to, n, lanes);
  for (int64_t i = keys.from; i < keys.to; i += SCALARS) {
    vector x[SCALARS * VECTORS];
    real *to = p + i * P_KEY;
    product(REALS, SCALARS, N, s->keys + (j + i) * c->head_dim, 1, SCALARS, s->queries + here * c->head_dim, lanes, c->head_dim, x);
    UNROLL for (int k = 0; k < SCALARS * N; k++) store(to + k / N * P_KEY + k % N * LANES, x[k]);
    if (bends(c)) bend(c, head, row, j + i, N, to, slope ? slope + i * P_KEY : NULL, P_KEY);
    if (__builtin_expect(!all_see(span, j + i), 0)) hide(N, s->lo + here, s->hi + here, j + i, to, P_KEY);
  }
  for (int64_t i = keys.from; i < keys.to; i += SCALARS) {
    vector x[SCALARS * VECTORS];
    real *to = ds + i * P_KEY;
    product(REALS, SCALARS, N, s->values + (j + i) * c->v_dim, 1, SCALARS, s->douts + here * c->v_dim, lanes, c->v_dim, x);
    UNROLL for (int k = 0; k < SCALARS * N; k++) store(to + k / N * P_KEY + k % N * LANES, x[k]);
    rebuild(N, p + i * P_KEY, to, s->lse + here, s->delta + here, slope ? slope + i * P_KEY : NULL);
  }
}

#define WEIGHTS(N)                                                                                                     \
  APART void weights##N(const call *c, backward_space *s, int64_t head, int64_t strip, int64_t j, int64_t n) {         \
    weights(N, c, s, head, strip, j, n);                                                                               \
  }
WEIGHTS(1) WEIGHTS(2) WEIGHTS(3)

/* STEPS rows or keys x one panel of columns: out += factor * sum over steps of a * columns. A gradient of rows sums over keys, one
 * of keys over rows: where the next number of `a` lies is known to the compiler, or it would compute addresses all the time. */
typedef struct { const real *a, *columns; int64_t steps; real *out; int64_t out_row, rows, width; real factor; } gradient;

ALWAYS void add_gradient(const int N, const int of_rows, const gradient *g) {
  vector x[STEPS * COLUMNS];
  for (int64_t i = 0; i < STEPS; i++) ask_for(g->out, i * g->out_row, N * LANES);
  product(REALS, STEPS, N, g->a, of_rows ? 1 : P_KEY, of_rows ? P_KEY : 1, g->columns, N * LANES, g->steps, x);
  add_to(STEPS, N, x, g->out, g->out_row, g->rows, g->width, g->factor);
}
APART void add_rows1(const gradient *g) { add_gradient(1, 1, g); }
APART void add_rows2(const gradient *g) { add_gradient(2, 1, g); }
APART void add_keys1(const gradient *g) { add_gradient(1, 0, g); }
APART void add_keys2(const gradient *g) { add_gradient(2, 0, g); }

ALWAYS void of_rows(const gradient *g) { (g->width > LANES ? add_rows2 : add_rows1)(g); }
ALWAYS void of_keys(const gradient *g) { (g->width > LANES ? add_keys2 : add_keys1)(g); }

/* A block of strips in the chunk: its first row, its rows, where each strip begins among them and which keys it saw (alike: all the
 * same); where it lies in p and ds. */
typedef struct { int64_t row, rows, strips, alike, first[BLOCK_STRIPS + 1]; range keys[BLOCK_STRIPS]; const real *p, *ds; } block;

static block block_of(const call *c, const backward_space *s, int64_t number, int64_t j, int64_t n) {
  const int64_t strip = s->strip + number * BLOCK_STRIPS;
  block b = {.row = first_row(c->rows, strip), .alike = 1, .p = s->p + number * BLOCK, .ds = s->ds + number * BLOCK};
  b.strips = least(BLOCK_STRIPS, s->strip + s->strips - strip);
  for (int64_t i = 0; i <= b.strips; i++) b.first[i] = first_row(c->rows, strip + i) - b.row;
  for (int64_t i = 0; i < b.strips; i++) {
    b.keys[i] = within(&s->spans[strip - s->strip + i], j, n);
    b.alike &= b.keys[i].from == b.keys[0].from && b.keys[i].to == b.keys[0].to;
  }
  b.rows = b.first[b.strips];
  return b;
}

/* The keys that any of the rows from .. to - 1 of a block saw. */
ALWAYS range keys_of(const block *b, int64_t from, int64_t to) {
  if (b->alike) return b->keys[0];
  range keys = {INT64_MAX, 0};
  for (int64_t i = 0; i < b->strips; i++)
    if (b->first[i] < to && b->first[i + 1] > from && b->keys[i].from < b->keys[i].to)
      keys.from = least(keys.from, b->keys[i].from), keys.to = most(keys.to, b->keys[i].to);
  return keys;
}

/* The rows of the strips of a block that saw any of the keys from .. to - 1. */
ALWAYS range rows_of(const block *b, int64_t from, int64_t to) {
  if (b->alike) return b->keys[0].from < to && b->keys[0].to > from ? (range){0, b->rows} : (range){0, 0};
  range rows = {INT64_MAX, 0};
  for (int64_t i = 0; i < b->strips; i++)
    if (b->keys[i].from < to && b->keys[i].to > from) rows.from = least(rows.from, b->first[i]), rows.to = b->first[i + 1];
  return rows;
}

/* A member's share of heights x widths pieces of a gradient, column by column, and its walk over them: divisions would take as long as
 * a tenth of a product. */
typedef struct { int64_t left, height, width; } share;

ALWAYS share share_of(team t, int64_t heights, int64_t widths) {
  const int64_t first = heights * widths * t.rank / t.size, end = heights * widths * (t.rank + 1) / t.size;
  return (share){end - first, first % heights, first / heights};
}
ALWAYS void next_of(share *s, int64_t heights) {
  s->left--;
  if (++s->height == heights) s->height = 0, s->width++;
}

/* dq of a block's rows: this member's share of (panel of columns, STEPS rows). */
static void query_gradients(const call *c, team t, const backward_space *s, const block *b, int64_t batch, int64_t head, int64_t j) {
  const int64_t heights = (b->rows + STEPS - 1) / STEPS, widths = (c->head_dim + PANEL - 1) / PANEL;
  for (share i = share_of(t, heights, widths); i.left; next_of(&i, heights)) {
    const int64_t d = i.width * PANEL, r = i.height * STEPS, width = panel_width(c->head_dim, d);
    const range keys = keys_of(b, r, r + STEPS);
    if (keys.from >= keys.to) continue;
    of_rows(&(gradient){
      .a = b->ds + keys.from * P_KEY + r, .steps = keys.to - keys.from,
      .columns = s->key_columns + d * s->panel + (j + keys.from) * width,
      .out = row_of(&c->dq, batch, head, b->row + r) + d, .out_row = c->dq.token / (int64_t)sizeof(real),
      .rows = least(c->rows - b->row, b->rows) - r, .width = c->head_dim - d, .factor = (real)c->scale});
  }
}

/* dk (or dv) of n keys from j on, from one block of rows. */
static void key_gradients(const call *c, const backward_space *s, const block *b, int of_values, real *out, int64_t key, int64_t d, int64_t n) {
  const range rows = rows_of(b, key, key + STEPS);
  if (rows.from >= rows.to) return;
  const int64_t columns = of_values ? c->v_dim : c->head_dim, here = b->row - s->row + rows.from;
  of_keys(&(gradient){
    .a = (of_values ? b->p : b->ds) + key * P_KEY + rows.from, .steps = rows.to - rows.from,
    .columns = (of_values ? s->dout_columns : s->query_columns) + d * s->rows + here * panel_width(columns, d),
    .out = out + d, .out_row = (of_values ? c->dv.token : c->dk.token) / (int64_t)sizeof(real),
    .rows = n - key, .width = columns - d, .factor = of_values ? 1 : (real)c->scale});
}

/* All gradients of the chunk with the n keys from j of the panel on. */
static void add_gradients(const call *c, team t, const backward_space *s, int64_t batch, int64_t head, int64_t j, int64_t n) {
  const int64_t blocks = (s->strips + BLOCK_STRIPS - 1) / BLOCK_STRIPS, kv = head / group_of(c);
  const int64_t panel0 = c->part.panel0, exist = least(n, c->part.panel1 - panel0 - j);
  block b[blocks];
  for (int64_t i = 0; i < blocks; i++) {
    b[i] = block_of(c, s, i, j, n);
    query_gradients(c, t, s, b + i, batch, head, j);
  }
  for (int of_values = 0; of_values < 2; of_values++) {
    const int64_t heights = (n + STEPS - 1) / STEPS, widths = ((of_values ? c->v_dim : c->head_dim) + PANEL - 1) / PANEL;
    for (share i = share_of(t, heights, widths); i.left; next_of(&i, heights)) {
      const int64_t key = i.height * STEPS;
      real *out = row_of(of_values ? &c->dv : &c->dk, batch, kv, panel0 + j + key);
      for (int64_t k = 0; k < blocks; k++) key_gradients(c, s, b + k, of_values, out, key, i.width * PANEL, exist);
    }
  }
}

/* One chunk of rows of one query head against the keys key0 .. key1 - 1. */
static void backward_chunk(const call *c, team t, backward_space *s, int64_t b, int64_t head) {
  if (c->part.pack & PACK_QUERIES) {
    for (int64_t i = t.rank; i < s->strips; i += t.size) pack_strip(c, s, b, head, s->strip + i);
    wait_for(t);
  }
  const int64_t keys = gradient_block(c->part.panel1 - c->part.panel0), end = round_up(c->part.key1 - c->part.panel0, SCALARS);
  for (int64_t j = c->part.key0 - c->part.panel0; j < end; j += keys) {
    const int64_t n = least(keys, end - j);
    int any = 0;
    for (int64_t i = 0; i < s->strips; i++) any |= within(&s->spans[i], j, n).to > 0;
    if (!any) continue;
    for (int64_t i = t.rank; i < s->strips; i += t.size) {
      const int64_t strip = s->strip + i, lanes = first_row(c->rows, strip + 1) - first_row(c->rows, strip);
      (lanes == LANES ? weights1 : lanes == 2 * LANES ? weights2 : weights3)(c, s, head, strip, j, n);
    }
    wait_for(t);
    add_gradients(c, t, s, b, head, j, n);
    wait_for(t);
  }
}

static void backward_head(const call *c, team t, char *space, int64_t b, int64_t kv) {
  backward_space s;
  backward_layout(c, t, space, &s);
  if (c->part.pack & PACK_KEYS) {
    pack_keys(c, t, &s, b, kv);
    wait_for(t);
  }
  for (int64_t g = c->part.group0; g < c->part.group1; g++)
    for (s.strip = c->part.strip0; s.strip < c->part.strip1; s.strip += chunk_strips(t)) {
      if (g > c->part.group0 || s.strip > c->part.strip0) wait_for(t); /* others may still ask what the chunk before sees */
      s.strips = least(chunk_strips(t), c->part.strip1 - s.strip), s.row = first_row(c->rows, s.strip);
      backward_chunk(c, t, &s, b, kv * group_of(c) + g);
    }
}

#endif
