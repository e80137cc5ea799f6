// gemm_mix.h: weights with 4-bit and 8-bit rows (MixLLM 3.3), in blocks of 16 rows of one width. Blocks of both widths
// lie in the order they are computed in; results leave through g.columns, so nothing is gathered or copied afterwards.
#pragma once

template <class Base, int Taken>
struct WideRule : Base {  // 8-bit rows: y = xs sum_g s sum((q + offset - offset) x); start is minus Taken sums of x
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(kFullOffset / Taken * start); }
};

template <bool X128>
struct Mix48 {
  using X = Q8Act;
  using Tile = IntTile;
  using Narrow = CenteredRule<Group<X128>>;
  template <int M>
  using Wide = WideRule<Group<X128>, (M < kManyTokens ? 1 : kCenter)>;
  static constexpr int kTile = kPanelTile, kPanelFrom = 48;
  static size_t tile_bytes(int kp, int count) { return W4AsymG128<X128>::tile_bytes(kp, count); }
  static size_t panel_bytes(int kp) { return (size_t)kp * 32; }
  template <bool>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    return W4AsymG128<X128>::template prepare<false>(g, q, first, count, mem);
  }
  static bool wide(const Gemm& g, int b) { return g.starts[b + 1] - g.starts[b] == 2; }
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + 3) / 4) * 16;
    return {(const uint8_t*)g.codes + (int64_t)g.starts[b] * chunks * 256, g.scale + at, g.zero + at, nullptr};
  }
  template <int M>
  static void unit(const Gemm& g, int first, int blocks, const IntTile& x, float* out) {
    const int chunks = Shape(g).chunks;
    for (int b = first; b < first + blocks; ++b, out += kPanelTile * 16) {
      const IntBlock w = block(g, chunks, b);
      if (b % 16 == 0) {
        for (int i = 16; i < 32; ++i) __builtin_prefetch(g.columns + (b + i) * 16, 0, 2);
        __builtin_prefetch(g.starts + b + 17, 0, 2);
      }
      if (wide(g, b)) int_block<ByteCodes, Wide<M>, M, prefetch_every(M, 1)>(w, x, chunks, out);
      else int_block<ForTokens<CenteredCodes, M>, ForTokens<Narrow, M>, M, prefetch_every(M, 2)>(w, x, chunks, out);
    }
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    const int chunks = Shape(g).chunks;
    for (int b = first; b < first + blocks; ++b, panel += (size_t)chunks * 512)
      if (!wide(g, b)) unpack_block<CenteredCodes>(block(g, chunks, b), chunks, panel, [](int, B64*) {});
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const IntTile& x, int index, float* out) {
    const int chunks = Shape(g).chunks;
    const uint8_t* after = (const uint8_t*)g.codes + (int64_t)g.starts[first + blocks] * chunks * 256;
    for (int b = 0; b < blocks; ++b, out += kPanelTile * 16) {
      IntBlock w = block(g, chunks, first + b);
      if (wide(g, first + b)) {
        int_block<ByteCodes, Wide<kPanelTile>, kPanelTile, 1>(w, x, chunks, out);
        continue;
      }
      const int part = 2 * index + b;  // of the unit after this one, a part during each tile
      w.next = after + (part < 8 ? part : 0) * (int64_t)chunks * 64;
      w.codes = (const uint8_t*)panel + (size_t)b * chunks * 512;
      int_block<SmallByteCodes, Narrow, kPanelTile, kPanel>(w, x, chunks, out);
    }
  }
};
