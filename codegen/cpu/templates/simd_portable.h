// simd_portable.h: the primitives of simd_avx512.h in plain C++ with GCC's vector extension, for any CPU. f_fma is a
// true fused multiply-add (one call per group of inputs), so that the integer formats give the same bits as on the
// other ISAs. f_dot, called once per input, is a multiplication and an addition.
#pragma once
#include <math.h>

#include "vec.h"

#define QC_UNROLL  // a vector here is many registers, so unrolling gains nothing

using I16 = i32x16;
using F16 = f32x16;
using B64 = u8x64;

constexpr int kSmallTile = 4;
constexpr int kPanelTile = 4;
constexpr int kFullOffset = 0;

QC_INLINE I16 i_set(int32_t v) { return splat(v); }
QC_INLINE I16 i_add(I16 a, I16 b) { return a + b; }
QC_INLINE I16 i_sub(I16 a, I16 b) { return a - b; }
QC_INLINE I16 i_mul(I16 a, I16 b) { return a * b; }
QC_INLINE I16 i_shl23(I16 a) { return a << 23; }
QC_INLINE I16 i_mul16(I16 a, int32_t s) { return a * s; }
QC_INLINE I16 i_load_u8(const uint8_t* p) { return __builtin_convertvector(load<u8x16>(p), i32x16); }

QC_INLINE F16 f_set(float v) { return splat(v); }
QC_INLINE F16 f_load(const float* p) { return load<f32x16>(p); }
QC_INLINE void f_store(float* p, F16 v) { store(p, v); }
QC_INLINE F16 f_add(F16 a, F16 b) { return a + b; }
QC_INLINE F16 f_sub(F16 a, F16 b) { return a - b; }
QC_INLINE F16 f_mul(F16 a, F16 b) { return a * b; }
QC_INLINE F16 f_fma(F16 a, F16 b, F16 c) {
  for (int i = 0; i < 16; ++i) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}
QC_INLINE F16 f_dot(F16 acc, F16 w, const float* x) { return acc + w * *x; }
QC_INLINE F16 f_from_i(I16 a) { return to_f32(a); }
QC_INLINE F16 f_bits(I16 a) { return bitcast<f32x16>(a); }

QC_INLINE B64 b_load(const void* p) { return load<u8x64>(p); }
QC_INLINE void b_pin(B64&) {}
QC_INLINE void b_store(void* p, B64 v) { store(p, v); }
QC_INLINE B64 b_set(uint8_t v) { return B64{} + v; }
QC_INLINE B64 b_low(B64 v) { return v & 15; }
QC_INLINE B64 b_high(B64 v) { return v >> 4; }
// The bits of `mask` in each byte >> Shift; the mask has none that come from the byte above.
template <int Shift>
QC_INLINE B64 b_bits(B64 v, uint8_t mask) { return (v >> Shift) & mask; }
QC_INLINE B64 b_lookup(const uint8_t* table, B64 index) {
  for (int i = 0; i < 64; ++i) index[i] = table[index[i]];
  return index;
}
QC_INLINE B64 b_lookup_low(const uint8_t* table, B64 v) { return b_lookup(table, b_low(v)); }
QC_INLINE B64 b_lookup_high(const uint8_t* table, B64 v) { return b_lookup(table, b_high(v)); }
QC_INLINE B64 b_rows(const uint8_t* p) { return bitcast<u8x64>(i_load_u8(p) * 0x01010101); }
QC_INLINE B64 b_add(B64 a, B64 b) { return a + b; }
QC_INLINE B64 b_sub(B64 a, B64 b) { return a - b; }
QC_INLINE B64 b_rescale(B64 q, B64 zero, B64 scale) { return (q - zero) * scale + 128; }

// Signed byte j of each row.
QC_INLINE I16 i_byte(B64 v, int j) { return (bitcast<i32x16>(v) << (24 - 8 * j)) >> 24; }
template <bool InOrder = false>
QC_INLINE I16 dot_small(I16 acc, B64 w, const int8_t* x) {
  for (int j = 0; j < 4; ++j) acc += i_byte(w, j) * x[j];
  return acc;
}
template <bool InOrder = false>
QC_INLINE I16 dot_full(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w ^ 128, x); }

QC_INLINE F16 f_bf16_even(B64 w) { return f_bits(bitcast<i32x16>(w) << 16); }
QC_INLINE F16 f_bf16_odd(B64 w) { return f_bits(bitcast<i32x16>(w) & (int32_t)0xffff0000u); }
QC_INLINE F16 f_byte(B64 v, int j) { return to_f32(i_byte(v, j)); }
