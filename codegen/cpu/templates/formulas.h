// formulas.h: what formulas of a model are made of: powers, means, one number for a whole row, weighted sums of slots.
#pragma once
#include "elementwise.h"

// x to the power halves / 2.
template <int halves>
QC_NOINLINE void power(Range rows, const float* x, int stride, int width, float* out) {
  static_assert(halves == 4 || halves == 1 || halves == -1 || halves == -2, "no such power");
  each_row(rows, x, stride, width, out, [](f32x16 v, int, int) {
    if (halves == 4) return v * v;
    if (halves == 1 || halves == -1)
      for (int i = 0; i < 16; ++i) v[i] = __builtin_sqrtf(v[i]);
    return halves < 0 ? 1.0f / v : v;
  });
}

// Adds the single value in the same row of y to each row of x.
QC_NOINLINE void add_row(Range rows, const float* x, int stride, int width, const float* y, int ys, float* out) {
  each_row(rows, x, stride, width, out, [=](f32x16 v, int t, int) { return v + y[(int64_t)t * ys]; });
}

// out[t][i] = the mean of columns i * width .. (i + 1) * width - 1 of x[t].   x: [rows][stride]
QC_NOINLINE void mean(Range rows, const float* x, int stride, int width, int count, float* out) {
  const int kp = gemm_kp(count);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float* to = out + (int64_t)t * kp;
    for (int n = 0; n < kp; ++n) to[n] = 0.0f;
    for (int n = 0; n < count; ++n, from += width) {
      f32x16 sums{};
      int i = 0;
      for (; i + 16 <= width; i += 16) sums += load<f32x16>(from + i);
      float sum = reduce_add(sums);
      for (; i < width; ++i) sum += from[i];
      to[n] = sum / (float)width;
    }
  }
}

// out[t][n] = sum over slots s of x[t][s] * weights[t][n][s], slots of `width` columns.   out: [rows][results * width]
QC_NOINLINE void mix(Range rows, const float* x, int stride, const float* weights, int ws, int slots, int results,
                     int width, float* out) {
  const int kp = gemm_kp(results * width);
  for (int t = rows.begin; t < rows.end; ++t) {
    float* to = out + (int64_t)t * kp;
    for (int i = 0; i < kp; ++i) to[i] = 0.0f;
    for (int n = 0; n < results; ++n, to += width)
      for (int s = 0; s < slots; ++s) {
        const float* from = x + (int64_t)t * stride + s * width;
        const float factor = weights[(int64_t)t * ws + n * slots + s];
        for (int i = 0; i < width; ++i) to[i] += from[i] * factor;
      }
  }
}
