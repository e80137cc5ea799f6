// gemm_amx.h: int8 and bfloat16 products on AMX tiles (Intel, Sapphire Rapids and later). One instruction multiplies 16
// tokens by 16 rows over 64 bytes of inputs. It takes 16 cycles regardless of the number of tokens, so a step with many
// tokens costs as much as a step with one while it is bound by weight bandwidth. The bytes that the kernels of
// gemm_int.h multiply are already in tile layout. Integer sums are exact and the rules' float operations are the same,
// so the results are bitwise the same too. bfloat16 sums are rounded in the instruction's own order, so with AMX they
// use it for every number of tokens.
#pragma once

constexpr int kSlabChunks = 4, kSlabBytes = kSlabChunks * 512;  // 128 inputs of a block, as bytes

// Byte offset of the line that is read kPrefetchBytes after offset `at` of a block. Blocks have `bytes` bytes and are
// read in pairs, so an offset past the end skips the other block of the pair.
QC_INLINE int64_t lines_ahead(int64_t at, int64_t bytes) {
  const int64_t ahead = at + kPrefetchBytes;
  return ahead < bytes ? ahead : ahead + ahead / bytes * bytes;
}

QC_INLINE void prefetch_lines(const void* from, int lines) {
  const char* p = (const char*)from;
  asm volatile("" : "+r"(p));  // one register, not one per line
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * 64, 0, 2);
}

// Whether weights multiplied in place are prefetched in software. The hardware prefetcher does better, unless the
// activations of many tokens stream beside the weights. (Measured on a Xeon 6.)
constexpr bool prefetches_direct(int count) { return count > kHalfTokens; }

// Sources of weight bytes for the tile kernels, slab by slab. fetch(s) is called one slab ahead; at(b, s) is slab s of
// block b. PanelBytes: a panel unpacked before, or weights that need no unpacking. It prefetches the next unit's
// weights meanwhile. DirectBytes: weights in memory, used in place. UnpackedBytes: unpacks into a ring, one slab ahead.
struct PanelBytes {
  const char* panel;
  int64_t block_bytes;
  const uint8_t* next;
  int lines_per_slab;
  // The next unit's weights are `lines` lines at `after`; an equal part of them is prefetched during each tile.
  PanelBytes(const char* panel, int chunks, const TilePass& pass, const uint8_t* after, int lines)
      : panel(panel),
        block_bytes((int64_t)chunks * 512),
        next(after + (int64_t)pass.index * (lines / pass.tiles) * 64) {
    const int slabs = pass.tiles * ((chunks + kSlabChunks - 1) / kSlabChunks + 1);
    lines_per_slab = (lines + slabs - 1) / slabs;
  }
  void fetch(int) { prefetch_lines(next, lines_per_slab), next += lines_per_slab * 64; }
  const char* at(int b, int s) const { return panel + b * block_bytes + s * kSlabBytes; }
};
struct DirectBytes {
  const IntBlock* w;
  int blocks, chunks;
  bool prefetches;
  alignas(64) char last[2][kSlabBytes];  // the last slab if it is partial: a tile step would read past the weights
  DirectBytes(const IntBlock* w, int blocks, int chunks, int count)
      : w(w), blocks(blocks), chunks(chunks), prefetches(prefetches_direct(count)) {}
  void fetch(int s) {
    if (s * kSlabChunks >= chunks) return;
    const int64_t ahead = lines_ahead((int64_t)s * kSlabBytes, (int64_t)chunks * 512);
    for (int b = 0; b < blocks && prefetches; ++b) prefetch_lines(w[b].codes + ahead, kSlabBytes / 64);
    const int left = chunks - s * kSlabChunks;
    for (int b = 0; b < blocks && left < kSlabChunks; ++b) memcpy(last[b], w[b].codes + s * kSlabBytes, left * 512);
  }
  const char* at(int b, int s) const {
    return (s + 1) * kSlabChunks > chunks ? last[b] : (const char*)w[b].codes + s * kSlabBytes;
  }
};
template <class Codes>
struct UnpackedBytes {
  const IntBlock* w;
  int blocks, chunks;
  alignas(64) char ring[2][2][kSlabBytes];
  UnpackedBytes(const IntBlock* w, int blocks, int chunks, int) : w(w), blocks(blocks), chunks(chunks) {}
  // `from`: first chunk, a multiple of kSlabChunks.
  static void unpack(const IntBlock& w, int from, int chunks, char* to) {
    const uint8_t* p = w.codes + (int64_t)from * Codes::kLines * 64;
    for (int end = from + chunks; from < end; from += kSlabChunks) {
      const typename Codes::Group group = Codes::group(w, from / kSlabChunks);
      for (int c = from; c < end && c < from + kSlabChunks; ++c, p += Codes::kLines * 64)
        QC_UNROLL for (int l = 0; l < Codes::kLines; ++l) {
          const typename Codes::Line line = Codes::line(p + l * 64, w.low);
          QC_UNROLL for (int d = 0; d < Codes::kDots; ++d, to += 64) b_store(to, Codes::operand(line, d, group));
        }
    }
  }
  void fetch(int s) {
    constexpr int kChunk = Codes::kLines * 64;
    const int from = s * kSlabChunks, n = chunks - from < kSlabChunks ? chunks - from : kSlabChunks;
    const int64_t ahead = lines_ahead((int64_t)from * kChunk, (int64_t)chunks * kChunk);
    for (int b = 0; b < blocks && n > 0; ++b) {
      prefetch_lines(w[b].codes + ahead, kSlabChunks * Codes::kLines);
      if (w[b].low) prefetch_lines(w[b].codes + w[b].low + ahead, kSlabChunks * Codes::kLines);
      unpack(w[b], from, n, ring[s % 2][b]);
    }
  }
  const char* at(int b, int s) const { return ring[s % 2][b]; }
};

