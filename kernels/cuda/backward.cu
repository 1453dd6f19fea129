// backward: the gradients of a pair of runs, in two kernels, added to what is there.
//
//   p = exp(score - lse)    ds = p (dout . v - delta)          lse, delta: of the whole row, over every key of the ring
//   backward_dq      dq += scale ds K                          a block per query tile and head, K and V come past
//   backward_dkdv    dv += p^T dout,  dk += scale ds^T Q       a block per key tile and K/V head, Q and dout of its group come past
//
// Shapes as in forward.cu; dout as o; dq, dk, dv in the type of the sums. A row with lse = -inf adds nothing. Every number of a
// gradient is summed by one thread in one order: no atomics, and the same bits on every run. That costs seven products
// where a fused kernel with atomics has five, but half the shared memory, so that two blocks fit on a multiprocessor.
//
// In the second kernel scores are computed transposed, K Q^T, so that p^T and ds^T lie in registers as the next product
// needs them. BM query rows and BN keys meet at a time; the owned side has WARPS / SPLIT * 16 M rows (see forward.cu).
#include "tile.cuh"

// exp2(score - this) is p; where lse is -inf it is 0.
template <typename Sum> __device__ __forceinline__ Sum base_of(Sum lse) {
  return lse == -infinity<Sum>() ? infinity<Sum>() : lse * (Sum)LOG2_E;
}

