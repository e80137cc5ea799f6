// gemm_int.h: formats with int8 dot products. Sums are exact in int32 within a group of inputs. The float
// operations that follow run in group order, each an addition or a fused multiply-add, so the result has the same bits
// on every ISA and for every number of tokens.
#pragma once

struct IntTile {
  const int8_t* x;       // [kp/32][M][32]
  const int32_t* start;  // [groups of the rule][M], see "Accumulation rules" below
  const float* scale;    // [scales per row][M]
};
struct IntBlock {             // one 16-row block
  const uint8_t* codes;       // 64-byte lines, in input order
  const float* scale;         // [groups][16], or [16]
  const uint8_t* zero;        // [groups][16], or [16]
  const uint8_t* group_scale; // [groups][16]; exponents for mxfp4
  int64_t low = 0;            // nested_8_4: byte offset from a line of upper nibbles to its lower nibbles
  const uint8_t* next = nullptr;  // weights to prefetch meanwhile, one line per 32 inputs
};

// Codes: how a 64-byte line of weights becomes the kDots operands of dot products. operand(line, d, group) makes
// operand d; group() computes once what all lines of a group of 128 inputs share.
struct PlainCodes {
  struct Group {};
  using Line = B64;
  QC_INLINE Group group(const IntBlock&, int) { return {}; }
  QC_INLINE B64 line(const uint8_t* p, int64_t) { return b_load(p); }
  QC_INLINE void pin(B64& line) { b_pin(line); }
};
struct ByteCodes : PlainCodes {  // value + 128
  static constexpr int kLines = 8, kDots = 1;
  static constexpr bool kSmall = false;  // whether codes are at most 31
  QC_INLINE B64 operand(B64 line, int, Group) { return line; }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_full<InOrder>(acc, w, x); }
};
struct SmallByteCodes : PlainCodes {  // 0..31
  static constexpr int kLines = 8, kDots = 1;
  static constexpr bool kSmall = true;
  QC_INLINE B64 operand(B64 line, int, Group) { return line; }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};
struct NibbleCodes : PlainCodes {
  static constexpr int kLines = 4, kDots = 2;
  static constexpr bool kSmall = true;
  QC_INLINE B64 operand(B64 line, int d, Group) { return d ? b_high(line) : b_low(line); }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};
// 4-bit codes minus their group's zero point, plus 16 to stay unsigned: 1..31. Where a line serves many tokens this is
// cheaper than a zero-point correction by multiplication for every token's sum, because the dot products keep the
// multipliers busy.
constexpr int kCenter = 16;
struct CenteredCodes : NibbleCodes {
  using Group = B64;
  QC_INLINE B64 group(const IntBlock& w, int g) { return b_sub(b_set(kCenter), b_rows(w.zero + g * 16)); }
  QC_INLINE B64 operand(B64 line, int d, B64 move) { return b_add(NibbleCodes::operand(line, d, {}), move); }
};
constexpr int kMxOffset = 12;
struct MxCodes : PlainCodes {  // E2M1 doubled, plus 12 to stay unsigned
  static constexpr int kLines = 4, kDots = 2;
  static constexpr bool kSmall = true;
  static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  QC_INLINE B64 operand(B64 line, int d, Group) {
    return d ? b_lookup_high(kTable, line) : b_lookup_low(kTable, line);
  }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};

constexpr int kNestedOffset = 64;
// 8 * upper nibble + lower nibble, plus the offset: 64..199, a ByteCode of value -64..71.
struct NestedCodes : PlainCodes {
  static constexpr int kLines = 4, kDots = 2;
  static constexpr bool kSmall = false;
  static constexpr uint8_t kTable[16] = {64,  72,  80,  88,  96,  104, 112, 120,
                                         128, 136, 144, 152, 160, 168, 176, 184};
  struct Line {
    B64 upper, lower;
  };
  QC_INLINE Line line(const uint8_t* p, int64_t low) { return {b_load(p), b_load(p + low)}; }
  QC_INLINE void pin(Line& line) { b_pin(line.upper), b_pin(line.lower); }
  QC_INLINE B64 operand(const Line& line, int d, Group) {
    return d ? b_add(b_lookup_high(kTable, line.upper), b_high(line.lower))
             : b_add(b_lookup_low(kTable, line.upper), b_low(line.lower));
  }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_full<InOrder>(acc, w, x); }
};

