// attention_amx.h: q k^T and p v on AMX tiles, for pages of bfloat16, 8-bit and 4-bit elements.
//
// The tile instruction multiplies bfloat16. k and v of such pages are bfloat16 exactly: as stored, or a code minus its
// zero point, an integer of at most 8 bits. q (with the score scale folded in) and p (with v's scale) are split into
// three bfloat16 terms, which hold all bits of a float. Products are therefore exact, and their sums are rounded like
// sums of floats.
//
// Exactness is as in attention.h. Rows go to tiles in stripes of 16 whatever their number, and a row of a tile's result
// depends on its own row alone, in the instruction's fixed order. Which slots and pages a stripe covers does depend on
// neighbouring rows, but only adds p = 0. In a tile, 0 * NaN is NaN, so slots that were never written become zeros
// among the values, or codes. (Tiles flush numbers below 2^-126 to zero.)
#pragma once

constexpr int kStripe = kHalfTokens, kTerms = 3;
constexpr int kOperand = 512;  // elements of a right-hand tile: 16 pairs of summands by 16 columns

// Tile configuration for stripes of `rows` rows: products take less time with 8 rows or fewer.
struct TileShape {
  explicit TileShape(int rows) { shape_tiles(64, rows < kStripe ? rows : kStripe, 7); }
  ~TileShape() { release_tiles(); }
};

constexpr int tile_depth(int dp) { return (dp + 31) / 32 * 32; }

// The buffers a thread's tiles are loaded from.
struct TileOperands {
  uint16_t *query, *key, *value, *weight;
  int columns;
  TileOperands(const AttentionScratch& s, int dp) : columns((dp + 31) / 32 * 2) {
    query = (uint16_t*)s.tiles;                         // [terms][rows][depth]
    key = query + kTerms * kTileRows * tile_depth(dp);  // [depth / 32][4] tiles
    value = key + columns / 2 * 4 * kOperand;           // [2][columns] tiles
    weight = value + 2 * columns * kOperand;            // [terms][16][64]
  }
  uint16_t* keys(int c, int m) const { return key + (c * 4 + 2 * m) * kOperand; }
  uint16_t* values(int c, int m) const { return value + (c * columns + 2 * m) * kOperand; }
};
constexpr size_t tile_operand_bytes(int dp) {
  const int depth = tile_depth(dp);
  return sizeof(uint16_t) * (size_t)(kTerms * (kTileRows * depth + kStripe * kPage) + depth / 32 * 8 * kOperand);
}

// ---- operands -----------------------------------------------------------------------------------------

QC_INLINE __m512i interleave_words(__m512i a, __m512i b, bool upper) {  // lower or upper halves: a0 b0 a1 b1 ...
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(a, upper ? _mm512_add_epi16(low, _mm512_set1_epi16(16)) : low, b);
}
// The upper words of a's lanes as bfloat16, then those of b's.
QC_INLINE __m512i upper_words(f32x16 a, f32x16 b) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                       31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
}
// The same interleaved in pairs, a's word first.
QC_INLINE __m512i paired_words(f32x16 a, f32x16 b) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  return _mm512_ternarylogic_epi32(upper, (__m512i)b, _mm512_srli_epi32((__m512i)a, 16), 0xca);  // upper ? b : a
}
// Splits vectors into bfloat16 terms, kept as floats of which only the upper words are used.
QC_INLINE __m512 nearest_term(__m512 x) {
  return (__m512)_mm512_and_si512(_mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000)),
                                  _mm512_set1_epi32((int)0xffff0000));
}
template <int N>
QC_INLINE void split_terms(const __m512* x, __m512 (*term)[N]) {
  QC_UNROLL for (int c = 0; c < N; ++c) term[0][c] = nearest_term(x[c]);
  QC_UNROLL for (int c = 0; c < N; ++c) term[2][c] = x[c] - term[0][c];
  QC_UNROLL for (int c = 0; c < N; ++c) term[1][c] = nearest_term(term[2][c]);
  QC_UNROLL for (int c = 0; c < N; ++c) term[2][c] -= term[1][c];
}

