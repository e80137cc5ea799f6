// xielu.h: xIELU on f32 rows.
#pragma once
#include "elementwise.h"

// `curve`: alpha_p, alpha_n, beta, eps.
QC_NOINLINE void xielu(Range rows, const float* x, int stride, int width, const float* curve, float* out) {
  const f32x16 eps = splat(curve[3]);
  each_row(rows, x, stride, width, out, [=](f32x16 v, int, int) {
    const f32x16 below = (vexpm1(vmin(v, eps)) - v) * curve[1];
    return select(v > 0.0f, v * curve[0] * v, below) + v * curve[2];
  });
}
