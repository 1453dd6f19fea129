// forward: attention of a pair of runs, q, k, v -> partial (o, m, l), not normalised.
//
//   m = max s,  l = sum exp(s - m),  o = sum exp(s - m) v        s = score(q . k), over the keys that a row sees
//
// q (batch, queries, heads, dim), k and v (batch, keys, heads / group, dim and v_dim), o as q with v_dim, m and l (batch,
// heads, queries). A row that sees nothing gives o = 0, m = -inf, l = 0.
//
// A block has BM query rows of one head, in shared memory; K and V come past BN keys at a time, in STAGES buffers: with two, the
// next keys arrive while these are worked on. A warp owns 16 M rows and V_DIM / SPLIT columns of o, so that (o, m, l) stay
// in its registers: SPLIT warps share rows and repeat their scores, where o would not fit otherwise. M = 2 lets each fragment of K
// and V serve two products, which halves the traffic from shared memory, the limit on Hopper.
#include "tile.cuh"

template <typename T, int DIM, int V_DIM, int WARPS, int M, int BN, int SPLIT, int STAGES>
__global__ void __launch_bounds__(WARPS * WARP, BLOCKS) forward(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const int2* __restrict__ bounds,
    const Span* __restrict__ spans, const SumOf<T>* __restrict__ slopes, SumOf<T>* __restrict__ o, SumOf<T>* __restrict__ m,
    SumOf<T>* __restrict__ l, Tile p) {
  using Sum = SumOf<T>;
  constexpr int THREADS = WARPS * WARP, BM = WARPS / SPLIT * 16 * M, PAD = Fragments<T>::PAD, LDK = DIM + PAD, LDV = V_DIM + PAD;
  constexpr int COLUMNS = V_DIM / SPLIT;
  DYNAMIC_SHARED(shared);
  T* sq = (T*)shared;
  T* sk = sq + BM * LDK;
  T* sv = sk + STAGES * BN * LDK;
  int2* sbounds = (int2*)(sv + STAGES * BN * LDV);

  // The last rows first: under a causal mask they take longest.
  const int tiles = (p.queries + BM - 1) / BM, head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int kv_head = PLANTED(13) ? head % (p.heads / p.group) : head / p.group;
  const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * BM;
  const int warp = threadIdx.x / WARP, mine = warp / SPLIT * 16 * M, column = warp % SPLIT * COLUMNS;
  q += batch * p.q.batch + head * p.q.head + first * p.q.token;
  k += batch * p.k.batch + kv_head * p.k.head, v += batch * p.v.batch + kv_head * p.v.head;
  o += batch * p.o.batch + head * p.o.head;
  m += batch * p.stats_batch + head * p.stats_head, l += batch * p.stats_batch + head * p.stats_head;
  if (bounds) bounds += batch * p.bounds_batch, spans += batch * p.spans_batch;
  const Span block = span_of(spans, first, BM, p), rows = span_of(spans, first + mine, 16 * M, p);
  const int begin = block.empty() ? 0 : block.lo / BN * BN, end = block.empty() ? 0 : block.hi;
  if (p.resume && begin >= end) return;

  auto issue = [&](int key, int stage) {
    auto real = [&](int j) { return PLANTED(2) || (key + j >= block.lo && key + j < block.hi); };
    copy_rows<T, BN, DIM, THREADS>(sk + stage * BN * LDK, k + key * p.k.token, p.k.token, p.dim, p.aligned & ALIGNED_K, real);
    copy_rows<T, BN, V_DIM, THREADS>(sv + stage * BN * LDV, v + key * p.v.token, p.v.token, p.v_dim, p.aligned & ALIGNED_V, real);
  };
  if (begin < end) {
    copy_rows<T, BM, DIM, THREADS>(sq, q, p.q.token, p.dim, p.aligned & ALIGNED_Q, [&](int i) { return first + i < p.queries; });
    issue(begin, 0);
  }
  copies_commit();
  load_bounds(sbounds, bounds, first, BM, p);
  __syncthreads();
  const bool gaps = bounds && !PLANTED(11) && has_gaps(sbounds, BM, block);

  const Sum NONE = -infinity<Sum>();
  const Score<Sum> score(p, slopes, head);
  Sum sum[M][COLUMNS / 8][4], top[M][2], total[M][2];
#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + mine + u * 16 + place_row() + 8 * i;
      const bool old = p.resume && r < p.queries;
      top[u][i] = old ? m[r] : NONE;
      total[u][i] = old && lane() % 4 == 0 ? l[r] : (Sum)0;  // each lane sums its own columns: they meet at the end
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int d = column + n * 8 + place_column() + j;
          sum[u][n][2 * i + j] = old && d < p.v_dim ? o[r * p.o.token + d] : (Sum)0;
        }
    }

  int stage = 0;
  for (int key = begin; key < end; key += BN) {
    copies_wait();
    if (!PLANTED(7)) __syncthreads();  // these keys are here for all, and nobody reads the other buffer any more
    const bool more = key + BN < end;
    if (STAGES == 2 && more) issue(key + BN, stage ^ 1), copies_commit();
    T *keys = sk + stage * BN * LDK, *values = sv + stage * BN * LDV;
    if (gaps && !block.full(key, BN)) blank_unseen<T, BN, LDK, LDV>(keys, values, sbounds, BM, key);

    if (rows.meets(key, BN)) {
      Sum s[M][BN / 8][4];
      clear(s);
      rows_by_rows<T, DIM, LDK>(s, sq + mine * LDK, keys);
      if (!score.plain)
#pragma unroll
        for (int u = 0; u < M; ++u)
#pragma unroll
          for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              Sum bend;
              const int i = first + mine + u * 16 + place_row() + 8 * (e / 2), j = key + n * 8 + place_column() + e % 2;
              s[u][n][e] = score.of(s[u][n][e], i, j, p, bend);
            }
      if (!rows.full(key, BN))
#pragma unroll
        for (int u = 0; u < M; ++u)
#pragma unroll
          for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int2 seen = sbounds[mine + u * 16 + place_row() + 8 * (e / 2)];
              const int j = key + n * 8 + place_column() + e % 2;
              if (j < seen.x || j >= seen.y) s[u][n][e] = PLANTED(6) ? (Sum)-10000 : NONE;
            }

      // The running maximum, the factor it costs what was summed before, and p = exp(s - m) in place of s.
      Sum fade[M][2];
      bool moved = false;
