// simd_avx512.h: the primitives of the GEMM kernels on AVX-512 with VNNI (bfloat16 dot products where the compiler has
// them enabled). simd_avx2.h and simd_portable.h define the same names. An I16 or F16 holds 16 output rows; a B64 holds
// 64 weight bytes, 4 for each of the 16 rows.
//
// Integer primitives are exact on every ISA. The dot products limit |w| and |x| to what every ISA can do: dot_small: w
// in 0..31, x in -127..127; dot_full: w = value + 128 with value in -127..127, the same x.
#pragma once
#include <immintrin.h>

#include "vec.h"

// Precedes a loop of at most 32 iterations with arrays that must live in registers.
#define QC_UNROLL _Pragma("GCC unroll 32")

using I16 = __m512i;
using F16 = __m512;
using B64 = __m512i;

constexpr int kSmallTile = 8;   // tokens that share one unpack of a weight block: decode, verification
constexpr int kPanelTile = 12;  // tokens per tile over an unpacked block: prefill
constexpr int kFullOffset = 128;  // dot_full adds kFullOffset * (sum of x): the accumulator must start at minus that

QC_INLINE I16 i_set(int32_t v) { return _mm512_set1_epi32(v); }
QC_INLINE I16 i_add(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
QC_INLINE I16 i_sub(I16 a, I16 b) { return _mm512_sub_epi32(a, b); }
QC_INLINE I16 i_mul(I16 a, I16 b) { return _mm512_mullo_epi32(a, b); }
QC_INLINE I16 i_shl23(I16 a) { return _mm512_slli_epi32(a, 23); }
// a * s, for a in 0..32767 and s in 16 signed bits.
QC_INLINE I16 i_mul16(I16 a, int32_t s) { return _mm512_madd_epi16(a, _mm512_set1_epi32(s)); }
QC_INLINE I16 i_load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)p)); }

QC_INLINE F16 f_set(float v) { return _mm512_set1_ps(v); }
QC_INLINE F16 f_load(const float* p) { return _mm512_loadu_ps(p); }
QC_INLINE void f_store(float* p, F16 v) { _mm512_storeu_ps(p, v); }
QC_INLINE F16 f_add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
QC_INLINE F16 f_sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
QC_INLINE F16 f_mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
QC_INLINE F16 f_fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }        // one rounding, every ISA
QC_INLINE F16 f_dot(F16 acc, F16 w, const float* x) { return _mm512_fmadd_ps(w, _mm512_set1_ps(*x), acc); }
QC_INLINE F16 f_from_i(I16 a) { return _mm512_cvtepi32_ps(a); }
QC_INLINE F16 f_bits(I16 a) { return _mm512_castsi512_ps(a); }

QC_INLINE B64 b_load(const void* p) {
  B64 v = _mm512_load_si512(p);
  asm("" : "+v"(v));  // one load, not one per instruction that uses it
  return v;
}
// Keeps computations on v behind the in-order dot products that precede this.
QC_INLINE void b_pin(B64& v) { asm volatile("" : "+v"(v)); }
QC_INLINE void b_store(void* p, B64 v) { _mm512_store_si512(p, v); }
QC_INLINE B64 b_set(uint8_t v) { return _mm512_set1_epi8((char)v); }
QC_INLINE B64 b_low(B64 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
QC_INLINE B64 b_high(B64 v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
template <int Shift>
QC_INLINE B64 b_bits(B64 v, uint8_t mask) {
  return _mm512_and_si512(_mm512_srli_epi16(v, Shift), _mm512_set1_epi8((char)mask));
}
// b_lookup_low, b_lookup_high: table[nibble] for the low and the high nibble of each byte.
QC_INLINE B64 table4(const uint8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
}
// b_rows: each row's byte of p[16], replicated to the 4 bytes of the row.
#ifdef __AVX512VBMI__
// vpermb uses 6 bits of an index; four copies of the table make the upper two irrelevant.
QC_INLINE B64 b_lookup_low(const uint8_t* table, B64 v) { return _mm512_permutexvar_epi8(v, table4(table)); }
QC_INLINE B64 b_lookup_high(const uint8_t* table, B64 v) {
  return _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), table4(table));
}
QC_INLINE B64 b_rows(const uint8_t* p) {
  const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_permutexvar_epi8(_mm512_mullo_epi32(rows, _mm512_set1_epi32(0x01010101)),
                                 _mm512_zextsi128_si512(_mm_loadu_si128((const __m128i*)p)));
}
#else
QC_INLINE B64 b_lookup_low(const uint8_t* table, B64 v) { return _mm512_shuffle_epi8(table4(table), b_low(v)); }
QC_INLINE B64 b_lookup_high(const uint8_t* table, B64 v) { return _mm512_shuffle_epi8(table4(table), b_high(v)); }
QC_INLINE B64 b_rows(const uint8_t* p) { return _mm512_mullo_epi32(i_load_u8(p), _mm512_set1_epi32(0x01010101)); }
#endif
// (q - zero) * scale + 128 as bytes; the caller guarantees that it fits.
QC_INLINE B64 b_rescale(B64 q, B64 zero, B64 scale) {
  __m512i t = _mm512_sub_epi8(q, zero), mask = _mm512_set1_epi16(255);
  __m512i even = _mm512_mullo_epi16(t, _mm512_and_si512(scale, mask));  // the low byte is right whatever is above it
  __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(t, 8), _mm512_srli_epi16(scale, 8));
  __m512i both = _mm512_or_si512(_mm512_and_si512(even, mask), _mm512_slli_epi16(odd, 8));
  return _mm512_xor_si512(both, _mm512_set1_epi8((char)128));
}