// Weights as signed bytes, with the zero point subtracted.
struct SignedNibbles : NibbleCodes {
  using Group = B64;
  QC_INLINE B64 group(const IntBlock& w, int g) { return b_sub(b_set(0), b_rows(w.zero + g * 16)); }
  QC_INLINE B64 operand(B64 line, int d, B64 move) { return b_add(NibbleCodes::operand(line, d, {}), move); }
};
struct SignedChannelNibbles : SignedNibbles {
  QC_INLINE B64 group(const IntBlock& w, int) { return SignedNibbles::group(w, 0); }
};
struct SignedNested : NestedCodes {  // 8 (u - z) + l - 8
  using Group = B64;
  QC_INLINE B64 group(const IntBlock& w, int g) {
    const B64 zero = b_rows(w.zero + g * 16), two = b_add(zero, zero), four = b_add(two, two);
    return b_sub(b_set((uint8_t)-(8 + kNestedOffset)), b_add(four, four));
  }
  QC_INLINE B64 operand(const Line& line, int d, B64 move) { return b_add(NestedCodes::operand(line, d, {}), move); }
};
struct SignedMx : MxCodes {  // E2M1 doubled
  static constexpr uint8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
  QC_INLINE B64 operand(B64 line, int d, Group) { return d ? b_lookup_high(kTable, line) : b_lookup_low(kTable, line); }
};

// A rule without a correction term: the weights are signed and zero-point corrected, so accumulators start at 0.
template <class Base>
struct SignedRule : Base {
  static constexpr bool kSigned = true;
};
// Gives the same bits as MxRule, as a sum times 2^(e-128) is exact. Where that scale is subnormal (e < 2) it cannot be
// built in the exponent field, and the multiplication would take some hundred cycles, so such groups take the MxRule
// path. Weights scaled to their maximum never need it.
template <class Base>
struct SignedMxRule : Base {
  static constexpr bool kSigned = true;
  QC_INLINE F16& sum(F16& acc) { return acc; }
  QC_INLINE F16& sum(MxRuleX128::Acc& acc) { return acc.group; }
  template <int M>
  __attribute__((noinline)) static void finish_subnormal(typename Base::Acc* acc, const I16* part, const IntBlock& w,
                                                         int g) {
    Base::template finish<M>(acc, part, w, g, nullptr);
  }
  template <int M>
  QC_INLINE void finish(typename Base::Acc* acc, const I16* part, const IntBlock& w, int g, const float*) {
    const I16 e = i_load_u8(w.group_scale + g * 16);
    if (__builtin_expect(_mm512_cmplt_epi32_mask(e, i_set(2)) != 0, 0)) {
      typename Base::Acc sums[M];  // separate variables, so that those of the common path stay in registers
      I16 parts[M];
      QC_UNROLL for (int m = 0; m < M; ++m) sums[m] = acc[m], parts[m] = i_add(part[m], i_set(Base::kMagic));
      finish_subnormal<M>(sums, parts, w, g);
      QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = sums[m];
      return;
    }
    const F16 s = f_bits(i_shl23(i_sub(e, i_set(1))));
    QC_UNROLL for (int m = 0; m < M; ++m) sum(acc[m]) = f_fma(f_from_i(part[m]), s, sum(acc[m]));
  }
};

