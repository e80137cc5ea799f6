// elementwise.h: element-by-element operators on f32 rows.
#pragma once
#include "acts.h"
#include "rowops.h"

// out[t] = f(x[t]), 16 columns at a time; f gets (values, row t, first column i). Padding stays zero. `stride`: floats
// between rows of `x`.
template <class F>
QC_INLINE void each_row(Range rows, const float* x, int stride, int width, float* out, const F& f) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float* to = out + (int64_t)t * kp;
    for (int i = 0; i < width; i += 16) store(to + i, f(load<f32x16>(from + i), t, i));
    for (int i = width; i < kp; ++i) to[i] = 0.0f;
  }
}

template <UnaryKind kind>
QC_NOINLINE void apply(Range rows, const float* x, int stride, int width, float* out) {
  each_row(rows, x, stride, width, out, [](f32x16 v, int, int) { return unary(kind, v); });
}
QC_NOINLINE void scale_by(Range rows, const float* x, int stride, int width, float factor, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int, int) { return v * factor; });
}
QC_NOINLINE void shift_by(Range rows, const float* x, int stride, int width, float offset, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int, int) { return v + offset; });
}
QC_NOINLINE void clamp(Range rows, const float* x, int stride, int width, float low, float high, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int, int) { return vmin(vmax(v, splat(low)), splat(high)); });
}
// Multiplies each row of x by the single value in the same row of y.
QC_NOINLINE void mul_row(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int t, int) { return v * y[(int64_t)t * ys]; });
}
// `ys`: floats between rows of `y`; 0 for a weight vector.
QC_NOINLINE void add(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out,
           [=](f32x16 v, int t, int i) { return v + load<f32x16>(y + (int64_t)t * ys + i); });
}
QC_NOINLINE void mul(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out,
           [=](f32x16 v, int t, int i) { return v * load<f32x16>(y + (int64_t)t * ys + i); });
}