// Accumulation rules: what happens to the int32 sums over groups of kChunks * 32 inputs. start() derives a token's
// correction term for a group from its activation sums. begin() gives the initial accumulator of that token and group.
// finish() adds a group's sum to the result. With kJoin > 1, close() adds the total of kJoin groups to the result. xs:
// token scales; rules named X128 have one per 128 inputs.
constexpr int kWhole = 1 << 30;
struct ChannelRule {  // W8: y = xs ws sum((q + offset - offset) x)
  static constexpr int kChunks = kWhole, kJoin = 1;
  static constexpr bool kX128 = false;
  using Acc = I16;
  static int32_t start(const int32_t* sums, int groups, int) {
    int32_t total = 0;
    for (int g = 0; g < groups; ++g) total += sums[g];
    return -kFullOffset * total;
  }
  QC_INLINE I16 zero() { return i_set(0); }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
  template <int M>
  QC_INLINE void finish(I16* acc, const I16* part, const IntBlock&, int, const float*) {
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = part[m];
  }
  QC_INLINE F16 result(I16 acc, const IntBlock& w, float xs) {
    return f_mul(f_from_i(acc), f_mul(f_set(xs), f_load(w.scale)));
  }
};
struct ChannelRuleX128 {  // y = ws sum_g xs sum((q + offset - offset) x)
  static constexpr int kChunks = 4, kJoin = 1;
  static constexpr bool kX128 = true;
  using Acc = F16;
  static int32_t start(const int32_t* sums, int, int g) { return -kFullOffset * sums[g]; }
  QC_INLINE F16 zero() { return f_set(0.0f); }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock&, int g, const float* xs) {
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_fma(f_from_i(part[m]), f_set(xs[g * M + m]), acc[m]);
  }
  QC_INLINE F16 result(F16 acc, const IntBlock& w, float) { return f_mul(acc, f_load(w.scale)); }
};
struct ZeroChannelRule : ChannelRule {  // qoq_channel: y = xs ws (sum(q x) - z sum(x))
  static int32_t start(const int32_t* sums, int, int g) { return -sums[g]; }
  QC_INLINE I16 begin(const IntBlock& w, int, int32_t start) { return i_mul(i_load_u8(w.zero), i_set(start)); }
};
struct ZeroChannelRuleX128 : ChannelRuleX128 {  // y = ws sum_g xs (sum(q x) - z sum(x))
  static int32_t start(const int32_t* sums, int, int g) { return -sums[g]; }
  QC_INLINE I16 begin(const IntBlock& w, int, int32_t start) { return i_mul16(i_load_u8(w.zero), start); }
};
struct QoqRule : ChannelRule {  // y = xs ws sum_g s1 (sum(q x) - z sum(x)), in int32 up to the end
  static constexpr int kChunks = 4;
  static int32_t start(const int32_t* sums, int, int g) { return -sums[g]; }
  QC_INLINE I16 begin(const IntBlock& w, int g, int32_t start) { return i_mul16(i_load_u8(w.zero + g * 16), start); }
  template <int M>
  QC_INLINE void finish(I16* acc, const I16* part, const IntBlock& w, int g, const float*) {
    I16 s = i_load_u8(w.group_scale + g * 16);
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = i_add(acc[m], i_mul(part[m], s));
  }
};
struct QoqRuleX128 : ChannelRuleX128 {  // y = ws sum_g xs s1 (sum(q x) - z sum(x))
  static int32_t start(const int32_t* sums, int, int g) { return -sums[g]; }
  QC_INLINE I16 begin(const IntBlock& w, int g, int32_t start) { return i_mul16(i_load_u8(w.zero + g * 16), start); }
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock& w, int g, const float* xs) {
    I16 scaled[M], s = i_load_u8(w.group_scale + g * 16);
    QC_UNROLL for (int m = 0; m < M; ++m) scaled[m] = i_mul(part[m], s);
    ChannelRuleX128::finish<M>(acc, scaled, w, g, xs);
  }
};
struct GroupRule {  // w4_asym_g128: y = xs sum_g s (sum(q x) - z sum(x))
  static constexpr int kChunks = 4, kJoin = 1;
  static constexpr bool kX128 = false;
  using Acc = F16;
  static int32_t start(const int32_t* sums, int, int g) { return -sums[g]; }
  QC_INLINE F16 zero() { return f_set(0.0f); }
  QC_INLINE I16 begin(const IntBlock& w, int g, int32_t start) { return i_mul16(i_load_u8(w.zero + g * 16), start); }
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock& w, int g, const float*) {
    F16 s = f_load(w.scale + g * 16);
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_fma(f_from_i(part[m]), s, acc[m]);
  }
  QC_INLINE F16 result(F16 acc, const IntBlock&, float xs) { return f_mul(acc, f_set(xs)); }
};
struct GroupRuleX128 : GroupRule {  // y = sum_g (s xs) (sum(q x) - z sum(x))
  static constexpr bool kX128 = true;
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock& w, int g, const float* xs) {
    F16 s = f_load(w.scale + g * 16);
    QC_UNROLL for (int m = 0; m < M; ++m)
      acc[m] = f_fma(f_from_i(part[m]), f_mul(s, f_set(xs[g * M + m])), acc[m]);
  }
  QC_INLINE F16 result(F16 acc, const IntBlock&, float) { return acc; }
};
// For CenteredCodes the zero point is already subtracted; the correction is only kCenter times the token's start.
template <class Base>
struct CenteredRule : Base {
  static int32_t start(const int32_t* sums, int groups, int g) { return kCenter * Base::start(sums, groups, g); }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
};
// From this many tokens on, dot products dominate and CenteredCodes are used. Below, plain codes and a zero-point
// correction per token.
constexpr int kManyTokens = 4;
template <class T>
struct Uncentered {
  using Type = T;
};
template <>
struct Uncentered<CenteredCodes> {
  using Type = NibbleCodes;
};
template <class Base>
struct Uncentered<CenteredRule<Base>> {
  using Type = Base;
};
template <class T, int M>
using ForTokens = std::conditional_t<(M < kManyTokens), typename Uncentered<T>::Type, T>;

