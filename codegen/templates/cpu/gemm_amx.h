// gemm_amx.h: int8 and bfloat16 products on AMX tiles (Intel, from Sapphire Rapids on). One instruction multiplies 16
// tokens by 16 rows over 64 bytes of inputs, in 16 cycles however few the tokens are, so that a step of many costs what
// a step of one does as long as weights come from memory. The bytes that the kernels of gemm_int.h multiply lie as a
// tile wants them; integer sums are exact, and the rules' float operations are the same, so the bits are too.
// bfloat16 sums are rounded in an order of the instruction's own: on AMX they go through it for every number of tokens.
#pragma once

constexpr int kSlabChunks = 4, kSlabBytes = kSlabChunks * 512;  // 128 inputs of a block, as bytes

// Where line `at` of a block's weights stands kPrefetchBytes later, blocks of `bytes` bytes being read in pairs.
QC_INLINE int64_t lines_ahead(int64_t at, int64_t bytes) {
  const int64_t ahead = at + kPrefetchBytes;
  return ahead < bytes ? ahead : ahead + ahead / bytes * bytes;
}

QC_INLINE void prefetch_lines(const void* from, int lines) {
  const char* p = (const char*)from;
  asm volatile("" : "+r"(p));  // one register, not one for each line
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * 64, 0, 2);
}

// Whether bytes that are multiplied as they lie are asked for ahead: the CPU's own prefetcher is better at it, unless
// the activations of many tokens stream beside them. (Measured on a Xeon 6.)
constexpr bool asks_ahead(int count) { return count > kHalfTokens; }

// Bytes of a unit's blocks, slab by slab: unpacked before (or never packed), in memory as they are, or unpacked now, a
// slab ahead. While the first are multiplied, the next unit's weights are asked for.
struct PanelBytes {
  const char* panel;
  int64_t block_bytes;
  const uint8_t* next;
  int each;
  // `lines` of the next unit's weights begin at `after`: a part is asked for during each tile.
  PanelBytes(const char* panel, int chunks, const Turn& turn, const uint8_t* after, int lines)
      : panel(panel),
        block_bytes((int64_t)chunks * 512),
        next(after + (int64_t)turn.index * (lines / turn.tiles) * 64) {
    const int slabs = turn.tiles * ((chunks + kSlabChunks - 1) / kSlabChunks + 1);
    each = (lines + slabs - 1) / slabs;
  }
  void fetch(int) { prefetch_lines(next, each), next += each * 64; }
  const char* at(int b, int s) const { return panel + b * block_bytes + s * kSlabBytes; }
};
struct DirectBytes {
  const IntBlock* w;
  int blocks, chunks;
  bool asks;
  alignas(64) char last[2][kSlabBytes];  // of an odd number of chunks: a step would read past the weights
  DirectBytes(const IntBlock* w, int blocks, int chunks, int count)
      : w(w), blocks(blocks), chunks(chunks), asks(asks_ahead(count)) {}
  void fetch(int s) {
    if (s * kSlabChunks >= chunks) return;
    const int64_t ahead = lines_ahead((int64_t)s * kSlabBytes, (int64_t)chunks * 512);
    for (int b = 0; b < blocks && asks; ++b) prefetch_lines(w[b].codes + ahead, kSlabBytes / 64);
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
  // From chunk `from` on, where a slab begins.
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

// Weights as signed bytes, their zeros taken off.
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

// A rule whose sums begin at nothing, as weights are signed.
template <class Base>
struct Signed : Base {
  static constexpr bool kSigned = true;
};
// The same bits as MxRule's: a sum times 2^(e-128) is exact. Where that is no normal number, which weights that were
// scaled to their largest do not need, the multiplication would take some hundred cycles.
template <class Base>
struct SignedMxRule : Base {
  static constexpr bool kSigned = true;
  QC_INLINE F16& sum(F16& acc) { return acc; }
  QC_INLINE F16& sum(MxRuleX128::Acc& acc) { return acc.group; }
  template <int M>
  __attribute__((noinline)) static void exactly(typename Base::Acc* acc, const I16* part, const IntBlock& w, int g) {
    Base::template finish<M>(acc, part, w, g, nullptr);
  }
  template <int M>
  QC_INLINE void finish(typename Base::Acc* acc, const I16* part, const IntBlock& w, int g, const float*) {
    const I16 e = i_load_u8(w.group_scale + g * 16);
    if (__builtin_expect(_mm512_cmplt_epi32_mask(e, i_set(2)) != 0, 0)) {
      typename Base::Acc sums[M];  // other variables than the usual way's, which stay in registers
      I16 parts[M];
      QC_UNROLL for (int m = 0; m < M; ++m) sums[m] = acc[m], parts[m] = i_add(part[m], i_set(Base::kMagic));
      exactly<M>(sums, parts, w, g);
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

constexpr int kTogether = 8;  // tokens whose sums are finished side by side

// Sums of the groups of slab s, as stored, go to the results of kTogether tokens, from m on, of block b.
template <class Rule, bool Begins>
QC_INLINE void finish_slab(const IntBlock& w, const IntTile& x, int s, int groups, int count, int b, int m,
                           const char* sums, typename Rule::Acc* acc) {
  const int first = Rule::kChunks == 1 ? s * kSlabChunks : s;
  typename Rule::Acc a[kTogether];
  QC_UNROLL for (int i = 0; i < kTogether; ++i) a[i] = acc[i];
  for (int j = 0; j < groups; ++j) {
    const int g = first + j;
    const char* lines = sums + ((j * 2 + b) * kTileTokens + m) * 64;
    I16 part[kTogether];
    QC_UNROLL for (int i = 0; i < kTogether; ++i) {
      part[i] = b_load(lines + i * 64);
      if (Begins) part[i] = i_add(part[i], Rule::begin(w, g, x.start[g * count + m + i]));
    }
    // Rules read the scale of token i of group g at [g * kTogether + i].
    Rule::template finish<kTogether>(a, part, w, g, x.scale + m + (int64_t)g * (count - kTogether));
  }
  if constexpr (Rule::kJoin > 1)
    Rule::template close<kTogether>(a, first, x.scale + m + (int64_t)s * (count - kTogether));
  QC_UNROLL for (int i = 0; i < kTogether; ++i) acc[i] = a[i];
}

// `count` tokens by one block or two, where a row has one sum.
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

// The same where every slab has sums of its own, or four. They go through memory to the vector units, and what has just
// been stored is slow to load: a slab's are taken up when the next slab is multiplied.
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
      for (int m = 0; m < count; m += kTogether)
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

// bfloat16: sums are floats already, and kp is whole steps.
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
  // While a step of 32 inputs is multiplied, `lines` lines of each block are asked for.
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
    const bool asks = asks_ahead(count);
    tile_steps(g, block, blocks, x, count, [&](const char* codes, int64_t c) {
      const char* next = codes + lines_ahead(c * 1024, bytes);
      for (int b = 0; b < blocks && asks; ++b) prefetch_lines(next + b * bytes, 16);
    }, out);
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm& g, int block, int blocks, char*, const Tile& x, const Turn& turn, float* out) {
    // Of the unit after this one, a part during each tile.
    const int64_t bytes = (int64_t)gemm_kp(g.k) * 32, lines = (2 * 16 + turn.tiles - 1) / turn.tiles;
    tile_steps(g, block, blocks, x, turn.count, [&](const char* codes, int64_t c) {
      const int64_t at = (turn.index * bytes / 1024 + c) * lines * 64;
      if (at < 2 * bytes) prefetch_lines(codes + 2 * bytes + at, (int)lines);
    }, out);
  }
};
