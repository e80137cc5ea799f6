// experts.h: mixture of experts. Router scores choose k experts per token; each expert's weights are read once for all
// tokens that chose it.
//
// Exactness. Every result row depends on its own token alone: experts are chosen per token, an expert's rows go through
// the GEMM, which computes each row by itself, and a token's slots are summed in the order of its choice.
//
// Expert indices are int32 [tokens][stride], stored in a float buffer. The slots of a value are adjacent:
// [tokens][k * width].
#pragma once
#include "gemm.h"
#include "rowops.h"

// ---- routers: few scores (E) per token, so plain loops ------------------------------------------------------

// x -> softmax(x)
QC_NOINLINE void softmax_rows(Range rows, const float* x, int stride, int width, float* out) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float *to = out + (int64_t)t * kp, top = from[0], sum = 0.0f;
    for (int i = 1; i < width; ++i) top = from[i] > top ? from[i] : top;
    for (int i = 0; i < width; ++i) to[i] = vexp(splat(from[i] - top))[0], sum += to[i];
    for (int i = 0; i < width; ++i) to[i] /= sum;
    for (int i = width; i < kp; ++i) to[i] = 0.0f;
  }
}

// Indices of the k largest elements of each row in descending order; on ties the lower index comes first.
QC_NOINLINE void top_k(Range rows, const float* x, int stride, int width, int k, float* out) {
  const int kp = gemm_kp(k);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    int32_t* to = (int32_t*)(out + (int64_t)t * kp);
    for (int n = 0; n < k; ++n) {
      int best = -1;
      for (int i = 0; i < width; ++i) {
        bool taken = false;
        for (int j = 0; j < n; ++j) taken |= to[j] == i;
        if (!taken && (best < 0 || from[i] > from[best])) best = i;
      }
      to[n] = best;
    }
    for (int n = k; n < kp; ++n) to[n] = 0;
  }
}

// Chooses every expert, in their order.
QC_NOINLINE void every_expert(Range rows, int experts, float* out) {
  const int kp = gemm_kp(experts);
  for (int t = rows.begin; t < rows.end; ++t) {
    int32_t* to = (int32_t*)(out + (int64_t)t * kp);
    for (int n = 0; n < kp; ++n) to[n] = n < experts ? n : 0;
  }
}

// Indices with `last` in place of those above it.
QC_NOINLINE void bound_choice(Range rows, const float* index, int k, int last, float* out) {
  const int kp = gemm_kp(k);
  for (int t = rows.begin; t < rows.end; ++t) {
    const int32_t* from = (const int32_t*)(index + (int64_t)t * kp);
    int32_t* to = (int32_t*)(out + (int64_t)t * kp);
    for (int n = 0; n < kp; ++n) to[n] = from[n] < last ? from[n] : last;
  }
}

// out[t][n] = 1 / sum of exp(x[t][i] - m), m = x[t][index[t][n]], over i that no earlier n has chosen, unless
// (m - x[t][i]) / max(|x[t][i]|, m) is more than the tolerance.
QC_NOINLINE void near_share(Range rows, const float* x, int stride, int width, const float* index, int k,
                            float tolerance, float* out) {
  const int kp = gemm_kp(k);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    const int32_t* which = (const int32_t*)(index + (int64_t)t * kp);
    float* to = out + (int64_t)t * kp;
    for (int n = 0; n < k; ++n) {
      const float best = from[which[n]];
      float sum = 0.0f;
      for (int i = 0; i < width; ++i) {
        bool taken = false;
        for (int j = 0; j < n; ++j) taken |= which[j] == i;
        const float size = from[i] < 0.0f ? -from[i] : from[i], divisor = size > best ? size : best;
        if (!taken && !((best - from[i]) / divisor > tolerance)) sum += vexp(splat(from[i] - best))[0];
      }
      to[n] = 1.0f / sum;
    }
    for (int n = k; n < kp; ++n) to[n] = 0.0f;
  }
}