template <typename T, int DIM, int V_DIM, int WARPS, int M, int BN, int SPLIT, int STAGES>
__global__ void __launch_bounds__(WARPS * WARP, BLOCKS) backward_dq(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    const SumOf<T>* __restrict__ lse, const SumOf<T>* __restrict__ delta, const int2* __restrict__ bounds,
    const Span* __restrict__ spans, const SumOf<T>* __restrict__ slopes, SumOf<T>* __restrict__ dq, Tile p) {
  using Sum = SumOf<T>;
  constexpr int THREADS = WARPS * WARP, BM = WARPS / SPLIT * 16 * M, PAD = Fragments<T>::PAD, LDK = DIM + PAD, LDV = V_DIM + PAD;
  constexpr int COLUMNS = DIM / SPLIT;
  DYNAMIC_SHARED(shared);
  T* sq = (T*)shared;
  T* sdout = sq + BM * LDK;
  T* sk = sdout + BM * LDV;
  T* sv = sk + STAGES * BN * LDK;
  int2* sbounds = (int2*)(sv + STAGES * BN * LDV);

  const int tiles = (p.queries + BM - 1) / BM, head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * BM;
  const int warp = threadIdx.x / WARP, mine = warp / SPLIT * 16 * M, column = warp % SPLIT * COLUMNS;
  q += batch * p.q.batch + head * p.q.head + first * p.q.token;
  dout += batch * p.o.batch + head * p.o.head + first * p.o.token;
  k += batch * p.k.batch + head / p.group * p.k.head, v += batch * p.v.batch + head / p.group * p.v.head;
  dq += batch * p.dq.batch + head * p.dq.head;
  lse += batch * p.stats_batch + head * p.stats_head, delta += batch * p.stats_batch + head * p.stats_head;
  if (bounds) bounds += batch * p.bounds_batch, spans += batch * p.spans_batch;
  const Span block = span_of(spans, first, BM, p), rows = span_of(spans, first + mine, 16 * M, p);
  if (block.empty()) return;
  const int begin = block.lo / BN * BN, end = block.hi;

  auto inside = [&](int i) { return first + i < p.queries; };
  auto issue = [&](int key, int stage) {
    auto real = [&](int j) { return key + j >= block.lo && key + j < block.hi; };
    copy_rows<T, BN, DIM, THREADS>(sk + stage * BN * LDK, k + key * p.k.token, p.k.token, p.dim, p.aligned & ALIGNED_K, real);
    copy_rows<T, BN, V_DIM, THREADS>(sv + stage * BN * LDV, v + key * p.v.token, p.v.token, p.v_dim, p.aligned & ALIGNED_V, real);
  };
  copy_rows<T, BM, DIM, THREADS>(sq, q, p.q.token, p.dim, p.aligned & ALIGNED_Q, inside);
  copy_rows<T, BM, V_DIM, THREADS>(sdout, dout, p.o.token, p.v_dim, p.aligned & ALIGNED_DOUT, inside);
  issue(begin, 0), copies_commit();
  load_bounds(sbounds, bounds, first, BM, p);
  __syncthreads();
  const bool gaps = bounds && !PLANTED(11) && has_gaps(sbounds, BM, block);

  const Score<Sum> score(p, slopes, head);
  Sum sum[M][COLUMNS / 8][4], base[M][2], less[M][2];
  clear(sum);
#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + mine + u * 16 + place_row() + 8 * i;
      base[u][i] = r < p.queries ? base_of(lse[r]) : infinity<Sum>();
      less[u][i] = r < p.queries ? delta[r] : (Sum)0;
    }

  int stage = 0;
  for (int key = begin; key < end; key += BN) {
    copies_wait();
    __syncthreads();
    const bool more = key + BN < end;
    if (STAGES == 2 && more) issue(key + BN, stage ^ 1), copies_commit();
    T *keys = sk + stage * BN * LDK, *values = sv + stage * BN * LDV;
    if (gaps && !block.full(key, BN)) blank_unseen<T, BN, LDK, LDV>(keys, values, sbounds, BM, key);

    if (rows.meets(key, BN)) {
      Sum s[M][BN / 8][4], dp[M][BN / 8][4];
      clear(s), clear(dp);
      rows_by_rows<T, DIM, LDK>(s, sq + mine * LDK, keys);
      rows_by_rows<T, V_DIM, LDV>(dp, sdout + mine * LDV, values);
      const bool full = rows.full(key, BN);
#pragma unroll
      for (int u = 0; u < M; ++u)
#pragma unroll
        for (int n = 0; n < BN / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = mine + u * 16 + place_row() + 8 * (e / 2), j = key + n * 8 + place_column() + e % 2;
            Sum bend = 1;
            if (!score.plain) s[u][n][e] = score.of(s[u][n][e], first + i, j, p, bend);
            s[u][n][e] = power_of_2(s[u][n][e] * score.factor - base[u][e / 2]) * (dp[u][n][e] - less[u][e / 2]) * bend;
            if (!full && (j < sbounds[i].x || j >= sbounds[i].y)) s[u][n][e] = 0;
          }
      held_by_rows<T, LDK>(sum, s, keys + column);
    }
    if (STAGES == 1 && more) {
      __syncthreads();
      issue(key + BN, 0), copies_commit();
    }
    if (STAGES == 2) stage ^= 1;
  }

#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = first + mine + u * 16 + place_row() + 8 * (e / 2), d = column + n * 8 + place_column() + e % 2;
        if (r < p.queries && d < p.dim) dq[r * p.dq.token + d] += (Sum)p.scale * sum[u][n][e];
      }
}

// The query tiles of a group of heads in which some row sees keys first .. first + BN - 1, in order. 32 tiles are looked at
// in one vote, so that skipping costs little whatever the mask. Each warp walks alone, to the same answers.
template <int BM, int BN> struct QueryTiles {
  const Span* spans;
  int first, queries, group;
  int head = 0, row = 0, base = -WARP * BM;
  unsigned left = 0;

  __device__ QueryTiles(const Span* spans, int first, const Tile& p) : spans(spans), first(first), queries(p.queries), group(p.group) {}
  __device__ bool next() {
    while (!left) {
      base += WARP * BM;
      if (base >= queries) {
        base = 0;
        if (++head >= group) return false;
      }
      left = __ballot_sync(ALL_LANES, sees(base + lane() * BM));
    }
    row = base + (__ffs(left) - 1) * BM;
    left &= left - 1;
    return true;
  }
  __device__ bool sees(int r) const {
    if (!spans) return r < queries;
    bool any = false;
    for (int i = r / SPAN_ROWS; i * SPAN_ROWS < r + BM && i * SPAN_ROWS < queries; ++i) any |= spans[i].meets(first, BN);
    return any;
  }
};