// nested_8_4: y = xs sum_g s/8 sum((8 (u - z) + l - 8) x). The kernel sums (8 u + l - 64) x; the zero-point correction
// is -(8 z - 56) sum(x).
template <class Base>
struct NestedRule : Base {
  QC_INLINE I16 begin(const IntBlock& w, int g, int32_t start) {
    const I16 zero = i_add(i_mul16(i_load_u8(w.zero + g * 16), 8), i_set(8 - kNestedOffset + kFullOffset));
    return i_mul(zero, i_set(start));
  }
  QC_INLINE F16 result(F16 acc, const IntBlock& w, float xs) {
    return f_mul(Base::result(acc, w, xs), f_set(0.125f));
  }
};
// mxfp4: y = xs sum_b 2^(e-128) sum(c x), with c the doubled element. The accumulator starts at the bits of the float
// 1.5 * 2^23, minus the table's offset, so that a sum s ends as the float 1.5 * 2^23 + s. Adding e - 128 to the
// exponent field scales it (the 128 is subtracted at the start). Subtracting 1.5 * 2^23, scaled alike, leaves exactly
// s * 2^(e-128) (e <= 230). This avoids the multiplier, which the dot products keep busy.
struct MxRule : GroupRule {
  static constexpr int kChunks = 1;
  static constexpr int32_t kMagic = 0x4b400000 - (128 << 23);
  static int32_t start(const int32_t* sums, int, int g) { return kMagic - kMxOffset * sums[g]; }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock& w, int g, const float*) {
    I16 e = i_shl23(i_load_u8(w.group_scale + g * 16));
    F16 base = f_bits(i_add(i_set(kMagic), e));
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_add(acc[m], f_sub(f_bits(i_add(part[m], e)), base));
  }
};
// Rules of one chunk with an activation scale per 128 inputs: the sum of four chunks is multiplied by it.
template <class Base>
struct JoinedRule : Base {  // y = sum_g xs (what Base makes of the four chunks of g)
  static constexpr bool kX128 = true;
  static constexpr int kJoin = 4;
  struct Acc {
    F16 total, group;
  };
  QC_INLINE Acc zero() { return {f_set(0.0f), f_set(0.0f)}; }
  template <int M>
  QC_INLINE void finish(Acc* acc, const I16* part, const IntBlock& w, int g, const float* xs) {
    F16 group[M];
    QC_UNROLL for (int m = 0; m < M; ++m) group[m] = acc[m].group;
    Base::template finish<M>(group, part, w, g, xs);
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m].group = group[m];
  }
  template <int M>
  QC_INLINE void close(Acc* acc, int g, const float* xs) {
    QC_UNROLL for (int m = 0; m < M; ++m)
      acc[m] = {f_fma(acc[m].group, f_set(xs[g / 4 * M + m]), acc[m].total), f_set(0.0f)};
  }
  QC_INLINE F16 result(Acc acc, const IntBlock&, float) { return acc.total; }
};
using MxRuleX128 = JoinedRule<MxRule>;