// Splits the queries into tile operands, in the order in which a page's keys are paired.
template <KvFormat F>
QC_NOINLINE void split_queries(AttentionScratch& s, int rows, int dp, float scale) {
  const int depth = tile_depth(dp);
  uint16_t* to = TileOperands(s, dp).query;
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < depth; d += 32, to += 32) {
      const float* q = s.q + r * dp + (F == kKv4 ? d / 2 : d);
      const bool second = F == kKv4 || d + 16 < dp;
      const __m512 x[2] = {load<f32x16>(q) * scale,
                           second ? load<f32x16>(q + (F == kKv4 ? dp / 2 : 16)) * scale : f32x16{}};
      __m512 term[kTerms][2];
      split_terms<2>(x, term);
      for (int i = 0; i < kTerms; ++i)
        store(to + i * kTileRows * depth,
              F == kKv4 ? paired_words(term[i][0], term[i][1]) : upper_words(term[i][0], term[i][1]));
    }
}

QC_INLINE __m512i widen(const char* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
// Two rows of 8-bit codes minus their zero points, paired.
QC_INLINE __m512i paired_bytes(const char* a, const char* b, f32x16 zero_a, f32x16 zero_b) {
  return paired_words((f32x16)_mm512_cvtepi32_ps(widen(a)) - zero_a, (f32x16)_mm512_cvtepi32_ps(widen(b)) - zero_b);
}
// The lower nibble of each word minus its zero point, as bfloat16.
QC_INLINE __m512i from_nibbles(__m512i words, __m512i zero) {
  // -16..15 as bfloat16, indexed by their lower 5 bits.
  alignas(64) static const uint16_t kValues[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130,
      0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  const __m512i difference = _mm512_sub_epi16(_mm512_and_si512(words, _mm512_set1_epi16(15)), zero);
  return _mm512_permutexvar_epi16(difference, _mm512_load_si512(kValues));
}

// Prefetches the line `ahead` bytes after p. That is the next page, which the hardware prefetcher would start on too
// late.
QC_INLINE void prefetch_ahead(const void* p, int64_t ahead) { __builtin_prefetch((const char*)p + ahead, 0, 2); }

// Unpacks a pair of key tiles: elements from 32 c on, slots 32 m .. 32 m + 31. The next page is `ahead` bytes further.
template <KvFormat F>
QC_INLINE void unpack_keys(const KvBlock& block, int64_t ahead, int dp, int c, int m, uint16_t* to) {
  __m512 zero[2];
  __m512i both[2];
  if constexpr (F >= kKv8)
    QC_UNROLL for (int h = 0; h < 2; ++h) {
      zero[h] = load<f32x16>(block.parameters + kPage + 32 * m + 16 * h);
      const __m512i whole = _mm512_cvtps_epi32(zero[h]);
      both[h] = _mm512_or_si512(whole, _mm512_slli_epi32(whole, 16));
    }
  for (int i = 0; i < 16; ++i, to += 32) {
    const int pair = 16 * c + i;
    if (pair >= dp / 2) {
      store(to, _mm512_setzero_si512()), store(to + kOperand, _mm512_setzero_si512());
      continue;
    }
    const char* a = block.k + (F == kKv16 ? 256 : F == kKv8 ? 128 : 64) * pair + (F == kKv16 ? 64 : 32) * m;
    const char* b = a + (F == kKv16 ? 128 : 64);
    if (F == kKv16 || m == 0) prefetch_ahead(a, ahead);
    if (F == kKv16 || (F == kKv8 && m == 0)) prefetch_ahead(b, ahead);
    if constexpr (F == kKv16) {
      const __m512i x = load<__m512i>(a), y = load<__m512i>(b);
      store(to, interleave_words(x, y, false)), store(to + kOperand, interleave_words(x, y, true));
    } else {
      QC_UNROLL for (int h = 0; h < 2; ++h) {
        if constexpr (F == kKv8) {
          store(to + h * kOperand, paired_bytes(a + 16 * h, b + 16 * h, zero[h], zero[h]));
        } else {
          const __m512i x = widen(a + 16 * h);
          store(to + h * kOperand, from_nibbles(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), both[h]));
        }
      }
    }
  }
}

// Zero points of a page's values in the form unpack_values takes: kKv8 floats, kKv4 words.
template <KvFormat F>
QC_INLINE void unpack_value_zeros(const KvBlock& block, int64_t ahead, int limit, float* to) {
  if constexpr (F >= kKv8)
    for (int j = 0; j < kPage; j += 16) {
      for (int i = 0; i < 4; ++i) prefetch_ahead(block.parameters + i * kPage + j, ahead);
      const f32x16 zero = select(kLanes + j < limit, load<f32x16>(block.parameters + 3 * kPage + j), splat(0.0f));
      if (F == kKv8) store(to + j, zero);
      else store((uint16_t*)to + j, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(zero)));
    }
}

