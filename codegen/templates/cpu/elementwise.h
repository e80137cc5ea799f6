// elementwise.h: operators on f32 rows one element at a time.
#pragma once
#include "rowops.h"

enum UnaryKind { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kTanh, kSigmoid };

QC_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + vexp(-x)); }
QC_INLINE f32x16 vtanh(f32x16 x) { return 1.0f - 2.0f / (vexp(x * 2.0f) + 1.0f); }

// erf to 1.5e-7 absolute (Abramowitz and Stegun 7.1.26).
QC_INLINE f32x16 verf(f32x16 x) {
  const f32x16 a = vabs(x), t = 1.0f / (1.0f + a * 0.3275911f);
  f32x16 p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32x16 y = 1.0f - p * t * vexp(-a * a);
  return select(x < 0.0f, -y, y);
}

template <UnaryKind kind>
QC_INLINE f32x16 unary(f32x16 x) {
  if (kind == kSilu) return x * sigmoid(x);
  if (kind == kGelu) return x * 0.5f * (1.0f + verf(x * 0.707106781f));
  if (kind == kGeluTanh) return x * sigmoid((x + x * x * x * 0.044715f) * 1.59576912f);
  if (kind == kRelu) return vmax(x, splat(0.0f));
  if (kind == kRelu2) return vmax(x, splat(0.0f)) * vmax(x, splat(0.0f));
  if (kind == kTanh) return vtanh(x);
  return sigmoid(x);
}

// out[t] = f(x[t], 16 columns from i); the padding stays zero. `stride` floats from one row of `x` to the next.
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
  each_row(rows, x, stride, width, out, [](f32x16 v, int, int) { return unary<kind>(v); });
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
// Each row of x times the one number of y's row.
QC_NOINLINE void mul_row(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int t, int) { return v * y[(int64_t)t * ys]; });
}
// `ys` floats from one row of `y` to the next: 0 for a weight vector.
QC_NOINLINE void add(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out,
           [=](f32x16 v, int t, int i) { return v + load<f32x16>(y + (int64_t)t * ys + i); });
}
QC_NOINLINE void mul(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out,
           [=](f32x16 v, int t, int i) { return v * load<f32x16>(y + (int64_t)t * ys + i); });
}
