// attention.h: softmax(q k^T) v over the paged cache, for prefill, decode and verification alike.
//
// Exactness. A query row's bits depend only on its own q, its position, and the cached k and v. Pages of 64 positions
// are reduced one by one in a fixed way: scores summed over dim in order, exponentials relative to the page's own
// maximum, p v summed over positions in order. Pages are merged into the running (maximum, sum, out) in page order
// (online softmax, Milakov and Gimelshein 2018). Which rows share a tile, which thread computes it, and whether pages
// are merged at once or later changes nothing: a page that is fully masked for a row merges as an exact no-op, and a
// masked position adds p = 0 exactly.
//
// Slots past the tile's last position may hold anything, NaN included: their scores are overwritten, not added to, and
// p v never reads them.
//
// On CPUs with AMX, products with bfloat16, 8-bit and 4-bit pages are computed on tiles (attention_amx.h).
#pragma once
#include "kv.h"

// Query rows (tokens x query heads of one kv head) that share a loaded page: kTileRows if products use AMX tiles,
// otherwise kVectorRows.
constexpr int kVectorRows = 48;
#if defined(QC_AMX)
constexpr int kTileRows = 128;
constexpr bool on_tiles(KvFormat f) { return f == kKv16 || f == kKv8 || f == kKv4; }
#else
constexpr int kTileRows = kVectorRows;
constexpr bool on_tiles(KvFormat) { return false; }
#endif
// AMX tiles pay off from this many query heads per kv head; with fewer, the rows of a single token take longer.
constexpr int min_tile_group(KvFormat f) { return f == kKv4 ? 2 : 4; }
constexpr bool uses_tiles_for(KvFormat f, int group) { return on_tiles(f) && group >= min_tile_group(f); }
constexpr int tile_height(KvFormat f, int group) { return uses_tiles_for(f, group) ? kTileRows : kVectorRows; }

struct AttentionArgs {
  const float* q;            // [tokens][q_stride]; this layer's heads start at column q_offset
  int q_stride, q_offset;
  float* out;                // [tokens][gemm_kp(heads * head_dim)]
  int heads;
  float scale;
  int window;                // 0: all earlier positions
  int chunk;                 // > 0: only positions of the query's own chunk, which begins at a multiple of it
  float softcap;             // 0: none
  const float* sinks;        // [heads] scores that only enter the softmax sum, or null
  const float* key_bias;     // [heads][key_bias_stride] key position's bias, relative to the query's, or null
  int key_bias_stride;
  const float* center;       // [kv_heads * head_dim] subtracted from cached keys, or null
  int sequences;
  const int32_t* positions;
  const int32_t* query_start;
  int k_offset, v_offset;    // kKvHier: columns of this layer's new keys and values in q's rows
  int value_start, value_dim;  // attention_latent.h: first of the keys' features that are values, and their number
};

struct AttentionScratch {    // one thread's working set
  float *q, *score, *part, *out;
  float q_sum[kTileRows], page_max[kTileRows], page_sum[kTileRows], shift[kTileRows];
  float run_max[kTileRows], run_sum[kTileRows];
  float center_dot[kTileRows];   // scaled q . center: what scores lack because cached keys are centered
  int32_t position[kTileRows], first[kTileRows];  // a row attends to positions first .. position; both ascend
  const float* bias[kTileRows];  // bias of the row's head
  int8_t* split;                 // kKvHier: q times the key scales of group `folded`, [rows][2][dp]
  float split_scale[kTileRows];
  int folded = -1;
  char* tiles;                   // attention_amx.h
  bool by_tiles = false;

  AttentionScratch(void* memory, int dp) {
    q = (float*)memory;                 // [rows][dp]
    score = q + kTileRows * dp;         // [rows][64]
    part = score + kTileRows * kPage;   // [rows][dp]
    out = part + kTileRows * dp;        // [rows][dp]
    split = (int8_t*)(out + kTileRows * dp);
    tiles = (char*)(split + 2 * kTileRows * dp);
  }
};

// Right-hand side type (lanes.h) that widens a page's elements to float.
template <KvFormat F>
struct Widened;
template <>
struct Widened<kKv32> {
  using Rows = Floats;
};
template <>
struct Widened<kKv16> {
  using Rows = Bfloats;
};
template <>
struct Widened<kKv8> {
  using Rows = Bytes;
};