// acc[row] + sum over 4 inputs of w[row][j] * x[j]. In assembly because GCC would broadcast x with a separate
// instruction, while the dot product can take it as a memory operand. InOrder: GCC keeps the source order of these, and
// of what b_pin holds back. Zen 4 distributes a few instructions between dot products over its free pipes; given many
// at once, it puts some on the pipes that dot products need.
template <bool InOrder = false>
QC_INLINE I16 dot_small(I16 acc, B64 w, const int8_t* x) {
  if constexpr (InOrder) asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t*)x));
  else asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t*)x));
  return acc;
}
template <bool InOrder = false>
QC_INLINE I16 dot_full(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
QC_INLINE B64 b_add(B64 a, B64 b) { return _mm512_add_epi8(a, b); }
QC_INLINE B64 b_sub(B64 a, B64 b) { return _mm512_sub_epi8(a, b); }
// The two bfloat16 of each row (inputs k and k+1), and signed byte j of each row, as floats.
QC_INLINE F16 f_bf16_even(B64 w) { return f_bits(_mm512_slli_epi32(w, 16)); }
QC_INLINE F16 f_bf16_odd(B64 w) { return f_bits(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u))); }
QC_INLINE F16 f_byte(B64 v, int j) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * j), 24));
}

#ifdef __AVX512BF16__
#define QC_BF16_DOT 1
// Activations stay bfloat16. A 4-bit weight q becomes the bfloat16 16 + q, which is q in the upper mantissa bits of 16:
// one shift and one logical operation for 32 weights. Those work on 16-bit lanes, so the resulting pairs are inputs
// (0,2) (1,3) (4,6) (5,7) of 8, and bf_copy32_w4 orders x to match.
using BfX = uint16_t;
QC_INLINE void bf_copy32(BfX* dst, const uint16_t* src) { memcpy(dst, src, 64); }
QC_INLINE void bf_copy32_w4(BfX* dst, const uint16_t* src) {
  const __m512i swap = _mm512_set_epi16(31, 29, 30, 28, 27, 25, 26, 24, 23, 21, 22, 20, 19, 17, 18, 16,  //
                                        15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
  _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(swap, _mm512_loadu_si512(src)));
}
QC_INLINE F16 bf_dot(F16 acc, B64 w, const BfX* x) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t*)x));
  return acc;
}
struct W4Bf {
  B64 pair[4];
};
constexpr float kW4Offset = 16.0f;
QC_INLINE B64 w4_pair(B64 shifted) {  // (shifted & 0x78) | 0x4180 in each 16-bit lane
  return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xea);
}
QC_INLINE W4Bf w4_unpack(B64 v) {
  return {{w4_pair(_mm512_slli_epi16(v, 3)), w4_pair(_mm512_srli_epi16(v, 5)), w4_pair(_mm512_srli_epi16(v, 1)),
           w4_pair(_mm512_srli_epi16(v, 9))}};
}
// Two chains per row: inputs 0..3 and inputs 4..7 of every 8.
QC_INLINE void w4_dot(F16& first, F16& second, const W4Bf& w, const BfX* x) {
  first = bf_dot(first, w.pair[0], x);
  second = bf_dot(second, w.pair[2], x + 4);
  first = bf_dot(first, w.pair[1], x + 2);
  second = bf_dot(second, w.pair[3], x + 6);
}
#endif