// out[t][n] = x[t][index[t][n]]; all rows may read one x, with stride 0
QC_NOINLINE void pick(Range rows, const float* x, int stride, const float* index, int k, float* out) {
  const int kp = gemm_kp(k);
  for (int t = rows.begin; t < rows.end; ++t) {
    const int32_t* which = (const int32_t*)(index + (int64_t)t * kp);
    float* to = out + (int64_t)t * kp;
    for (int n = 0; n < k; ++n) to[n] = x[(int64_t)t * stride + which[n]];
    for (int n = k; n < kp; ++n) to[n] = 0.0f;
  }
}

// x -> x / max(sum(x) + eps, floor)
QC_NOINLINE void normalize(Range rows, const float* x, int stride, int width, float eps, float floor, float* out) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float *to = out + (int64_t)t * kp, sum = 0.0f;
    for (int i = 0; i < width; ++i) sum += from[i];
    sum += eps;
    if (sum < floor) sum = floor;
    for (int i = 0; i < width; ++i) to[i] = from[i] / sum;
    for (int i = width; i < kp; ++i) to[i] = 0.0f;
  }
}

// Splits the scores into `groups` equal runs and keeps the `keep` best runs, ranked by their best score (count 1) or by
// the sum of their two best. All other scores become minus infinity.
QC_NOINLINE void limit_groups(Range rows, const float* x, int stride, int width, int groups, int keep, int count,
                              float* out) {
  const int kp = gemm_kp(width), run = width / groups;
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    float* to = out + (int64_t)t * kp;
    for (int g = 0; g < groups; ++g) {
      int better = 0;
      auto score = [&](int group) {
        float first = -__builtin_inff(), second = first;
        for (int i = group * run; i < (group + 1) * run; ++i) {
          if (from[i] > first) second = first, first = from[i];
          else if (from[i] > second) second = from[i];
        }
        return count == 1 ? first : first + second;
      };
      const float own = score(g);
      for (int other = 0; other < groups; ++other)
        if (other != g && (score(other) > own || (score(other) == own && other < g))) ++better;
      for (int i = g * run; i < (g + 1) * run; ++i) to[i] = better < keep ? from[i] : -__builtin_inff();
    }
    for (int i = width; i < kp; ++i) to[i] = 0.0f;
  }
}

// out[t] = sum over slots of y[t][slot] * scores[t][slot]; a plain sum without scores.
QC_NOINLINE void combine(Range rows, const float* y, int stride, int slots, int width, const float* scores, float* out) {
  const int kp = gemm_kp(width), score_stride = gemm_kp(slots);
  for (int t = rows.begin; t < rows.end; ++t) {
    float* to = out + (int64_t)t * kp;
    for (int i = 0; i < kp; ++i) to[i] = 0.0f;
    for (int n = 0; n < slots; ++n) {
      const float* from = y + (int64_t)t * stride + n * width;
      const float factor = scores ? scores[(int64_t)t * score_stride + n] : 1.0f;
      for (int i = 0; i < width; ++i) to[i] += from[i] * factor;
    }
  }
}

// ---- experts ------------------------------------------------------------------------------------------------

constexpr int kExpertRows = 32;  // rows gathered per expert GEMM call

struct Experts {
  int tokens, slots, experts;
  const float* x;          // [tokens][x_stride]: one input per token (x_slot 0), or one per slot, x_slot floats apart
  int x_stride, x_slot;
  const float* index;      // [tokens][gemm_kp(slots)] int32
  Gemm gemm;               // of expert 0; m, out and out_stride are set per call
  int64_t codes, scale, zero, group_scale, exponent, low, bias;  // stride between experts, in elements (codes: bytes)
  float* out;              // [tokens][out_stride], slots adjacent
  int64_t out_stride;
};

// Bytes of scratch for one chunk: the gathered rows in any activation format, their results, and one row.
constexpr size_t expert_scratch_bytes(int kp, int np) {
  return np ? sizeof(float) * ((size_t)kExpertRows * (2 * kp + np) + kp + 64) + 256 : 0;
}

