// attention_hier.h: the hierarchical cache of QuantSpec (Tiwari et al. 2025, 4.2 and 4.3), for kKvHier and kKvHier4.
//
// Positions count in groups of 128. A row in group j reads groups j - 1 and j, its newest 128 to 256 positions, in
// bf16, and older groups rounded: x = scale * (u + l / 16) + zero, u in 0..15 and l in -8..7, kKvHier4 without l. Keys
// have scale and zero for each channel of a group, values for each position. What a row reads depends on its position
// alone, so neither the step it is in nor how often it was drafted before shows in its results.
//
// The newest groups are in a ring of three: rows of a step on both sides of a boundary, and rows computed again after
// drafts beyond it were rejected, find the group before theirs still in bf16. The step that has the first row of
// group j rounds group j - 2. All its positions were verified by then, for no draft reaches 128 positions ahead.
//
// Entries of a sequence's block table, from 0: the ring, K and V of position p in 2 (p / 64 mod 6) and the next, as in
// kKv16; from 12 on the rounded pages of 64 positions, both pages of a group adjacent. A rounded block:
//
//   K upper u8 [Dp/2][64], V upper u8 [64][Dp/2], low nibble d, high nibble d + Dp/2
//   V scale, V offset f32 [64]     offset = -zero / scale
//   K scale f32 [Dp] in a group's first page, K zero in its second
//   K lower, V lower as the upper, l + 8
#pragma once
#include "attention.h"

struct HierBlock {
  const uint8_t *k_upper, *v_upper;
  const float *v_scale, *v_offset, *k_parameter;
  const uint8_t *k_lower, *v_lower;

  HierBlock(const char* p, int dp) {
    const int plane = kPage * dp / 2;
    k_upper = (const uint8_t*)p;
    v_upper = k_upper + plane;
    v_scale = (const float*)(v_upper + plane);
    v_offset = v_scale + kPage;
    k_parameter = v_offset + kPage;
    k_lower = (const uint8_t*)(k_parameter + dp);
    v_lower = k_lower + plane;
  }
};

template <KvFormat F>
QC_INLINE KvBlock newest(const KvLayer<F>& kv, int sequence, int page, int head) {
  const int entry = 2 * (page % kRingPages);
  return {kv.at(sequence, entry, head), kv.at(sequence, entry + 1, head), nullptr};
}
template <KvFormat F>
QC_INLINE HierBlock rounded(const KvLayer<F>& kv, int sequence, int page, int head) {
  return {kv.at(sequence, 2 * kRingPages + page, head), kv_padded(F, kv.head_dim)};
}

// ---- rounding a group --------------------------------------------------------------------------------

struct HierCodes {
  u8x16 upper, lower;
};
QC_INLINE HierCodes hier_codes(f32x16 x, f32x16 scale, f32x16 zero) {
  const f32x16 t = (x - zero) / scale;
  const f32x16 u = vmin(vmax(round_even(t), splat(0.0f)), splat(15.0f));
  const f32x16 l = vmin(vmax(round_even((t - u) * 16.0f), splat(-8.0f)), splat(7.0f)) + 8.0f;
  return {__builtin_convertvector(round_to_i32(u), u8x16), __builtin_convertvector(round_to_i32(l), u8x16)};
}
QC_INLINE void store_pairs(const HierCodes& low, const HierCodes& high, const uint8_t* upper, const uint8_t* lower) {
  store((uint8_t*)upper, low.upper | high.upper << 4);
  store((uint8_t*)lower, low.lower | high.lower << 4);
}
QC_INLINE float hier_scale(float low, float high) {
  const float scale = (high - low) / 15.0f;
  return scale > 1e-37f ? scale : 1.0f;
}
QC_INLINE f32x16 newest_at(const void* p, int index) { return bf16_to_f32(load<u16x16>((const uint16_t*)p + index)); }