// score[r][j] = sum over d of q[r][d] * k[d][j] for j < limit, rounded up (for quantized k: with the codes).
template <KvFormat F>
QC_INLINE void score_page(const KvBlock& block, AttentionScratch& s, int rows, int dp, int limit) {
  const int n = rows < 4 ? kPage : (limit + 15) / 16 * 16;  // few rows need all columns for enough accumulators
  if constexpr (F == kKv4) {
    const uint8_t* k = (const uint8_t*)block.k;
    multiply(rows, s.q, dp, Nibbles<0>{k, kPage}, 0, dp / 2, n, s.score, kPage, false);
    multiply(rows, s.q + dp / 2, dp, Nibbles<4>{k, kPage}, 0, dp / 2, n, s.score, kPage, true);
  } else {
    const typename Widened<F>::Rows k{block.k, kPage};
    for (int d = 0; d < dp; d += 64)  // keeps this part of k in L1
      multiply(rows, s.q, dp, k, d, d + 64 < dp ? d + 64 : dp, n, s.score, kPage, d > 0);
  }
}

// part[r][d] = sum over positions j < limit of p[r][j] * v[j][d] (for quantized v: with the codes).
template <KvFormat F>
QC_INLINE void value_page(const KvBlock& block, AttentionScratch& s, int rows, int dp, int limit) {
  if constexpr (F == kKv4) {
    const uint8_t* v = (const uint8_t*)block.v;
    multiply(rows, s.score, kPage, Nibbles<0>{v, dp / 2}, 0, limit, dp / 2, s.part, dp, false);
    multiply(rows, s.score, kPage, Nibbles<4>{v, dp / 2}, 0, limit, dp / 2, s.part + dp / 2, dp, false);
  } else {
    multiply(rows, s.score, kPage, typename Widened<F>::Rows{block.v, dp}, 0, limit, dp, s.part, dp, false);
  }
}

// cap * tanh(x / cap)
QC_INLINE f32x16 apply_softcap(f32x16 x, float cap) {
  return cap - (2.0f * cap) / (vexp(x * (2.0f / cap)) + 1.0f);
}

// The first position that a query at `position` attends to.
QC_INLINE int first_visible(const AttentionArgs& a, int position) {
  const int near = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
  const int own = a.chunk > 0 ? position - position % a.chunk : 0;
  return near > own ? near : own;
}

// Mask of 16 slots of a page, from slot 16 c on: lanes are -1 where row r of the tile attends to them.
QC_INLINE i32x16 visible(const AttentionScratch& s, int r, int start, int c) {
  const i32x16 slot = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + 16 * c;
  const int last = s.position[r] - start, first = s.first[r] - start;
  return ((slot - (last + 1)) & (first - 1 - slot)) >> 31;
}

// Bias of key positions from..from + 15 for a query at position `query`. Lanes beyond the query are arbitrary.
QC_INLINE f32x16 key_bias(const float* bias, int query, int from) {
  f32x16 x;
  for (int i = 0; i < 16; ++i) x[i] = bias[from + i <= query ? from + i : query] - bias[query];
  return x;
}

// Brings the scores of all rows to their final scale, -inf where masked; page_max is their maximum. Slots from
// 16 * parts on are masked for all rows and not read.
template <KvFormat F, bool masked>
QC_INLINE void scale_scores(const AttentionArgs& a, const KvBlock& block, AttentionScratch& s, int rows, int start,
                            int parts) {
  for (int r = 0; r < rows; ++r) {
    float* row = s.score + r * kPage;
    f32x16 x[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      if (masked && c >= parts) {
        x[c] = splat(-__builtin_inff());
        continue;
      }
      x[c] = load<f32x16>(row + 16 * c);
      if constexpr (F >= kKv8) {
        const float* p = block.parameters + 16 * c;
        x[c] = (x[c] - load<f32x16>(p + kPage) * s.q_sum[r]) * load<f32x16>(p);
      }
      x[c] *= a.scale;
      if (a.softcap > 0) x[c] = apply_softcap(x[c] + s.center_dot[r], a.softcap);  // softmax alone ignores this shift
      if (a.key_bias) x[c] += key_bias(s.bias[r], s.position[r], start + 16 * c);
      if (masked) x[c] = select(visible(s, r, start, c), x[c], splat(-__builtin_inff()));
      store(row + 16 * c, x[c]);
    }
    s.page_max[r] = reduce_max(vmax(vmax(x[0], x[2]), vmax(x[1], x[3])));
  }
}