// Software prefetch covers one line in this many, so that memory never idles while M tokens are multiplied. (Measured
// on Zen 4: up to 5 dot products per line, the hardware prefetcher does the rest better than more prefetches would.)
constexpr int prefetch_every(int m, int dots) { return m < (dots == 1 ? 6 : 3) ? 4 : 1; }
constexpr int kPrefetchNextUnit = 0, kNoPrefetch = -1;
// A nested weight has two lines at once, and the hardware prefetcher fetches both by itself: without software prefetch
// 2 to 4 tokens are up to 27 % faster. More tokens would be 10 % slower from memory, and 7 % faster where a cache holds
// everything.
template <class Codes>
constexpr int prefetch_every(int m) {
  return std::is_same_v<Codes, NestedCodes> && m > 1 && m < 5 ? kNoPrefetch : prefetch_every(m, Codes::kDots);
}

// Whether each line is also prefetched into L1, kL1PrefetchBytes before its use, with a non-temporal hint: streaming
// weights would otherwise evict x, which every block reads again. (Measured on Zen 4: gains 2 to 14 % from memory and
// nothing from a cache. For other formats and token counts the additional instructions cost time.)
template <class Codes>
constexpr bool prefetches_to_l1(int m) {
  return std::is_same_v<Codes, ByteCodes> && (m == 2 || (m > 3 && m < 7));
}
constexpr int kL1PrefetchBytes = 128;

// Position of a block's kernel: weights, weights to prefetch meanwhile, activations, group.
struct IntCursor {
  const uint8_t *p, *next;
  const int8_t* x;
  int g;
};

// Whether dot products and operand conversions keep their source order; for one token decided by measurement.
template <class Codes>
constexpr bool in_order(int m) {
  return m >= kManyTokens || (m == 1 && std::is_same_v<Codes, MxCodes>);
}

// Line l of a chunk of 32 inputs: its dot products with M tokens, in C accumulator chains.
template <class Codes, int M, int C, bool InOrder>
QC_INLINE void int_line(I16* part, const uint8_t* p, int64_t low, const int8_t* x, int l, typename Codes::Group group) {
  typename Codes::Line line = Codes::line(p + l * 64, low);
  B64 v[Codes::kDots];
  QC_UNROLL for (int d = 0; d < Codes::kDots && !InOrder; ++d) v[d] = Codes::operand(line, d, group);
  QC_UNROLL for (int d = 0; d < Codes::kDots; ++d) {
    if (d && InOrder) Codes::pin(line);
    if (InOrder) v[d] = Codes::operand(line, d, group);
    const int s = l * Codes::kDots + d;
    I16* chain = part + s % C * M;
    QC_UNROLL for (int m = 0; m < M; ++m) chain[m] = Codes::template dot<InOrder>(chain[m], v[d], x + m * 32 + s * 4);
  }
}

#ifdef QC_HALF_BLOCKS
constexpr bool kHalfBlocks = true;

// A chunk of 32 inputs with M tokens, eight rows at a time: operands and sums then fit the registers.
template <class Codes, int M, int Half>
QC_INLINE void int_half(I16* part, const uint8_t* p, int64_t low, const int8_t* x, typename Codes::Group group) {
  constexpr int kAtOnce = Codes::kSmall ? 4 : 1;
  QC_UNROLL for (int s = 0; s < 8; s += kAtOnce) {
    B64 v[kAtOnce];
    QC_UNROLL for (int i = 0; i < kAtOnce; ++i)
      v[i] = Codes::operand(Codes::line(p + (s + i) / Codes::kDots * 64, low), (s + i) % Codes::kDots, group);
    QC_UNROLL for (int m = 0; m < M; ++m)
      if constexpr (Codes::kSmall)
        dot_small_four<Half>(part[m], v, x + m * 32 + s * 4);
      else
        dot_full_half<Half>(part[m], v[0], x + m * 32 + s * 4);
  }
}
template <class Codes, int M>
QC_INLINE void int_chunk(I16* part, const uint8_t* p, int64_t low, const int8_t* x, typename Codes::Group group) {
  int_half<Codes, M, 0>(part, p, low, x, group);
  asm volatile("" ::: "memory");  // otherwise GCC interleaves both halves, and operands spill
  int_half<Codes, M, 1>(part, p, low, x, group);
}
#else
constexpr bool kHalfBlocks = false;
template <class Codes, int M>
QC_INLINE void int_chunk(I16*, const uint8_t*, int64_t, const int8_t*, typename Codes::Group) {}
#endif

