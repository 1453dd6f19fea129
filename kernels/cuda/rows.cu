// The small kernels round the tiles: a warp works on a row, or on the bounds of 32.
//
//   clip     global bounds of a run of queries -> local bounds in a run of keys, and their spans
//   delta    sum(dout * out)
//   merge    accumulator (o, m, l) += partial (o, m, l)
//   finish   (o, m, l) -> out, lse
//
// Rows are (batch, token, head). An empty side has m = -inf; its o and l are not used, so they may hold anything.
#include "tile.cuh"

struct Run { int64_t start, step; int count; };

// local = how many keys of the run lie before the global bound; lo and hi are (batches, rows), a row contiguous.
__device__ __forceinline__ int keys_before(const Run& run, int64_t position) {
  if (PLANTED(3)) position += run.start;
  if (position <= run.start) return 0;
  const uint64_t ahead = (uint64_t)(position - run.start - 1) / (uint64_t)run.step + 1;
  return ahead < (uint64_t)run.count ? (int)ahead : run.count;
}

__global__ void clip(const int64_t* __restrict__ lo, const int64_t* __restrict__ hi, int2* __restrict__ bounds,
                                Span* __restrict__ spans, Run run, int rows, int batches) {
  const int groups = (rows + SPAN_ROWS - 1) / SPAN_ROWS;
  const int64_t w = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (w >= (int64_t)groups * batches) return;
  const int r = (int)(w % groups) * SPAN_ROWS + lane();
  Span span = Span::none();
  if (r < rows) {
    const int64_t i = w / groups * rows + r;
    const int2 mine = make_int2(keys_before(run, lo[i]), keys_before(run, hi[i]));
    bounds[i] = mine;
    span = mine.x < mine.y ? Span{mine.x, mine.y, mine.x, mine.y} : Span{NEVER, 0, NEVER, 0};
  }
#pragma unroll
  for (int s = WARP / 2; s; s /= 2)
    span.join(Span{__shfl_xor_sync(ALL_LANES, span.lo, s), __shfl_xor_sync(ALL_LANES, span.hi, s),
                   __shfl_xor_sync(ALL_LANES, span.lo_max, s), __shfl_xor_sync(ALL_LANES, span.hi_min, s)});
  if (lane() == 0) spans[w] = span;
}

// Strides of the first and second array of rows, and of the statistics that belong to them.
struct Rows {
  Strides a, b;
  int64_t a_batch, a_head, b_batch, b_head;
  int tokens, heads, batches, dim;
};

struct Row {
  int64_t batch, token, head;
  bool real;
  __device__ explicit Row(const Rows& p) {
    const int64_t w = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    head = w % p.heads, token = w / p.heads % p.tokens, batch = w / p.heads / p.tokens;
    real = batch < p.batches;
  }
  __device__ int64_t of(const Strides& s) const { return batch * s.batch + token * s.token + head * s.head; }
  __device__ int64_t at(int64_t by_batch, int64_t by_head) const { return batch * by_batch + head * by_head + token; }
};

template <typename T> __global__ void delta(const T* __restrict__ dout, const T* __restrict__ out, SumOf<T>* __restrict__ sums, Rows p) {
  const Row row(p);
  if (!row.real) return;
  dout += row.of(p.a), out += row.of(p.b);
  SumOf<T> x = 0;
  for (int d = lane(); d < p.dim; d += WARP) x += widen(dout[d]) * widen(out[d]);
#pragma unroll
  for (int s = WARP / 2; s; s /= 2) x += __shfl_xor_sync(ALL_LANES, x, s);
  if (lane() == 0) sums[row.at(p.a_batch, p.a_head)] = x;
}

template <typename Sum>
__global__ void merge(Sum* __restrict__ o, Sum* __restrict__ m, Sum* __restrict__ l, const Sum* __restrict__ other_o,
                      const Sum* __restrict__ other_m, const Sum* __restrict__ other_l, Rows p) {
  const Row row(p);
  if (!row.real) return;
  const int64_t i = row.at(p.a_batch, p.a_head), j = row.at(p.b_batch, p.b_head);
  const Sum NONE = -infinity<Sum>(), mine = m[i], its = other_m[j], total = l[i];
  if (its == NONE && !PLANTED(5)) return;
  const bool some = mine != NONE;
  const Sum top = larger(mine, its), a = power_of_2((mine - top) * (Sum)LOG2_E), b = power_of_2((its - top) * (Sum)LOG2_E);
  o += row.of(p.a), other_o += row.of(p.b);
  for (int d = lane(); d < p.dim; d += WARP) o[d] = (some ? o[d] * a : (Sum)0) + other_o[d] * b;
  if (!PLANTED(14)) __syncwarp();  // every lane has read m and l
  if (lane() == 0) m[i] = top, l[i] = (some ? total * a : (Sum)0) + other_l[j] * b;
}

template <typename T>
__global__ void finish(const SumOf<T>* __restrict__ o, const SumOf<T>* __restrict__ m, const SumOf<T>* __restrict__ l,
                       T* __restrict__ out, SumOf<T>* __restrict__ lse, Rows p) {
  using Sum = SumOf<T>;
  const Row row(p);
  if (!row.real) return;
  const int64_t i = row.at(p.a_batch, p.a_head);
  const Sum top = m[i], total = l[i];
  const bool some = total != 0;  // also where it is NaN
  o += row.of(p.a), out += row.of(p.b);
  for (int d = lane(); d < p.dim; d += WARP) round_to(out[d], some ? o[d] / total : (Sum)0);
  if (lane() == 0) lse[row.at(p.b_batch, p.b_head)] = some ? top + logarithm(total) : -infinity<Sum>();
}