// Turns scores into probabilities relative to page_max; page_sum is their sum. For quantized v, each is then multiplied
// by v's scale, and `shift` is the zero-point correction of p v.
template <KvFormat F, bool masked>
QC_INLINE void exponentiate(const AttentionArgs& a, const KvBlock& block, AttentionScratch& s, int rows, int start,
                            int parts) {
  for (int r = 0; r < rows; ++r) {
    float* row = s.score + r * kPage;
    const float base = !masked || s.page_max[r] > -__builtin_inff() ? s.page_max[r] : 0.0f;
    f32x16 x[4], shift[4];
    i32x16 mask[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      if (masked && c >= parts) {
        x[c] = f32x16{}, mask[c] = i32x16{};
        continue;
      }
      if (masked) mask[c] = visible(s, r, start, c);
      x[c] = vexp(load<f32x16>(row + 16 * c) - base);
      if (masked) x[c] = select(mask[c], x[c], splat(0.0f));
    }
    s.page_sum[r] = reduce_add((x[0] + x[2]) + (x[1] + x[3]));
    s.shift[r] = 0.0f;
    if constexpr (F >= kKv8) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const float* p = block.parameters + 2 * kPage + 16 * c;
        x[c] *= load<f32x16>(p);
        if (masked) x[c] = select(mask[c], x[c], splat(0.0f));
        shift[c] = x[c] * load<f32x16>(p + kPage);
        if (masked) shift[c] = select(mask[c], shift[c], splat(0.0f));
      }
      s.shift[r] = reduce_add((shift[0] + shift[2]) + (shift[1] + shift[3]));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) store(row + 16 * c, x[c]);
  }
}

template <KvFormat F, bool masked>
QC_NOINLINE void softmax_page(const AttentionArgs& a, const KvBlock& block, AttentionScratch& s, int rows, int start,
                             int parts = kPage / 16) {
  scale_scores<F, masked>(a, block, s, rows, start, parts);
  exponentiate<F, masked>(a, block, s, rows, start, parts);
}

// e^(x - top) for x <= top, exactly 0 where x is -inf.
QC_INLINE f32x16 exp_difference(f32x16 x, f32x16 top) {
  return select(x > -__builtin_inff(), vexp(x - top), splat(0.0f));
}

// Merges the (maximum, sum) of a page for 16 rows from r on into the running ones. keep and add: factors for `out` and
// `part`.
QC_INLINE void merge_sums(AttentionScratch& s, int r, const float* most, const float* sum, float* keep, float* add) {
  const f32x16 old = load<f32x16>(s.run_max + r), now = load<f32x16>(most);
  const f32x16 top = vmax(old, now);
  const f32x16 k = exp_difference(old, top), a = exp_difference(now, top);
  store(keep, k);
  store(add, a);
  store(s.run_max + r, top);
  store(s.run_sum + r, load<f32x16>(s.run_sum + r) * k + load<f32x16>(sum) * a);
}

// Merges the page's (maximum, sum, part) of every row into the running (maximum, sum, out).
QC_INLINE void merge_page(AttentionScratch& s, int rows, int dp) {
  float keep[kTileRows], add[kTileRows];
  for (int r = 0; r < rows; r += 16) merge_sums(s, r, s.page_max + r, s.page_sum + r, keep + r, add + r);
  for (int r = 0; r < rows; ++r) {
    float *out = s.out + r * dp, *part = s.part + r * dp;
    for (int d = 0; d < dp; d += 16)
      store(out + d, load<f32x16>(out + d) * keep[r] + (load<f32x16>(part + d) - s.shift[r]) * add[r]);
  }
}

// Dot product of a query with the keys' center over n features, in order.
QC_INLINE float dot(const float* q, const float* center, int n) {
  f32x16 sum{};
  int i = 0;
  for (; i + 16 <= n; i += 16) sum += load<f32x16>(q + i) * load<f32x16>(center + i);
  float x = reduce_add(sum);
  for (; i < n; ++i) x += q[i] * center[i];
  return x;
}

// 1 / (sum + e^(sink - top)), the normalization of results relative to `top`; 0 where the sink outweighs everything.
QC_INLINE float inverse_with_sink(float top, float sum, float sink) {
  const float over = sink - top;
  return over > 80.0f ? 0.0f : 1.0f / (sum + vexp(splat(over))[0]);
}

// Products on AMX tiles, where available.
#if defined(QC_AMX)
#include "attention_amx.h"
#else
struct TileShape {
  explicit TileShape(int) {}
};
constexpr size_t tile_operand_bytes(int) { return 0; }
template <KvFormat F>
void split_queries(AttentionScratch&, int rows, int dp, float scale);
template <KvFormat F, class Blocks>
void attend_on_tiles(const AttentionArgs&, const Blocks&, AttentionScratch&, int rows, int dp, int page, int last_page,
                     int last);
