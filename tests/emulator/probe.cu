// Every instruction of platform.cuh on small whole numbers, whose products and sums are exact: a warp copies a (16 x dim), b (32 x dim)
// and v (32 x dim) to shared memory, leaves row 5 of b out, and gives s = a b^T and o = s v.
#include "tile.cuh"

template <typename T>
__global__ void probe(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ v, SumOf<T>* __restrict__ s,
                      SumOf<T>* __restrict__ o, const float* __restrict__ x, float* __restrict__ y, int dim) {
  using Sum = SumOf<T>;
  constexpr int LD = 64 + Fragments<T>::PAD;
  DYNAMIC_SHARED(shared);
  T *sa = (T*)shared, *sb = sa + 16 * LD, *sv = sb + 32 * LD;
  copy_rows<T, 16, 64, WARP>(sa, a, dim, dim, true, [](int) { return true; });
  copy_rows<T, 32, 64, WARP>(sb, b, dim, dim, true, [](int i) { return i != 5; });
  copy_rows<T, 32, 64, WARP>(sv, v, dim, dim, true, [](int) { return true; });
  copies_commit();
  copies_wait();
  __syncthreads();
  Sum first[1][4][4], second[1][8][4];
  clear(first), clear(second);
  rows_by_rows<T, 64, LD>(first, sa, sb);
  held_by_rows<T, LD>(second, first, sv);
  for (int e = 0; e < 4; ++e) {
    const int row = place_row() + 8 * (e / 2), column = place_column() + e % 2;
    for (int n = 0; n < 4; ++n) s[row * 32 + n * 8 + column] = first[0][n][e];
    for (int n = 0; n < 8; ++n) o[row * 64 + n * 8 + column] = second[0][n][e];
  }
  y[lane()] = power_of_2(x[lane()]);
}
