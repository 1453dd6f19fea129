// The instructions of a whole warp on matrices, with the fragment layouts of the PTX ISA; and the asynchronous copies.
#include "runtime.h"

namespace emulator {
namespace {
float widened(uint32_t pair, int half, bool bfloat) {
  const uint16_t bits = (uint16_t)(pair >> 16 * half);
  if (bfloat) return __bfloat162float({bits});
  __half h;
  memcpy(&h, &bits, 2);
  return __half2float(h);
}

// Tensor cores cut the sum off rather than round it.
float towards_zero(double x) {
  const float f = (float)x;
  return std::fabs((double)f) > std::fabs(x) ? std::nextafter(f, 0.0f) : f;
}

template <typename C, typename X> struct Operands { C* c; const X *a, *b; };

void multiply_half(void** brought, const void* common) {
  float a[16][16], b[16][8];
  const bool bfloat = *(const bool*)common;
  for (int l = 0; l < 32; ++l) {
    const auto& x = *(Operands<float, uint32_t>*)brought[l];
    const int g = l / 4, t = l % 4;
    for (int h = 0; h < 2; ++h) {
      for (int r = 0; r < 4; ++r) a[g + 8 * (r % 2)][2 * t + h + 8 * (r / 2)] = widened(x.a[r], h, bfloat);
      for (int r = 0; r < 2; ++r) b[2 * t + h + 8 * r][g] = widened(x.b[r], h, bfloat);
    }
  }
  for (int l = 0; l < 32; ++l)
    for (int e = 0; e < 4; ++e) {
      float& c = ((Operands<float, uint32_t>*)brought[l])->c[e];
      double sum = c;
      for (int k = 0; k < 16; ++k) sum += (double)a[l / 4 + 8 * (e / 2)][k] * b[k][l % 4 * 2 + e % 2];
      c = towards_zero(sum);
    }
}

void multiply_double(void** brought, const void*) {
  double a[16][8], b[8][8];
  for (int l = 0; l < 32; ++l) {
    const auto& x = *(Operands<double, double>*)brought[l];
    for (int r = 0; r < 4; ++r) a[l / 4 + 8 * (r % 2)][l % 4 + 4 * (r / 2)] = x.a[r];
    for (int r = 0; r < 2; ++r) b[l % 4 + 4 * r][l / 4] = x.b[r];
  }
  for (int l = 0; l < 32; ++l)
    for (int e = 0; e < 4; ++e) {
      double& c = ((Operands<double, double>*)brought[l])->c[e];
      for (int k = 0; k < 8; ++k) c = std::fma(a[l / 4 + 8 * (e / 2)][k], b[k][l % 4 * 2 + e % 2], c);
    }
}

struct Loaded { uint32_t* to; const uint16_t* row; };
void load(void** brought, const void* common) {
  const bool transposed = *(const bool*)common;
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      uint32_t pair = 0;
      for (int e = 0; e < 2; ++e) {
        const int row = transposed ? l % 4 * 2 + e : l / 4, column = transposed ? l / 4 : l % 4 * 2 + e;
        pair |= (uint32_t)((Loaded*)brought[8 * i + row])->row[column] << 16 * e;
      }
      ((Loaded*)brought[l])->to[i] = pair;
    }
}
}  // namespace

void mma_16816(float* c, const uint32_t* a, const uint32_t* b, bool bfloat, Place at) {
  Operands<float, uint32_t> mine{c, a, b};
  meet("mma.m16n8k16", &mine, multiply_half, &bfloat, at);
}

void mma_1688(double* c, const double* a, const double* b, Place at) {
  Operands<double, double> mine{c, a, b};
  meet("mma.m16n8k8.f64", &mine, multiply_double, nullptr, at);
}

void load_matrices(uint32_t* r, const void* row, bool transposed, Place at) {
  if ((uintptr_t)row % 16) fail("ldmatrix at %s:%d: a row is not aligned to 16 bytes", at.file, at.line);
  if (!memory::is_shared(row, 16)) fail("ldmatrix at %s:%d: a row is not in shared memory", at.file, at.line);
  memory::access(row, 16, READ, nullptr, "ldmatrix");
  Loaded mine{r, (const uint16_t*)row};
  meet("ldmatrix", &mine, load, &transposed, at);
}

// A copy lands when it is waited for, not before; what it will overwrite is out of bounds to all until then.
void copy_async(void* shared, const void* global, bool real, Place at) {
  if ((uintptr_t)shared % 16 || (real && (uintptr_t)global % 16)) fail("cp.async at %s:%d: an address is not aligned to 16 bytes", at.file, at.line);
  if (!memory::is_shared(shared, 16)) fail("cp.async at %s:%d: the destination is not in shared memory", at.file, at.line);
  if (real) memory::access(global, 16, READ, nullptr, "cp.async");
  memory::access(shared, 16, WRITE, nullptr, "cp.async");
  memory::in_flight((char*)shared, 16, true);
  threads[current].open.push_back({(char*)shared, (const char*)global, real});
}

void copies_commit() {
  Thread& me = threads[current];
  me.committed.insert(me.committed.end(), me.open.begin(), me.open.end());
  me.open.clear();
}

void copies_wait() {
  for (const Copy& c : threads[current].committed) {
    memory::in_flight(c.to, 16, false);
    if (c.real) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
  }
  threads[current].committed.clear();
}
}  // namespace emulator
