// lanes.h: a small register-tiled matrix product for attention; the right-hand side is widened on the fly.
//
//   multiply(rows, a, lda, B, k0, k1, n, c, ldc, accumulate)
//   c[r][j] (+)= sum over k0 <= k < k1, ascending, of a[r][k] * B[k][j],   r < rows, j < n, n a multiple of 16
//
// Each c is one chain of multiply-adds in the order of k. Its bits therefore depend neither on the tile it falls in nor
// on where k is split, nor on whether B is widened in registers or in memory.
#pragma once
#include "gemm.h"

#define QC_NOINLINE static __attribute__((noinline, unused))
#define QC_MEMBER inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kTileVectors = 4, kTileHeight = 6;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kTileVectors = 1, kTileHeight = 6;  // 12 of 16
#else
constexpr int kTileVectors = 1, kTileHeight = 2;  // 8 of 16
#endif

// acc + w * x, rounded once on every ISA; otherwise the int8 codes computed next would occasionally differ. Without FMA
// it goes through double, where the product is exact (double rounding shows once in 2^29).
QC_INLINE F16 fused(F16 acc, F16 w, const float* x) {
#if defined(__AVX512F__) || defined(__AVX2__)
  return f_dot(acc, w, x);
#else
  typedef double f64x16 __attribute__((vector_size(128)));
  const f64x16 sum = __builtin_convertvector(w, f64x16) * (double)*x + __builtin_convertvector(acc, f64x16);
  return __builtin_convertvector(sum, f32x16);
#endif
}

QC_INLINE F16 to_lanes(f32x16 v) {
#if defined(QC_ISA_AVX512)
  return v;
#else
  float t[16];
  store(t, v);
  return f_load(t);
#endif
}
QC_INLINE F16 to_lanes(u8x16 v) {
  alignas(16) uint8_t t[16];
  store(t, v);
  return f_from_i(i_load_u8(t));
}

QC_INLINE F16 widen_bf16(const uint16_t* p) {
#if defined(QC_ISA_AVX512)
  // Moves each word to the upper half of its lane and zeroes the lower half, in one permutation.
  const __m512i upper = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000,
                                         0x70000, 0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return f_bits(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper, words));
#else
  return to_lanes(bf16_to_f32(load<u16x16>(p)));
#endif
}

// Right-hand sides: at(k, j) is B[k][j .. j + 15] as floats; `stride` is elements per row (nibbles: bytes).
struct Floats {
  const void* p;
  int stride;
  QC_MEMBER F16 at(int k, int j) const { return f_load((const float*)p + k * stride + j); }
};
struct Bfloats {
  const void* p;
  int stride;
  QC_MEMBER F16 at(int k, int j) const { return widen_bf16((const uint16_t*)p + k * stride + j); }
};
struct Bytes {
  const void* p;
  int stride;
  QC_MEMBER F16 at(int k, int j) const { return f_from_i(i_load_u8((const uint8_t*)p + k * stride + j)); }
};
template <int shift>
struct Nibbles {
  const void* p;
  int stride;
  QC_MEMBER F16 at(int k, int j) const {
    return to_lanes((load<u8x16>((const uint8_t*)p + k * stride + j) >> shift) & 15);
  }
};

template <int R, int V, class B>
QC_INLINE void multiply_tile(const float* a, int lda, const B& b, int k0, int k1, int j, float* c, int ldc,
                             bool accumulate) {
  F16 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? f_load(c + r * ldc + j + 16 * v) : f_set(0.0f);
  for (int k = k0; k < k1; ++k) {
    F16 w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = b.at(k, j + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fused(sum[r][v], w[v], a + r * lda + k);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) f_store(c + r * ldc + j + 16 * v, sum[r][v]);
}

template <int R, class B>
QC_NOINLINE void multiply_rows(const float* a, int lda, const B& b, int k0, int k1, int j0,
                                                    int j1, float* c, int ldc, bool accumulate) {
  int j = j0;
  for (; j + 16 * kTileVectors <= j1; j += 16 * kTileVectors)
    multiply_tile<R, kTileVectors>(a, lda, b, k0, k1, j, c, ldc, accumulate);
  for (; j < j1; j += 16) multiply_tile<R, 1>(a, lda, b, k0, k1, j, c, ldc, accumulate);
}

template <class B>
static void multiply(int rows, const float* a, int lda, const B& b, int k0, int k1, int n, float* c, int ldc,
                     bool accumulate) {
  constexpr int kBand = 64;  // columns at a time, so that B's band stays in L1 for all rows
  for (int j = 0; j < n; j += kBand) {
    const int end = j + kBand < n ? j + kBand : n;
    int r = 0;
    for (; r + kTileHeight <= rows; r += kTileHeight)
      multiply_rows<kTileHeight>(a + r * lda, lda, b, k0, k1, j, end, c + r * ldc, ldc, accumulate);
    const float* ar = a + r * lda;
    float* cr = c + r * ldc;
    switch (rows - r) {
#if defined(__AVX2__)
      case 5: multiply_rows<5>(ar, lda, b, k0, k1, j, end, cr, ldc, accumulate); break;
      case 4: multiply_rows<4>(ar, lda, b, k0, k1, j, end, cr, ldc, accumulate); break;
      case 3: multiply_rows<3>(ar, lda, b, k0, k1, j, end, cr, ldc, accumulate); break;
      case 2: multiply_rows<2>(ar, lda, b, k0, k1, j, end, cr, ldc, accumulate); break;
#endif
      case 1: multiply_rows<1>(ar, lda, b, k0, k1, j, end, cr, ldc, accumulate); break;
    }
  }
}
