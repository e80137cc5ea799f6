// gemm_mix.h: weights with 4-bit and 8-bit rows (MixLLM 3.3), in blocks of 16 rows of one width. Blocks of both widths
// are stored in the order they are computed. The epilogue scatters results by g.columns, so no gather or copy follows.
#pragma once

constexpr int kBlocksAhead = 4;  // farther ahead, streaming weights evict the prefetched columns

template <class Base, int StartFactor>
struct WideRule : Base {  // 8-bit rows: y = xs sum_g s sum((q + offset - offset) x); start is -StartFactor * sum(x)
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(kFullOffset / StartFactor * start); }
};

template <bool X128>
struct Mix48 {
  using X = Q8Act;
  using Tile = IntTile;
  using Narrow = CenteredRule<Group<X128>>;
  template <int M>
  using Wide = WideRule<Group<X128>, (M < kManyTokens ? 1 : kCenter)>;
  static constexpr int kTile = kPanelTile, kStreamFrom = kNever, kPanelFrom = 48, kPanelLeast = kTile;
  static size_t tile_bytes(int kp, int count) { return W4AsymG128<X128>::tile_bytes(kp, count); }
  static size_t panel_bytes(int kp) { return (size_t)kp * 32; }
  template <TileKind>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    return W4AsymG128<X128>::template prepare<kDirectTile>(g, q, first, count, mem);
  }
  static bool wide(const Gemm& g, int b) { return g.starts[b + 1] - g.starts[b] == 2; }
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + 3) / 4) * 16;
    return {(const uint8_t*)g.codes + (int64_t)g.starts[b] * chunks * 256, g.scale + at, g.zero + at, nullptr};
  }
  template <int M>
  static void unit(const Gemm& g, int first, int blocks, const IntTile& x, float* out) {
    const int chunks = Shape(g).chunks;
    for (int b = first; b < first + blocks; ++b, out += kBufferRows * 16) {
      const IntBlock w = block(g, chunks, b);
      __builtin_prefetch(g.columns + (b + kBlocksAhead) * 16);
      __builtin_prefetch(g.starts + b + kBlocksAhead);
      if (wide(g, b)) int_block<ByteCodes, Wide<M>, M, prefetch_every(M, 1)>(w, x, chunks, out);
      else int_block<ForTokens<CenteredCodes, M>, ForTokens<Narrow, M>, M, prefetch_every(M, 2)>(w, x, chunks, out);
    }
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    const int chunks = Shape(g).chunks;
    for (int b = first; b < first + blocks; ++b, panel += (size_t)chunks * 512)
      if (!wide(g, b)) unpack_block<CenteredCodes>(block(g, chunks, b), chunks, panel, [](int, B64*) {});
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const IntTile& x, const TilePass& pass,
                         float* out) {
    const int chunks = Shape(g).chunks;
    const uint8_t* after = (const uint8_t*)g.codes + (int64_t)g.starts[first + blocks] * chunks * 256;
    for (int b = 0; b < blocks; ++b, out += kBufferRows * 16) {
      IntBlock w = block(g, chunks, first + b);
      if (wide(g, first + b)) {
        int_block<ByteCodes, Wide<kPanelTile>, kPanelTile, 1>(w, x, chunks, out);
        continue;
      }
      const int part = 2 * pass.index + b;  // prefetches the next unit, a part of it during each tile
      w.next = after + (part < 8 ? part : 0) * (int64_t)chunks * 64;
      w.codes = (const uint8_t*)panel + (size_t)b * chunks * 512;
      int_block<SmallByteCodes, Narrow, kPanelTile, kPrefetchNextUnit>(w, x, chunks, out);
    }
  }
};

#if defined(QC_AMX)
struct SignedByteCodes : ByteCodes {  // the signed value
  QC_INLINE B64 operand(B64 line, int, Group) { return b_add(line, b_set(kFullOffset)); }
};
// As UnpackedBytes, for blocks of either width: both become signed bytes, so that one kernel takes any pair of blocks.
struct MixedBytes {
  const IntBlock* w;
  const bool* wide;
  int blocks, chunks;
  alignas(64) char ring[2][2][kSlabBytes];
  MixedBytes(const IntBlock* w, const bool* wide, int blocks, int chunks)
      : w(w), wide(wide), blocks(blocks), chunks(chunks) {}
  static void unpack(const IntBlock& w, bool wide, int from, int chunks, char* to) {
    if (wide) UnpackedBytes<SignedByteCodes>::unpack(w, from, chunks, to);
    else UnpackedBytes<SignedNibbles>::unpack(w, from, chunks, to);
  }
  void fetch(int s) {
    const int from = s * kSlabChunks, n = chunks - from < kSlabChunks ? chunks - from : kSlabChunks;
    for (int b = 0; b < blocks && n > 0; ++b) {
      const int lines = wide[b] ? ByteCodes::kLines : NibbleCodes::kLines;
      prefetch_lines(w[b].codes + lines_ahead((int64_t)from * lines * 64, (int64_t)chunks * lines * 64), 4 * lines);
      unpack(w[b], wide[b], from, n, ring[s % 2][b]);
    }
  }
  const char* at(int b, int s) const { return ring[s % 2][b]; }
};
// mix_4_8 on AMX tiles.
template <bool X128>
struct Mix48Tiles : Mix48<X128> {
  using VectorKernels = Mix48<X128>;
  using Rule = SignedRule<Group<X128>>;
  static constexpr int kTileBytes = 64, kTile = kTileTokens, kStreamFrom = 12, kPanelFrom = kTile + 1, kPanelLeast = 2;
  template <TileKind kind>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    if constexpr (kind == kDirectTile) return VectorKernels::template prepare<kind>(g, q, first, count, mem);
    else return prepare_int<Rule, kTileBytes>(Shape(g).chunks, q, first, count, mem);
  }
  static void streamed(const Gemm& g, int first, int blocks, const IntTile& x, int count, float* out) {
    const int chunks = Shape(g).chunks, last = first + blocks - 1;
    const IntBlock w[2] = {VectorKernels::block(g, chunks, first), VectorKernels::block(g, chunks, last)};
    const bool wide[2] = {VectorKernels::wide(g, first), VectorKernels::wide(g, last)};
    tile_blocks<Rule>(w, blocks, MixedBytes(w, wide, blocks, chunks), x, chunks, count, out);
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    const int chunks = Shape(g).chunks;
    for (int b = first; b < first + blocks; ++b, panel += (size_t)chunks * 512)
      MixedBytes::unpack(VectorKernels::block(g, chunks, b), VectorKernels::wide(g, b), 0, chunks, panel);
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const IntTile& x, const TilePass& pass,
                         float* out) {
    const int chunks = Shape(g).chunks, last = first + blocks - 1;
    const IntBlock w[2] = {VectorKernels::block(g, chunks, first), VectorKernels::block(g, chunks, last)};
    const uint8_t* after = (const uint8_t*)g.codes + (int64_t)g.starts[first + blocks] * chunks * 256;
    PanelBytes bytes(panel, chunks, pass, after, 2 * chunks * NibbleCodes::kLines);
    tile_blocks<Rule>(w, blocks, bytes, x, chunks, pass.count, out);
  }
};
#define QC_MIX_KERNELS Mix48Tiles
#else
#define QC_MIX_KERNELS Mix48
#endif