// Channels d and d + dp / 2 of a group's keys. k: bf16 [dp][64] of both pages.
QC_INLINE void round_keys(const char* const* k, const HierBlock* to, int dp, int d) {
  float scale[2], zero[2];
  for (int half = 0; half < 2; ++half) {
    const int row = (d + half * dp / 2) * kPage;
    f32x16 low = newest_at(k[0], row), high = low;
    for (int i = 0; i < kHierGroup; i += 16) {
      const f32x16 x = newest_at(k[i / kPage], row + i % kPage);
      low = vmin(x, low);
      high = vmax(x, high);
    }
    zero[half] = -reduce_max(-low);
    scale[half] = hier_scale(zero[half], reduce_max(high));
    ((float*)to[0].k_parameter)[d + half * dp / 2] = scale[half];
    ((float*)to[1].k_parameter)[d + half * dp / 2] = zero[half];
  }
  for (int i = 0; i < kHierGroup; i += 16) {
    const int page = i / kPage, at = d * kPage + i % kPage;
    const f32x16 low = newest_at(k[page], at), high = newest_at(k[page], at + dp / 2 * kPage);
    store_pairs(hier_codes(low, splat(scale[0]), splat(zero[0])), hier_codes(high, splat(scale[1]), splat(zero[1])),
                to[page].k_upper + at, to[page].k_lower + at);
  }
}

// The value at slot `slot` of a page. v: bf16 [64][dp], of which head_dim elements count.
QC_INLINE void round_value(const char* v, const HierBlock& to, int head_dim, int dp, int slot) {
  float low = newest_at(v, slot * dp)[0], high = low;
  for (int d = 0; d < head_dim; ++d) {
    const float x = bf16_to_f32(((const uint16_t*)v)[slot * dp + d]);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  const float scale = hier_scale(low, high);
  ((float*)to.v_scale)[slot] = scale;
  ((float*)to.v_offset)[slot] = -low / scale;
  for (int d = 0; d < dp / 2; d += 16) {
    const int at = slot * dp + d;
    store_pairs(hier_codes(newest_at(v, at), splat(scale), splat(low)),
                hier_codes(newest_at(v, at + dp / 2), splat(scale), splat(low)), to.v_upper + slot * dp / 2 + d,
                to.v_lower + slot * dp / 2 + d);
  }
}

template <KvFormat F>
QC_NOINLINE void round_group(const KvLayer<F>& kv, int sequence, int head, int group) {
  const int dp = kv_padded(F, kv.head_dim), page = group * (kHierGroup / kPage);
  const KvBlock from[2] = {newest(kv, sequence, page, head), newest(kv, sequence, page + 1, head)};
  const HierBlock to[2] = {rounded(kv, sequence, page, head), rounded(kv, sequence, page + 1, head)};
  const char* const k[2] = {from[0].k, from[1].k};
  for (int d = 0; d < dp / 2; ++d) round_keys(k, to, dp, d);
  for (int i = 0; i < kHierGroup; ++i) round_value(from[i / kPage].v, to[i / kPage], kv.head_dim, dp, i % kPage);
}

// ---- products with rounded pages ---------------------------------------------------------------------

struct Pair {  // 16 elements from low nibbles and 16 from high ones
  F16 low, high;
};

// Codes as floats: u of the upper plane, or 16 u + l + 8 of both; `stride` bytes a row.
template <bool both>
struct HierRows {
  const uint8_t *upper, *lower;
  int stride;
  QC_MEMBER Pair at(int k, int j) const {
#if defined(QC_ISA_AVX512)
    const __m128i u = _mm_loadu_si128((const __m128i*)(upper + k * stride + j)), mask = _mm_set1_epi8(15);
    if (!both) {
      const __m512i wide = _mm512_cvtepu8_epi32(u);
      // A permutation looks at 4 bits of an index: it takes the low nibble out and makes it a float at once.
      const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      return {_mm512_permutexvar_ps(wide, table), _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table)};
    }
    const __m128i l = _mm_loadu_si128((const __m128i*)(lower + k * stride + j));
    const __m128i low = _mm_ternarylogic_epi32(mask, l, _mm_slli_epi16(u, 4), 0xca);  // mask ? l : u << 4
    const __m128i high = _mm_ternarylogic_epi32(mask, _mm_srli_epi16(l, 4), u, 0xca);
    return {f_from_i(_mm512_cvtepu8_epi32(low)), f_from_i(_mm512_cvtepu8_epi32(high))};
#else
    const u8x16 u = load<u8x16>(upper + k * stride + j);
    if (!both) return {to_lanes(u & 15), to_lanes(u >> 4)};
    const u8x16 l = load<u8x16>(lower + k * stride + j);
    return {to_lanes((u & 15) << 4 | (l & 15)), to_lanes((u >> 4) << 4 | l >> 4)};
#endif
  }
};

