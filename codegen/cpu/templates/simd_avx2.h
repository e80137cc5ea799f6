// simd_avx2.h: the primitives of simd_avx512.h on AVX2 with FMA; 16 output rows are two ymm registers. int8 dot
// products use AVX-VNNI where the compiler has it enabled (or its AVX-512VL form, which runs the same code path on a
// machine without AVX-VNNI), otherwise vpmaddubsw, kept within its saturation limits.
#pragma once
#include <immintrin.h>

#include "vec.h"

// Precedes a loop of at most 32 iterations with arrays that must live in registers.
#define QC_UNROLL _Pragma("GCC unroll 32")

struct I16 {
  __m256i a, b;
};
struct F16 {
  __m256 a, b;
};
using B64 = I16;  // rows 0..7 and rows 8..15, 4 bytes each

constexpr int kSmallTile = 4;
constexpr int kPanelTile = 4;

QC_INLINE I16 i_set(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
QC_INLINE I16 i_add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QC_INLINE I16 i_sub(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
QC_INLINE I16 i_mul(I16 x, I16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
QC_INLINE I16 i_shl23(I16 x) { return {_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)}; }
QC_INLINE I16 i_mul16(I16 x, int32_t s) {
  return {_mm256_madd_epi16(x.a, _mm256_set1_epi32(s)), _mm256_madd_epi16(x.b, _mm256_set1_epi32(s))};
}
QC_INLINE I16 i_load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}

QC_INLINE F16 f_set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
QC_INLINE F16 f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QC_INLINE void f_store(float* p, F16 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
QC_INLINE F16 f_add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QC_INLINE F16 f_sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QC_INLINE F16 f_mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QC_INLINE F16 f_fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
QC_INLINE F16 f_dot(F16 acc, F16 w, const float* x) {
  __m256 v = _mm256_broadcast_ss(x);
  return {_mm256_fmadd_ps(w.a, v, acc.a), _mm256_fmadd_ps(w.b, v, acc.b)};
}
QC_INLINE F16 f_from_i(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
QC_INLINE F16 f_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

QC_INLINE B64 b_load(const void* p) {
  return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)p + 1)};
}
QC_INLINE void b_pin(B64&) {}
QC_INLINE void b_store(void* p, B64 v) {
  _mm256_store_si256((__m256i*)p, v.a);
  _mm256_store_si256((__m256i*)p + 1, v.b);
}
QC_INLINE B64 b_set(uint8_t v) { return {_mm256_set1_epi8((char)v), _mm256_set1_epi8((char)v)}; }
QC_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
QC_INLINE B64 b_low(B64 v) { return {low_nibbles(v.a), low_nibbles(v.b)}; }
QC_INLINE B64 b_high(B64 v) { return {low_nibbles(_mm256_srli_epi16(v.a, 4)), low_nibbles(_mm256_srli_epi16(v.b, 4))}; }
template <int Shift>
QC_INLINE B64 b_bits(B64 v, uint8_t mask) {
  const __m256i kept = _mm256_set1_epi8((char)mask);
  return {_mm256_and_si256(_mm256_srli_epi16(v.a, Shift), kept), _mm256_and_si256(_mm256_srli_epi16(v.b, Shift), kept)};
}
QC_INLINE B64 b_lookup(const uint8_t* table, B64 index) {
  __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
QC_INLINE B64 b_lookup_low(const uint8_t* table, B64 v) { return b_lookup(table, b_low(v)); }
QC_INLINE B64 b_lookup_high(const uint8_t* table, B64 v) { return b_lookup(table, b_high(v)); }
QC_INLINE B64 b_rows(const uint8_t* p) { return i_mul(i_load_u8(p), i_set(0x01010101)); }
QC_INLINE B64 b_add(B64 x, B64 y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
QC_INLINE B64 b_sub(B64 x, B64 y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
QC_INLINE __m256i rescale(__m256i t, __m256i scale) {
  const __m256i mask = _mm256_set1_epi16(255);
  __m256i even = _mm256_mullo_epi16(t, _mm256_and_si256(scale, mask));
  __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(t, 8), _mm256_srli_epi16(scale, 8));
  __m256i both = _mm256_or_si256(_mm256_and_si256(even, mask), _mm256_slli_epi16(odd, 8));
  return _mm256_xor_si256(both, _mm256_set1_epi8((char)128));
}
QC_INLINE B64 b_rescale(B64 q, B64 zero, B64 scale) {
  B64 t = b_sub(q, zero);
  return {rescale(t.a, scale.a), rescale(t.b, scale.b)};
}

QC_INLINE __m256i x_quad(const int8_t* x) { return _mm256_set1_epi32(load<int32_t>(x)); }
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
constexpr int kFullOffset = 128;
QC_INLINE __m256i dot_ymm(__m256i acc, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(acc, w, x);
#else
  return _mm256_dpbusd_epi32(acc, w, x);
#endif
}
template <bool InOrder = false>
QC_INLINE I16 dot_small(I16 acc, B64 w, const int8_t* x) {
  __m256i v = x_quad(x);
  return {dot_ymm(acc.a, w.a, v), dot_ymm(acc.b, w.b, v)};
}
template <bool InOrder = false>
QC_INLINE I16 dot_full(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
#else
// vpmaddubsw adds two products in 16 bits with saturation. With w <= 31 they stay below 2 * 31 * 127 = 7874.
QC_INLINE __m256i dot_ymm(__m256i acc, __m256i w, __m256i x) {
  __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <bool InOrder = false>
QC_INLINE I16 dot_small(I16 acc, B64 w, const int8_t* x) {
  __m256i v = x_quad(x);
  return {dot_ymm(acc.a, w.a, v), dot_ymm(acc.b, w.b, v)};
}
// As dot_small four times, for rows 0..7 (`Half` 0) or 8..15. Four sums of two products fit 16 bits, 4 * 7874 = 31496,
// and are widened together, which spares the multiplier.
#define QC_HALF_BLOCKS
template <int Half>
QC_INLINE void dot_small_four(I16& acc, const B64* w, const int8_t* x) {
  __m256i pairs;
  QC_UNROLL for (int i = 0; i < 4; ++i) {
    const __m256i more = _mm256_maddubs_epi16(Half ? w[i].b : w[i].a, x_quad(x + i * 4));
    pairs = i ? _mm256_add_epi16(pairs, more) : more;
  }
  __m256i& sum = Half ? acc.b : acc.a;
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// A full byte is passed as |value|, with its sign moved to x: 2 * 127 * 127 = 32258 still fits, and no offset needs
// correcting afterwards.
constexpr int kFullOffset = 0;
QC_INLINE __m256i dot_signed(__m256i acc, __m256i w, __m256i x) {
  __m256i value = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
  return dot_ymm(acc, _mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
}
template <bool InOrder = false>
QC_INLINE I16 dot_full(I16 acc, B64 w, const int8_t* x) {
  __m256i v = x_quad(x);
  return {dot_signed(acc.a, w.a, v), dot_signed(acc.b, w.b, v)};
}
template <int Half>
QC_INLINE void dot_full_half(I16& acc, B64 w, const int8_t* x) {
  __m256i& sum = Half ? acc.b : acc.a;
  sum = dot_signed(sum, Half ? w.b : w.a, x_quad(x));
}
#endif

QC_INLINE F16 f_bf16_even(B64 w) { return f_bits({_mm256_slli_epi32(w.a, 16), _mm256_slli_epi32(w.b, 16)}); }
QC_INLINE F16 f_bf16_odd(B64 w) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
  return f_bits({_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)});
}
QC_INLINE F16 f_byte(B64 v, int j) {
  return f_from_i({_mm256_srai_epi32(_mm256_slli_epi32(v.a, 24 - 8 * j), 24),
                   _mm256_srai_epi32(_mm256_slli_epi32(v.b, 24 - 8 * j), 24)});
}
