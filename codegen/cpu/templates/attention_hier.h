// attention_hier.h: the hierarchical cache of QuantSpec (Tiwari et al. 2025, 4.2 and 4.3), for kKvHier and kKvHier4.
//
// Positions form groups of 128. A row in group j reads groups j - 1 and j, its newest 128 to 256 positions, in bf16,
// and older groups quantized: x = scale * (u + l / 16) + zero, u in 0..15 and l in -8..7, kKvHier4 without l. Keys have
// scale and zero per channel of a group, values per position. What a row reads depends only on its position, so its
// result depends neither on the step it is computed in nor on how often it was drafted before.
//
// The newest groups live in a ring of three. Rows of a step that spans a group boundary, and rows recomputed after
// drafts beyond it were rejected, still find the previous group in bf16. The step with the first row of group j
// quantizes group j - 2. All positions of that group are verified by then, as no draft reaches 128 positions ahead.
//
// Entries of a sequence's block table: first the ring, with K and V of position p in entries 2 (p / 64 mod 6) and the
// next one, as in kKv16; from entry 12 on the quantized pages of 64 positions, both pages of a group adjacent. A
// quantized block:
//
//   K upper u8 [Dp/8][64][4]: byte j of block b has channel 8 b + j in its low nibble, 8 b + 4 + j in its high
//   V upper u8 [8][Dp][4], the same with positions
//   V scale, V offset f32 [64]     offset = -zero / scale
//   K scale f32 [Dp] in a group's first page, K zero in its second
//   K lower, V lower like upper, as l + 8
//
// Codes are multiplied as bytes. The other operand (queries times key scales, probabilities times value scales) is
// split for each page into two bytes with 15 bits together, so that sums are exact integers in any order. For the
// draft's coarse keys one query byte is enough.
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
QC_INLINE KvBlock ring_block(const KvLayer<F>& kv, int sequence, int page, int head) {
  const int entry = 2 * (page % kRingPages);
  return {kv.at(sequence, entry, head), kv.at(sequence, entry + 1, head), nullptr};
}
template <KvFormat F>
QC_INLINE HierBlock quantized_block(const KvLayer<F>& kv, int sequence, int page, int head) {
  return {kv.at(sequence, 2 * kRingPages + page, head), kv_padded(F, kv.head_dim)};
}

// ---- quantizing a group ------------------------------------------------------------------------------

// Quantizes x[j] of 16 columns with its scale and zero into byte j % 4 of each column in both planes.
QC_INLINE void store_codes(const f32x16* x, const float* scale, const float* zero, const uint8_t* upper,
                           const uint8_t* lower) {
  u32x16 u{}, l{};
  for (int j = 0; j < 8; ++j) {
    const f32x16 t = (x[j] - zero[j]) / scale[j];
    const f32x16 high = vmin(vmax(round_even(t), splat(0.0f)), splat(15.0f));
    const f32x16 rest = vmin(vmax(round_even((t - high) * 16.0f), splat(-8.0f)), splat(7.0f)) + 8.0f;
    const int shift = 8 * (j % 4) + j / 4 * 4;
    u |= bitcast<u32x16>(round_to_i32(high)) << shift;
    l |= bitcast<u32x16>(round_to_i32(rest)) << shift;
  }
  store((uint8_t*)upper, u);
  store((uint8_t*)lower, l);
}
QC_INLINE float hier_scale(float low, float high) {
  const float scale = (high - low) / 15.0f;
  return scale > 1e-37f ? scale : 1.0f;
}
QC_INLINE f32x16 load_bf16(const void* p, int index) { return bf16_to_f32(load<u16x16>((const uint16_t*)p + index)); }

// Quantizes channels 8 b .. 8 b + 7 of a group's keys. k: bf16 [dp][64] of both pages.
QC_INLINE void quantize_keys(const char* const* k, const HierBlock* to, int b) {
  float scale[8], zero[8];
  for (int j = 0; j < 8; ++j) {
    const int row = (8 * b + j) * kPage;
    f32x16 low = load_bf16(k[0], row), high = low;
    for (int i = 0; i < kHierGroup; i += 16) {
      const f32x16 x = load_bf16(k[i / kPage], row + i % kPage);
      low = vmin(x, low);
      high = vmax(x, high);
    }
    zero[j] = -reduce_max(-low);
    scale[j] = hier_scale(zero[j], reduce_max(high));
    ((float*)to[0].k_parameter)[8 * b + j] = scale[j];
    ((float*)to[1].k_parameter)[8 * b + j] = zero[j];
  }
  for (int i = 0; i < kHierGroup; i += 16) {
    const int page = i / kPage, slot = i % kPage, at = 4 * (b * kPage + slot);
    f32x16 x[8];
    for (int j = 0; j < 8; ++j) x[j] = load_bf16(k[page], (8 * b + j) * kPage + slot);
    store_codes(x, scale, zero, to[page].k_upper + at, to[page].k_lower + at);
  }
}

