// Matrix products of a warp, one interface for four types: C(16x8) += A(16xK) B(Kx8).
//
// In every type lane 4g + t holds of C the rows g, g+8 and the columns 2t, 2t+1. So a product's result can be used in place
// as the next product's A (`hold`): attention needs no other exchange between lanes. What differs is how A and B are held.
//   float16, bfloat16   tensor cores, K = 16, sums in float
//   double              tensor cores, K = 8; `hold` renumbers k within a group of 8, and `load_rows` of B does the same
//   float               no tensor core is exact: each lane multiplies its own 2x2 of C, K = 8
// Number `column` of a row in shared memory stands at `place(row, column)` of it, so that no load has bank conflicts.
#pragma once
#include "platform.cuh"

template <typename T> struct Fragments {
  using Sum = float;
  static constexpr int K = 16;
  static constexpr int PAD = 8;  // a row of shared memory is 16 bytes longer than its data: ldmatrix without bank conflicts
  struct A { uint32_t x[4]; };
  struct B { uint32_t x[2]; };
  static __device__ __forceinline__ int place(int, int column) { return column; }

  // A from 16 rows of K numbers in shared memory.
  static __device__ __forceinline__ void load_a(A& a, const T* s, int ld) {
    load_matrices(a.x, s + lane() % 16 * ld + lane() / 16 * 8);
  }
  // Two B (16 columns) from shared memory that holds each column as a row: 16 rows of K numbers.
  static __device__ __forceinline__ void load_columns(B (&b)[2], const T* s, int ld) {
    uint32_t r[4];
    load_matrices(r, s + (lane() / 16 * 8 + lane() % 8) * ld + lane() / 8 % 2 * 8);
    b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
  }
  // Two B (16 columns) from shared memory that holds rows as rows: K rows of 16 numbers. To go with `hold`.
  static __device__ __forceinline__ void load_rows(B (&b)[2], const T* s, int ld) {
    uint32_t r[4];
    load_matrices_transposed(r, s + lane() % 16 * ld + lane() / 16 * 8);
    b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
  }
  // K columns of C, rounded, as A.
  static __device__ __forceinline__ void hold(A& a, const float (*c)[4]) {
    a.x[0] = pack(c[0][0], c[0][1], T{}), a.x[1] = pack(c[0][2], c[0][3], T{});
    a.x[2] = pack(c[1][0], c[1][1], T{}), a.x[3] = pack(c[1][2], c[1][3], T{});
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) { mma_m16n8k16(c, a.x, b.x, T{}); }
};

template <> struct Fragments<double> {
  using Sum = double;
  static constexpr int K = 8;
  static constexpr int PAD = 4;
  struct A { double x[4]; };
  struct B { double x[2]; };
  // Four rows of four numbers fill the banks, and so do, of four rows that are two apart, four numbers side by side.
  static __device__ __forceinline__ int place(int row, int column) { return column ^ (row & 4); }

  static __device__ __forceinline__ void load_a(A& a, const double* s, int ld) {
    s += lane() / 4 * ld;
    const int low = place(lane() / 4, lane() % 4), high = low ^ 4;
    a.x[0] = s[low], a.x[1] = s[8 * ld + low], a.x[2] = s[high], a.x[3] = s[8 * ld + high];
  }
  static __device__ __forceinline__ void load_columns(B (&b)[2], const double* s, int ld) {
    s += lane() / 4 * ld;
    const int low = place(lane() / 4, lane() % 4), high = low ^ 4;
    b[0].x[0] = s[low], b[0].x[1] = s[high], b[1].x[0] = s[8 * ld + low], b[1].x[1] = s[8 * ld + high];
  }
  // k = t is row 2t and k = t + 4 is row 2t + 1: the columns of C that this lane holds.
  static __device__ __forceinline__ void load_rows(B (&b)[2], const double* s, int ld) {
    s += lane() % 4 * 2 * ld + place(lane() % 4 * 2, lane() / 4);
    b[0].x[0] = s[0], b[0].x[1] = s[ld], b[1].x[0] = s[8], b[1].x[1] = s[ld + 8];
  }
  static __device__ __forceinline__ void hold(A& a, const double (*c)[4]) {
    a.x[0] = c[0][0], a.x[1] = c[0][2], a.x[2] = c[0][1], a.x[3] = c[0][3];
  }
  static __device__ __forceinline__ void multiply(double (&c)[4], const A& a, const B& b) { mma_m16n8k8(c, a.x, b.x); }
};