template <class Rule, class = void>
constexpr bool is_signed = false;
template <class Rule>
constexpr bool is_signed<Rule, std::void_t<decltype(Rule::kSigned)>> = true;

constexpr int kFinishTokens = 8;  // tokens finished side by side, to hide latency

// Finishes the stored sums of the groups of slab s: adds them to the results of kFinishTokens tokens, from m on, of
// block b.
template <class Rule, bool AddsStart>
QC_INLINE void finish_slab(const IntBlock& w, const IntTile& x, int s, int groups, int count, int b, int m,
                           const char* sums, typename Rule::Acc* acc) {
  const int first = Rule::kChunks == 1 ? s * kSlabChunks : s;
  typename Rule::Acc a[kFinishTokens];
  QC_UNROLL for (int i = 0; i < kFinishTokens; ++i) a[i] = acc[i];
  for (int j = 0; j < groups; ++j) {
    const int g = first + j;
    const char* lines = sums + ((j * 2 + b) * kTileTokens + m) * 64;
    I16 part[kFinishTokens];
    QC_UNROLL for (int i = 0; i < kFinishTokens; ++i) {
      part[i] = b_load(lines + i * 64);
      if (AddsStart) part[i] = i_add(part[i], Rule::begin(w, g, x.start[g * count + m + i]));
    }
    // Rules read the scale of token i of group g at [g * kFinishTokens + i].
    Rule::template finish<kFinishTokens>(a, part, w, g, x.scale + m + (int64_t)g * (count - kFinishTokens));
  }
  if constexpr (Rule::kJoin > 1)
    Rule::template close<kFinishTokens>(a, first, x.scale + m + (int64_t)s * (count - kFinishTokens));
  QC_UNROLL for (int i = 0; i < kFinishTokens; ++i) acc[i] = a[i];
}

// One or two blocks for `count` tokens, with a single int32 sum per output.
template <class Rule, class Op, class Bytes>
static void tile_whole(const IntBlock* w, int blocks, Bytes& bytes, const IntTile& x, int chunks, int count,
                       float* out) {
  alignas(64) char sums[2 * kTileTokens * 64];
  const bool both = count > kHalfTokens, two = blocks == 2;
  const int8_t* at = x.x;
  zero_tiles();
  bytes.fetch(0);
  for (int s = 0; s * kSlabChunks < chunks; ++s) {
    bytes.fetch(s + 1);
    const char *first = bytes.at(0, s), *second = bytes.at(blocks - 1, s);
    for (int c = s * kSlabChunks; c < chunks && c < (s + 1) * kSlabChunks; c += 2, first += 1024, second += 1024) {
      tile_step<Op, 64>(at, first, second, both, two);
      at += count * 64;
    }
  }
  store_tiles(sums, both, two);
  for (int b = 0; b < blocks; ++b)
    for (int m = 0; m < count; ++m) {
      I16 sum = b_load(sums + (b * kTileTokens + m) * 64);
      if (std::is_same_v<Op, TileUnsigned>) sum = i_add(sum, Rule::begin(w[b], 0, x.start[m]));
      f_store(out + (b * kBufferRows + m) * 16, Rule::result(sum, w[b], x.scale[m]));
    }
}

