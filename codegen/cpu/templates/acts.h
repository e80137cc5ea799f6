// acts.h: activation functions on 16 floats.
#pragma once
#include "vec.h"

enum UnaryKind {
  kSilu, kGelu, kGeluTanh, kGeluQuick, kRelu, kRelu2, kTanh, kSigmoid, kMish, kElu, kSoftplus, kExp
};

QC_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + vexp(-x)); }
QC_INLINE f32x16 vtanh(f32x16 x) { return 1.0f - 2.0f / (vexp(x * 2.0f) + 1.0f); }

// erf with absolute error 1.5e-7 (Abramowitz and Stegun 7.1.26).
QC_INLINE f32x16 verf(f32x16 x) {
  const f32x16 a = vabs(x), t = 1.0f / (1.0f + a * 0.3275911f);
  f32x16 p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32x16 y = 1.0f - p * t * vexp(-a * a);
  return select(x < 0.0f, -y, y);
}

// e^x - 1 for x <= 0. Near 0, where the subtraction would cancel, a Taylor series is used.
QC_INLINE f32x16 vexpm1(f32x16 x) {
  f32x16 p = x * 0.00138888889f + 0.00833333377f;
  p = p * x + 0.0416666679f;
  p = p * x + 0.166666672f;
  p = p * x + 0.5f;
  return select(x > -0.25f, p * (x * x) + x, vexp(x) - 1.0f);
}

// x tanh(log(1 + e^x)) = x w (w + 2) / (w (w + 2) + 2) with w = e^x; equals x beyond 20.
QC_INLINE f32x16 mish(f32x16 x) {
  const f32x16 w = vexp(vmin(x, splat(20.0f))), y = w * (w + 2.0f);
  return x * (y / (y + 2.0f));
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|); the logarithm is 2 artanh(w / (w + 2)), a series of odd powers of at most
// a third, which keeps the digits of results near 0.
QC_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 w = vexp(-vabs(x)), z = w / (w + 2.0f), y = z * z;
  f32x16 p = y * (2.0f / 13) + 2.0f / 11;
  p = p * y + 2.0f / 9;
  p = p * y + 2.0f / 7;
  p = p * y + 2.0f / 5;
  p = p * y + 2.0f / 3;
  p = p * y + 2.0f;
  return vmax(x, splat(0.0f)) + p * z;
}

QC_INLINE f32x16 unary(UnaryKind kind, f32x16 x) {
  switch (kind) {
    case kSilu: return x / (1.0f + vexp(-x));
    case kGelu: return x * 0.5f * (1.0f + verf(x * 0.707106781f));
    case kGeluTanh: return x * sigmoid((x + x * x * x * 0.044715f) * 1.59576912f);
    case kGeluQuick: return x * sigmoid(x * 1.702f);
    case kRelu: return vmax(x, splat(0.0f));
    case kRelu2: return vmax(x, splat(0.0f)) * vmax(x, splat(0.0f));
    case kTanh: return vtanh(x);
    case kSigmoid: return sigmoid(x);
    case kMish: return mish(x);
    case kElu: return select(x > 0.0f, x, vexpm1(vmin(x, splat(0.0f))));
    case kSoftplus: return softplus(x);
    case kExp: return vexp(x);
  }
  return x;
}

// The activations that gated products are compiled with: in a library, those of its model.
#ifndef QC_GATES
#define QC_GATES kSilu, kGelu, kGeluTanh, kGeluQuick, kRelu, kRelu2, kTanh, kSigmoid, kMish, kElu, kSoftplus, kExp
#endif

template <UnaryKind... kinds>
QC_INLINE f32x16 unary_of(UnaryKind kind, f32x16 x) {
  f32x16 y = x;
  if (!((kind == kinds && (y = unary(kinds, x), true)) || ...)) __builtin_trap();
  return y;
}
