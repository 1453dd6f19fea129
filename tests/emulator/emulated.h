// CUDA C++ for g++: what platform.cuh includes instead of its PTX. A kernel file is compiled as it is, with this first.
//
// Every CUDA thread becomes a fiber (fibers.cpp); barriers, votes, shuffles and tensor-core instructions are meetings of
// fibers. In checked mode the compiler marks every access to memory, and memory.cpp judges it.
#pragma once
#include <cmath>
#include <stddef.h>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::shared_memory()

// ------------------------------------------------------------------------------------------------- types and intrinsics

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct __half { _Float16 x; };
struct __half2 { __half x, y; };
struct __nv_bfloat16 { uint16_t x; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __half2float(__half h) { return (float)h.x; }
inline __half __float2half_rn(float f) { return {(_Float16)f}; }
inline float __bfloat162float(__nv_bfloat16 h) {
  const uint32_t u = (uint32_t)h.x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return {0x7fff};
  return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)}; }
inline float __int_as_float(int i) {
  float f;
  memcpy(&f, &i, 4);
  return f;
}
inline int __ffs(int x) { return __builtin_ffs(x); }

// ------------------------------------------------------------------------------------------------- meetings of fibers

namespace emulator {
struct Place { const char* file; int line; };
#define HERE emulator::Place at = {__builtin_FILE(), __builtin_LINE()}
enum Shuffle { INDEX, XOR, BALLOT };
unsigned char* shared_memory();
void barrier(Place at);
bool barrier_or(bool mine, Place at);
void warp_barrier(Place at);
uint64_t shuffle(Shuffle how, uint64_t mine, int which, int width, Place at);
void mma_16816(float* c, const uint32_t* a, const uint32_t* b, bool bfloat, Place at);
void mma_1688(double* c, const double* a, const double* b, Place at);
void load_matrices(uint32_t* r, const void* row, bool transposed, Place at);
void copy_async(void* shared, const void* global, bool real, Place at);
void copies_commit();
void copies_wait();
float about(float x);
template <typename T> T shuffled(Shuffle how, T mine, int which, int width, Place at) {
  uint64_t bits = 0;
  memcpy(&bits, &mine, sizeof mine);
  bits = shuffle(how, bits, which, width, at);
  memcpy(&mine, &bits, sizeof mine);
  return mine;
}
}  // namespace emulator

inline void syncthreads(HERE) { emulator::barrier(at); }
inline bool syncthreads_or(bool mine, HERE) { return emulator::barrier_or(mine, at); }
#define __syncthreads syncthreads
#define __syncthreads_or syncthreads_or
// The kernels use whole warps only: a mask is always all lanes.
inline void __syncwarp(HERE) { emulator::warp_barrier(at); }
template <typename T> T __shfl_sync(unsigned, T x, int lane, int width, HERE) { return emulator::shuffled(emulator::INDEX, x, lane, width, at); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask, HERE) { return emulator::shuffled(emulator::XOR, x, mask, 32, at); }
inline unsigned __ballot_sync(unsigned, bool x, HERE) { return (unsigned)emulator::shuffle(emulator::BALLOT, x, 0, 32, at); }
inline bool __any_sync(unsigned, bool x, HERE) { return emulator::shuffle(emulator::BALLOT, x, 0, 32, at) != 0; }
inline bool __all_sync(unsigned, bool x, HERE) { return emulator::shuffle(emulator::BALLOT, x, 0, 32, at) == 0xffffffffu; }

// ------------------------------------------------------------------------------------- the instructions of platform.cuh

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16, HERE) { emulator::mma_16816(c, a, b, true, at); }
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half, HERE) { emulator::mma_16816(c, a, b, false, at); }
inline void mma_m16n8k8(double (&c)[4], const double (&a)[4], const double (&b)[2], HERE) { emulator::mma_1688(c, a, b, at); }
inline void load_matrices(uint32_t (&r)[4], const void* row, HERE) { emulator::load_matrices(r, row, false, at); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, HERE) { emulator::load_matrices(r, row, true, at); }
inline void copy_16_async(void* shared, const void* global, bool real, HERE) { emulator::copy_async(shared, global, real, at); }
inline void copies_commit() { emulator::copies_commit(); }
inline void copies_wait() { emulator::copies_wait(); }
inline float power_of_2(float x) { return emulator::about(exp2f(x)); }

// --------------------------------------------------------------------------------------------- how Python calls a kernel

namespace emulator {
template <typename T> constexpr const char* kind() {
  if (std::is_pointer_v<T>) return std::is_const_v<std::remove_pointer_t<T>> ? "in" : "out";
  return std::is_integral_v<T> ? "integer" : std::is_floating_point_v<T> ? "floating" : "struct";
}
template <typename... P> int signature(void (*)(P...), const char** kinds, int* sizes) {
  int n = 0;
  ((kinds[n] = kind<P>(), sizes[n] = (int)sizeof(P), ++n), ...);
  return n;
}
template <typename... P, size_t... I> __attribute__((no_sanitize("thread"))) void call(void (*f)(P...), void** a, std::index_sequence<I...>) {
  f(*(P*)a[I]...);
}
template <typename... P> __attribute__((no_sanitize("thread"))) void invoke(void (*f)(P...), void** a) { call(f, a, std::index_sequence_for<P...>{}); }
}  // namespace emulator
