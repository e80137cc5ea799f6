// attention_latent.h: attention with features of the keys as values, for all query heads of a single key head
// (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1: multi-head latent attention).
//
// A page is widened to float once for all rows of a tile, [dim][position]. It is then the right operand of scores (lanes
// are positions) and the left operand of p v (lanes are rows). So neither product needs it transposed.
//
// Exactness. As in attention.h: every score is a chain of multiply-adds over features in order, every sum of values one
// over a page's positions in order, and pages are merged in order. A row's lane has no influence on its bits.
#pragma once
#include "attention.h"

constexpr int kLatentRows = kVectorRows;  // most rows per tile

// One thread's working set besides AttentionScratch: a widened page, and sums with a column per row.
struct LatentScratch {
  float* page;     // [dp][64]
  float* weights;  // [64][kLatentRows] softmax weights
  float* part;     // [kLatentHeight][kLatentRows], of some value features in the page
  float* sum;      // [value features][kLatentRows], of all pages so far
};
constexpr size_t latent_scratch_bytes(int dp) {
  return sizeof(float) * (size_t)(dp * kPage + (kPage + 8 + dp) * kLatentRows);
}
QC_INLINE LatentScratch latent_scratch(void* memory, int dp) {
  float* page = (float*)memory;
  float* weights = page + dp * kPage;
  float* part = weights + kPage * kLatentRows;
  return {page, weights, part, part + 8 * kLatentRows};
}

// Positions 0 .. n - 1 of a page as floats, n a multiple of 16; returned as [dp][64].
template <KvFormat F>
QC_INLINE const float* widen_page(const KvBlock& block, int dp, int n, float* to) {
  if constexpr (F == kLatent32) return (const float*)block.k;
  for (int d = 0; d < dp; ++d)
    for (int j = 0; j < n; j += 16) {
      const int at = d * kPage + j;
      if constexpr (F == kLatent16) {
        store(to + at, bf16_to_f32(load<u16x16>((const uint16_t*)block.k + at)));
      } else {
        u8x16 codes;
        if constexpr (F == kLatent8) {
          codes = load<u8x16>((const uint8_t*)block.k + at);
        } else {
          const int half = d < dp / 2 ? d : d - dp / 2;
          codes = load<u8x16>((const uint8_t*)block.k + half * kPage + j);
          codes = (d < dp / 2 ? codes : codes >> 4) & 15;
        }
        const float* scale = block.parameters + d / kLatentGroup * 2 * kPage + j;
        store(to + at, (__builtin_convertvector(codes, f32x16) - load<f32x16>(scale + kPage)) * load<f32x16>(scale));
      }
    }
  return to;
}

#if defined(__AVX512F__)
constexpr int kLatentHeight = 8;  // with one vector of rows, as many chains as hide the latency of multiply-adds
#else
constexpr int kLatentHeight = kTileHeight;
#endif

// Adds the page's weighted sums of features d .. d + R - 1 for 16 V rows to the running ones, rescaling both.
template <int R, int V>
QC_INLINE void add_features(const float* values, const LatentScratch& l, int d, int limit, const float* keep,
                            const float* add) {
  multiply_tile<R, V>(values + d * kPage, kPage, Floats{l.weights, kLatentRows}, 0, limit, 0, l.part, kLatentRows, false);
  for (int i = 0; i < R; ++i)
    for (int r = 0; r < 16 * V; r += 16) {
      float* sum = l.sum + (d + i) * kLatentRows + r;
      const f32x16 part = load<f32x16>(l.part + i * kLatentRows + r);
      store(sum, load<f32x16>(sum) * load<f32x16>(keep + r) + part * load<f32x16>(add + r));
    }
}
template <int V>
QC_NOINLINE void add_values(const float* values, const LatentScratch& l, int features, int limit, const float* keep,
                            const float* add) {
  int d = 0;
  for (; d + kLatentHeight <= features; d += kLatentHeight) add_features<kLatentHeight, V>(values, l, d, limit, keep, add);
  for (; d < features; ++d) add_features<1, V>(values, l, d, limit, keep, add);
}

