// gemm_int.h: the formats whose products are int8 dot products. Exact in int32 within a group of inputs; the float
// operations that follow run in group order, each an addition or a fused multiply-add, so the bits are the same on
// every ISA, for every number of tokens.
#pragma once

struct IntTile {
  const int8_t* x;       // [kp/32][M][32]
  const int32_t* start;  // [groups of the rule][M], see Rule::start
  const float* scale;    // [scales of a row][M]
};
struct IntBlock {             // one 16-row block
  const uint8_t* codes;       // 64-byte lines, in input order
  const float* scale;         // [groups][16], or [16]
  const uint8_t* zero;        // [groups][16], or [16]
  const uint8_t* group_scale; // [groups][16]; exponents for mxfp4
  int64_t low = 0;            // nested_8_4: bytes from the upper nibbles of a line to the lower
  const uint8_t* next = nullptr;  // weights to prefetch meanwhile, a line for every 32 inputs
};

// How a 64-byte line of weights becomes operands of dot products: operand d, of kDots, is made of the line and of what
// group() makes once for all lines of a group of 128 inputs.
struct PlainCodes {
  struct Group {};
  using Line = B64;
  QC_INLINE Group group(const IntBlock&, int) { return {}; }
  QC_INLINE B64 line(const uint8_t* p, int64_t) { return b_load(p); }
  QC_INLINE void pin(B64& line) { b_pin(line); }
};
struct ByteCodes : PlainCodes {  // value + 128
  static constexpr int kLines = 8, kDots = 1;
  QC_INLINE B64 operand(B64 line, int, Group) { return line; }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_full<InOrder>(acc, w, x); }
};
struct SmallByteCodes : PlainCodes {  // 0..31
  static constexpr int kLines = 8, kDots = 1;
  QC_INLINE B64 operand(B64 line, int, Group) { return line; }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};
struct NibbleCodes : PlainCodes {
  static constexpr int kLines = 4, kDots = 2;
  QC_INLINE B64 operand(B64 line, int d, Group) { return d ? b_high(line) : b_low(line); }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};
// Less their group's zero, plus 16 to be unsigned: 1..31. Where a line serves many tokens that costs less than to take
// the zero from every token's sum by a multiplication, as multipliers are what dot products keep busy.
constexpr int kCenter = 16;
struct CenteredCodes : NibbleCodes {
  using Group = B64;
  QC_INLINE B64 group(const IntBlock& w, int g) { return b_sub(b_set(kCenter), b_rows(w.zero + g * 16)); }
  QC_INLINE B64 operand(B64 line, int d, B64 move) { return b_add(NibbleCodes::operand(line, d, {}), move); }
};
constexpr int kMxOffset = 12;
struct MxCodes : PlainCodes {  // E2M1 doubled, plus 12 to be unsigned
  static constexpr int kLines = 4, kDots = 2;
  static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  QC_INLINE B64 operand(B64 line, int d, Group) {
    return d ? b_lookup_high(kTable, line) : b_lookup_low(kTable, line);
  }
  template <bool InOrder>
  QC_INLINE I16 dot(I16 acc, B64 w, const int8_t* x) { return dot_small<InOrder>(acc, w, x); }
};

constexpr int kNestedOffset = 64;
// 8 * upper nibble + lower nibble, plus the offset: 64..199, a ByteCode of value -64..71
struct NestedCodes : PlainCodes {
  static constexpr int kLines = 4, kDots = 2;
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

// What is done with the int32 sums of a group of kChunks * 32 inputs. start() gives a token's number for a group from
// its activation sums, begin() what the token's sum of the group begins at, finish() adds the group to the result, and
// after every kJoin groups, where these are more than one, close() adds those together. xs are the tokens' scales; rules
// named X128 have one for every 128 inputs.
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
// A rule that begins at the zero times a token's start, over CenteredCodes.
template <class Base>
struct CenteredRule : Base {
  static int32_t start(const int32_t* sums, int groups, int g) { return kCenter * Base::start(sums, groups, g); }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
};
// From this many tokens on dot products take the time: centered codes serve them.
constexpr int kManyTokens = 4;
template <class T>
struct Plain {
  using Type = T;
};
template <>
struct Plain<CenteredCodes> {
  using Type = NibbleCodes;
};
template <class Base>
struct Plain<CenteredRule<Base>> {
  using Type = Base;
};
template <class T, int M>
using ForTokens = std::conditional_t<(M < kManyTokens), typename Plain<T>::Type, T>;

// nested_8_4: y = xs sum_g s/8 sum((8 (u - z) + l - 8) x), which is a sum over 8 u + l - 64, less (8 z - 56) sum(x).
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
// mxfp4: y = xs sum_b 2^(e-128) sum(c x), c the doubled element. The sum starts at the bits of the float 1.5 * 2^23,
// less the table's offset, so that a sum s ends as the float 1.5 * 2^23 + s. Adding e - 128 to the exponent field (the
// 128 was taken off at the start) scales it, and subtracting 1.5 * 2^23 scaled alike leaves s * 2^(e-128), exactly
// (e <= 230). The multiplier, which the dot products keep busy, is not used.
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
struct MxRuleX128 : MxRule {  // y = sum_g xs sum_b 2^(e-128) sum(c x), g of four b
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
    MxRule::finish<M>(group, part, w, g, xs);
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m].group = group[m];
  }
  template <int M>
  QC_INLINE void close(Acc* acc, int g, const float* xs) {
    QC_UNROLL for (int m = 0; m < M; ++m)
      acc[m] = {f_fma(acc[m].group, f_set(xs[g / 4 * M + m]), acc[m].total), f_set(0.0f)};
  }
  QC_INLINE F16 result(Acc acc, const IntBlock&, float) { return acc.total; }
};

