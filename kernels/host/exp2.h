/* 2^x and tanh in lanes.
 *
 * 2^x = 2^n p(f), n = round(x), f = x - n in [-1/2, 1/2]: adding a large number rounds x and leaves n in the low bits, from
 * where a shift makes the exponent. p is a minimax polynomial of degree 5 (float, 2e-7 .. 2.4e-7 relative) or 11 (double, 1e-17)
 * with p(0) = 1 exactly, so that the largest score of a row weighs exactly 1. Never compile this with -ffast-math or
 * -fassociative-math: they cancel the rounding. */
#ifndef RINGMPI_EXP2_H
#define RINGMPI_EXP2_H

#include "vector.h"

#define LOG2E 1.44269504088896340736
enum { SIDE_BY_SIDE = 4 };

#define EACH UNROLL for (int i = 0; i < n; i++)
#define HORNER(a) EACH p[i] = p[i] * f[i] + (real)(a);

/* 2^x for x <= 126 (1022): 0 below -126 (-1022) and for -inf, NaN for NaN. Of n vectors side by side, step by step: one after the other,
 * what waits for the step before would fill the scheduler (9.8 cycles a vector became 8.3 in double, Zen 3). */
ALWAYS void exp2_each(const int n, vector *x) {
  const real rounder = IS_DOUBLE ? (real)(6755399441055744. + 1023) : (real)(12582912. + 127);
  vector shifted[SIDE_BY_SIDE], f[SIDE_BY_SIDE], p[SIDE_BY_SIDE];
  EACH x[i] = larger(every(IS_DOUBLE ? -1023 : -127), x[i]);
  EACH shifted[i] = x[i] + rounder;
  EACH f[i] = x[i] - (shifted[i] - rounder);
  if (IS_DOUBLE) {
    EACH p[i] = every((real)4.45564334039882557e-10);
    HORNER(7.07419220963901515e-09) HORNER(1.01780583904288933e-07) HORNER(1.32154325519282140e-06) HORNER(1.52527338379880643e-05)
    HORNER(1.54035304636790957e-04) HORNER(1.33335581464107881e-03) HORNER(9.61812910758731363e-03) HORNER(5.55041086648216039e-02)
    HORNER(2.40226506959101582e-01) HORNER(6.93147180559945286e-01) HORNER(1)
  } else {
    EACH p[i] = every((real)1.326472712e-03);
    HORNER(9.671512645e-03) HORNER(5.550733743e-02) HORNER(2.402224209e-01) HORNER(6.931469776e-01) HORNER(1)
  }
  EACH x[i] = p[i] * (vector)((lane_mask)shifted[i] << (IS_DOUBLE ? 52 : 23));
}
#undef EACH
#undef HORNER
ALWAYS vector exp2_lanes(vector x) {
  exp2_each(1, &x);
  return x;
}

/* exp(s - m) = 2^exponent(s, base_of(m)). Where there is a fused multiply-add, the base is m log2 e and the exponent takes one
 * instruction; `rounding` is what rounding the base lost, to be made good once a row. Elsewhere the base is m itself. */
#define PER_BASE (FUSED ? 1 : LOG2E)
ALWAYS double rounding(real m) {
  return FUSED ? __builtin_fma((double)m, (double)(real)LOG2E, -(double)(real)(m * (real)LOG2E)) : 0;
}
ALWAYS vector base_of(vector m) { return m * (real)(LOG2E / PER_BASE); }
ALWAYS vector exponent(vector s, vector base) {
  return FUSED ? product_less(s, every((real)LOG2E), base) : (s - base) * (real)LOG2E;
}
ALWAYS vector exponent_between(vector base, vector other) { return (base - other) * (real)PER_BASE; }

/* tanh y: a rational (double) or polynomial (float) near 0, where 1 - 2 / (e^2y + 1) would cancel; Cephes' coefficients. */
ALWAYS vector tanh_lanes(vector y) {
  vector size = larger(-y, y), z = y * y, near;
  if (IS_DOUBLE) {
    vector p = (every((real)-9.64399179425052238628e-1) * z + (real)-9.92877231001918586564e1) * z + (real)-1.61468768441708447952e3;
    vector q = ((z + (real)1.12811678491632931402e2) * z + (real)2.23548839060100448583e3) * z + (real)4.84406305325125486048e3;
    near = y + y * z * (p / q);
  } else {
    vector p = ((every((real)-5.70498872745e-3) * z + (real)2.06390887954e-2) * z + (real)-5.37397155531e-2) * z;
    near = y + y * z * ((p + (real)1.33314422036e-1) * z + (real)-3.33332819422e-1);
  }
  vector capped = keep(size > every(22), every(22), size);
  vector far = 1 - 2 / (exp2_lanes(capped * (real)(2 * LOG2E)) + 1);
  far = keep(y < every(0), -far, far);
  return keep(size < every((real)0.625), near, far);
}

#endif
