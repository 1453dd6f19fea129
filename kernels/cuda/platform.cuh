// The machine: every inline PTX instruction, under a name that says what it does. Nothing else in kernels/ is PTX.
//
// The tests run these kernels on a CPU; there `emulated.h` supplies the same names.
#pragma once

#ifndef BUG
#define BUG 0
#endif
// False, but in the tests that plant the n-th of some well-known bugs where it has been made before.
#define PLANTED(n) (BUG == (n))

#ifdef RINGMPI_EMULATED
#include <emulated.h>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

// The block's shared memory, of a size chosen at launch.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// C(16x8, float) += A(16x16) B(16x8), by a warp. Lane 4g + t holds, two 16-bit numbers a register:
//   a: rows g, g+8 of columns 2t.., then of columns 8+2t..    b: rows 2t.., 8+2t.. of column g    c: rows g, g+8 of columns 2t, 2t+1
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// C(16x8) += A(16x8) B(8x8) in double, by a warp. Lane 4g + t holds
//   a: (g, t), (g+8, t), (g, t+4), (g+8, t+4)    b: (t, g), (t+4, g)    c: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
// Hopper has this shape in hardware; elsewhere it is four of m8n8k4.
__device__ __forceinline__ void mma_m16n8k8(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ == 900
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
               : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%0,%1};"
                 : "+d"(c[2 * (i & 1)]), "+d"(c[2 * (i & 1) + 1])
                 : "d"(a[i]), "d"(b[i >> 1]));
#endif
}

// Four 8x8 matrices of 16-bit numbers from shared memory: lane 8i + r gives the address of row r of matrix i, and lane
// 4g + t receives columns 2t, 2t+1 of row g of each; transposed, rows 2t, 2t+1 of column g.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16; `!real` writes zeros and reads nothing.
__device__ __forceinline__ void copy_16_async(void* shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(shared)), "l"(global), "r"(real ? 16 : 0) : "memory");
}
// Closes the group of copies started so far, and waits for all groups of this thread.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// 2^x to two units in the last place; results below the smallest normal number are 0.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

// Two floats as 16-bit numbers in one register, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 v = __floats2half2_rn(low, high);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float& y, float x) { y = x; }
__device__ __forceinline__ void round_to(double& y, double x) { y = x; }
__device__ __forceinline__ void round_to(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void round_to(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }

constexpr double LOG2_E = 1.4426950408889634074, LN_2 = 0.69314718055994530942;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
__device__ __forceinline__ int lane() { return threadIdx.x % WARP; }
template <typename Sum> __device__ __forceinline__ Sum infinity() { return (Sum)__int_as_float(0x7f800000); }