// Quantizes values at slots 8 b .. 8 b + 7 of a page. v: bf16 [64][dp], of which head_dim elements are used.
QC_INLINE void quantize_values(const char* v, const HierBlock& to, int head_dim, int dp, int b) {
  float scale[8], zero[8];
  for (int j = 0; j < 8; ++j) {
    const int slot = 8 * b + j;
    f32x16 least = splat(bf16_to_f32(((const uint16_t*)v)[slot * dp])), most = least;
    for (int d = 0; d + 16 <= head_dim; d += 16) {
      least = vmin(load_bf16(v, slot * dp + d), least);
      most = vmax(load_bf16(v, slot * dp + d), most);
    }
    float low = -reduce_max(-least), high = reduce_max(most);
    for (int d = head_dim / 16 * 16; d < head_dim; ++d) {
      const float x = bf16_to_f32(((const uint16_t*)v)[slot * dp + d]);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    zero[j] = low;
    scale[j] = hier_scale(low, high);
    ((float*)to.v_scale)[slot] = scale[j];
    ((float*)to.v_offset)[slot] = -low / scale[j];
  }
  for (int d = 0; d < dp; d += 16) {
    const int at = 4 * (b * dp + d);
    f32x16 x[8];
    for (int j = 0; j < 8; ++j) x[j] = load_bf16(v, (8 * b + j) * dp + d);
    store_codes(x, scale, zero, to.v_upper + at, to.v_lower + at);
  }
}

template <KvFormat F>
QC_NOINLINE void quantize_group(const KvLayer<F>& kv, int sequence, int head, int group) {
  const int dp = kv_padded(F, kv.head_dim), page = group * (kHierGroup / kPage);
  const KvBlock from[2] = {ring_block(kv, sequence, page, head), ring_block(kv, sequence, page + 1, head)};
  const HierBlock to[2] = {quantized_block(kv, sequence, page, head), quantized_block(kv, sequence, page + 1, head)};
  const char* const k[2] = {from[0].k, from[1].k};
  for (int b = 0; b < dp / 8; ++b) quantize_keys(k, to, b);
  for (int b = 0; b < kHierGroup / 8; ++b) quantize_values(from[b / 8].v, to[b / 8], kv.head_dim, dp, b % 8);
}

// ---- products with quantized pages -------------------------------------------------------------------

#if defined(QC_ISA_AVX512)
constexpr bool kWholeBytes = true;  // dot products take 8-bit codes; elsewhere each plane is multiplied separately
constexpr int kByteHeight = 10;
QC_INLINE void join_nibbles(const uint8_t* upper, const uint8_t* lower, B64* w) {
  const B64 u = b_load(upper), l = b_load(lower), mask = _mm512_set1_epi8(15);
  w[0] = _mm512_ternarylogic_epi32(mask, l, _mm512_slli_epi16(u, 4), 0xca);  // mask ? l : u << 4
  w[1] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(l, 4), u, 0xca);
}
#else
constexpr bool kWholeBytes = false;
constexpr int kByteHeight = 2;
QC_INLINE void join_nibbles(const uint8_t*, const uint8_t*, B64*) {}
#endif

// Splits rows x [rows][n] into scale * (128 high + low), or scale * high if P is 1; bytes: [rows][2][n], high first.
template <int P>
QC_INLINE void split_rows(const float* x, int rows, int n, int8_t* bytes, float* scale) {
  for (int r = 0; r < rows; ++r, x += n, bytes += 2 * n) {
    f32x16 most{};
    for (int i = 0; i < n; i += 16) most = vmax(vabs(load<f32x16>(x + i)), most);
    constexpr float levels = P == 2 ? 16256.0f : 127.0f;
    const float top = reduce_max(most), inverse = top > 1e-30f ? levels / top : 1.0f;
    for (int i = 0; i < n; i += 16) {
      const f32x16 q = round_even(load<f32x16>(x + i) * inverse), high = P == 2 ? round_even(q * 0.0078125f) : q;
      store(bytes + i, __builtin_convertvector(round_to_i32(high), i8x16));
      if (P == 2) store(bytes + n + i, __builtin_convertvector(round_to_i32(q - high * 128.0f), i8x16));
    }
    scale[r] = top > 1e-30f ? top / levels : 1.0f;
  }
}

// One page's codes u8 [n / 8][columns][4], and the byte distance to those of the next page.
struct HierCodes {
  const uint8_t *upper, *lower;
  int columns;
  int64_t ahead;
};

