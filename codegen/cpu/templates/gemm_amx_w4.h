// gemm_amx_w4.h: 4-bit weights by bfloat16 activations on AMX tiles. For every 32 inputs the tile instruction rounds
// four times: the sum over the first inputs of all pairs, the sum over the second ones, the total of both, and its
// addition to the accumulator. For a single token, vector instructions reproduce this faster, as the unpacked weights
// do not go through memory.
#pragma once

// w4_asym_g128 with bfloat16 activations, as in W4AsymG128Bf16, with a group's sum computed by one tile.
struct W4Bf16Tiles {
  using X = const uint16_t*;
  using VectorKernels = W4AsymG128Bf16;
  using Tile = VectorKernels::Tile;
  static constexpr int kTileBytes = 64, kTile = kTileTokens, kStreamFrom = 2, kPanelFrom = kTile + 1, kPanelLeast = 1;
  static constexpr int kGroupBytes = kSlabChunks * 1024;  // a block's weights of one group, as bfloat16
  static size_t tile_bytes(int kp, int count) { return VectorKernels::tile_bytes(kp, count); }
  static size_t panel_bytes(int kp) { return VectorKernels::panel_bytes(kp); }
  // Tiles flush numbers below 2^-126 to zero; vector instructions do not. With inputs below 2^-100 zeroed, none occur.
  static constexpr uint16_t kFlushBelow = (127 - 100) << 7;
  static u16x16 flush_tiny(u16x16 x) {
    const u16x16 magnitude = x & 0x7fff;
    return x & (u16x16)(magnitude >= kFlushBelow);
  }
  static void copy(uint16_t* to, const uint16_t* from) {
    alignas(64) uint16_t flushed[32];
    store(flushed, flush_tiny(load<u16x16>(from))), store(flushed + 16, flush_tiny(load<u16x16>(from + 16)));
    bf_copy32_w4(to, flushed);
  }
  // A single token's activations are converted to float.
  template <TileKind kind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    const int kp = gemm_kp(g.k);
    Tile tile{prepare_float<BfX, uint16_t, copy>(kp, x, first, count, mem).x, nullptr};
    if (kind == kDirectTile) {
      float* floats = (float*)mem;
      for (int k = 0; k < kp; k += 16) store(floats + k, bf16_to_f32(load<u16x16>(tile.x + k)));
      mem += sizeof(float) * kp;
      tile.x = (const BfX*)floats;
    }
    tile.sums = VectorKernels::sums(kp, x, first, count, mem, flush_tiny);
    return tile;
  }
  static void unpack_group(const uint8_t* codes, int chunks, char* to) {
    for (int l = 0; l < chunks * 4; ++l, to += 256) {
      const W4Bf pairs = w4_unpack(b_load(codes + l * 64));
      QC_UNROLL for (int i = 0; i < 4; ++i) b_store(to + i * 64, pairs.pair[i]);
    }
  }
  static void unpack(const Gemm& g, int block, int blocks, char* panel) {
    const int chunks = gemm_kp(g.k) / 32;
    for (int b = 0; b < blocks; ++b)
      unpack_group(VectorKernels::block(g, block + b).codes, chunks, panel + (size_t)b * chunks * 1024);
  }
  // y = sum_g s (sum((q + offset) x) - (z + offset) sum(x)), for M tokens.
  template <int M>
  QC_INLINE void finish(const VectorKernels::Block& w, const Tile& x, int g, int count, int m, const char* sums,
                        F16* acc) {
    const F16 s = f_load(w.scale + g * 16), minus_z = f_sub(f_set(-kW4Offset), f_from_i(i_load_u8(w.zero + g * 16)));
    const float* of_x = x.sums + g * count + m;
    QC_UNROLL for (int i = 0; i < M; ++i)
      acc[i] = f_fma(f_fma(minus_z, f_set(of_x[i]), f_load((const float*)(sums + i * 64))), s, acc[i]);
  }
  // A chunk's sum for one token, in the tile instruction's order: the first inputs of all pairs, the second ones, then
  // the total.
  template <int B>
  QC_INLINE void chunk_sums(const uint8_t* const* codes, const float* x, F16* sum) {
    F16 even[B], odd[B];
    QC_UNROLL for (int b = 0; b < B; ++b) even[b] = odd[b] = f_set(0.0f);
    QC_UNROLL for (int l = 0; l < 4; ++l) QC_UNROLL for (int b = 0; b < B; ++b) {
      __builtin_prefetch(codes[b] + l * 64 + kPrefetchBytes, 0, 2);
      const W4Bf pairs = w4_unpack(b_load(codes[b] + l * 64));
      QC_UNROLL for (int i = 0; i < 4; ++i) {
        even[b] = f_dot(even[b], f_bf16_even(pairs.pair[i]), x + l * 8 + i * 2);
        odd[b] = f_dot(odd[b], f_bf16_odd(pairs.pair[i]), x + l * 8 + i * 2 + 1);
      }
    }
    QC_UNROLL for (int b = 0; b < B; ++b) sum[b] = f_add(even[b], odd[b]);
  }
  template <int>
  static void unit(const Gemm& g, int block, int blocks, const Tile& tile, float* out) {
    const VectorKernels::Block w[2] = {VectorKernels::block(g, block), VectorKernels::block(g, block + blocks - 1)};
    const int chunks = gemm_kp(g.k) / 32;
    const float* x = (const float*)tile.x;
    F16 acc[2] = {f_set(0.0f), f_set(0.0f)};
    for (int group = 0; group * kSlabChunks < chunks; ++group) {
      F16 total[2] = {f_set(0.0f), f_set(0.0f)};
      for (int c = group * kSlabChunks; c < chunks && c < (group + 1) * kSlabChunks; ++c) {
        const uint8_t* codes[2] = {w[0].codes + (int64_t)c * 256, w[1].codes + (int64_t)c * 256};
        F16 sum[2];
        chunk_sums<2>(codes, x + c * 32, sum);
        for (int b = 0; b < 2; ++b) total[b] = f_add(total[b], sum[b]);
      }
      for (int b = 0; b < 2; ++b) finish<1>(w[b], tile, group, 1, 0, (const char*)&total[b], acc + b);
    }
    for (int b = 0; b < blocks; ++b) f_store(out + b * kBufferRows * 16, acc[b]);
  }
  // at(b, g): the bfloat16 weights of group g of block b. fetch(g) is called one group ahead.
  template <class Fetch, class At>
  static void tile_units(const Gemm& g, int block, int blocks, const Tile& x, int count, const Fetch& fetch,
                         const At& at, float* out) {
    const VectorKernels::Block w[2] = {VectorKernels::block(g, block), VectorKernels::block(g, block + blocks - 1)};
    const int chunks = gemm_kp(g.k) / 32, groups = (chunks + kSlabChunks - 1) / kSlabChunks;
    const bool both = count > kHalfTokens, two = blocks == 2;
    alignas(64) char sums[2][2 * kTileTokens * 64];
    F16 acc[2][kTileTokens];
    for (int b = 0; b < blocks; ++b)
      for (int m = 0; m < kTileTokens; ++m) acc[b][m] = f_set(0.0f);
    const auto finish_group = [&](int group) {
      for (int b = 0; b < blocks; ++b)
        for (int m = 0; m < count; m += kFinishTokens)
          finish<kFinishTokens>(w[b], x, group, count, m, sums[group % 2] + (b * kTileTokens + m) * 64, acc[b] + m);
    };
    const uint16_t* from = x.x;
    fetch(0);
    for (int group = 0; group < groups; ++group) {
      const int left = chunks - group * kSlabChunks, n = left < kSlabChunks ? left : kSlabChunks;
      fetch(group + 1);
      const char *first = at(0, group), *second = at(blocks - 1, group);
      zero_tiles();
      for (int c = 0; c < n; ++c, from += count * 32)
        tile_step<TileBf16, 64>(from, first + c * 1024, second + c * 1024, both, two);
      store_tiles(sums[group % 2], both, two);
      if (group) finish_group(group - 1);
    }
    finish_group(groups - 1);
    for (int b = 0; b < blocks; ++b)
      for (int m = 0; m < count; ++m) f_store(out + (b * kBufferRows + m) * 16, acc[b][m]);
  }
  static void streamed(const Gemm& g, int block, int blocks, const Tile& x, int count, float* out) {
    alignas(64) char ring[2][2][kGroupBytes];
    const int64_t chunks = gemm_kp(g.k) / 32, bytes = chunks * 256;
    const uint8_t* codes = VectorKernels::block(g, block).codes;
    const auto fetch = [&](int group) {
      const int64_t from = (int64_t)group * kSlabChunks, left = chunks - from;
      const int64_t n = left < kSlabChunks ? left : kSlabChunks;
      for (int b = 0; b < blocks && n > 0; ++b) {
        prefetch_lines(codes + b * bytes + lines_ahead(from * 256, bytes), kSlabChunks * 4);
        unpack_group(codes + b * bytes + from * 256, (int)n, ring[group % 2][b]);
      }
    };
    tile_units(g, block, blocks, x, count, fetch, [&](int b, int group) { return ring[group % 2][b]; }, out);
  }
  static void panel_unit(const Gemm& g, int block, int blocks, char* panel, const Tile& x, const TilePass& pass,
                         float* out) {
    const int chunks = gemm_kp(g.k) / 32, lines = 2 * 4 * chunks;
    PanelBytes bytes(panel, chunks, pass, VectorKernels::block(g, block).codes + (int64_t)lines * 64, lines);
    const auto at = [&](int b, int group) { return panel + ((int64_t)b * chunks + group * kSlabChunks) * 1024; };
    tile_units(g, block, blocks, x, pass.count, [&](int group) { bytes.fetch(group); }, at, out);
  }
};
