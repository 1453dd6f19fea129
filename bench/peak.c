/* The ceiling: multiply-adds on registers alone, in the vectors that the tile is compiled for. */
#include "vector.h"

enum { CHAINS = SCALARS == 8 ? 16 : 12 }; /* with the operands as many as there are registers, and more than the latency of two units */

/* Runs `steps` x CHAINS vector multiply-adds; returns how many operations that were. */
__attribute__((visibility("default"))) double multiply_adds(int64_t steps, real *out) {
  vector c[CHAINS], a = every((real)0.999), b = every((real)1e-3);
  UNROLL for (int i = 0; i < CHAINS; i++) c[i] = every((real)i);
  for (int64_t t = 0; t < steps; t++) {
    UNROLL for (int i = 0; i < CHAINS; i++) c[i] = c[i] * a + b;
    UNROLL for (int i = 0; i < CHAINS; i++) {
#if defined __SSE2__ && (defined __AVX2__ || VECTOR_BYTES == 16)
      __asm__ volatile("" : "+v"(c[i]));
#elif defined __aarch64__
      __asm__ volatile("" : "+w"(c[i]));
#endif
    }
  }
  UNROLL for (int i = 1; i < CHAINS; i++) c[0] += c[i];
  *out = c[0][0];
  return 2. * CHAINS * LANES * steps;
}
