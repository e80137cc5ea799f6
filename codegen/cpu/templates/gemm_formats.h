// gemm_formats.h: the formats of gemm_int.h as run_gemm needs them: activation layout, weight unpacking, and which
// kernel handles a tile of tokens.
#pragma once

// Packs the tile of `count` tokens from `first` as [kp/Step][count][Step], zero-padded after the last input. The codes
// of a single token are used in place.
template <class Rule, int Step = 32>
static IntTile prepare_int(int chunks, const Q8Act& q, int first, int count, char*& mem) {
  const int kp = chunks * 32, groups = Rule::kChunks == kWhole ? 1 : (chunks + Rule::kChunks - 1) / Rule::kChunks;
  IntTile tile{q.q + (int64_t)first * kp, (const int32_t*)mem, q.scale + (int64_t)first * q.scales};
  for (int g = 0; g < groups; ++g)
    for (int m = 0; m < count; ++m)
      ((int32_t*)mem)[g * count + m] = Rule::start(q.sums + (int64_t)(first + m) * q.groups, q.groups, g);
  mem += (groups * count * 4 + 63) / 64 * 64;
  if (count == 1 && kp % Step == 0) return tile;
  if (Rule::kX128) {
    for (int s = 0; s < q.scales; ++s)
      for (int m = 0; m < count; ++m) ((float*)mem)[s * count + m] = tile.scale[m * q.scales + s];
    tile.scale = (const float*)mem;
    mem += (q.scales * count * 4 + 63) / 64 * 64;
  }
  for (int at = 0; at < kp; at += Step)
    for (int m = 0; m < count; ++m) {
      int8_t* to = (int8_t*)mem + (int64_t)at * count + m * Step;
      memcpy(to, tile.x + (int64_t)m * kp + at, 32);
      if (Step == 64 && at + 32 < kp) memcpy(to + 32, tile.x + (int64_t)m * kp + at + 32, 32);
      else if (Step == 64) memset(to + 32, 0, 32);
    }
  tile.x = (const int8_t*)mem;
  mem += (int64_t)(kp + Step - 1) / Step * Step * count;
  return tile;
}

// Unpacks a block's weights to bytes; convert(chunk, operands) is applied to each line.
template <class Codes, class Convert>
static void unpack_block(IntBlock w, int chunks, char* panel, const Convert& convert) {
  for (int c = 0; c < chunks; ++c, w.codes += Codes::kLines * 64)
    for (int l = 0; l < Codes::kLines; ++l, panel += 128) {
      const typename Codes::Group group = Codes::group(w, c / 4);
      const typename Codes::Line line = Codes::line(w.codes + l * 64, w.low);
      B64 v[2] = {Codes::operand(line, 0, group), Codes::operand(line, 1, group)};
      convert(c, v);
      b_store(panel, v[0]), b_store(panel + 64, v[1]);
    }
}

// An integer format. Codes and Rule work on the packed weights, PanelCodes and PanelRule on the panel of bytes that
// unpack() makes (kp * 16 per block). Both compute the same numbers with exact operations in another order.
template <class Format, class Codes, class Rule, class PanelCodes, class PanelRule, int PanelFrom>
struct IntFormat {
  using X = Q8Act;
  using Tile = IntTile;
  static constexpr int kTile = kPanelTile, kStreamFrom = kNever, kPanelFrom = PanelFrom, kPanelLeast = kTile;
  static constexpr bool kUnpacks = Codes::kLines != PanelCodes::kLines;
  static size_t tile_bytes(int kp, int count) {
    return (size_t)kp * count + ((size_t)kp / 32 + (kp + 127) / 128 + 8) * count * 4 + 128;
  }
  static size_t panel_bytes(int kp) { return (size_t)kp * 32; }
  template <TileKind kind>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    const int chunks = Shape(g).chunks;
    if constexpr (kind == kUnpackedTile) return prepare_int<PanelRule>(chunks, q, first, count, mem);
    if (count < kManyTokens) return prepare_int<ForTokens<Rule, 1>>(chunks, q, first, count, mem);
    return prepare_int<Rule>(chunks, q, first, count, mem);
  }
  template <int M>
  static void unit(const Gemm& g, int block, int blocks, const IntTile& x, float* out) {
    const int chunks = Shape(g).chunks;
    for (int b = 0; b < blocks; ++b)
      int_block<ForTokens<Codes, M>, ForTokens<Rule, M>, M, prefetch_every<Codes>(M)>(
          Format::block(g, chunks, block + b), x, chunks, out + b * kBufferRows * 16);
  }
  static void panel_unit(const Gemm& g, int block, int blocks, char* panel, const IntTile& x, const TilePass& pass,
                         float* out) {
    const int chunks = Shape(g).chunks, part = 2 * pass.index;
    for (int b = 0; b < blocks; ++b) {
      IntBlock w = Format::block(g, chunks, block + b);
      // Prefetches the next unit, a part of it during each tile.
      const int64_t lines = part + b < 2 * Codes::kLines ? (2 - b) * Codes::kLines + part + b : 0;
      w.next = w.codes + lines * chunks * 64;
      if (kUnpacks) w.codes = (const uint8_t*)panel + (size_t)b * chunks * 512;
      int_block<PanelCodes, PanelRule, kPanelTile, kUnpacks ? kPrefetchNextUnit : 1>(w, x, chunks,
                                                                                     out + b * kBufferRows * 16);
    }
  }
  static void unpack(const Gemm& g, int block, int blocks, char* panel) {
    if constexpr (kUnpacks)
      for (int b = 0, chunks = Shape(g).chunks; b < blocks; ++b, panel += (size_t)chunks * 512) {
        const IntBlock w = Format::block(g, chunks, block + b);
        unpack_block<Codes>(w, chunks, panel, [&](int c, B64* v) { Format::convert(w, c, v); });
      }
  }
  QC_INLINE void convert(const IntBlock&, int, B64*) {}
};

