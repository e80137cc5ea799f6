// hadamard.h: multiplies column blocks of each row by a Hadamard matrix, writing a GEMM's input format.
#pragma once
#include "rowops.h"

// to = from times the core matrix, kCore columns at a time. kCore 1: four Sylvester doublings at once instead.
template <int kCore>
QC_INLINE void hadamard_core(const float* from, int block, const float* core, float* to) {
  if (kCore == 1) {
    for (int i = 0; i < block; i += 16) {
      float a[16], b[16];
      for (int l = 0; l < 16; ++l) a[l] = from[i + l];
      for (int stride = 1; stride < 16; stride *= 2) {
        for (int l = 0; l < 16; ++l) b[l] = l & stride ? a[l ^ stride] - a[l] : a[l] + a[l ^ stride];
        for (int l = 0; l < 16; ++l) a[l] = b[l];
      }
      for (int l = 0; l < 16; ++l) to[i + l] = a[l];
    }
    return;
  }
  for (int i = 0; i < block; i += kCore) {
    float sum[kCore] = {};
    for (int k = 0; k < kCore; ++k)
      for (int j = 0; j < kCore; ++j) sum[j] += from[i + k] * core[k * kCore + j];
    for (int j = 0; j < kCore; ++j) to[i + j] = sum[j];
  }
}

// to = from [block] times H / sqrt(block), with H as below.
template <int kCore>
QC_INLINE void hadamard_block(const float* from, int block, const float* core, float* to) {
  hadamard_core<kCore>(from, block, core, to);
  for (int stride = kCore == 1 ? 16 : kCore; stride < block; stride *= 2)
    for (int i = 0; i < block; i += 2 * stride)
      for (int l = 0; l < stride; ++l) {
        const float a = to[i + l], b = to[i + stride + l];
        to[i + l] = a + b, to[i + stride + l] = a - b;
      }
  const float factor = 1.0f / __builtin_sqrtf((float)block);
  for (int i = 0; i < block; ++i) to[i] *= factor;
}

// out[t] = x[t] with each block of columns times H / sqrt(block), in the format of out. H is kron(doublings, core);
// block is a multiple of 16 where kCore is 1. The summation order of a row does not depend on its neighbours.
template <int kCore, class Out>
QC_NOINLINE void hadamard(Range rows, const float* x, int width, int block, const float* core, const Worker& w,
                          Out out) {
  const int kp = gemm_kp(width);
  float* row = (float*)w.scratch;
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * kp;
    for (int start = 0; start < width; start += block)
      hadamard_block<kCore>(from + start, block, core, row + start);
    for (int i = width; i < kp; ++i) row[i] = 0.0f;
    put(out, t, row, width);
  }
}