// Of how many lines one is asked for, so that the memory is never idle while M tokens are multiplied (measured on Zen 4:
// the CPU's own prefetcher does the rest better than more requests would, up to 5 dot products a line).
constexpr int prefetch_every(int m, int dots) { return m < (dots == 1 ? 6 : 3) ? 4 : 1; }
constexpr int kPanel = 0, kNone = -1;
// Of a nested weight's two lines at once that prefetcher fetches both by itself, and 2 to 4 tokens are faster by up to 27 %
// if it is left alone; more tokens are slower by 10 % from memory, and faster by 7 % where a cache holds all.
template <class Codes>
constexpr int prefetch_every(int m) {
  return std::is_same_v<Codes, NestedCodes> && m > 1 && m < 5 ? kNone : prefetch_every(m, Codes::kDots);
}

// Whether each line is fetched into the first-level cache kNearBytes before its use, by a hint that gives it no lasting
// place there: weights streaming through would push out x, which every block reads again. (Measured on Zen 4: 2 to 14 %
// from memory and nothing from a cache, where for other formats and tokens the more instructions cost time.)
template <class Codes>
constexpr bool fetched_near(int m) {
  return std::is_same_v<Codes, ByteCodes> && (m == 2 || (m > 3 && m < 7));
}
constexpr int kNearBytes = 128;

// Where a block's kernel has come to: weights, those to prefetch meanwhile, activations, group.
struct IntPlace {
  const uint8_t *p, *next;
  const int8_t* x;
  int g;
};

// Whether dot products and operands stand in the order they are written in; for one token measured.
template <class Codes>
constexpr bool in_order(int m) {
  return m >= kManyTokens || (m == 1 && std::is_same_v<Codes, MxCodes>);
}

// Line l of a chunk of 32 inputs: its dot products with M tokens, in C chains of sums.
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

// S groups of a chunk each side by side, or one of up to `chunks`.
template <class Codes, class Rule, int M, int Every, int S>
QC_INLINE void int_groups(const IntBlock& w, const IntTile& x, int chunks, IntPlace& at, typename Rule::Acc* acc) {
  // Independent sums, to hide the latency of a dot product; one where the next group soon starts another.
  constexpr int C = Rule::kChunks == 1 ? 1 : M < 3 ? 4 : M < 6 ? 2 : 1;
  constexpr int kChunk = Codes::kLines * 64;
  constexpr int64_t kAhead = kPrefetchBytes + (M < kManyTokens ? 0 : kPrefetchBytes / 2);  // measured on Zen 4
  const int32_t* start = x.start + at.g * M;
  const typename Codes::Group group = Codes::group(w, at.g);
  I16 part[S * C * M];
  QC_UNROLL for (int j = 0; j < S; ++j)
    QC_UNROLL for (int i = 0; i < M * C; ++i)
      part[j * C * M + i] = i < M ? Rule::begin(w, at.g + j, start[j * M + i]) : i_set(0);
  for (int c = chunks < Rule::kChunks ? chunks : Rule::kChunks; c; --c, at.p += S * kChunk, at.x += S * M * 32) {
    if (Every == kPanel) __builtin_prefetch(at.next, 0, 2), at.next += 64;
    QC_UNROLL for (int l = 0; l < Codes::kLines; ++l)
      QC_UNROLL for (int j = 0; j < S; ++j) {
        const uint8_t* p = at.p + j * kChunk;
        if (Every > 0 && fetched_near<Codes>(M)) __builtin_prefetch(p + l * 64 + kNearBytes, 0, 0);
        if (Every > 0 && l % (Every > 0 ? Every : 1) == 0) {
          __builtin_prefetch(p + l * 64 + kAhead, 0, 2);
          if (std::is_same_v<Codes, NestedCodes>) __builtin_prefetch(p + w.low + l * 64 + kAhead, 0, 2);
        }
        int_line<Codes, M, C, in_order<Codes>(M)>(part + j * C * M, p, w.low, at.x + j * M * 32, l, group);
      }
  }
  QC_UNROLL for (int j = 0; j < S; ++j) {
    I16* sum = part + j * C * M;
    QC_UNROLL for (int i = M; i < M * C; ++i) sum[i % M] = i_add(sum[i % M], sum[i]);
    Rule::template finish<M>(acc, sum, w, at.g + j, x.scale);
  }
  at.g += S;
}

// Every: of how many lines of weights one is prefetched, or kNone; kPanel: these are unpacked, and of the next unit's
// packed ones a few are.
template <class Codes, class Rule, int M, int Every>
__attribute__((noinline)) static void int_block(const IntBlock& w, const IntTile& x, int chunks, float* out) {
  typename Rule::Acc acc[M];
  QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = Rule::zero();
  IntPlace at = {w.codes, w.next, x.x, 0};
  if constexpr (Rule::kJoin > 1) {
    constexpr int S = M == 4 ? 2 : 1;  // 4 tokens have too few sums to hide the latency of a dot product, 5 need no more
    for (; chunks >= Rule::kJoin; chunks -= Rule::kJoin) {
      if constexpr (M < kManyTokens) {
        QC_UNROLL for (int j = 0; j < Rule::kJoin; j += S) {
          int_groups<Codes, Rule, M, Every, S>(w, x, 1, at, acc);
          asm volatile("" ::: "memory");  // weights are asked for and read in the order they lie in
        }
      } else {
        _Pragma("GCC unroll 1")  // else GCC leaves all of finish() to the end, and sums do not fit the registers
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
