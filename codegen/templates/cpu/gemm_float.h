// gemm_float.h: the formats whose products are float or bfloat16. Each output is one chain of multiply-adds over the
// inputs in order (4-bit weights: two chains a group), the same for every number of tokens; at few tokens two blocks
// run side by side, so that their chains hide each other's latency.
#pragma once

// [kp/32][M][32] activations of one tile.
template <class E>
struct FloatTile {
  const E* x;
};

template <class E, class Source, void (*Copy)(E*, const Source*)>
static FloatTile<E> prepare_float(int kp, const Source* x, int first, int count, char*& mem) {
  E* to = (E*)mem;
  for (int c = 0; c < kp / 32; ++c)
    for (int m = 0; m < count; ++m) Copy(to + (c * count + m) * 32, x + (int64_t)(first + m) * kp + c * 32);
  mem += sizeof(E) * kp * count;
  return {to};
}

struct F32Codes {
  using E = float;
  using Source = float;
  static constexpr int kLines = 32;  // 64-byte lines of a block per 32 inputs
  static void copy(float* to, const float* from) { memcpy(to, from, 128); }
  QC_INLINE F16 dot(F16 acc, const uint8_t* w, const float* x) { return f_dot(acc, f_load((const float*)w), x); }
};
struct Bf16Codes {
  using E = BfX;
  using Source = uint16_t;
  static constexpr int kLines = 16;
  static void copy(BfX* to, const uint16_t* from) { bf_copy32(to, from); }
  QC_INLINE F16 dot(F16 acc, const uint8_t* w, const BfX* x) { return bf_dot(acc, b_load(w), x); }
};

// B blocks by M tokens. While block b's prefetch would run past its end it runs into the block that follows the unit.
template <class Codes, int B, int M>
static void float_blocks(const uint8_t* codes, int64_t block_bytes, int64_t skip, const typename Codes::E* x, int chunks,
                         float* out) {
  constexpr int kStep = 32 / Codes::kLines;
  F16 acc[B * M];
  QC_UNROLL for (int i = 0; i < B * M; ++i) acc[i] = f_set(0.0f);
  const uint8_t* p = codes;
  for (; chunks; --chunks, p += Codes::kLines * 64, x += M * 32) {
    const int64_t ahead = kPrefetchBytes + (chunks * Codes::kLines * 64 <= kPrefetchBytes ? skip : 0);
    QC_UNROLL for (int l = 0; l < Codes::kLines; ++l)
      QC_UNROLL for (int b = 0; b < B; ++b) {
        const uint8_t* line = p + b * block_bytes + l * 64;
        __builtin_prefetch(line + ahead);
        QC_UNROLL for (int m = 0; m < M; ++m)
          acc[b * M + m] = Codes::dot(acc[b * M + m], line, x + m * 32 + l * kStep);
      }
  }
  QC_UNROLL for (int b = 0; b < B; ++b)
    QC_UNROLL for (int m = 0; m < M; ++m) f_store(out + (b * kBufferRows + m) * 16, acc[b * M + m]);
}

template <class Codes>
struct FloatFormat {
  using X = const typename Codes::Source*;
  using Tile = FloatTile<typename Codes::E>;
  static constexpr int kPanelFrom = kSmallTile + 1;
  static size_t tile_bytes(int kp, int count) { return sizeof(typename Codes::E) * kp * count; }
  static size_t panel_bytes(int) { return 0; }
  template <bool>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<typename Codes::E, typename Codes::Source, Codes::copy>(gemm_kp(g.k), x, first, count, mem);
  }
  template <int M>
  static void unit(const Gemm& g, int block, int blocks, const Tile& x, float* out) {
    const int chunks = gemm_kp(g.k) / 32;
    const int64_t bytes = (int64_t)chunks * Codes::kLines * 64;
    const uint8_t* codes = (const uint8_t*)g.codes + block * bytes;
    if constexpr (M <= 2)
      float_blocks<Codes, 2, M>(codes, blocks == 2 ? bytes : 0, bytes, x.x, chunks, out);
    else
      for (int b = 0; b < blocks; ++b)
        float_blocks<Codes, 1, M>(codes + b * bytes, 0, 0, x.x, chunks, out + b * kBufferRows * 16);
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm& g, int block, int blocks, char*, const Tile& x, float* out) {
    unit<kPanelTile>(g, block, blocks, x, out);
  }
};

using F32 = FloatFormat<F32Codes>;
using Bf16 = FloatFormat<Bf16Codes>;