template <typename T, int DIM, int V_DIM, int WARPS, int M, int BM, int SPLIT, int STAGES>
__global__ void __launch_bounds__(WARPS * WARP, BLOCKS) backward_dkdv(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    const SumOf<T>* __restrict__ lse, const SumOf<T>* __restrict__ delta, const int2* __restrict__ bounds,
    const Span* __restrict__ spans, const SumOf<T>* __restrict__ slopes, SumOf<T>* __restrict__ dk, SumOf<T>* __restrict__ dv,
    Tile p) {
  using Sum = SumOf<T>;
  constexpr int THREADS = WARPS * WARP, BN = WARPS / SPLIT * 16 * M, PAD = Fragments<T>::PAD, LDK = DIM + PAD, LDV = V_DIM + PAD;
  constexpr int K_COLUMNS = DIM / SPLIT, V_COLUMNS = V_DIM / SPLIT;
  static_assert(BM <= THREADS, "a thread for every row that comes past");
  DYNAMIC_SHARED(shared);
  T* sk = (T*)shared;
  T* sv = sk + BN * LDK;
  T* sq = sv + BN * LDV;
  T* sdout = sq + STAGES * BM * LDK;
  int2* sbounds = (int2*)(sdout + STAGES * BM * LDV);
  Sum* sbase = (Sum*)(sbounds + STAGES * BM);
  Sum* sless = sbase + STAGES * BM;

  const int tiles = (p.keys + BN - 1) / BN, kv_heads = p.heads / p.group, kv_head = blockIdx.x / tiles % kv_heads;
  const int batch = blockIdx.x / tiles / kv_heads, first = (int)(blockIdx.x % tiles) * BN;
  const int warp = threadIdx.x / WARP, mine = warp / SPLIT * 16 * M, column = warp % SPLIT;
  q += batch * p.q.batch + kv_head * p.group * p.q.head, dout += batch * p.o.batch + kv_head * p.group * p.o.head;
  k += batch * p.k.batch + kv_head * p.k.head + first * p.k.token, v += batch * p.v.batch + kv_head * p.v.head + first * p.v.token;
  dk += batch * p.dk.batch + kv_head * p.dk.head, dv += batch * p.dv.batch + kv_head * p.dv.head;
  lse += batch * p.stats_batch + kv_head * p.group * p.stats_head, delta += batch * p.stats_batch + kv_head * p.group * p.stats_head;
  if (bounds) bounds += batch * p.bounds_batch, spans += batch * p.spans_batch;
  QueryTiles<BM, BN> tile(spans, first, p);
  if (!tile.next()) return;

  // A row that sees nothing is not read: it may hold NaN.
  auto issue = [&](int head, int row, int stage) {
    const bool picky = bounds && span_of(spans, row, BM, p).some_row_sees_nothing();
    auto real = [&](int i) {
      if (row + i >= p.queries) return false;
      if (!picky) return true;
      const int2 mine = bounds[row + i];
      return mine.x < mine.y;
    };
    copy_rows<T, BM, DIM, THREADS>(sq + stage * BM * LDK, q + head * p.q.head + row * p.q.token, p.q.token, p.dim, p.aligned & ALIGNED_Q, real);
    copy_rows<T, BM, V_DIM, THREADS>(sdout + stage * BM * LDV, dout + head * p.o.head + row * p.o.token, p.o.token, p.v_dim,
                                     p.aligned & ALIGNED_DOUT, real);
    const int i = threadIdx.x;
    if (i >= BM) return;
    const bool there = real(i);
    sbase[stage * BM + i] = there ? base_of(lse[head * p.stats_head + row + i]) : infinity<Sum>();
    sless[stage * BM + i] = there ? delta[head * p.stats_head + row + i] : (Sum)0;
    sbounds[stage * BM + i] = !there ? make_int2(0, 0) : bounds ? bounds[row + i] : make_int2(0, p.keys);
  };
  auto inside = [&](int j) { return first + j < p.keys; };
  copy_rows<T, BN, DIM, THREADS>(sk, k, p.k.token, p.dim, p.aligned & ALIGNED_K, inside);
  copy_rows<T, BN, V_DIM, THREADS>(sv, v, p.v.token, p.v_dim, p.aligned & ALIGNED_V, inside);
  issue(tile.head, tile.row, 0), copies_commit();

  Sum dk_sum[M][K_COLUMNS / 8][4], dv_sum[M][V_COLUMNS / 8][4];
  clear(dk_sum), clear(dv_sum);
  bool more = true;
  for (int stage = 0; more;) {
    const int head = tile.head, row = tile.row;
    copies_wait();
    __syncthreads();
    more = tile.next();
    if (STAGES == 2 && more) issue(tile.head, tile.row, stage ^ 1), copies_commit();
    const T *queries = sq + stage * BM * LDK, *douts = sdout + stage * BM * LDV;
    const int2* seen = sbounds + stage * BM;
    const Sum *base = sbase + stage * BM, *less = sless + stage * BM;
    const Score<Sum> score(p, slopes, kv_head * p.group + head);
    const Span rows = span_of(spans, row, BM, p);

    if (rows.meets(first + mine, 16 * M)) {
      const bool full = rows.full(first + mine, 16 * M);
      Sum s[M][BM / 8][4], dp[M][BM / 8][4];
      clear(s), clear(dp);
      rows_by_rows<T, DIM, LDK>(s, sk + mine * LDK, queries);
      rows_by_rows<T, V_DIM, LDV>(dp, sv + mine * LDV, douts);
#pragma unroll
      for (int n = 0; n < BM / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = n * 8 + place_column() + e;
          const Sum b = base[i], d = less[i];
          const int2 keys = full ? make_int2(0, NEVER) : seen[i];
#pragma unroll
          for (int u = 0; u < M; ++u)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int j = first + mine + u * 16 + place_row() + 8 * h;
              Sum &x = s[u][n][2 * h + e], &y = dp[u][n][2 * h + e], bend = 1;
              if (!score.plain) x = score.of(x, row + i, j, p, bend);
              x = power_of_2(x * score.factor - b);
              y = x * (y - d) * bend;
              if (!full && (j < keys.x || j >= keys.y)) x = y = 0;
            }
        }
      held_by_rows<T, LDV>(dv_sum, s, douts + column * V_COLUMNS);
      held_by_rows<T, LDK>(dk_sum, dp, queries + column * K_COLUMNS);
    }
    if (STAGES == 1 && more) {
      __syncthreads();
      issue(tile.head, tile.row, 0), copies_commit();
    }
    if (STAGES == 2) stage ^= 1;
  }

#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t r = first + mine + u * 16 + place_row() + 8 * (e / 2);
      if (r >= p.keys) continue;
#pragma unroll
      for (int n = 0; n < K_COLUMNS / 8; ++n) {
        const int d = column * K_COLUMNS + n * 8 + place_column() + e % 2;
        if (d < p.dim) dk[r * p.dk.token + d] += (Sum)p.scale * dk_sum[u][n][e];
      }
#pragma unroll
      for (int n = 0; n < V_COLUMNS / 8; ++n) {
        const int d = column * V_COLUMNS + n * 8 + place_column() + e % 2;
        if (d < p.v_dim) dv[r * p.dv.token + d] += dv_sum[u][n][e];
      }
    }
}