constexpr int kPairVectors = kTileVectors > 1 ? 2 : 1, kPairHeight = kTileVectors > 1 ? 6 : kTileHeight / 2;

// apart: c[r][j] = sum over k < n of a[r][k] * low[k][j], and c[r][j + split] with high. Else c[r][j] is both sums, the
// second of a[r][k + split] * high[k][j].
template <int R, int V, bool apart, class B>
QC_INLINE void multiply_pair_tile(const float* a, int lda, int split, const B& b, int n, int j, float* c, int ldc) {
  F16 low[R][V], high[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) low[r][v] = high[r][v] = f_set(0.0f);
  for (int k = 0; k < n; ++k)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Pair w = b.at(k, j + 16 * v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        low[r][v] = fused(low[r][v], w.low, a + r * lda + k);
        high[r][v] = fused(high[r][v], w.high, a + r * lda + k + (apart ? 0 : split));
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + j + 16 * v;
      f_store(to, apart ? low[r][v] : f_add(low[r][v], high[r][v]));
      if (apart) f_store(to + split, high[r][v]);
    }
}

template <int R, bool apart, class B>
QC_NOINLINE void multiply_pair_rows(const float* a, int lda, int split, const B& b, int n, int columns, float* c, int ldc) {
  int j = 0;
  for (; j + 16 * kPairVectors <= columns; j += 16 * kPairVectors)
    multiply_pair_tile<R, kPairVectors, apart>(a, lda, split, b, n, j, c, ldc);
  for (; j < columns; j += 16) multiply_pair_tile<R, 1, apart>(a, lda, split, b, n, j, c, ldc);
}

template <bool apart, class B>
static void multiply_pairs(int rows, const float* a, int lda, int split, const B& b, int n, int columns, float* c, int ldc) {
  int r = 0;
  for (; r + kPairHeight <= rows; r += kPairHeight)
    multiply_pair_rows<kPairHeight, apart>(a + r * lda, lda, split, b, n, columns, c + r * ldc, ldc);
  const float* ar = a + r * lda;
  float* cr = c + r * ldc;
  switch (rows - r) {
#if defined(QC_ISA_AVX512)
    case 5: multiply_pair_rows<5, apart>(ar, lda, split, b, n, columns, cr, ldc); break;
    case 4: multiply_pair_rows<4, apart>(ar, lda, split, b, n, columns, cr, ldc); break;
    case 3: multiply_pair_rows<3, apart>(ar, lda, split, b, n, columns, cr, ldc); break;
#endif
    case 2: multiply_pair_rows<2, apart>(ar, lda, split, b, n, columns, cr, ldc); break;
    case 1: multiply_pair_rows<1, apart>(ar, lda, split, b, n, columns, cr, ldc); break;
  }
}

// ---- attention ---------------------------------------------------------------------------------------

// Keys' scales go into q, to s.part; what their zeros add to a row's scores is -s.q_sum.
QC_INLINE void fold_keys(AttentionScratch& s, int rows, int dp, const float* scale, const float* zero, bool both) {
  for (int r = 0; r < rows; ++r) {
    f32x16 sum{};
    for (int d = 0; d < dp; d += 16) {
      const f32x16 q = load<f32x16>(s.q + r * dp + d), step = load<f32x16>(scale + d) * (both ? 0.0625f : 1.0f);
      store(s.part + r * dp + d, q * step);
      sum += q * (load<f32x16>(zero + d) - step * (both ? 8.0f : 0.0f));
    }
    s.q_sum[r] = -reduce_add(sum);
  }
}

// A page's parameters as kKv8 has them: scores take -q_sum in by a scale and a zero of 1.
QC_INLINE void page_parameters(const HierBlock& block, bool both, float* to) {
  for (int i = 0; i < kPage; i += 16) {
    store(to + i, splat(1.0f));
    store(to + kPage + i, splat(1.0f));
    store(to + 2 * kPage + i, load<f32x16>(block.v_scale + i) * (both ? 0.0625f : 1.0f));
    store(to + 3 * kPage + i, load<f32x16>(block.v_offset + i) * (both ? 16.0f : 1.0f) + (both ? 8.0f : 0.0f));
  }
}