// First / 16 of the columns of a value tile. The two nibbles of a byte are half a row apart.
template <KvFormat F>
constexpr int value_column(int tile, int columns) {
  return F == kKv4 ? tile / 2 + tile % 2 * (columns / 2) : tile;
}

// Unpacks values at slots 32 c .. 32 c + 31, tiles 2 m and 2 m + 1. Slots from `limit` on become zeros, or arbitrary
// codes.
template <KvFormat F>
QC_INLINE void unpack_values(const KvBlock& block, int64_t ahead, const float* zero, int dp, int limit, int c, int m,
                             uint16_t* to) {
  const bool second = F == kKv4 || 2 * m + 1 < dp / 16;
  const int row = F == kKv16 ? 2 * dp : F == kKv8 ? dp : dp / 2;
  const char* a = block.v + 32 * c * row + (F == kKv16 ? 64 : F == kKv8 ? 32 : 16) * m;
  for (int j = 32 * c; j < 32 * c + 32; j += 2, a += 2 * row, to += 32) {
    if (m % (F == kKv16 ? 1 : F == kKv8 ? 2 : 4) == 0) prefetch_ahead(a, ahead), prefetch_ahead(a + row, ahead);
    if constexpr (F == kKv16) {
      const uint32_t lanes = second ? 0xffffffffu : 0xffffu;
      const __m512i x = _mm512_maskz_loadu_epi16(j < limit ? lanes : 0, a);
      const __m512i y = _mm512_maskz_loadu_epi16(j + 1 < limit ? lanes : 0, a + row);
      store(to, interleave_words(x, y, false));
      if (second) store(to + kOperand, interleave_words(x, y, true));
    } else if constexpr (F == kKv8) {
      const f32x16 less = splat(zero[j]), less_next = splat(zero[j + 1]);
      store(to, paired_bytes(a, a + row, less, less_next));
      if (second) store(to + kOperand, paired_bytes(a + 16, a + row + 16, less, less_next));
    } else {
      const __m512i both = _mm512_set1_epi32(load<int32_t>((const uint16_t*)zero + j));
      const __m512i x = _mm512_or_si512(widen(a), _mm512_slli_epi32(widen(a + row), 16));
      store(to, from_nibbles(x, both));
      store(to + kOperand, from_nibbles(_mm512_srli_epi32(x, 4), both));
    }
  }
}

// ---- products -----------------------------------------------------------------------------------------

