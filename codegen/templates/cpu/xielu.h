// xielu.h: xIELU on f32 rows.
#pragma once
#include "elementwise.h"

// e^x - 1 for x <= 0: near 0, where the difference would lose its digits, by its series.
QC_INLINE f32x16 vexpm1(f32x16 x) {
  f32x16 p = x * 0.00138888889f + 0.00833333377f;
  p = p * x + 0.0416666679f;
  p = p * x + 0.166666672f;
  p = p * x + 0.5f;
  return select(x > -0.25f, p * (x * x) + x, vexp(x) - 1.0f);
}

// The curve is alpha_p, alpha_n, beta and eps.
QC_NOINLINE void xielu(Range rows, const float* x, int stride, int width, const float* curve, float* out) {
  const f32x16 eps = splat(curve[3]);
  each_row(rows, x, stride, width, out, [=](f32x16 v, int, int) {
    const f32x16 below = (vexpm1(vmin(v, eps)) - v) * curve[1];
    return select(v > 0.0f, v * curve[0] * v, below) + v * curve[2];
  });
}
