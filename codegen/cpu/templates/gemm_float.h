// gemm_float.h: formats with float or bfloat16 products. Each output is one chain of multiply-adds over the inputs in
// order (4-bit weights: two chains per group), the same for every number of tokens. With few tokens two blocks run
// interleaved, so that their chains hide each other's latency.
#pragma once

// Activations of one tile, [kp/32][M][32].
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

// B blocks by M tokens. A prefetch that would run past the end of block b is moved by `skip` bytes, to the block after
// the unit. Steps of one or two tokens wait for memory anyway; from three on, lines must be there when their products begin.
template <class Codes, int B, int M>
static void float_blocks(const uint8_t* codes, int64_t block_bytes, int64_t skip, const typename Codes::E* x,
                         int chunks, float* out) {
  constexpr int kStep = 32 / Codes::kLines, kEvery = M < 3 ? 8 : 1;
  F16 acc[B * M];
  QC_UNROLL for (int i = 0; i < B * M; ++i) acc[i] = f_set(0.0f);
  const uint8_t* p = codes;
  for (; chunks; --chunks, p += Codes::kLines * 64, x += M * 32) {
    const int64_t ahead = kPrefetchBytes + (chunks * Codes::kLines * 64 <= kPrefetchBytes ? skip : 0);
    QC_UNROLL for (int l = 0; l < Codes::kLines; ++l)
      QC_UNROLL for (int b = 0; b < B; ++b) {
        const uint8_t* line = p + b * block_bytes + l * 64;
        if (l % kEvery == 0) __builtin_prefetch(line + ahead, 0, 2);
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
  static constexpr int kTile = kPanelTile, kStreamFrom = kNever, kPanelFrom = kSmallTile + 1, kPanelLeast = kTile;
  static size_t tile_bytes(int kp, int count) { return sizeof(typename Codes::E) * kp * count; }
  static size_t panel_bytes(int) { return 0; }
  template <TileKind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<typename Codes::E, typename Codes::Source, Codes::copy>(gemm_kp(g.k), x, first, count, mem);
  }
  template <int M>
  static void unit(const Gemm& g, int block, int blocks, const Tile& x, float* out) {
    const int chunks = gemm_kp(g.k) / 32;
    const int64_t bytes = (int64_t)chunks * Codes::kLines * 64;
    const uint8_t* codes = (const uint8_t*)g.codes + block * bytes;
    if constexpr (M <= 3)
      float_blocks<Codes, 2, M>(codes, blocks == 2 ? bytes : 0, bytes, x.x, chunks, out);
    else
      for (int b = 0; b < blocks; ++b)
        float_blocks<Codes, 1, M>(codes + b * bytes, 0, 0, x.x, chunks, out + b * kBufferRows * 16);
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm& g, int block, int blocks, char*, const Tile& x, const TilePass&, float* out) {
    unit<kPanelTile>(g, block, blocks, x, out);
  }
};

using F32 = FloatFormat<F32Codes>;
using Bf16 = FloatFormat<Bf16Codes>;

// The lines of nibbles of a chunk of 32 inputs, as they are stored.
struct NibbleLines {
  using Opened = const uint8_t*;
  static constexpr int kBytes = 256;
  QC_INLINE Opened open(const uint8_t* chunk) { return chunk; }
  QC_INLINE B64 line(const Opened& chunk, int l) { return b_load(chunk + l * 64); }
};

// Asymmetric weights in groups of `Chunks` * 32 inputs, with bfloat16 activations, in 4 bits, or stored in fewer and
// opened by `Lines`: y = sum_g s (sum((q + offset) x)
// - (z + offset) sum(x)), where q + offset is exact in bfloat16. The offset makes unpacking cheap; it costs a few units
// in the last place of the float sum.
template <int Chunks, class Lines = NibbleLines>
struct W4AsymBf16 {
  using X = const uint16_t*;
  struct Tile {
    const BfX* x;
    const float* sums;  // [groups][M]
  };
  static constexpr int kGroup = Chunks * 32;  // inputs
  static constexpr int kTile = kSmallTile;  // three accumulators per token, so fewer tokens fit the registers
  static constexpr int kStreamFrom = kNever, kPanelFrom = 48, kPanelLeast = kTile;
  static size_t tile_bytes(int kp, int count) { return (sizeof(BfX) * kp + (kp + kGroup - 1) / kGroup * 4) * count + 64; }
  static size_t panel_bytes(int kp) { return (size_t)kp / 8 * sizeof(W4Bf) * 2; }
  template <TileKind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    const BfX* copy = prepare_float<BfX, uint16_t, bf_copy32_w4>(gemm_kp(g.k), x, first, count, mem).x;
    return {copy, sums(gemm_kp(g.k), x, first, count, mem, [](u16x16 v) { return v; })};
  }
  // [groups][count] sums of filter(activation).
  template <class Filter>
  static const float* sums(int kp, X x, int first, int count, char*& mem, const Filter& flush_tiny) {
    float* to = (float*)mem;
    const int groups = (kp + kGroup - 1) / kGroup;
    for (int i = 0; i < groups * count; ++i) {
      const int group = i / count, end = kp < (group + 1) * kGroup ? kp : (group + 1) * kGroup;
      f32x16 sum = splat(0.0f);
      for (int k = group * kGroup; k < end; k += 16)
        sum += bf16_to_f32(flush_tiny(load<u16x16>(x + (int64_t)(first + i % count) * kp + k)));
      to[i] = reduce_add(sum);
    }
    mem += (groups * count * 4 + 63) / 64 * 64;
    return to;
  }

  struct Block {
    const uint8_t* codes;
    const float* scale;   // [groups][16]
    const uint8_t* zero;  // [groups][16]
    const W4Bf* panel;    // [kp/8], replaces codes and zero where unpacked
  };
  static Block block(const Gemm& g, int b) {
    const int64_t chunks = gemm_kp(g.k) / 32, at = b * ((chunks + Chunks - 1) / Chunks) * 16;
    return {(const uint8_t*)g.codes + b * chunks * Lines::kBytes, g.scale + at, g.zero + at, nullptr};
  }
  template <bool Panel, int B, int M>
  static void blocks_by_tokens(Block (&w)[B], const Tile& tile, int chunks, float* out) {
    const int64_t skip = B == 1 ? 0 : (int64_t)chunks * Lines::kBytes;
    const BfX* x = tile.x;
    F16 acc[B * M];
    QC_UNROLL for (int i = 0; i < B * M; ++i) acc[i] = f_set(0.0f);
    for (int g = 0; chunks > 0; ++g, chunks -= Chunks) {
      F16 first[B * M], second[B * M];
      QC_UNROLL for (int i = 0; i < B * M; ++i) first[i] = second[i] = f_set(0.0f);
      const int64_t ahead = kPrefetchBytes + (chunks * Lines::kBytes <= kPrefetchBytes ? skip : 0);
      for (int c = chunks < Chunks ? chunks : Chunks; c; --c, x += M * 32) {
        typename Lines::Opened opened[B];
        if (!Panel) QC_UNROLL for (int b = 0; b < B; ++b) opened[b] = Lines::open(w[b].codes);
        QC_UNROLL for (int l = 0; l < 4; ++l) QC_UNROLL for (int b = 0; b < B; ++b) {
          if (!Panel && l * 64 < Lines::kBytes) __builtin_prefetch(w[b].codes + l * 64 + ahead, 0, 2);
          const W4Bf v = Panel ? w[b].panel[l] : w4_unpack(Lines::line(opened[b], l));
          QC_UNROLL for (int m = 0; m < M; ++m)
            w4_dot(first[b * M + m], second[b * M + m], v, x + m * 32 + l * 8);
        }
        QC_UNROLL for (int b = 0; b < B; ++b) w[b].codes += Lines::kBytes, w[b].panel += 4;
      }
      QC_UNROLL for (int b = 0; b < B; ++b) {
        const F16 s = f_load(w[b].scale + g * 16);
        const F16 minus_z = f_sub(f_set(-kW4Offset), f_from_i(i_load_u8(w[b].zero + g * 16)));
        QC_UNROLL for (int m = 0; m < M; ++m) {
          const int i = b * M + m;
          acc[i] = f_fma(f_fma(minus_z, f_set(tile.sums[g * M + m]), f_add(first[i], second[i])), s, acc[i]);
        }
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
      blocks_by_tokens<false, 2, M>(w, x, chunks, out);
    } else {
      for (int b = 0; b < blocks; ++b) {
        Block w[1] = {block(g, first + b)};
        blocks_by_tokens<false, 1, M>(w, x, chunks, out + b * kBufferRows * 16);
      }
    }
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    const int chunks = gemm_kp(g.k) / 32;
    W4Bf* to = (W4Bf*)panel;
    for (int b = 0; b < blocks; ++b) {
      const Block w = block(g, first + b);
      for (int c = 0; c < chunks; ++c) {
        const typename Lines::Opened opened = Lines::open(w.codes + c * Lines::kBytes);
        QC_UNROLL for (int l = 0; l < 4; ++l) *to++ = w4_unpack(Lines::line(opened, l));
      }
    }
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const Tile& x, const TilePass&,
                         float* out) {
    const int chunks = gemm_kp(g.k) / 32;
    for (int b = 0; b < blocks; ++b) {
      Block w[1] = {block(g, first + b)};
      w[0].panel = (const W4Bf*)panel + b * chunks * 4;
      blocks_by_tokens<true, 1, kTile>(w, x, chunks, out + b * kBufferRows * 16);
    }
  }
};
using W4AsymG128Bf16 = W4AsymBf16<4>;