// Loads all terms of 32 elements of a stripe's left operand. add_product then adds their products with a tile to sum N.
QC_INLINE void load_terms(const uint16_t* from, int stride, int64_t term) {
  tile_load<4>(from, stride * 2);
  tile_load<5>(from + term, stride * 2);
  tile_load<6>(from + 2 * term, stride * 2);
}
template <int N>
QC_INLINE void add_product(const uint16_t* with) {
  tile_load<7>(with, 64);
  TileBf16::dot<N, 4, 7>();
  TileBf16::dot<N, 5, 7>();
  TileBf16::dot<N, 6, 7>();
}
QC_INLINE void add_products(int m, const uint16_t* with, bool second) {
  if (m % 2 == 0) {
    add_product<0>(with);
    if (second) add_product<1>(with + kOperand);
  } else {
    add_product<2>(with);
    if (second) add_product<3>(with + kOperand);
  }
}
// Stores `count` sum tiles; tile i covers 16 columns from place(i) on.
template <class Place>
QC_INLINE void store_sums(float* to, int stride, int count, const Place& place) {
  tile_store<0>(to + place(0), stride * 4);
  if (count > 1) tile_store<1>(to + place(1), stride * 4);
  if (count > 2) tile_store<2>(to + place(2), stride * 4);
  if (count > 3) tile_store<3>(to + place(3), stride * 4);
}

// Software pipeline over pairs of tiles: unpack(c, m), and one pair later multiply(c, m), as stored bytes take time to
// become loadable by a tile.
template <class Unpack, class Multiply>
QC_INLINE void pipeline_pairs(int chunks, int first, int pairs, const Unpack& unpack, const Multiply& multiply) {
  int last_c = -1, last_m = 0;
  for (int c = 0; c < chunks; ++c)
    for (int m = first; m < first + pairs; ++m) {
      unpack(c, m);
      if (last_c >= 0) multiply(last_c, last_m);
      last_c = c, last_m = m;
    }
  multiply(last_c, last_m);
}

// score[r][j] = q k^T for the stripe of rows from `first` on and 16 * parts slots.
template <class Unpack>
QC_INLINE void score_stripe(const TileOperands& t, int first, int depth, int parts, float* score,
                            const Unpack& unpack) {
  zero_tiles();
  pipeline_pairs(depth / 32, 0, (parts + 1) / 2, unpack, [&](int c, int m) {
    if (m == 0) load_terms(t.query + first * depth + 32 * c, depth, kTileRows * depth);
    add_products(m, t.keys(c, m), 2 * m + 1 < parts);
  });
  store_sums(score, kPage, parts, [](int i) { return 16 * i; });
}

// part[r][d] = p v of a stripe, for slots below `limit`.
template <KvFormat F, class Unpack>
QC_INLINE void value_stripe(const TileOperands& t, int dp, int limit, float* part, const Unpack& unpack) {
  const int columns = dp / 16, pairs = (columns + 1) / 2;
  for (int first = 0; first < pairs; first += 2) {
    zero_tiles();
    pipeline_pairs((limit + 31) / 32, first, pairs - first < 2 ? 1 : 2, unpack, [&](int c, int m) {
      if (m == first) load_terms(t.weight + 32 * c, kPage, kStripe * kPage);
      add_products(m, t.values(c, m), 2 * m + 1 < columns);
    });
    store_sums(part, dp, columns - 2 * first, [&](int i) { return 16 * value_column<F>(2 * first + i, columns); });
  }
}

// ---- softmax ------------------------------------------------------------------------------------------

// e^x of a row's 64 scores, x <= 0 or slightly above: 1 exactly at 0, relative error below 2.4e-7 down to -87, clamped
// there. As vexp, but with the best degree 5 polynomial that has p(0) = 1 (its own error is 9e-8) and with fused
// multiply-adds. All four vectors advance operation by operation: a core's instruction window is too small to overlap a
// whole chain with the next one.
QC_INLINE void exp_below(__m512* x) {
  constexpr float kRest[5] = {0.0418979293f, 0.166676362f, 0.499991495f, 0.999999707f, 1.0f};
  __m512 t[4], n[4];
  QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = _mm512_max_ps(x[c], splat(-87.0f));
  QC_UNROLL for (int c = 0; c < 4; ++c) t[c] = _mm512_fmadd_ps(x[c], splat(1.44269504f), splat(kRoundMagic));
  QC_UNROLL for (int c = 0; c < 4; ++c) n[c] = t[c] - splat(kRoundMagic);
  QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = _mm512_fmadd_ps(n[c], splat(-0.693359375f), x[c]);
  QC_UNROLL for (int c = 0; c < 4; ++c) n[c] = _mm512_fmadd_ps(n[c], splat(2.12194440e-4f), x[c]);
  QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = splat(0.00829031472f);
  QC_UNROLL for (float rest : kRest)
    QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = _mm512_fmadd_ps(x[c], n[c], splat(rest));
  QC_UNROLL for (int c = 0; c < 4; ++c)
    x[c] = (__m512)_mm512_add_epi32((__m512i)x[c], _mm512_slli_epi32((__m512i)t[c], 23));
}