// The same with one sum per slab, or four. The sums go through memory to the vector units. Loading what a tile store
// has just written is slow, so a slab's sums are finished while the next slab is multiplied.
template <class Rule, class Op, class Bytes>
static void tile_groups(const IntBlock* w, int blocks, Bytes& bytes, const IntTile& x, int chunks, int count,
                        float* out) {
  constexpr int kParts = Rule::kChunks == 1 ? kSlabChunks : 1, kPart = 2 * kTileTokens * 64;
  constexpr int kStep = kParts == 1 ? 2 : 1;  // chunks
  alignas(64) char sums[2][kParts * kPart];
  typename Rule::Acc acc[2][kTileTokens];
  for (int b = 0; b < blocks; ++b)
    for (int m = 0; m < count; ++m) acc[b][m] = Rule::zero();
  const bool both = count > kHalfTokens, two = blocks == 2;
  const int slabs = (chunks + kSlabChunks - 1) / kSlabChunks;
  const int8_t* at = x.x;
  const auto finish = [&](int s, int groups) {
    for (int b = 0; b < blocks; ++b)
      for (int m = 0; m < count; m += kFinishTokens)
        finish_slab<Rule, std::is_same_v<Op, TileUnsigned>>(w[b], x, s, groups, count, b, m, sums[s % 2], acc[b] + m);
  };
  bytes.fetch(0);
  for (int s = 0; s < slabs; ++s) {
    const int left = chunks - s * kSlabChunks, n = left < kSlabChunks ? left : kSlabChunks;
    bytes.fetch(s + 1);
    const char *first = bytes.at(0, s), *second = bytes.at(blocks - 1, s);
    for (int c = 0; c < n; c += kStep, first += kStep * 512, second += kStep * 512) {
      if (kParts > 1 || c == 0) zero_tiles();
      tile_step<Op, kStep * 32>(at, first, second, both, two);
      at += count * kStep * 32;
      if (kParts > 1) store_tiles(sums[s % 2] + c * kPart, both, two);
    }
    if (kParts == 1) store_tiles(sums[s % 2], both, two);
    if (s) finish(s - 1, kParts);
  }
  finish(slabs - 1, kParts == 1 ? 1 : chunks - (slabs - 1) * kSlabChunks);
  for (int b = 0; b < blocks; ++b)
    for (int m = 0; m < count; ++m)
      f_store(out + (b * kBufferRows + m) * 16, Rule::result(acc[b][m], w[b], x.scale[m]));
}

template <class Rule, class Bytes>
static void tile_blocks(const IntBlock* w, int blocks, Bytes&& bytes, const IntTile& x, int chunks, int count,
                        float* out) {
  using Op = std::conditional_t<is_signed<Rule>, TileSigned, TileUnsigned>;
  if constexpr (Rule::kChunks == kWhole) tile_whole<Rule, Op>(w, blocks, bytes, x, chunks, count, out);
  else tile_groups<Rule, Op>(w, blocks, bytes, x, chunks, count, out);
}

// bfloat16: the tile sums already are the float results, and kp is a whole number of steps.
struct Bf16Tiles {
  using X = const uint16_t*;
  using Tile = FloatTile<uint16_t>;
  static constexpr int kTileBytes = 64, kTile = kTileTokens, kStreamFrom = 1, kPanelFrom = kTile + 1, kPanelLeast = 1;
  static size_t tile_bytes(int kp, int count) { return sizeof(uint16_t) * kp * count; }
  static size_t panel_bytes(int) { return 0; }
  template <TileKind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<uint16_t, uint16_t, copy>(gemm_kp(g.k), x, first, count, mem);
  }
  static void copy(uint16_t* to, const uint16_t* from) { memcpy(to, from, 64); }
  // `ahead(codes, c)` is called before step c (32 inputs) to issue its prefetches.
  template <class Ahead>
  static void tile_steps(const Gemm& g, int block, int blocks, const Tile& x, int count, const Ahead& ahead,
                         float* out) {
    const int64_t chunks = gemm_kp(g.k) / 32, bytes = chunks * 1024;
    const char *first = (const char*)g.codes + block * bytes, *second = first + (blocks - 1) * bytes;
    zero_tiles();
    for (int64_t c = 0; c < chunks; ++c) {
      ahead(first, c);
      tile_step<TileBf16, 64>(x.x + c * count * 32, first + c * 1024, second + c * 1024, count > kHalfTokens,
                              blocks == 2);
    }
    static_assert(kBufferRows == kTileTokens, "tiles are stored where the epilogue looks");
    store_tiles(out, count > kHalfTokens, blocks == 2);
  }
  static void streamed(const Gemm& g, int block, int blocks, const Tile& x, int count, float* out) {
    const int64_t bytes = (int64_t)gemm_kp(g.k) * 32;
    const bool prefetches = prefetches_direct(count);
    tile_steps(g, block, blocks, x, count, [&](const char* codes, int64_t c) {
      const char* next = codes + lines_ahead(c * 1024, bytes);
      for (int b = 0; b < blocks && prefetches; ++b) prefetch_lines(next + b * bytes, 16);
    }, out);
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm& g, int block, int blocks, char*, const Tile& x, const TilePass& pass, float* out) {
    // Prefetches the next unit, an equal part during each tile.
    const int64_t bytes = (int64_t)gemm_kp(g.k) * 32, lines = (2 * 16 + pass.tiles - 1) / pass.tiles;
    tile_steps(g, block, blocks, x, pass.count, [&](const char* codes, int64_t c) {
      const int64_t at = (pass.index * bytes / 1024 + c) * lines * 64;
      if (at < 2 * bytes) prefetch_lines(codes + 2 * bytes + at, (int)lines);
    }, out);
  }
};
