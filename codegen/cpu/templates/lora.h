// lora.h: what adapters add to linears, y += B (A x), where each row has the adapter of its sequence, or none.
//
// The host writes the LoraTable into a weight of the model. A sequence's adapter is that of its first KV page, as a
// page holds what one adapter computed. A row's bits depend on its own x and its adapter alone: every dot product adds
// its terms in the order of inputs, every output in that of ranks, whatever rows share the step.
#pragma once
#include "abi.h"
#include "rowops.h"

struct LoraBlock {         // of 16 outputs
  int32_t first, count;    // the ranks that change them
  int64_t at;              // factors of b, from which on theirs lie: [count][16]
};
struct LoraSite {          // an adapter's factors in one linear; float or bfloat16, as the linear's activations are
  const void* a;           // [ranks][kp], zeros from k on
  const void* b;           // scale included
  const LoraBlock* blocks; // [outputs / 16, rounded up]
  int64_t ranks;           // a multiple of 4, padded with zeros; 0: the adapter leaves this linear as it is
};
struct LoraTable {         // zeros: there are no adapters
  const int32_t* adapter;  // [KV pages] 0: none
  const LoraSite* sites;   // [adapters][count], adapter 1 first
  int64_t count;
};

constexpr int kLoraRows = 4;  // rows of one adapter that are computed together

// The adapter's factors of sequence s in linear `site`; null if it has none there, or no rows.
QC_INLINE const LoraSite* lora_site(const LoraTable& table, int site, const qc_batch& b, int s) {
  if (b.query_start[s] == b.query_start[s + 1]) return nullptr;
  const int32_t adapter = table.adapter[b.block_table[(int64_t)s * b.block_stride]];
  if (!adapter) return nullptr;
  const LoraSite* entry = table.sites + (adapter - 1) * table.count + site;
  return entry->ranks ? entry : nullptr;
}

// Whether any row of the step has an adapter in linear `site`.
QC_INLINE bool lora_active(const LoraTable& table, int site, const qc_batch& b) {
  for (int s = 0; table.adapter && s < b.sequences; ++s)
    if (lora_site(table, site, b, s)) return true;
  return false;
}

struct LoraRows {
  const LoraSite* site;
  int count, row[kLoraRows];
};

// Calls f(group) for the rows `rows` that have an adapter in linear `site`, in groups of one adapter.
template <class F>
QC_INLINE void each_group(const LoraTable& table, int site, const qc_batch& b, Range rows, const F& f) {
  LoraRows group{};
  for (int s = 0; s < b.sequences; ++s) {
    const int begin = b.query_start[s] > rows.begin ? b.query_start[s] : rows.begin;
    const int end = b.query_start[s + 1] < rows.end ? b.query_start[s + 1] : rows.end;
    const LoraSite* entry = begin < end ? lora_site(table, site, b, s) : nullptr;
    for (int row = begin; entry && row < end; ++row) {
      if (group.count && (group.count == kLoraRows || group.site != entry)) f(group), group.count = 0;
      group.site = entry;
      group.row[group.count++] = row;
    }
  }
  if (group.count) f(group);
}

// Row t of activations as floats: in place, or in `space` [kp].
QC_INLINE const float* lora_row(const float* x, int t, int kp, float*) { return x + (int64_t)t * kp; }
QC_INLINE const float* lora_row(const uint16_t* x, int t, int kp, float* space) {
  for (int i = 0; i < kp; i += 16) store(space + i, bf16_to_f32(load<u16x16>(x + (int64_t)t * kp + i)));
  return space;
}
QC_INLINE const float* lora_row(const Q8Rows& x, int t, int kp, float* space) {
  const float* scale = x.scale + (int64_t)t * x.scales;
  for (int i = 0; i < kp; i += 16) {
    const i8x16 codes = load<i8x16>(x.q + (int64_t)t * kp + i);
    store(space + i, __builtin_convertvector(codes, f32x16) * scale[i / x.kind.scale_group]);
  }
  return space;
}

QC_INLINE F16 lora_factors(const float* p) { return f_load(p); }
QC_INLINE F16 lora_factors(const uint16_t* p) { return widen_bf16(p); }