// The sum (or maximum) over the 16 lanes of each row, in the same order for every row.
template <class Join>
QC_INLINE f32x16 reduce_rows(const float (*lanes)[16], const Join& join) {
  __m512 x[8];
  QC_UNROLL for (int i = 0; i < 8; ++i) {
    const __m512 a = load<f32x16>(lanes[2 * i]), b = load<f32x16>(lanes[2 * i + 1]);
    x[i] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  QC_UNROLL for (int i = 0; i < 4; ++i)
    x[i] = join(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88), _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
  QC_UNROLL for (int i = 0; i < 2; ++i)
    x[i] = join(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
  x[0] = join(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return (f32x16)_mm512_permutexvar_ps(order, x[0]);
}

// Bit mask of the slots of a page that row r of the tile attends to.
QC_INLINE uint64_t visible_slots(const AttentionScratch& s, int r, int start) {
  const int last = s.position[r] - start, first = s.first[r] - start;
  const uint64_t seen = last >= kPage - 1 ? ~0ull : last < 0 ? 0 : (2ull << last) - 1;
  return first <= 0 ? seen : first >= kPage ? 0 : seen >> first << first;
}

struct StripeRows {
  int first, count, start;  // first row of the tile; rows; the page's first position
  float *score, *most, *sum;
};

// What remains to be applied to a page's scores before softmax: nothing; k's scales where k is quantized; or nothing,
// because softcap or bias made finish_scores compute the final scores in place.
enum Scores { kUnscaled, kScaled, kFinal };

template <KvFormat F>
QC_NOINLINE void finish_scores(const AttentionArgs& a, const KvBlock& block, const AttentionScratch& s,
                               const StripeRows& rows) {
  for (int i = 0; i < rows.count; ++i)
    for (int c = 0; c < 4; ++c) {
      float* score = rows.score + i * kPage + 16 * c;
      f32x16 x = load<f32x16>(score);
      if (F >= kKv8) x *= load<f32x16>(block.parameters + 16 * c);
      // Without softcap the shift would not matter to softmax.
      if (a.softcap > 0) x = apply_softcap(x + s.center_dot[rows.first + i], a.softcap);
      if (a.key_bias) x += key_bias(s.bias[rows.first + i], s.position[rows.first + i], rows.start + 16 * c);
      store(score, x);
    }
}

// Turns the scores of a stripe's rows into probabilities relative to their maximum, stored as tile operands, and their
// sums. For quantized v, probabilities are then multiplied by v's scales. Masked scores may hold anything.
template <KvFormat F, Scores scores, bool masked>
QC_NOINLINE void softmax_stripe(const AttentionArgs& a, const KvBlock& block, const AttentionScratch& s,
                                const StripeRows& rows, uint16_t* weight) {
  __m512 k_scale[4], v_scale[4];
  if constexpr (F >= kKv8)
    QC_UNROLL for (int c = 0; c < 4; ++c) {
      k_scale[c] = load<f32x16>(block.parameters + 16 * c);
      v_scale[c] = load<f32x16>(block.parameters + 2 * kPage + 16 * c);
    }
  alignas(64) float lanes[kStripe][16];
  for (int i = rows.count; i < kStripe; ++i) store(lanes[i], splat(0.0f));
  uint64_t seen[kStripe];
  const auto only = [&](int i, int c, __m512 x, float otherwise) {
    return masked ? _mm512_mask_blend_ps((__mmask16)(seen[i] >> 16 * c), splat(otherwise), x) : x;
  };
  for (int i = 0; i < rows.count; ++i) {
    if (masked) seen[i] = visible_slots(s, rows.first + i, rows.start);
    __m512 x[4];
    QC_UNROLL for (int c = 0; c < 4; ++c) {
      x[c] = load<f32x16>(rows.score + i * kPage + 16 * c);
      if (scores == kScaled) x[c] *= k_scale[c];
      x[c] = only(i, c, x[c], -__builtin_inff());
    }
    store(lanes[i], _mm512_max_ps(_mm512_max_ps(x[0], x[2]), _mm512_max_ps(x[1], x[3])));
  }
  store(rows.most, reduce_rows(lanes, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); }));

  for (int i = 0; i < rows.count; ++i, weight += kPage) {
    const __m512 less = splat(rows.most[i]);
    __m512 x[4], term[kTerms][4];
    QC_UNROLL for (int c = 0; c < 4; ++c) {
      x[c] = load<f32x16>(rows.score + i * kPage + 16 * c);
      x[c] = scores == kScaled ? _mm512_fmsub_ps(x[c], k_scale[c], less) : x[c] - less;
    }
    exp_below(x);
    QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = only(i, c, x[c], 0.0f);
    store(lanes[i], (x[0] + x[2]) + (x[1] + x[3]));
    if constexpr (F >= kKv8)
      QC_UNROLL for (int c = 0; c < 4; ++c) x[c] = only(i, c, x[c] * v_scale[c], 0.0f);
    split_terms<4>(x, term);
    QC_UNROLL for (int k = 0; k < kTerms; ++k)
      QC_UNROLL for (int c = 0; c < 4; c += 2)
        store(weight + k * kStripe * kPage + 16 * c, upper_words(term[k][c], term[k][c + 1]));
  }
  store(rows.sum, reduce_rows(lanes, [](__m512 x, __m512 y) { return x + y; }));
}

// ---- pages --------------------------------------------------------------------------------------------

// Processes the rows of a tile page by page, stripe by stripe. A stripe's scores, softmax, values and merge depend on
// each other, and on data that goes through memory between tiles and vectors. To hide those latencies, the next
// stripe's scores and the previous stripe's merge are interleaved.
template <KvFormat F, class Blocks>
struct Stripes {
  const AttentionArgs& a;
  AttentionScratch& s;
  const Blocks& blocks;  // gives the block of a page
  const int rows, dp, last_page, last;
  const TileOperands t;
  alignas(64) float most[2][kStripe], sum[2][kStripe];

  struct Step {
    int page, first;
  };
  int count(Step x) const { return rows - x.first < kStripe ? rows - x.first : kStripe; }
  // Slots, relative to x's page, of the positions of its first and last row; may lie outside the page.
  int first_slot(Step x) const { return s.position[x.first] - x.page * kPage; }
  int last_slot(Step x) const { return s.position[x.first + count(x) - 1] - x.page * kPage; }
  int end(Step x) const { return last_slot(x) < kPage ? last_slot(x) + 1 : kPage; }
  int limit(int page) const { return last - page * kPage < kPage ? last - page * kPage + 1 : kPage; }
  bool attends(Step x) const { return last_slot(x) >= 0 && s.first[x.first] < (x.page + 1) * kPage; }

  // Moves x to the next step, itself included, with rows that attend to its page; false if there is none.
  bool find(Step& x) const {
    for (;; x.first += kStripe) {
      if (x.first >= rows) ++x.page, x.first = 0;
      if (x.page > last_page) return false;
      if (attends(x)) return true;
    }
  }
  int64_t ahead(int page) const { return blocks(page < last_page ? page + 1 : page).k - blocks(page).k; }

  // A page is unpacked on first use: interleaved with the products if there is one stripe, otherwise before all
  // stripes.
  void add_scores(Step x, bool new_page) const {
    const int parts = (end(x) + 15) / 16;
    const KvBlock block = blocks(x.page);
    const int64_t next = ahead(x.page);
    const auto unpack = [&](int c, int m) { unpack_keys<F>(block, next, dp, c, m, t.keys(c, m)); };
    const auto nothing = [](int, int) {};
    if (new_page && rows > kStripe) {
      for (int c = 0; c < tile_depth(dp) / 32; ++c)
        for (int m = 0; m < (limit(x.page) + 31) / 32; ++m) unpack(c, m);
    }
    if (rows > kStripe) score_stripe(t, x.first, tile_depth(dp), parts, s.score, nothing);
    else score_stripe(t, x.first, tile_depth(dp), parts, s.score, unpack);
  }
  void add_values(Step x, bool new_page) const {
    const KvBlock block = blocks(x.page);
    const int64_t next = ahead(x.page);
    const int slots = limit(x.page);
    alignas(64) float zero[kPage];
    if (new_page) unpack_value_zeros<F>(block, next, slots, zero);
    const auto unpack = [&](int c, int m) { unpack_values<F>(block, next, zero, dp, slots, c, m, t.values(c, m)); };
    const auto nothing = [](int, int) {};
    if (new_page && rows > kStripe) {
      for (int c = 0; c < (slots + 31) / 32; ++c)
        for (int m = 0; m < t.columns / 2; ++m) unpack(c, m);
    }
    if (rows > kStripe) value_stripe<F>(t, dp, end(x), s.part, nothing);
    else value_stripe<F>(t, dp, end(x), s.part, unpack);
  }
  void softmax(Step x, int parity) {
    const KvBlock block = blocks(x.page);
    const StripeRows to = {x.first, count(x), x.page * kPage, s.score, most[parity], sum[parity]};
    const bool all = first_slot(x) >= kPage - 1 && s.first[x.first + count(x) - 1] <= x.page * kPage;
    const bool final = a.softcap > 0 || a.key_bias;
    constexpr Scores scores = F >= kKv8 ? kScaled : kUnscaled;
    if (final) finish_scores<F>(a, block, s, to);
    if (final && all) softmax_stripe<F, kFinal, false>(a, block, s, to, t.weight);
    else if (final) softmax_stripe<F, kFinal, true>(a, block, s, to, t.weight);
    else if (all) softmax_stripe<F, scores, false>(a, block, s, to, t.weight);
    else softmax_stripe<F, scores, true>(a, block, s, to, t.weight);
  }
  void merge(Step x, int parity) {
    float keep[kStripe], add[kStripe];
    merge_sums(s, x.first, most[parity], sum[parity], keep, add);
    const float* from = s.part;
    float* out = s.out + x.first * dp;
    for (int r = 0; r < count(x); ++r)
      for (int d = 0; d < dp; d += 16, from += 16, out += 16)
        store(out, (f32x16)_mm512_fmadd_ps(load<f32x16>(from), splat(add[r]), load<f32x16>(out) * keep[r]));
  }

  void attend(int page) {
    Step before{}, now{page, 0};
    if (!find(now)) return;
    add_scores(now, true);
    bool more = true, any = false, new_page = true;
    for (int parity = 0; more; parity ^= 1, any = true) {
      Step next{now.page, now.first + kStripe};
      more = find(next);
      const bool next_is_new_page = more && next.page != now.page;
      softmax(now, parity);
      if (more) add_scores(next, next_is_new_page);
      if (any) merge(before, parity ^ 1);
      add_values(now, new_page);
      before = now, now = next, new_page = next_is_new_page;
      if (!more) merge(before, parity);
    }
  }
};

template <KvFormat F, class Blocks>
QC_NOINLINE void attend_on_tiles(const AttentionArgs& a, const Blocks& blocks, AttentionScratch& s, int rows, int dp,
                                 int page, int last_page, int last) {
  Stripes<F, Blocks>{a, s, blocks, rows, dp, last_page, last, TileOperands(s, dp), {}, {}}.attend(page);
}
