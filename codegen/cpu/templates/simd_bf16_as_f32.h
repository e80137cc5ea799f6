// simd_bf16_as_f32.h: the bfloat16 primitives for CPUs without a bfloat16 dot product: activations are converted to
// float once per call, weights in registers. Gives the same bits as vdpbf16ps: that adds the second product of a pair
// before the first and rounds after each addition. A product of two bfloat16 is exact in float, so a fused multiply-add
// and a multiplication followed by an addition agree.
#pragma once

using BfX = float;
QC_INLINE void bf_copy32(BfX* dst, const uint16_t* src) {
  for (int i = 0; i < 32; ++i) dst[i] = bf16_to_f32(src[i]);
}
QC_INLINE void bf_copy32_w4(BfX* dst, const uint16_t* src) { bf_copy32(dst, src); }
QC_INLINE F16 bf_dot(F16 acc, B64 w, const BfX* x) {
  return f_dot(f_dot(acc, f_bf16_odd(w), x + 1), f_bf16_even(w), x);
}
struct W4Bf {
  F16 value[8];
};
constexpr float kW4Offset = 16.0f;  // as where it makes unpacking cheap, because the offset affects how sums round
QC_INLINE W4Bf w4_unpack(B64 v) {
  B64 low = b_low(v), high = b_high(v);
  W4Bf w;
  for (int j = 0; j < 4; ++j) {
    w.value[j] = f_add(f_byte(low, j), f_set(kW4Offset));
    w.value[4 + j] = f_add(f_byte(high, j), f_set(kW4Offset));
  }
  return w;
}
// vdpbf16ps sees the pairs (0,2) (1,3) (4,6) (5,7).
QC_INLINE void w4_dot(F16& first, F16& second, const W4Bf& w, const BfX* x) {
  constexpr int kOrder[4] = {2, 0, 3, 1};
  QC_UNROLL for (int j : kOrder) {
    first = f_dot(first, w.value[j], x + j);
    second = f_dot(second, w.value[4 + j], x + 4 + j);
  }
}