// Attends to a page of keys k [dp][64] for the tile's rows, the last of which is at position `last`.
QC_INLINE void attend_latent_page(const AttentionArgs& a, const float* k, AttentionScratch& s, const LatentScratch& l,
                                  int rows, int dp, int page, int last) {
  const int start = page * kPage, limit = last - start + 1 < kPage ? last - start + 1 : kPage;
  const KvBlock block{(char*)k, nullptr, nullptr};
  score_page<kKv32>(block, s, rows, dp, limit);
  const bool all = start + kPage - 1 <= s.position[0] && s.first[rows - 1] <= start;
  if (all) softmax_page<kKv32, false>(a, block, s, rows, start);
  else softmax_page<kKv32, true>(a, block, s, rows, start, (limit + 15) / 16);
  const int wide = (rows + 15) / 16 * 16;
  for (int j = 0; j < limit; ++j) {
    for (int r = 0; r < rows; ++r) l.weights[j * kLatentRows + r] = s.score[r * kPage + j];
    for (int r = rows; r < wide; ++r) l.weights[j * kLatentRows + r] = 0.0f;
  }
  alignas(64) float keep[kTileRows], add[kTileRows];
  for (int r = 0; r < wide; r += 16) merge_sums(s, r, s.page_max + r, s.page_sum + r, keep + r, add + r);
  const float* values = k + a.value_start * kPage;
  static_assert(kLatentRows == 48, "add_values takes one to three vectors of rows");
  if (wide == 16) add_values<1>(values, l, a.value_dim, limit, keep, add);
  else if (wide == 32) add_values<2>(values, l, a.value_dim, limit, keep, add);
  else add_values<3>(values, l, a.value_dim, limit, keep, add);
}

// Query rows first .. first + rows - 1 of one sequence; row = token * heads + head.
template <KvFormat F>
QC_NOINLINE void attend_latent_tile(const AttentionArgs& a, const KvLayer<F>& kv, void* memory, int sequence,
                                    int first, int rows) {
  const int d = kv.head_dim, dp = kv_padded(F, d);
  AttentionScratch s(memory, dp);
  const LatentScratch l = latent_scratch((char*)memory + attention_scratch_bytes(dp), dp);
  const int token0 = a.query_start[sequence];
  for (int r = 0; r < rows; ++r) {
    const int t = token0 + (first + r) / a.heads, h = (first + r) % a.heads;
    memcpy(s.q + r * dp, a.q + (int64_t)t * a.q_stride + a.q_offset + h * d, sizeof(float) * (size_t)d);
    memset(s.q + r * dp + d, 0, sizeof(float) * (size_t)(dp - d));
    s.center_dot[r] = 0.0f;
    s.position[r] = a.positions[t];
    s.first[r] = first_visible(a, s.position[r]);
    s.bias[r] = a.key_bias ? a.key_bias + (int64_t)h * a.key_bias_stride : nullptr;
  }
  for (int r = 0; r < kTileRows; ++r) s.run_max[r] = s.page_max[r] = -__builtin_inff(), s.run_sum[r] = s.page_sum[r] = 0.0f;
  memset(l.sum, 0, sizeof(float) * (size_t)(a.value_dim * kLatentRows));

  const int last = s.position[rows - 1];
  const int start = s.first[0];
  for (int page = start / kPage; page <= last / kPage; ++page) {
    const int limit = last - page * kPage + 1 < kPage ? last - page * kPage + 1 : kPage;
    const float* k = widen_page<F>(kv.block(sequence, page, 0), dp, (limit + 15) / 16 * 16, l.page);
    attend_latent_page(a, k, s, l, rows, dp, page, last);
  }

  const int out_stride = gemm_kp(a.heads * a.value_dim);
  for (int r = 0; r < rows; ++r) {
    const int t = token0 + (first + r) / a.heads, h = (first + r) % a.heads;
    float* to = a.out + (int64_t)t * out_stride + h * a.value_dim;
    const float inverse = a.sinks ? inverse_with_sink(s.run_max[r], s.run_sum[r], a.sinks[h]) : 1.0f / s.run_sum[r];
    for (int i = 0; i < a.value_dim; ++i) to[i] = l.sum[i * kLatentRows + r] * inverse;
    if (h == a.heads - 1) memset(to + a.value_dim, 0, sizeof(float) * (size_t)(out_stride - a.heads * a.value_dim));
  }
}