template <KvFormat F>
QC_NOINLINE void attend_rounded(const AttentionArgs& a, const KvLayer<F>& kv, AttentionScratch& s, int sequence, int head,
                                int rows, int page, int last) {
  constexpr bool both = F == kKvHier;
  const int dp = kv_padded(F, kv.head_dim), half = dp / 2;
  const HierBlock block = rounded(kv, sequence, page, head);
  const HierBlock pair = rounded(kv, sequence, page ^ 1, head);
  const float* scale = page % 2 ? pair.k_parameter : block.k_parameter;
  const float* zero = page % 2 ? block.k_parameter : pair.k_parameter;
  alignas(64) float parameters[4 * kPage];
  fold_keys(s, rows, dp, scale, zero, both);
  page_parameters(block, both, parameters);
  multiply_pairs<false>(rows, s.part, dp, half, HierRows<both>{block.k_upper, block.k_lower, kPage}, half, kPage, s.score,
                        kPage);
  const KvBlock as_bytes = {nullptr, nullptr, parameters};
  if (a.window == 0 || page * kPage > last - a.window) soften_page<kKv8, false>(a, as_bytes, s, rows, page * kPage);
  else soften_page<kKv8, true>(a, as_bytes, s, rows, page * kPage);
  multiply_pairs<true>(rows, s.score, kPage, half, HierRows<both>{block.v_upper, block.v_lower, half}, kPage, half, s.part,
                       dp);
  merge_page(s, rows, dp);
}

// All rows of a tile are in one group, so pages are rounded or not for all of them.
template <KvFormat F>
void attend_hier_page(const AttentionArgs& a, const KvLayer<F>& kv, AttentionScratch& s, int sequence, int head, int rows,
                      int page, int last) {
  if (page / (kHierGroup / kPage) + 2 <= last / kHierGroup) attend_rounded<F>(a, kv, s, sequence, head, rows, page, last);
  else attend_block<kKv16>(a, newest(kv, sequence, page, head), s, rows, kv_padded(F, kv.head_dim), page, last);
}

// Tokens begin .. end - 1, of one sequence and group, to the ring.
template <KvFormat F>
QC_INLINE void append_newest(const AttentionArgs& a, const KvLayer<F>& kv, int sequence, int head, int begin, int end) {
  const int d = kv.head_dim, dp = kv_padded(F, d);
  alignas(64) float k[1024], v[1024];
  memset(k, 0, sizeof(float) * (size_t)dp);
  memset(v, 0, sizeof(float) * (size_t)dp);
  for (int t = begin; t < end; ++t) {
    const float* row = a.q + (int64_t)t * a.q_stride + head * d;
    memcpy(k, row + a.k_offset, sizeof(float) * (size_t)d);
    memcpy(v, row + a.v_offset, sizeof(float) * (size_t)d);
    const int p = a.positions[t];
    kv_append<kKv16>(newest(kv, sequence, p / kPage, head), p % kPage, k, v, dp);
  }
}

// One thread takes a sequence's rows of one kv head from group to group, since each group's keys take the place of
// others that rows before them read.
template <KvFormat F>
void attend_sequence(const AttentionArgs& a, const KvLayer<F>& kv, void* memory, int sequence, int head) {
  const int begin = a.query_start[sequence], end = a.query_start[sequence + 1], group = a.heads / kv.kv_heads;
  for (int t = begin, next; t < end; t = next) {
    const int p = a.positions[t], room = kHierGroup - p % kHierGroup;
    next = end - t < room ? end : t + room;
    append_newest<F>(a, kv, sequence, head, t, next);
    if (p % kHierGroup == 0 && p >= 2 * kHierGroup) round_group<F>(kv, sequence, head, p / kHierGroup - 2);
    const int last = (next - begin) * group;
    for (int first = (t - begin) * group; first < last; first += kTileRows)
      attend_tile<F>(a, kv, memory, sequence, head, first, last - first < kTileRows ? last - first : kTileRows);
  }
}
