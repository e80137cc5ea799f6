// simd_amx.h: AMX tile primitives. gemm_amx.h uses them for 16 tokens by 16 rows of a block, twice each;
// attention_amx.h assigns the tiles differently.
#pragma once
#include "vec.h"

constexpr int kHalfTokens = 16, kTileTokens = 2 * kHalfTokens;
// Tiles 0..3 are accumulators: tokens 0..15 by block 0 and by block 1, then tokens 16..31 by both. Tiles 4 and 5 hold
// the activations of both halves, 6 and 7 the weights of both blocks.
template <int T>
QC_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
QC_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
QC_INLINE void tile_store(void* p, int64_t stride = 64) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
struct TileUnsigned {  // signed activations by weights in 0..255
  template <int Sum, int X, int W>
  QC_INLINE void dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
  }
};
struct TileSigned {
  template <int Sum, int X, int W>
  QC_INLINE void dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
  }
};
struct TileBf16 {
  template <int Sum, int X, int W>
  QC_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
  }
};

// Configures tiles for steps of `bytes` bytes of inputs; tiles from `weights` on hold weights. Token tiles use all rows
// unless `tokens` says otherwise: whatever follows the last token is multiplied too, and the result ignored.
static void shape_tiles(int bytes, int tokens = kHalfTokens, int weights = 6) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int t = 0; t < 8; ++t) {
    shape.rows[t] = (uint8_t)(t < weights ? tokens : bytes / 4);
    shape.bytes[t] = (uint16_t)(t < 4 || t >= weights ? 64 : bytes);
  }
  asm volatile("ldtilecfg %0" : : "m"(shape));
}
QC_INLINE void release_tiles() { asm volatile("tilerelease"); }

QC_INLINE void zero_tiles() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }

// One step: x is [tokens][Bytes], a block's weights [Bytes / 4][64].
template <class Op, int Bytes>
QC_INLINE void tile_step(const void* x, const void* first, const void* second, bool both, bool two) {
  tile_load<4>(x, Bytes);
  tile_load<6>(first, 64);
  Op::template dot<0, 4, 6>();
  if (two) {
    tile_load<7>(second, 64);
    Op::template dot<1, 4, 7>();
  }
  if (!both) return;
  tile_load<5>((const char*)x + kHalfTokens * Bytes, Bytes);
  Op::template dot<2, 5, 6>();
  if (two) Op::template dot<3, 5, 7>();
}

// Stores 16 lines per tile: block b of half h at to + (b * kTileTokens + h * kHalfTokens) * 64.
QC_INLINE void store_tiles(void* to, bool both, bool two) {
  char* p = (char*)to;
  tile_store<0>(p);
  if (two) tile_store<1>(p + kTileTokens * 64);
  if (!both) return;
  tile_store<2>(p + kHalfTokens * 64);
  if (two) tile_store<3>(p + (kTileTokens + kHalfTokens) * 64);
}