#if defined(QC_AMX)
// AMX traits of a format: how its weights become tile bytes, the rule to use then, and from how many tokens on it is
// faster.
template <class WeightBytes, class Rule, int From>
struct TileTraitsBase {
  using Bytes = WeightBytes;
  using TileRule = Rule;
  static constexpr int kMinTokens = From;
};
template <class Codes, class Rule>
struct TileTraits : TileTraitsBase<DirectBytes, Rule, 2> {};  // bytes used in place
template <class Base>
struct TileTraits<CenteredCodes, CenteredRule<Base>>
    : TileTraitsBase<UnpackedBytes<SignedNibbles>, SignedRule<Base>, 8> {};
template <class Rule>
struct TileTraits<NibbleCodes, Rule> : TileTraitsBase<UnpackedBytes<SignedChannelNibbles>, SignedRule<Rule>, 8> {};
template <class Rule>
struct TileTraits<NestedCodes, Rule> : TileTraitsBase<UnpackedBytes<SignedNested>, SignedRule<Rule>, 8> {};
template <class Rule>
struct TileTraits<MxCodes, Rule> : TileTraitsBase<UnpackedBytes<SignedMx>, SignedMxRule<Rule>, 12> {};

// An integer format on AMX tiles. Few tokens stay with the vector kernels above, which do not write unpacked weights to
// memory. With many tokens, a format that rounds each group of inputs separately uses its own panel conversion, if that
// yields whole rows.
template <class Format, class Codes, class Rule, class PanelCodes, class PanelRule, int PanelFrom>
struct IntTiles : IntFormat<Format, Codes, Rule, PanelCodes, PanelRule, PanelFrom> {
  using VectorKernels = IntFormat<Format, Codes, Rule, PanelCodes, PanelRule, PanelFrom>;
  using Traits = TileTraits<Codes, Rule>;
  using Bytes = typename Traits::Bytes;
  using TileRule = typename Traits::TileRule;
  static constexpr bool kConverts = !std::is_same_v<Rule, PanelRule> && PanelRule::kChunks == kWhole;
  static constexpr int kTileBytes = Rule::kChunks == 1 ? 32 : 64;
  static constexpr int kTile = kTileTokens, kStreamFrom = Traits::kMinTokens, kPanelFrom = kTile + 1, kPanelLeast = 2;
  template <TileKind kind>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    using Used = std::conditional_t<kind == kUnpackedTile, PanelRule, Rule>;
    if constexpr (kind == kDirectTile) return VectorKernels::template prepare<kind>(g, q, first, count, mem);
    else return prepare_int<Used, kTileBytes>(Shape(g).chunks, q, first, count, mem);
  }
  static void streamed(const Gemm& g, int block, int blocks, const IntTile& x, int count, float* out) {
    const int chunks = Shape(g).chunks;
    const IntBlock w[2] = {Format::block(g, chunks, block), Format::block(g, chunks, block + blocks - 1)};
    tile_blocks<TileRule>(w, blocks, Bytes(w, blocks, chunks, count), x, chunks, count, out);
  }
  static void panel_unit(const Gemm& g, int block, int blocks, char* panel, const IntTile& x, const TilePass& pass,
                         float* out) {
    const int chunks = Shape(g).chunks;
    if (!VectorKernels::kUnpacks && chunks % kSlabChunks) return streamed(g, block, blocks, x, pass.count, out);
    const IntBlock w[2] = {Format::block(g, chunks, block), Format::block(g, chunks, block + blocks - 1)};
    const int lines = 2 * chunks * Codes::kLines;
    const char* from = VectorKernels::kUnpacks ? panel : (const char*)w[0].codes;
    PanelBytes bytes(from, chunks, pass, w[0].codes + (int64_t)lines * 64, lines);
    using Used = std::conditional_t<kConverts, PanelRule, TileRule>;
    tile_blocks<Used>(w, blocks, bytes, x, chunks, pass.count, out);
  }
  static void unpack(const Gemm& g, int block, int blocks, char* panel) {
    if constexpr (kConverts) return VectorKernels::unpack(g, block, blocks, panel);
    else if constexpr (VectorKernels::kUnpacks)
      for (int b = 0, chunks = Shape(g).chunks; b < blocks; ++b, panel += (size_t)chunks * 512)
        Bytes::unpack(Format::block(g, chunks, block + b), 0, chunks, panel);
  }
};
#define QC_INT_KERNELS IntTiles
#else
#define QC_INT_KERNELS IntFormat
#endif