#endif
constexpr size_t attention_scratch_bytes(int dp) {
  return sizeof(float) * (size_t)(3 * kTileRows * dp + kTileRows * kPage) + (size_t)(2 * kTileRows * dp) +
         tile_operand_bytes(dp);
}

// Attends to one page for the tile's rows, the last of which is at position `last`, and merges the result.
template <KvFormat F>
QC_INLINE void attend_block(const AttentionArgs& a, const KvBlock& block, AttentionScratch& s, int rows, int dp, int page,
                            int last) {
  const int limit = last - page * kPage + 1 < kPage ? last - page * kPage + 1 : kPage;
  score_page<F>(block, s, rows, dp, limit);
  const bool all = page * kPage + kPage - 1 <= s.position[0] && s.first[rows - 1] <= page * kPage;
  if (all) softmax_page<F, false>(a, block, s, rows, page * kPage);
  else softmax_page<F, true>(a, block, s, rows, page * kPage, (limit + 15) / 16);
  value_page<F>(block, s, rows, dp, limit);
  merge_page(s, rows, dp);
}
// The same for pages `page` .. `last_page`; blocks(page) gives a page's block.
template <KvFormat F, class Blocks>
QC_INLINE void attend_pages(const AttentionArgs& a, const Blocks& blocks, AttentionScratch& s, int rows, int dp, int page,
                            int last_page, int last) {
  if constexpr (on_tiles(F))
    if (s.by_tiles) return attend_on_tiles<F>(a, blocks, s, rows, dp, page, last_page, last);
  for (; page <= last_page; ++page) attend_block<F>(a, blocks(page), s, rows, dp, page, last);
}

// Hierarchical caches (attention_hier.h): one page, quantized or not; and all rows of a sequence, appending to the
// cache.
template <KvFormat F>
void attend_hier_page(const AttentionArgs&, const KvLayer<F>&, AttentionScratch&, int sequence, int head, int rows, int page,
                      int last);
template <KvFormat F>
void attend_sequence(const AttentionArgs&, const KvLayer<F>&, void* memory, int sequence, int head);

// Query rows first .. first + rows - 1 of one sequence and kv head; row = token * group + head in group.
template <KvFormat F>
QC_NOINLINE void attend_tile(const AttentionArgs& a, const KvLayer<F>& kv, void* memory,
                                                  int sequence, int head, int first, int rows) {
  const int d = kv.head_dim, dp = kv_padded(F, d), group = a.heads / kv.kv_heads;
  AttentionScratch s(memory, dp);
  const int token0 = a.query_start[sequence];
  for (int r = 0; r < rows; ++r) {
    const int t = token0 + (first + r) / group, h = head * group + (first + r) % group;
    float* q = s.q + r * dp;
    memcpy(q, a.q + (int64_t)t * a.q_stride + a.q_offset + h * d, sizeof(float) * (size_t)d);
    memset(q + d, 0, sizeof(float) * (size_t)(dp - d));
    f32x16 sum{};
    for (int i = 0; i < dp; i += 16) sum += load<f32x16>(q + i);
    s.q_sum[r] = reduce_add(sum);
    s.center_dot[r] = a.center ? dot(q, a.center + head * d, d) * a.scale : 0.0f;
    s.position[r] = a.positions[t];
    s.first[r] = first_visible(a, s.position[r]);
    s.bias[r] = a.key_bias ? a.key_bias + (int64_t)h * a.key_bias_stride : nullptr;
  }
  constexpr KvFormat pages = F >= kKvHier ? kKv16 : F;
  s.by_tiles = uses_tiles_for(pages, group);
  if constexpr (on_tiles(pages))
    if (s.by_tiles) split_queries<F>(s, rows, dp, a.scale);
  for (int r = 0; r < kTileRows; ++r) s.run_max[r] = s.page_max[r] = -__builtin_inff(), s.run_sum[r] = 0.0f;
  memset(s.out, 0, sizeof(float) * (size_t)(rows * dp));

  const int last = s.position[rows - 1];
  const int start = s.first[0];
  if constexpr (F >= kKvHier) {
    for (int page = start / kPage; page <= last / kPage; ++page)
      attend_hier_page<F>(a, kv, s, sequence, head, rows, page, last);
  } else {
    const auto blocks = [&](int page) { return kv.block(sequence, page, head); };
    attend_pages<F>(a, blocks, s, rows, dp, start / kPage, last / kPage, last);
  }

  const int out_stride = gemm_kp(a.heads * d);
  for (int r = 0; r < rows; ++r) {
    const int t = token0 + (first + r) / group, h = head * group + (first + r) % group;
    float* to = a.out + (int64_t)t * out_stride + h * d;
    const float less = a.softcap > 0 ? 0.0f : s.center_dot[r];  // missing from these scores
    const float inverse =
        a.sinks ? inverse_with_sink(s.run_max[r], s.run_sum[r], a.sinks[h] - less) : 1.0f / s.run_sum[r];
    for (int i = 0; i < d; ++i) to[i] = s.out[r * dp + i] * inverse;
    if (h == a.heads - 1)
      memset(to + d, 0, sizeof(float) * (size_t)(out_stride - a.heads * d));
  }
}