// The gathered rows in the format the GEMM reads, built in thread-local memory.
QC_INLINE const float* expert_rows(float*, char* memory, int, Q8Kind) { return (const float*)memory; }
QC_INLINE const uint16_t* expert_rows(uint16_t*, char* memory, int, Q8Kind) { return (const uint16_t*)memory; }
QC_INLINE Q8Rows expert_rows(Q8Rows*, char* memory, int kp, Q8Kind how) {
  const int groups = (kp + how.group - 1) / how.group, scales = (kp + how.scale_group - 1) / how.scale_group;
  float* scale = (float*)(memory + (size_t)kExpertRows * kp);
  return {(int8_t*)memory, scale, (int32_t*)(scale + kExpertRows * scales), how, groups, scales};
}
QC_INLINE void put_expert(const float* out, int row, const float* from, int k) { put((float*)out, row, from, k); }
QC_INLINE void put_expert(const uint16_t* out, int row, const float* from, int k) { put((uint16_t*)out, row, from, k); }
QC_INLINE void put_expert(const Q8Rows& out, int row, const float* from, int k) { put(out, row, from, k); }

// One chunk of rows that chose `expert`, for this thread's share of the output columns.
template <class Rows, class Run>
static void expert_chunk(const Experts& e, int expert, const int* pairs, int count, Q8Kind how, const Worker& w,
                         char* memory, const Run& run) {
  const bool gated = e.gemm.epilogue == kGated;
  const int width = gated ? e.gemm.n / 2 : e.gemm.n;  // columns per slot
  const int k = e.gemm.k, kp = gemm_kp(k), np = (width + 15) / 16 * 16;
  float* row = (float*)memory;
  float* result = row + kp;
  auto rows = expert_rows((Rows*)nullptr, (char*)(result + kExpertRows * np), kp, how);
  for (int i = 0; i < count; ++i) {
    const int t = pairs[i] / e.slots, slot = pairs[i] % e.slots;
    memcpy(row, e.x + (int64_t)t * e.x_stride + slot * e.x_slot, sizeof(float) * (size_t)k);
    memset(row + k, 0, sizeof(float) * (size_t)(kp - k));
    put_expert(rows, i, row, k);
  }
  Gemm g = e.gemm;
  g.m = count;
  g.codes = (const char*)g.codes + expert * e.codes;
  if (g.scale) g.scale += expert * e.scale;
  if (g.zero) g.zero += expert * e.zero;
  if (g.group_scale) g.group_scale += expert * e.group_scale;
  if (g.exponent) g.exponent += expert * e.exponent;
  if (g.low) g.low += expert * e.low;
  if (g.bias) g.bias += expert * e.bias;
  g.out = result;
  g.out_stride = np;
  run(g, rows, w);
  const int units = gated ? np / 16 : (np / 16 + 1) / 2, each = gated ? 16 : 32;  // the column split run_gemm uses
  const int begin = (int)((int64_t)units * w.tid / w.threads) * each;
  int end = (int)((int64_t)units * (w.tid + 1) / w.threads) * each;
  end = end < width ? end : width;
  for (int i = 0; i < count && begin < end; ++i) {
    float* to = e.out + (pairs[i] / e.slots) * e.out_stride + (pairs[i] % e.slots) * width;
    memcpy(to + begin, result + i * np + begin, sizeof(float) * (size_t)(end - begin));
  }
}

// y[t][slot] = weight[index[t][slot]] x. Rows: the GEMM's activation type (float, uint16_t or Q8Rows); `how`:
// quantization.
template <class Rows, class Run>
QC_NOINLINE void expert_gemm(const Experts& e, Q8Kind how, const Worker& w, char* memory, const Run& run) {
  const int index_stride = gemm_kp(e.slots);
  for (int expert = 0; expert < e.experts; ++expert) {
    int pairs[kExpertRows], count = 0;
    for (int t = 0; t < e.tokens; ++t) {
      const int32_t* chosen = (const int32_t*)(e.index + (int64_t)t * index_stride);
      // A token chooses an expert once at most, but the last one (bound_choice); where it chooses all in their order, at
      // once.
      const bool last = expert == e.experts - 1;
      for (int slot = !last && expert < e.slots && chosen[expert] == expert ? expert : 0; slot < e.slots; ++slot) {
        if (chosen[slot] != expert) continue;
        pairs[count++] = t * e.slots + slot;
        if (count == kExpertRows) {
          expert_chunk<Rows>(e, expert, pairs, count, how, w, memory, run);
          count = 0;
        }
        if (!last) break;
      }
    }
    if (count) expert_chunk<Rows>(e, expert, pairs, count, how, w, memory, run);
  }
}