#pragma unroll
      for (int u = 0; u < M; ++u)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Sum x = NONE;
#pragma unroll
          for (int n = 0; n < BN / 8; ++n) x = larger(x, larger(s[u][n][2 * i], s[u][n][2 * i + 1]));
          x = larger(top[u][i], score.natural(row_largest(x), p));
          const Sum base = x == NONE && !PLANTED(4) ? (Sum)0 : x * (Sum)LOG2_E;
          fade[u][i] = power_of_2(top[u][i] * (Sum)LOG2_E - base);
          moved |= x != top[u][i];
          top[u][i] = x;
          total[u][i] *= fade[u][i];
#pragma unroll
          for (int n = 0; n < BN / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              s[u][n][2 * i + j] = power_of_2(s[u][n][2 * i + j] * score.factor - base);
              total[u][i] += s[u][n][2 * i + j];
            }
        }
      if (PLANTED(9) ? __all_sync(ALL_LANES, moved) : __any_sync(ALL_LANES, moved))
#pragma unroll
        for (int u = 0; u < M; ++u)
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[u][n][e] *= fade[u][e / 2];
      held_by_rows<T, LDV>(sum, s, values + column);
      if (PLANTED(8)) __syncthreads();
    }
    if (STAGES == 1 && more) {
      __syncthreads();
      issue(key + BN, 0), copies_commit();
    }
    if (STAGES == 2) stage ^= 1;
  }
  copies_wait();
  if (SPLIT > 1) __syncthreads();  // all warps of a row have read the m and l to resume from

#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Sum row_total = row_sum(total[u][i]);
      const int r = first + mine + u * 16 + place_row() + 8 * i;
      if (r >= p.queries) continue;
      // A NaN that a row sees stays in m too: the maximum ignores it, and m = -inf would say that the row saw nothing.
      const Sum largest = row_total == row_total ? top[u][i] : row_total;
      if (lane() % 4 == 0 && column == 0) m[r] = PLANTED(12) ? largest * (Sum)LOG2_E : largest, l[r] = row_total;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int d = column + n * 8 + place_column() + j;
          if (d < p.v_dim) o[r * p.o.token + d] = sum[u][n][2 * i + j];
        }
    }
}