// S groups of one chunk each, interleaved, or one group of up to `chunks` chunks.
template <class Codes, class Rule, int M, int Every, int S>
QC_INLINE void int_groups(const IntBlock& w, const IntTile& x, int chunks, IntCursor& at, typename Rule::Acc* acc) {
  // Independent accumulators hide the latency of a dot product. One chain suffices where the next group soon starts
  // another.
  constexpr int C = Rule::kChunks == 1 || kHalfBlocks ? 1 : M < 3 ? 4 : M < 6 ? 2 : 1;
  constexpr int kChunk = Codes::kLines * 64;
  constexpr int64_t kAhead = kPrefetchBytes + (M < kManyTokens ? 0 : kPrefetchBytes / 2);  // measured on Zen 4
  const int32_t* start = x.start + at.g * M;
  const typename Codes::Group group = Codes::group(w, at.g);
  I16 part[S * C * M];
  QC_UNROLL for (int j = 0; j < S; ++j)
    QC_UNROLL for (int i = 0; i < M * C; ++i)
      part[j * C * M + i] = i < M ? Rule::begin(w, at.g + j, start[j * M + i]) : i_set(0);
  for (int c = chunks < Rule::kChunks ? chunks : Rule::kChunks; c; --c, at.p += S * kChunk, at.x += S * M * 32) {
    if (Every == kPrefetchNextUnit) __builtin_prefetch(at.next, 0, 2), at.next += 64;
    QC_UNROLL for (int l = 0; l < Codes::kLines; ++l)
      QC_UNROLL for (int j = 0; j < S; ++j) {
        const uint8_t* p = at.p + j * kChunk;
        if (Every > 0 && prefetches_to_l1<Codes>(M)) __builtin_prefetch(p + l * 64 + kL1PrefetchBytes, 0, 0);
        if (Every > 0 && l % (Every > 0 ? Every : 1) == 0) {
          __builtin_prefetch(p + l * 64 + kAhead, 0, 2);
          if (std::is_same_v<Codes, NestedCodes>) __builtin_prefetch(p + w.low + l * 64 + kAhead, 0, 2);
        }
        if constexpr (!kHalfBlocks)
          int_line<Codes, M, C, in_order<Codes>(M)>(part + j * C * M, p, w.low, at.x + j * M * 32, l, group);
      }
    QC_UNROLL for (int j = 0; j < S && kHalfBlocks; ++j)
      int_chunk<Codes, M>(part + j * M, at.p + j * kChunk, w.low, at.x + j * M * 32, group);
  }
  QC_UNROLL for (int j = 0; j < S; ++j) {
    I16* sum = part + j * C * M;
    QC_UNROLL for (int i = M; i < M * C; ++i) sum[i % M] = i_add(sum[i % M], sum[i]);
    Rule::template finish<M>(acc, sum, w, at.g + j, x.scale);
  }
  at.g += S;
}

// Every: one in how many lines of weights is prefetched, or kNoPrefetch. kPrefetchNextUnit: the weights are an unpacked
// panel, and a few lines of the next unit's packed weights are prefetched instead.
template <class Codes, class Rule, int M, int Every>
__attribute__((noinline)) static void int_block(const IntBlock& w, const IntTile& x, int chunks, float* out) {
  typename Rule::Acc acc[M];
  QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = Rule::zero();
  IntCursor at = {w.codes, w.next, x.x, 0};
  if constexpr (Rule::kJoin > 1) {
    constexpr int S = M == 4 ? 2 : 1;  // 4 tokens have too few accumulators to hide dot-product latency; 5 have enough
    for (; chunks >= Rule::kJoin; chunks -= Rule::kJoin) {
      if constexpr (M < kManyTokens) {
        QC_UNROLL for (int j = 0; j < Rule::kJoin; j += S) {
          int_groups<Codes, Rule, M, Every, S>(w, x, 1, at, acc);
          asm volatile("" ::: "memory");  // keeps prefetches and loads of weights in memory order
        }
      } else {
        _Pragma("GCC unroll 1")  // otherwise GCC defers all of finish(), and the sums spill
        for (int j = 0; j < Rule::kJoin; j += S) int_groups<Codes, Rule, M, Every, S>(w, x, 1, at, acc);
      }
      Rule::template close<M>(acc, at.g - 1, x.scale);
    }
    for (int j = 0; j < chunks; ++j) int_groups<Codes, Rule, M, Every, 1>(w, x, 1, at, acc);
    if (chunks) Rule::template close<M>(acc, at.g - 1, x.scale);
  } else {
    for (; chunks > 0; chunks -= Rule::kChunks) int_groups<Codes, Rule, M, Every, 1>(w, x, chunks, at, acc);
  }
  QC_UNROLL for (int m = 0; m < M; ++m) f_store(out + m * 16, Rule::result(acc[m], w, x.scale[m]));
}