// Each format in two variants: one activation scale per row, or one per 128 inputs (X128).
template <bool X128>
using Channel = std::conditional_t<X128, ChannelRuleX128, ChannelRule>;
template <bool X128>
using ZeroChannel = std::conditional_t<X128, ZeroChannelRuleX128, ZeroChannelRule>;
template <bool X128>
using Qoq = std::conditional_t<X128, QoqRuleX128, QoqRule>;
template <bool X128>
using Group = std::conditional_t<X128, GroupRuleX128, GroupRule>;
template <bool X128>
using Nested = NestedRule<Group<X128>>;
template <bool X128>
using Mx = std::conditional_t<X128, MxRuleX128, MxRule>;

template <bool X128>
struct W8SymChannel : QC_INT_KERNELS<W8SymChannel<X128>, ByteCodes, Channel<X128>, ByteCodes, Channel<X128>, 9> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 512, g.scale + b * 16, nullptr, nullptr};
  }
};
template <bool X128>
struct W4AsymG128 : QC_INT_KERNELS<W4AsymG128<X128>, CenteredCodes, CenteredRule<Group<X128>>, SmallByteCodes,
                              CenteredRule<Group<X128>>, 48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + 3) / 4) * 16;
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 256, g.scale + at, g.zero + at, nullptr};
  }
};
template <bool X128>
struct QoqG128 : QC_INT_KERNELS<QoqG128<X128>, CenteredCodes, CenteredRule<Qoq<X128>>, ByteCodes, Channel<X128>, 48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + 3) / 4) * 16;
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 256, g.scale + b * 16, g.zero + at, g.group_scale + at};
  }
  // Converts to the int8 weights themselves: (q - z) s1 lies in [-127, 127] by the format's protective range.
  QC_INLINE void convert(const IntBlock& w, int chunk, B64* v) {
    const B64 center = b_set(kCenter), scale = b_rows(w.group_scale + chunk / 4 * 16);
    v[0] = b_rescale(v[0], center, scale), v[1] = b_rescale(v[1], center, scale);
  }
};
template <bool X128>
struct QoqChannel : QC_INT_KERNELS<QoqChannel<X128>, NibbleCodes, ZeroChannel<X128>, SmallByteCodes, ZeroChannel<X128>,
                                   48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 256, g.scale + b * 16, g.zero + b * 16, nullptr};
  }
};
template <bool X128>
struct Mxfp4 : QC_INT_KERNELS<Mxfp4<X128>, MxCodes, Mx<X128>, SmallByteCodes, Mx<X128>, 48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * chunks;
    return {(const uint8_t*)g.codes + at * 256, nullptr, nullptr, g.exponent + at * 16};
  }
};
template <bool X128>
struct Nested84 : QC_INT_KERNELS<Nested84<X128>, NestedCodes, Nested<X128>, ByteCodes, Nested<X128>, 48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    IntBlock w = W4AsymG128<X128>::block(g, chunks, b);
    w.low = g.low - (const uint8_t*)g.codes;
    return w;
  }
};
