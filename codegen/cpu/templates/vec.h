// vec.h: 16-lane vectors with GCC's vector extension, shared by every generated C++ file.
//
// The semantics are the same on every ISA: on AVX-512 a value is one zmm register, elsewhere the compiler splits it.
// Compile with -ffp-contract=off: a*b+c must stay a multiplication and an addition, so that results are the same on
// every ISA. A fused multiply-add is requested by name where wanted.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define QC_INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

// Unaligned load and store of any vector type: load<f32x16>(p), store(p, v).
template <class V>
QC_INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
QC_INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}
// Reinterprets the bits as another type of the same size.
template <class V, class W>
QC_INLINE V bitcast(W w) {
  static_assert(sizeof(V) == sizeof(W), "bitcast keeps the size");
  V v;
  memcpy(&v, &w, sizeof(V));
  return v;
}

QC_INLINE f32x16 splat(float x) { return f32x16{} + x; }
QC_INLINE i32x16 splat(int32_t x) { return i32x16{} + x; }
QC_INLINE f32x16 to_f32(i32x16 v) { return __builtin_convertvector(v, f32x16); }
QC_INLINE f32x16 to_f32(u8x16 v) { return __builtin_convertvector(v, f32x16); }
QC_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {  // mask lanes are 0 or -1, as from comparisons
#if defined(__AVX512F__)
  return mask ? yes : no;  // a mask register and one blend
#else
  return bitcast<f32x16>((bitcast<i32x16>(yes) & mask) | (bitcast<i32x16>(no) & ~mask));
#endif
}

// a if a > b, else b; so vmax(x, y) is y where x is NaN. GCC compares 64-byte vectors lane by lane if there is no
// register of that size, so each part is compared separately there.
#if defined(__AVX512F__)
typedef f32x16 f32part;
typedef i32x16 i32part;
QC_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
QC_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
#else
#if defined(__AVX2__)
typedef float f32part __attribute__((vector_size(32)));
typedef int32_t i32part __attribute__((vector_size(32)));
#else
typedef float f32part __attribute__((vector_size(16)));
typedef int32_t i32part __attribute__((vector_size(16)));
#endif
template <class F>
QC_INLINE f32x16 by_parts(f32x16 a, f32x16 b, const F& f) {
  constexpr int n = 64 / sizeof(f32part);
  f32part x[n], y[n];
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  for (int i = 0; i < n; ++i) x[i] = f(x[i], y[i]);
  return load<f32x16>(x);
}
QC_INLINE f32x16 vmax(f32x16 a, f32x16 b) {
  return by_parts(a, b, [](f32part x, f32part y) { return x > y ? x : y; });
}
QC_INLINE f32x16 vmin(f32x16 a, f32x16 b) {
  return by_parts(a, b, [](f32part x, f32part y) { return x < y ? x : y; });
}
#endif
QC_INLINE f32x16 vabs(f32x16 a) { return bitcast<f32x16>(bitcast<i32x16>(a) & 0x7fffffff); }

// Rounds to nearest even, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa bits.
constexpr float kRoundMagic = 12582912.0f;
QC_INLINE f32x16 round_even(f32x16 x) { return (x + kRoundMagic) - kRoundMagic; }
QC_INLINE i32x16 round_to_i32(f32x16 x) {
  return bitcast<i32x16>(x + kRoundMagic) - bitcast<int32_t>(kRoundMagic);
}

// bfloat16 <-> float. Conversion to bf16 rounds to nearest even (NaN is not handled: no NaN reaches the kernels).
QC_INLINE f32x16 bf16_to_f32(u16x16 v) {
  return bitcast<f32x16>(__builtin_convertvector(v, u32x16) << 16);
}
QC_INLINE u16x16 f32_to_bf16(f32x16 v) {
  u32x16 u = bitcast<u32x16>(v);
  return __builtin_convertvector((u + 0x7fffu + ((u >> 16) & 1u)) >> 16, u16x16);
}
QC_INLINE float bf16_to_f32(uint16_t v) { return bitcast<float>((uint32_t)v << 16); }

// IEEE half -> float, exactly. Infinity and NaN are not handled: no weight holds them.
struct Half {
  uint16_t bits;
};
QC_INLINE f32x16 f16_to_f32(u16x16 v) {
  const u32x16 u = __builtin_convertvector(v, u32x16), magnitude = u & 0x7fffu;
  const f32x16 subnormal = to_f32(bitcast<i32x16>(magnitude)) * 0x1p-24f;
  const f32x16 normal = bitcast<f32x16>((magnitude << 13) + (112u << 23));
  const f32x16 value = select(bitcast<i32x16>(magnitude < 0x400u), subnormal, normal);
  return bitcast<f32x16>(bitcast<u32x16>(value) | (u & 0x8000u) << 16);
}

// Sum and maximum over the 16 lanes, in a fixed tree order: lane i with i + 8, then 4, 2, 1.
template <class F>
QC_INLINE float reduce(f32x16 v, const F& join) {
#if defined(__AVX512F__) && __has_builtin(__builtin_shufflevector)
  v = join(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = join(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
#else
  typedef float f32x4 __attribute__((vector_size(16)));
  f32x4 q[4];
  memcpy(q, &v, sizeof q);
  const f32x4 s = join(join(q[0], q[2]), join(q[1], q[3]));
  return join(join(s[0], s[2]), join(s[1], s[3]));
#endif
}
QC_INLINE float reduce_add(f32x16 v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}
QC_INLINE float reduce_max(f32x16 v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x, relative error below 1.2e-7 on [-87, 88]; clamped outside, so it is never 0, infinite or NaN.
// x = n ln2 + r with |r| <= ln2/2 (ln2 in two parts), e^r by a degree 7 Chebyshev interpolant, then 2^n by exponent bits.
QC_INLINE f32x16 vexp(f32x16 x) {
  x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
  const f32x16 t = x * 1.44269504f + kRoundMagic;  // n in the low bits
  f32x16 n = t - kRoundMagic;
  f32x16 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  f32x16 p = splat(0.000198911803f);
  p = p * r + 0.00139338209f;
  p = p * r + 0.00833331048f;
  p = p * r + 0.041666463f;
  p = p * r + 0.166666672f;
  p = p * r + 0.5f;
  p = (p * (r * r) + r) + 1.0f;
  return bitcast<f32x16>(bitcast<i32x16>(p) + (bitcast<i32x16>(t) << 23));
}
