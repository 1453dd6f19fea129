// What the attention kernels share: the parameters of a pair, which keys its rows see, copies to shared memory, scores.
//
// A pair is a run of queries and a run of keys. Row i of the queries sees the local keys bounds[i].x <= j < bounds[i].y;
// null bounds: every row sees every key. `clip` (rows.cu) makes them from the global bounds, and a Span for every 32 rows.
#pragma once
#include "fragments.cuh"

struct Strides { int64_t batch, token, head; };  // in elements; the last axis is contiguous

struct Tile {
  Strides q, k, v, o, dq, dk, dv;              // o: the partial's o (forward) or dout (backward)
  int64_t stats_batch, stats_head;             // m, l, lse, delta: tokens are contiguous
  int64_t bounds_batch, spans_batch;           // 0 where all batch entries share them
  int64_t ahead, query_step, key_step;         // ALiBi: a query's diagonal less a key's position, ahead + i query_step - j key_step
  double scale, softcap;                       // softcap 0: none
  int queries, keys, heads, group;             // group: query heads a K/V head
  int dim, v_dim;                              // head_dim of q and k; of v and o
  int resume;                                  // forward starts from the (o, m, l) that is there: the merge is then free
  int aligned;                                 // bits: q, k, v, dout may be copied 16 bytes at a time
};
enum Aligned { ALIGNED_Q = 1, ALIGNED_K = 2, ALIGNED_V = 4, ALIGNED_DOUT = 8 };

// ------------------------------------------------------------------------------------------------------ who sees what

constexpr int SPAN_ROWS = 32, NEVER = 0x7fffffff;

// The extremes of the bounds of some rows: keys outside [lo, hi) are seen by no row, keys inside [lo_max, hi_min) by all.
// A row that sees nothing sets lo_max to NEVER and hi_min to 0.
struct __align__(16) Span {
  int lo, hi, lo_max, hi_min;
  __device__ static Span none() { return Span{NEVER, 0, 0, NEVER}; }
  __device__ bool empty() const { return lo >= hi; }
  __device__ bool meets(int key, int n) const { return key < hi && key + n > lo; }
  __device__ bool full(int key, int n) const { return key >= lo_max && key + n <= hi_min; }
  __device__ bool some_row_sees_nothing() const { return lo_max == NEVER; }
  __device__ void join(const Span& s) {
    lo = lo < s.lo ? lo : s.lo, hi = hi > s.hi ? hi : s.hi;
    lo_max = lo_max > s.lo_max ? lo_max : s.lo_max, hi_min = hi_min < s.hi_min ? hi_min : s.hi_min;
  }
};

// The span of rows first .. first + n - 1, or of a few more round them.
__device__ __forceinline__ Span span_of(const Span* spans, int first, int n, const Tile& p) {
  if (!spans) return Span{0, first < p.queries ? p.keys : 0, 0, p.keys};
  Span all = Span::none();
  for (int r = first / SPAN_ROWS; r * SPAN_ROWS < first + n && r * SPAN_ROWS < p.queries; ++r) all.join(spans[r]);
  return all;
}

// The bounds of the block's rows in shared memory; rows beyond the last see nothing.
__device__ __forceinline__ void load_bounds(int2* s, const int2* bounds, int first, int rows, const Tile& p) {
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    const int r = first + i;
    s[i] = r >= p.queries ? make_int2(0, 0) : bounds ? bounds[r] : make_int2(0, p.keys);
  }
}

// Whether some key of the block's span is seen by none of its rows: if one is, so is the first, or one where a row's keys end. The
// span may be wider than what a block of fewer than SPAN_ROWS rows sees. Called by the whole block.
__device__ __forceinline__ bool has_gaps(const int2* bounds, int rows, const Span& span) {
  bool gap = false;
  for (int i = threadIdx.x; i <= rows; i += blockDim.x) {
    const int key = i < rows ? bounds[i].y : span.lo;
    if (key < span.lo || key >= span.hi) continue;
    bool seen = false;
    for (int r = 0; r < rows; ++r) seen |= bounds[r].x <= key && key < bounds[r].y;
    gap |= !seen;
  }
  return __syncthreads_or(gap);
}