// The same for values that are features of the keys (attention_latent.h), of the only kv head.
template <KvFormat F>
void attend_latent_tile(const AttentionArgs&, const KvLayer<F>&, void* memory, int sequence, int first, int rows);
template <KvFormat F>
QC_INLINE void attend_rows(const AttentionArgs& a, const KvLayer<F>& kv, void* memory, int sequence, int head, int first,
                           int rows) {
  if constexpr (is_latent(F)) attend_latent_tile<F>(a, kv, memory, sequence, first, rows);
  else attend_tile<F>(a, kv, memory, sequence, head, first, rows);
}

// The most query rows that any sequence has for one kv head.
QC_INLINE int max_rows(const AttentionArgs& a, int group) {
  int most = 1;
  for (int s = 0; s < a.sequences; ++s) {
    const int rows = (a.query_start[s + 1] - a.query_start[s]) * group;
    most = rows > most ? rows : most;
  }
  return most;
}

// Attention of kv heads heads.begin .. heads.end - 1, for every sequence, by this thread.
template <KvFormat F>
QC_NOINLINE void attention(const AttentionArgs& a, const KvLayer<F>& kv, Range heads,
                                                void* memory) {
  const int group = a.heads / kv.kv_heads;
  const int tile = tile_height(F, group);
  const TileShape shape(max_rows(a, group));
  for (int h = heads.begin; h < heads.end; ++h)
    for (int s = 0; s < a.sequences; ++s) {
      const int rows = (a.query_start[s + 1] - a.query_start[s]) * group;
      if constexpr (F >= kKvHier) attend_sequence<F>(a, kv, memory, s, h);
      else for (int first = 0; first < rows; first += tile)
        attend_rows<F>(a, kv, memory, s, h, first, rows - first < tile ? rows - first : tile);
    }
}

// Rows per tile such that each of `threads` threads gets a tile: small tiles pay off although pages are loaded
// repeatedly.
QC_INLINE int tile_rows(const AttentionArgs& a, int kv_heads, int threads, int most) {
  for (int tile = most;; tile = (tile + 1) / 2) {
    int tiles = 0;
    for (int s = 0; s < a.sequences; ++s)
      tiles += kv_heads * (((a.query_start[s + 1] - a.query_start[s]) * (a.heads / kv_heads) + tile - 1) / tile);
    if (tiles >= threads || tile == 1) return tile;
  }
}

// The same for latents. The time of a tile is about proportional to its rows, so tiles are as equal as possible, and
// their number is a multiple of the number of threads.
QC_INLINE int latent_tile_rows(const AttentionArgs& a, int threads, int most) {
  const int rows = max_rows(a, a.heads), waves = (rows + threads * most - 1) / (threads * most);
  return ((rows + threads * waves - 1) / (threads * waves) + 7) / 8 * 8;
}

// The same for all kv heads, with tiles assigned dynamically; `next` is the shared task counter.
template <KvFormat F>
QC_NOINLINE void attention_tasks(const AttentionArgs& a, const KvLayer<F>& kv, uint32_t* next, const Worker& w) {
  const int group = a.heads / kv.kv_heads;
  const int most = tile_height(F, group);
  const int tile = F >= kKvHier   ? 1 << 30
                   : is_latent(F) ? latent_tile_rows(a, w.threads, most)
                                  : tile_rows(a, kv.kv_heads, w.threads, most);
  const TileShape shape(max_rows(a, group));
  uint32_t at = 0, task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
  for (int s = 0; s < a.sequences; ++s) {
    const int rows = (a.query_start[s + 1] - a.query_start[s]) * group;
    if (rows == 0) continue;
    for (int first = (rows - 1) / tile * tile; first >= 0; first -= tile)  // longest tiles first
      for (int h = 0; h < kv.kv_heads; ++h, ++at) {
        if (at != task) continue;
        if constexpr (F >= kKvHier) attend_sequence<F>(a, kv, w.scratch, s, h);
        else attend_rows<F>(a, kv, w.scratch, s, h, first, rows - first < tile ? rows - first : tile);
        task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      }
  }
}