template <> struct Fragments<float> {
  using Sum = float;
  static constexpr int K = 8;
  static constexpr int PAD = 4;
  struct A { float x[2][8]; };  // rows g, g+8, all k
  struct B { float x[2][8]; };  // columns 2t, 2t+1, all k
  static __device__ __forceinline__ int place(int, int column) { return column; }

  static __device__ __forceinline__ void load_a(A& a, const float* s, int ld) {
#pragma unroll
    for (int i = 0; i < 2; ++i) eight(a.x[i], s + (lane() / 4 + 8 * i) * ld);
  }
  static __device__ __forceinline__ void load_columns(B (&b)[2], const float* s, int ld) {
#pragma unroll
    for (int i = 0; i < 4; ++i) eight(b[i / 2].x[i % 2], s + (i / 2 * 8 + lane() % 4 * 2 + i % 2) * ld);
  }
  static __device__ __forceinline__ void load_rows(B (&b)[2], const float* s, int ld) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 two = *(const float2*)(s + k * ld + n * 8 + lane() % 4 * 2);
        b[n].x[0][k] = two.x, b[n].x[1][k] = two.y;
      }
  }
  // The four lanes of a row have two columns each, and all need all eight.
  static __device__ __forceinline__ void hold(A& a, const float (*c)[4]) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) a.x[i][k] = __shfl_sync(ALL_LANES, c[0][2 * i + k % 2], k / 2, 4);
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[e] = fmaf(a.x[e / 2][k], b.x[e % 2][k], c[e]);
  }

 private:
  static __device__ __forceinline__ void eight(float (&x)[8], const float* s) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 four = *(const float4*)(s + j);
      x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
    }
  }
};

template <typename T> using SumOf = typename Fragments<T>::Sum;

// Blocks of 128 threads that are to share a multiprocessor's registers: two leave a thread all 255 that it can name. Left to
// itself the compiler may want three, and spill.
constexpr int BLOCKS = 2;

// C = 0.
template <typename Sum, int M, int N> __device__ __forceinline__ void clear(Sum (&c)[M][N][4]) {
#pragma unroll
  for (int u = 0; u < M; ++u)
#pragma unroll
    for (int n = 0; n < N; ++n) c[u][n][0] = c[u][n][1] = c[u][n][2] = c[u][n][3] = 0;
}

// C(16M x 8N) += A B^T: the rows of A and of B lie in shared memory, DEPTH numbers each. Each fragment of B serves M products.
template <typename T, int DEPTH, int LD, typename Sum, int M, int N>
__device__ __forceinline__ void rows_by_rows(Sum (&c)[M][N][4], const T* a, const T* b) {
  using F = Fragments<T>;
#pragma unroll
  for (int k = 0; k < DEPTH; k += F::K) {
    typename F::A rows[M];
#pragma unroll
    for (int u = 0; u < M; ++u) F::load_a(rows[u], a + u * 16 * LD + k, LD);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      typename F::B columns[2];
      F::load_columns(columns, b + n * 8 * LD + k, LD);
#pragma unroll
      for (int u = 0; u < M; ++u) F::multiply(c[u][n], rows[u], columns[0]), F::multiply(c[u][n + 1], rows[u], columns[1]);
    }
  }
}

// C(16M x 8N) += P B: P(16M x 8J) is a product's result in registers, B has 8J rows in shared memory.
template <typename T, int LD, typename Sum, int M, int N, int J>
__device__ __forceinline__ void held_by_rows(Sum (&c)[M][N][4], const Sum (&p)[M][J][4], const T* b) {
  using F = Fragments<T>;
#pragma unroll
  for (int k = 0; k < 8 * J; k += F::K) {
    typename F::A held[M];
#pragma unroll
    for (int u = 0; u < M; ++u) F::hold(held[u], p[u] + k / 8);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      typename F::B columns[2];
      F::load_rows(columns, b + k * LD + n * 8, LD);
#pragma unroll
      for (int u = 0; u < M; ++u) F::multiply(c[u][n], held[u], columns[0]), F::multiply(c[u][n + 1], held[u], columns[1]);
    }
  }
}