// Keys that no row of the block sees become zeros: they may hold NaN, and 0 * NaN is NaN. Called by the whole block.
template <typename T, int KEYS, int LDK, int LDV>
__device__ __forceinline__ void blank_unseen(T* k, T* v, const int2* bounds, int rows, int first) {
  for (int j = threadIdx.x; j < KEYS; j += blockDim.x) {
    bool seen = false;
    for (int r = 0; r < rows; ++r) seen |= bounds[r].x <= first + j && first + j < bounds[r].y;
    if (seen) continue;
    for (int d = 0; d < LDK; ++d) round_to(k[j * LDK + d], (SumOf<T>)0);
    for (int d = 0; d < LDV; ++d) round_to(v[j * LDV + d], (SumOf<T>)0);
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------- global to shared memory

// The block's copy of ROWS rows of `dim` numbers, widened to D with zeros. Rows for which `real` is false become zeros and
// are not read. Aligned rows go 16 bytes a thread by cp.async; others number by number. Either is there after
// copies_wait and a barrier.
template <typename T, int ROWS, int D, int THREADS, typename Real>
__device__ __forceinline__ void copy_rows(T* s, const T* global, int64_t stride, int dim, bool aligned, Real real) {
  using F = Fragments<T>;
  constexpr int LD = D + F::PAD, CHUNK = 16 / sizeof(T), CHUNKS = D / CHUNK, STEP = THREADS / CHUNKS;
  if (aligned || PLANTED(10)) {
    const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK;
    if (THREADS % CHUNKS && row >= STEP) return;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP)
      if (ROWS % STEP == 0 || r + row < ROWS) {
        const int64_t offset = PLANTED(1) ? (int)((uint32_t)(r + row) * (uint32_t)stride) : (r + row) * stride;
        copy_16_async(s + (r + row) * LD + F::place(r + row, column), global + offset + column, column < dim && real(r + row));
      }
  } else {
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
      const int row = i / D, column = i % D;
      // Not through a reference to the place, which cost the forward kernel of 96 columns 16 bytes of local memory on sm_100.
      if (column < dim && real(row)) s[row * LD + F::place(row, column)] = global[row * stride + column];
      else round_to(s[row * LD + F::place(row, column)], (SumOf<T>)0);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- scores

// How a product q . k becomes a score, for one head. Scores are kept to base 2: score * log2(e).
//
// Without softcap and ALiBi, and with a positive scale, products stay as they are and `factor` brings them to base 2 in
// the same instruction that subtracts a maximum; otherwise `of` is applied to each and `factor` is 1.
template <typename Sum> struct Score {
  bool plain;
  Sum factor, slope;
  __device__ Score(const Tile& p, const Sum* slopes, int head)
      : plain(!slopes && p.softcap == 0 && p.scale > 0), factor(plain ? (Sum)(p.scale * LOG2_E) : (Sum)1), slope(slopes ? slopes[head] : 0) {}

  // The score of query i and key j to base 2, and d(score)/d(scale q . k), which a softcap makes less than 1.
  __device__ __forceinline__ Sum of(Sum product, int i, int j, const Tile& p, Sum& bend) const {
    Sum s = (Sum)p.scale * product;
    bend = 1;
    if (p.softcap != 0) {
      const Sum t = hyperbolic_tangent(s / (Sum)p.softcap);
      s = (Sum)p.softcap * t, bend = 1 - t * t;
    }
    if (slope != 0) {
      const int64_t d = p.ahead + i * p.query_step - j * p.key_step;
      s -= slope * (Sum)(d < 0 ? -d : d);
    }
    return s * (Sum)LOG2_E;
  }
  // A maximum of what `products` gave, as a score to base e.
  __device__ __forceinline__ Sum natural(Sum top, const Tile& p) const { return top * (plain ? (Sum)p.scale : (Sum)LN_2); }
};

// The place of this lane's numbers in a product of 16M x 8N: row 16u + place_row() + 8i, column 8n + place_column() + j.
__device__ __forceinline__ int place_row() { return lane() / 4; }
__device__ __forceinline__ int place_column() { return lane() % 4 * 2; }
// The sum or the largest over the four lanes of a row.
template <typename Sum> __device__ __forceinline__ Sum row_sum(Sum x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
template <typename Sum> __device__ __forceinline__ Sum row_largest(Sum x) {
  x = larger(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return larger(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