// c[r][j ..] = sum over k < n of x[r][k] * code[k][j ..] for R split rows x of P bytes.
template <int R, int V, bool both, int P>
QC_INLINE void multiply_code_tile(const int8_t* x, int n, const float* scale, const HierCodes& codes, int j, float* c) {
  I16 high[R][V], low[R][V];
  QC_UNROLL for (int r = 0; r < R; ++r)
    QC_UNROLL for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = i_set(0);
  for (int plane = 0; plane < (both && !kWholeBytes ? 2 : 1); ++plane) {
    if (plane) {
      QC_UNROLL for (int r = 0; r < R; ++r)
        QC_UNROLL for (int v = 0; v < V; ++v) {
          high[r][v] = i_mul(high[r][v], i_set(16));
          low[r][v] = i_mul(low[r][v], i_set(16));
        }
    }
    for (int k = 0; k < n; k += 8)
      QC_UNROLL for (int v = 0; v < V; ++v) {
        const int at = k / 2 * codes.columns + 4 * (j + 16 * v);
        // A page's planes are short and apart: the hardware prefetcher hardly starts on one before it ends.
        __builtin_prefetch(codes.upper + at + codes.ahead, 0, 2);
        if (both) __builtin_prefetch(codes.lower + at + codes.ahead, 0, 2);
        B64 w[2];
        if (both && kWholeBytes) {
          join_nibbles(codes.upper + at, codes.lower + at, w);
        } else {
          const B64 pairs = b_load((plane ? codes.lower : codes.upper) + at);
          w[0] = b_low(pairs), w[1] = b_high(pairs);
        }
        QC_UNROLL for (int r = 0; r < R; ++r) {
          const int8_t* bytes = x + r * 2 * n + k;
          high[r][v] = dot_small(dot_small(high[r][v], w[0], bytes), w[1], bytes + 4);
          if (P == 2) low[r][v] = dot_small(dot_small(low[r][v], w[0], bytes + n), w[1], bytes + n + 4);
        }
      }
  }
  QC_UNROLL for (int r = 0; r < R; ++r)
    QC_UNROLL for (int v = 0; v < V; ++v) {
      F16 sum = f_from_i(high[r][v]);
      if (P == 2) sum = f_add(f_mul(sum, f_set(128.0f)), f_from_i(low[r][v]));
      f_store(c + r * codes.columns + j + 16 * v, f_mul(sum, f_set(scale[r])));
    }
}

template <int R, bool both, int P>
QC_NOINLINE void multiply_code_rows(const int8_t* x, int n, const float* scale, const HierCodes& codes, float* c) {
  constexpr int V = R > 6 ? 1 : 2;  // limited by the accumulator registers
  for (int j = 0; j < codes.columns; j += 16 * V) multiply_code_tile<R, V, both, P>(x, n, scale, codes, j, c);
}

template <bool both, int P>
static void multiply_codes(int rows, const int8_t* x, int n, const float* scale, const HierCodes& codes, float* c) {
  int r = 0;
  for (; r + kByteHeight <= rows; r += kByteHeight)
    multiply_code_rows<kByteHeight, both, P>(x + r * 2 * n, n, scale + r, codes, c + r * codes.columns);
  x += r * 2 * n, scale += r, c += r * codes.columns;
  switch (rows - r) {
#if defined(QC_ISA_AVX512)
    case 9: multiply_code_rows<9, both, P>(x, n, scale, codes, c); break;
    case 8: multiply_code_rows<8, both, P>(x, n, scale, codes, c); break;
    case 7: multiply_code_rows<7, both, P>(x, n, scale, codes, c); break;
    case 6: multiply_code_rows<6, both, P>(x, n, scale, codes, c); break;
    case 5: multiply_code_rows<5, both, P>(x, n, scale, codes, c); break;
    case 4: multiply_code_rows<4, both, P>(x, n, scale, codes, c); break;
    case 3: multiply_code_rows<3, both, P>(x, n, scale, codes, c); break;
    case 2: multiply_code_rows<2, both, P>(x, n, scale, codes, c); break;
#endif
    case 1: multiply_code_rows<1, both, P>(x, n, scale, codes, c); break;
  }
}

// ---- attention ---------------------------------------------------------------------------------------

// Writes q times the key scales to s.part; the key zero points add -s.q_sum to a row's scores.
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

// A page's parameters in kKv8 form: a scale and a zero of 1 make scale_scores subtract q_sum.
QC_INLINE void page_parameters(const HierBlock& block, bool both, float* to) {
  for (int i = 0; i < kPage; i += 16) {
    store(to + i, splat(1.0f));
    store(to + kPage + i, splat(1.0f));
    store(to + 2 * kPage + i, load<f32x16>(block.v_scale + i) * (both ? 0.0625f : 1.0f));
    store(to + 3 * kPage + i, load<f32x16>(block.v_offset + i) * (both ? 16.0f : 1.0f) + (both ? 8.0f : 0.0f));
  }
}