// t[m][j] = sum over k of a[j][k] x[m][k], for M rows.
template <int M, class T>
QC_NOINLINE void lora_dots(const LoraSite& site, const float* const* x, int kp, float* const* t) {
  for (int j = 0; j < site.ranks; j += 4) {
    const T* a = (const T*)site.a + (int64_t)j * kp;
    F16 sum[M][4];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < 4; ++i) sum[m][i] = f_set(0.0f);
    for (int k = 0; k < kp; k += 16)
      for (int i = 0; i < 4; ++i) {
        const F16 w = lora_factors(a + (int64_t)i * kp + k);
        for (int m = 0; m < M; ++m) sum[m][i] = f_fma(w, f_load(x[m] + k), sum[m][i]);
      }
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < 4; ++i) t[m][j + i] = reduce_add(bitcast<f32x16>(sum[m][i]));
  }
}

// y[m][i] += sum over j of b[i][j] t[m][j], for M rows and the outputs of 16-column blocks.
template <int M, class T>
QC_NOINLINE void lora_columns(const LoraSite& site, Range blocks, const float* const* t, float* const* y) {
  for (int i = blocks.begin; i < blocks.end; ++i) {
    const LoraBlock& block = site.blocks[i];
    const T* b = (const T*)site.b + block.at;
    if (!block.count) continue;
    F16 sum[M];
    for (int m = 0; m < M; ++m) sum[m] = f_set(0.0f);
    for (int j = 0; j < block.count; ++j) {
      const F16 w = lora_factors(b + (int64_t)j * 16);
      for (int m = 0; m < M; ++m) sum[m] = f_fma(w, f_set(t[m][block.first + j]), sum[m]);
    }
    for (int m = 0; m < M; ++m) f_store(y[m] + i * 16, f_add(f_load(y[m] + i * 16), sum[m]));
  }
}

// Calls f with the number of rows as a constant.
template <class F>
QC_INLINE void with_rows(int count, const F& f) {
  static_assert(kLoraRows == 4, "one case for each number of rows");
  if (count == 1) f(std::integral_constant<int, 1>());
  if (count == 2) f(std::integral_constant<int, 2>());
  if (count == 3) f(std::integral_constant<int, 3>());
  if (count == 4) f(std::integral_constant<int, 4>());
}

// t[row] = A x[row] for the rows `rows` that have an adapter in linear `site`. T: the type of factors.
template <class T, class X>
static void lora_shrink(const LoraTable& table, int site, const qc_batch& b, Range rows, const X& x, int k,
                        const Worker& w, float* t, int stride) {
  const int kp = gemm_kp(k);
  each_group(table, site, b, rows, [&](const LoraRows& group) {
    const float* from[kLoraRows];
    float* to[kLoraRows];
    for (int m = 0; m < group.count; ++m) {
      from[m] = lora_row(x, group.row[m], kp, (float*)w.scratch + (int64_t)m * kp);
      to[m] = t + (int64_t)group.row[m] * stride;
    }
    with_rows(group.count, [&](auto m) { lora_dots<decltype(m)::value, T>(*group.site, from, kp, to); });
  });
}

// y[row] += B t[row] for all rows that have an adapter in linear `site`; the 16-column blocks `blocks` of y.
template <class T>
static void lora_expand(const LoraTable& table, int site, const qc_batch& b, Range blocks, const float* t, int t_stride,
                        float* y, int y_stride) {
  each_group(table, site, b, {0, b.tokens}, [&](const LoraRows& group) {
    const float* from[kLoraRows];
    float* to[kLoraRows];
    for (int m = 0; m < group.count; ++m) {
      from[m] = t + (int64_t)group.row[m] * t_stride;
      to[m] = y + (int64_t)group.row[m] * y_stride;
    }
    with_rows(group.count, [&](auto m) { lora_columns<decltype(m)::value, T>(*group.site, blocks, from, to); });
  });
}

// out[t] = act(gate) * up, where gate and up are alternate 16-column blocks of a row of x. The bits are those of GEMMs
// with a gate, which add an offset of 0 to up (that makes -0 a 0).
template <UnaryKind kind>
QC_NOINLINE void gate_rows(Range rows, const float* x, int stride, int width, float* out) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float* to = out + (int64_t)t * kp;
    for (int i = 0; i < width; i += 16) {
      const f32x16 y = unary(kind, load<f32x16>(from + 2 * i)) * (load<f32x16>(from + 2 * i + 16) + 0.0f);
      store(to + i, width - i < 16 ? select(kLanes < width - i, y, f32x16{}) : y);
    }
    for (int i = (width + 15) / 16 * 16; i < kp; i += 16) store(to + i, f32x16{});
  }
}