// w4_asym_g128 with bfloat16 activations: y = sum_g s sum((q - z) x), (q - z) exact in bfloat16.
struct W4AsymG128Bf16 {
  using X = const uint16_t*;
  using Tile = FloatTile<BfX>;
  static constexpr int kPanelFrom = 25;
  static size_t tile_bytes(int kp, int count) { return sizeof(BfX) * kp * count; }
  static size_t panel_bytes(int kp) { return (size_t)kp / 8 * sizeof(W4Bf) * 2; }
  template <bool>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<BfX, uint16_t, bf_copy32_w4>(gemm_kp(g.k), x, first, count, mem);
  }

  struct Block {
    const uint8_t* codes;
    const float* scale;   // [groups][16]
    const uint8_t* zero;  // [groups][16]
    const W4Bf* panel;    // [kp/8], instead of codes and zero where unpacked
  };
  static Block block(const Gemm& g, int b) {
    const int64_t chunks = gemm_kp(g.k) / 32, at = b * ((chunks + 3) / 4) * 16;
    return {(const uint8_t*)g.codes + b * chunks * 256, g.scale + at, g.zero + at, nullptr};
  }
  template <bool Panel, int B, int M>
  static void blocks_by_tokens(Block (&w)[B], const BfX* x, int chunks, float* out) {
    F16 acc[B * M];
    QC_UNROLL for (int i = 0; i < B * M; ++i) acc[i] = f_set(0.0f);
    for (int g = 0; chunks > 0; ++g, chunks -= 4) {
      F16 first[B * M], second[B * M];
      B64 zero[B];
      QC_UNROLL for (int b = 0; b < B; ++b)
        if (!Panel) zero[b] = b_rows(w[b].zero + g * 16);
      QC_UNROLL for (int i = 0; i < B * M; ++i) first[i] = second[i] = f_set(0.0f);
      for (int c = chunks < 4 ? chunks * 4 : 16; c; --c) {
        QC_UNROLL for (int b = 0; b < B; ++b) {
          if (!Panel) __builtin_prefetch(w[b].codes + kPrefetchBytes);
          const W4Bf v = Panel ? *w[b].panel++ : w4_unpack(b_load(w[b].codes), zero[b]);
          if (!Panel) w[b].codes += 64;
          QC_UNROLL for (int m = 0; m < M; ++m) w4_dot(first[b * M + m], second[b * M + m], v, x + m * 32);
        }
        x += c % 4 == 1 ? M * 32 - 24 : 8;
      }
      QC_UNROLL for (int b = 0; b < B; ++b) {
        const F16 s = f_load(w[b].scale + g * 16);
        QC_UNROLL for (int m = 0; m < M; ++m)
          acc[b * M + m] = f_fma(f_add(first[b * M + m], second[b * M + m]), s, acc[b * M + m]);
      }
    }
    QC_UNROLL for (int b = 0; b < B; ++b)
      QC_UNROLL for (int m = 0; m < M; ++m) f_store(out + (b * kBufferRows + m) * 16, acc[b * M + m]);
  }
  template <int M>
  static void unit(const Gemm& g, int first, int blocks, const Tile& x, float* out) {
    const int chunks = gemm_kp(g.k) / 32;
    if constexpr (M <= 2) {
      Block w[2] = {block(g, first), block(g, first + blocks - 1)};
      blocks_by_tokens<false, 2, M>(w, x.x, chunks, out);
    } else {
      for (int b = 0; b < blocks; ++b) {
        Block w[1] = {block(g, first + b)};
        blocks_by_tokens<false, 1, M>(w, x.x, chunks, out + b * kBufferRows * 16);
      }
    }
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    const int steps = gemm_kp(g.k) / 8;
    W4Bf* to = (W4Bf*)panel;
    for (int b = 0; b < blocks; ++b) {
      const Block w = block(g, first + b);
      for (int s = 0; s < steps; ++s) *to++ = w4_unpack(b_load(w.codes + s * 64), b_rows(w.zero + s / 16 * 16));
    }
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const Tile& x, float* out) {
    const int chunks = gemm_kp(g.k) / 32;
    for (int b = 0; b < blocks; ++b) {
      Block w[1] = {block(g, first + b)};
      w[0].panel = (const W4Bf*)panel + b * chunks * 4;
      blocks_by_tokens<true, 1, kPanelTile>(w, x.x, chunks, out + b * kBufferRows * 16);
    }
  }
};