template <KvFormat F>
QC_NOINLINE void attend_quantized(const AttentionArgs& a, const KvLayer<F>& kv, AttentionScratch& s, int sequence,
                                  int head, int rows, int page, int last) {
  constexpr bool both = F == kKvHier;
  constexpr int kQueryBytes = both ? 2 : 1;
  const int dp = kv_padded(F, kv.head_dim);
  const HierBlock block = quantized_block(kv, sequence, page, head);
  // The next page if it is quantized too; after the newest quantized page, the page itself.
  const int next = page + 1 < (s.position[0] / kHierGroup - 1) * (kHierGroup / kPage) ? page + 1 : page;
  const int64_t ahead = kv.at(sequence, 2 * kRingPages + next, head) - (const char*)block.k_upper;
  for (int i = 0; i < 2 * kPage + dp; i += 16) __builtin_prefetch((const char*)(block.v_scale + i) + ahead, 0, 2);
  alignas(64) float parameters[4 * kPage];
  page_parameters(block, both, parameters);
  if (s.folded != page / 2) {
    const HierBlock first = quantized_block(kv, sequence, page & ~1, head),
                    second = quantized_block(kv, sequence, page | 1, head);
    fold_keys(s, rows, dp, first.k_parameter, second.k_parameter, both);
    split_rows<kQueryBytes>(s.part, rows, dp, s.split, s.split_scale);
    s.folded = page / 2;
  }
  const HierCodes keys = {block.k_upper, block.k_lower, kPage, ahead}, values = {block.v_upper, block.v_lower, dp, ahead};
  multiply_codes<both, kQueryBytes>(rows, s.split, dp, s.split_scale, keys, s.score);
  const KvBlock as_bytes = {nullptr, nullptr, parameters};
  if (s.first[rows - 1] <= page * kPage) softmax_page<kKv8, false>(a, as_bytes, s, rows, page * kPage);
  else softmax_page<kKv8, true>(a, as_bytes, s, rows, page * kPage);
  alignas(64) int8_t weights[kVectorRows * 2 * kPage];
  float scale[kVectorRows];
  split_rows<2>(s.score, rows, kPage, weights, scale);
  multiply_codes<both, 2>(rows, weights, kPage, scale, values, s.part);
  merge_page(s, rows, dp);
}

// All rows of a tile are in one group, so a page is quantized for all of them or for none.
template <KvFormat F>
void attend_hier_page(const AttentionArgs& a, const KvLayer<F>& kv, AttentionScratch& s, int sequence, int head, int rows,
                      int page, int last) {
  if (page / (kHierGroup / kPage) + 2 <= last / kHierGroup)
    attend_quantized<F>(a, kv, s, sequence, head, rows, page, last);
  else
    attend_pages<kKv16>(a, [&](int p) { return ring_block(kv, sequence, p, head); }, s, rows,
                        kv_padded(F, kv.head_dim), page, page, last);
}

// Appends tokens begin .. end - 1, all of one sequence and group, to the ring.
template <KvFormat F>
QC_INLINE void append_to_ring(const AttentionArgs& a, const KvLayer<F>& kv, int sequence, int head, int begin,
                              int end) {
  const int d = kv.head_dim, dp = kv_padded(F, d);
  alignas(64) float k[1024], v[1024];
  memset(k, 0, sizeof(float) * (size_t)dp);
  memset(v, 0, sizeof(float) * (size_t)dp);
  for (int t = begin; t < end; ++t) {
    const float* row = a.q + (int64_t)t * a.q_stride + head * d;
    memcpy(k, row + a.k_offset, sizeof(float) * (size_t)d);
    memcpy(v, row + a.v_offset, sizeof(float) * (size_t)d);
    const int p = a.positions[t];
    kv_append<kKv16>(ring_block(kv, sequence, p / kPage, head), p % kPage, k, v, dp);
  }
}

// One thread processes a sequence's rows of one kv head group by group, since the keys of each new group overwrite
// others in the ring that earlier rows read.
template <KvFormat F>
void attend_sequence(const AttentionArgs& a, const KvLayer<F>& kv, void* memory, int sequence, int head) {
  const int begin = a.query_start[sequence], end = a.query_start[sequence + 1], group = a.heads / kv.kv_heads;
  for (int t = begin, next; t < end; t = next) {
    const int p = a.positions[t], room = kHierGroup - p % kHierGroup;
    next = end - t < room ? end : t + room;
    append_to_ring<F>(a, kv, sequence, head, t, next);
    if (p % kHierGroup == 0 && p >= 2 * kHierGroup) quantize_group<F>(kv, sequence, head, p / kHierGroup - 2);
    const int last = (next - begin) * group;
    for (int first = (t - begin) * group; first < last; first += kVectorRows)
      attend_tile<F>(a, kv, memory, sequence, head, first, last - first < kVectorRows ? last - first : kVectorRows);
  }
}
