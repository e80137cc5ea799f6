// simd_bf16_as_f32.h: the bfloat16 primitives where the CPU has no bfloat16 dot product: activations become
// float once per call, weights in registers, and products are float fused multiply-adds.
#pragma once

using BfX = float;
QC_INLINE void bf_copy32(BfX* dst, const uint16_t* src) {
  for (int i = 0; i < 32; ++i) dst[i] = bf16_to_f32(src[i]);
}
QC_INLINE void bf_copy32_w4(BfX* dst, const uint16_t* src) { bf_copy32(dst, src); }
QC_INLINE F16 bf_dot(F16 acc, B64 w, const BfX* x) {
  return f_dot(f_dot(acc, f_bf16_even(w), x), f_bf16_odd(w), x + 1);
}
struct W4Bf {
  F16 value[8];
};
constexpr float kW4Offset = 0.0f;
QC_INLINE W4Bf w4_unpack(B64 v) {
  B64 low = b_low(v), high = b_high(v);
  return {{f_byte(low, 0), f_byte(low, 1), f_byte(low, 2), f_byte(low, 3),  //
           f_byte(high, 0), f_byte(high, 1), f_byte(high, 2), f_byte(high, 3)}};
}
QC_INLINE void w4_dot(F16& first, F16& second, const W4Bf& w, const BfX* x) {
  QC_UNROLL for (int j = 0; j < 4; ++j) {
    first = f_dot(first, w.value[j], x + j);
    second = f_dot(second, w.value[4 + j], x + 4 + j);
  }
}
