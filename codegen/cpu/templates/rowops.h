// rowops.h: operators that treat each row (token) independently: embed, norm, quantize, take_rows.
//
// Activations are rows of gemm_kp(width) elements. The elements past `width` are zero, and every function here keeps
// them zero. A function processes the rows of its Range, so the caller decides the split over threads.
#pragma once
#include "lanes.h"

struct Range {
  int begin, end;
};

// This thread's contiguous share of `n` items.
QC_INLINE Range share(int n, const Worker& w) {
  return {(int)((int64_t)n * w.tid / w.threads), (int)((int64_t)n * (w.tid + 1) / w.threads)};
}

QC_INLINE int32_t reduce_add(i32x16 v) {
  int32_t t[16], sum = 0;
  store(t, v);
  for (int i = 0; i < 16; ++i) sum += t[i];
  return sum;
}

struct Q8Kind {
  int group, scale_group;  // inputs per code sum and per scale; one is a multiple of the other
  float top, last_top;     // the largest magnitude over the scale, and that in a row's last scale group
  float clip;              // codes are clipped to this magnitude; 0: none is larger than it may be
};
struct Q8Rows {    // int8 rows with scales and code sums
  int8_t* q;       // [rows][kp]
  float* scale;    // [rows][scales]
  int32_t* sums;   // [rows][groups]
  Q8Kind kind;
  int groups, scales;
  operator Q8Act() const { return {q, scale, sums, groups, scales}; }
};

// Prefetches a few rows that other cores have just written all at once, instead of missing on each in turn.
QC_INLINE void prefetch_rows(Range rows, const float* x, int kp) {
  if (rows.end - rows.begin > 16) return;
  for (int64_t i = (int64_t)rows.begin * kp; i < (int64_t)rows.end * kp; i += 16) __builtin_prefetch(x + i, 0, 3);
}

// put(out, t, row, width): stores one zero-padded float row in the format of `out`.

QC_INLINE void put(float* out, int t, const float* row, int width) {
  const int kp = gemm_kp(width);
  memcpy(out + (int64_t)t * kp, row, (size_t)kp * sizeof(float));
}

QC_INLINE void put(uint16_t* out, int t, const float* row, int width) {
  const int kp = gemm_kp(width);
  for (int i = 0; i < kp; i += 16) store(out + (int64_t)t * kp + i, f32_to_bf16(load<f32x16>(row + i)));
}

// get(x, t, row, width): the elements of a stored row as floats, without the padding.

QC_INLINE void get(const float* x, int t, float* row, int width) {
  memcpy(row, x + (int64_t)t * gemm_kp(width), (size_t)width * sizeof(float));
}

QC_INLINE void get(const uint16_t* x, int t, float* row, int width) {
  for (int i = 0; i < width; ++i) {
    const uint32_t bits = (uint32_t)x[(int64_t)t * gemm_kp(width) + i] << 16;
    memcpy(row + i, &bits, sizeof bits);
  }
}

QC_INLINE void get(const Q8Rows& x, int t, float* row, int width) {
  for (int i = 0; i < width; ++i)
    row[i] = x.q[(int64_t)t * gemm_kp(width) + i] * x.scale[(int64_t)t * x.scales + i / x.kind.scale_group];
}

template <class Rows>
QC_INLINE void get_rows(Range rows, const Rows& x, int width, float* out) {
  for (int t = rows.begin; t < rows.end; ++t) get(x, t, out + (int64_t)t * width, width);
}

// Scale of elements begin .. end - 1: max |row| / top (1 where all are zero).
QC_INLINE float scale_of(const float* row, int begin, int end, float top) {
  f32x16 top0{}, top1{};
  for (int i = begin; i < end; i += 32) {
    top0 = vmax(vabs(load<f32x16>(row + i)), top0);
    top1 = vmax(vabs(load<f32x16>(row + i + 16)), top1);
  }
  const float scale = reduce_max(vmax(top0, top1)) / top;
  return scale > 1e-37f ? scale : 1.0f;  // keeps 1 / scale finite
}

// q = round(row / scale), half to even, clipped where the kind says so, one scale group at a time: groups scales.begin ..
// scales.end - 1 of the row.
QC_INLINE void put_scales(const Q8Rows& out, int t, Range scales, const float* row, int kp) {
  const int step = out.kind.scale_group;
  int8_t* q = out.q + (int64_t)t * kp;
  const f32x16 clip = splat(out.kind.clip);
  int32_t* sums = out.sums + (int64_t)t * out.groups + (scales.begin ? scales.begin * (step / out.kind.group) : 0);
  for (int s = scales.begin; s < scales.end; ++s) {
    const int last = s + 1 < out.scales ? (s + 1) * step : kp;
    const float scale = scale_of(row, s * step, last, s + 1 < out.scales ? out.kind.top : out.kind.last_top);
    const float inverse = 1.0f / scale;
    for (int begin = s * step; begin < last; begin += out.kind.group) {
      i32x16 sum{};
      const int end = begin + out.kind.group < last ? begin + out.kind.group : last;
      for (int i = begin; i < end; i += 16) {
        const f32x16 x = load<f32x16>(row + i) * inverse;
        const i32x16 code = round_to_i32(out.kind.clip > 0 ? vmin(vmax(x, -clip), clip) : x);
        sum += code;
        store(q + i, __builtin_convertvector(code, i8x16));
      }
      *sums++ = reduce_add(sum);
    }
    out.scale[(int64_t)t * out.scales + s] = scale;
  }
}

QC_INLINE void put(const Q8Rows& out, int t, const float* row, int width) {
  put_scales(out, t, {0, out.scales}, row, gemm_kp(width));
}

// Columns of a row, whole scale groups or cache lines.
QC_INLINE void put_columns(const Q8Rows& out, int t, Range columns, const float* row, int kp) {
  const int step = out.kind.scale_group;
  put_scales(out, t, {columns.begin / step, columns.end / step}, row, kp);
}
QC_INLINE void put_columns(uint16_t* out, int t, Range columns, const float* row, int kp) {
  for (int i = columns.begin; i < columns.end; i += 16)
    store(out + (int64_t)t * kp + i, f32_to_bf16(load<f32x16>(row + i)));
}

// out[t] = table[ids[t]] * factor.   table: [vocab][width]
QC_INLINE f32x16 widen(const float* p) { return load<f32x16>(p); }
QC_INLINE f32x16 widen(const uint16_t* p) { return bf16_to_f32(load<u16x16>(p)); }
QC_INLINE f32x16 widen(const Half* p) { return f16_to_f32(load<u16x16>((const uint16_t*)p)); }
QC_INLINE float widen1(float x) { return x; }
QC_INLINE float widen1(uint16_t x) { return bf16_to_f32(x); }
QC_INLINE float widen1(Half x) { return f16_to_f32(u16x16{} + x.bits)[0]; }

template <class T>
QC_NOINLINE void embed(Range rows, const int32_t* ids, const T* table, int width,
                                            float factor, float* out) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const T* from = table + (int64_t)ids[t] * width;
    float* to = out + (int64_t)t * kp;
    int i = 0;
    for (; i + 16 <= width; i += 16) store(to + i, widen(from + i) * factor);
    for (; i < width; ++i) to[i] = widen1(from[i]) * factor;
    for (; i < kp; ++i) to[i] = 0.0f;
  }
}

// The same for a table packed as the weight of a w8_sym_channel gemm: [vocab / 16][kp / 4][16 rows][4], code + 128.
QC_NOINLINE void embed(Range rows, const int32_t* ids, const uint8_t* codes, const float* row_scale, int width,
                       float factor, float* out) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t) {
    const int64_t id = ids[t];
    const uint8_t* from = codes + (id / 16) * 16 * kp + id % 16 * 4;
    const float scale = row_scale[id];
    float* to = out + (int64_t)t * kp;
    for (int i = 0; i < kp; i += 4, from += 64)  // codes past `width` stand for 0
      for (int j = 0; j < 4; ++j) to[i + j] = ((int)from[j] - 128) * scale * factor;
  }
}

// out[t] = given[t] * factor where given[t] is not null, in place of a token's row.   given: [tokens] or null, each [width]
QC_NOINLINE void embed_given(Range rows, const float* const* given, int width, float factor, float* out) {
  for (int t = rows.begin; given && t < rows.end; ++t)
    for (int i = 0; given[t] && i < width; ++i) out[(int64_t)t * gemm_kp(width) + i] = given[t][i] * factor;
}

// out[t] = given[t], rows of `width` floats without padding.
QC_NOINLINE void read_features(Range rows, const float* given, int width, float* out) {
  for (int t = rows.begin; t < rows.end; ++t) {
    memcpy(out + (int64_t)t * gemm_kp(width), given + (int64_t)t * width, (size_t)width * sizeof(float));
    memset(out + (int64_t)t * gemm_kp(width) + width, 0, (size_t)(gemm_kp(width) - width) * sizeof(float));
  }
}

enum NormKind { kRms, kLayer };

// out[t] = (x[t] - mean) / sqrt(variance + eps) * weight + bias; kRms: mean is taken as 0. x: [tokens][stride], zero
// past `width` unless `part` (other values follow there).
template <NormKind kind, class Out>
QC_NOINLINE void norm(Range rows, const float* x, int stride, bool part, int width, const float* weight,
                                           const float* bias, float eps, const Worker& w, Out out) {
  const int kp = gemm_kp(width);
  float* row = (float*)w.scratch;
  prefetch_rows(rows, x, stride);
  for (int t = rows.begin; t < rows.end; ++t) {
    const float* from = x + (int64_t)t * stride;
    if (part) {
      for (int i = 0; i < kp; ++i) row[i] = i < width ? from[i] : 0.0f;
      from = row;
    }
    if (kind == kLayer) {
      f32x16 sum0{}, sum1{};
      for (int i = 0; i < kp; i += 32) sum0 += load<f32x16>(from + i), sum1 += load<f32x16>(from + i + 16);
      const float mean = reduce_add(sum0 + sum1) / (float)width;
      for (int i = 0; i < kp; i += 16) store(row + i, load<f32x16>(from + i) - mean);
      for (int i = width; i < kp; ++i) row[i] = 0.0f;
      from = row;
    }
    f32x16 sum0{}, sum1{};
    for (int i = 0; i < kp; i += 32) {
      f32x16 a = load<f32x16>(from + i), b = load<f32x16>(from + i + 16);
      sum0 += a * a, sum1 += b * b;
    }
    const float inverse = 1.0f / __builtin_sqrtf(reduce_add(sum0 + sum1) / (float)width + eps);
    int i = 0;
    for (; i + 16 <= width; i += 16) {
      f32x16 v = load<f32x16>(from + i) * inverse;
      if (weight) v *= load<f32x16>(weight + i);
      if (bias) v += load<f32x16>(bias + i);
      store(row + i, v);
    }
    for (; i < width; ++i) {
      float v = from[i] * inverse;
      if (weight) v *= weight[i];
      if (bias) v += bias[i];
      row[i] = v;
    }
    for (; i < kp; ++i) row[i] = 0.0f;
    put(out, t, row, width);
  }
}

// Normalizes `heads` blocks of `width` columns of x, from column `offset` on, each in place. x: [tokens][stride]
template <NormKind kind>
QC_NOINLINE void norm_heads(Range rows, float* x, int stride, int offset, int heads, int width, const float* weight,
                            const float* bias, int step, float eps) {
  for (int t = rows.begin; t < rows.end; ++t)
    for (int h = 0; h < heads; ++h) {
      const float *w = weight ? weight + h * step : nullptr, *b = bias ? bias + h * step : nullptr;
      float* row = x + (int64_t)t * stride + offset + h * width;
      float mean = 0.0f, square = 0.0f;
      for (int i = 0; kind == kLayer && i < width; ++i) mean += row[i];
      mean /= (float)width;
      for (int i = 0; i < width; ++i) square += (row[i] - mean) * (row[i] - mean);
      const float inverse = 1.0f / __builtin_sqrtf(square / (float)width + eps);
      for (int i = 0; i < width; ++i)
        row[i] = (row[i] - mean) * inverse * (w ? w[i] : 1.0f) + (b ? b[i] : 0.0f);
    }
}

struct GatherSource {
  const float* x;
  int stride, width;
};

// out[t][i] = column index[i] of the concatenated sources; zero where the index is negative.
template <int count>
QC_NOINLINE void gather(Range rows, const GatherSource (&sources)[count], const int32_t* index, int width, float* out) {
  const int kp = gemm_kp(width);
  for (int i = 0; i < kp;) {  // copies runs of consecutive columns at once
    int at = i < width ? index[i] : -1, run = 1, n = 0;
    while (at >= 0 && at >= sources[n].width) at -= sources[n++].width;
    if (at >= 0)
      while (i + run < width && at + run < sources[n].width && index[i + run] == index[i] + run) ++run;
    for (int t = rows.begin; t < rows.end; ++t) {
      float* to = out + (int64_t)t * kp + i;
      if (at < 0) *to = 0.0f;
      else memcpy(to, sources[n].x + (int64_t)t * sources[n].stride + at, (size_t)run * sizeof(float));
    }
    i += run;
  }
}

// out[t] = x[t] in the format of out: quantized with scales, or bf16.
template <class Out>
QC_NOINLINE void quantize(Range rows, const float* x, int width, Out out) {
  prefetch_rows(rows, x, gemm_kp(width));
  for (int t = rows.begin; t < rows.end; ++t) put(out, t, x + (int64_t)t * gemm_kp(width), width);
}

// The same for a range of columns of `rows` rows, run by the thread that produced them.
template <class Out>
QC_NOINLINE void quantize_share(int rows, Range columns, const float* x, int width, Out out) {
  for (int t = 0; t < rows; ++t) put_columns(out, t, columns, x + (int64_t)t * gemm_kp(width), gemm_kp(width));
}

// out[r] = x[index[r]]
QC_NOINLINE void take_rows(Range rows, const int32_t* index, const float* x, int width,
                                                float* out) {
  for (int r = rows.begin; r < rows.end; ++r) put(out, r, x + (int64_t)index[r] * gemm_kp(width), width);
}

// Zeroes the padding of rows written by a GEMM, which writes only its own columns.
QC_NOINLINE void pad_rows(Range rows, float* x, int width) {
  const int kp = gemm_kp(width);
  for (int t = rows.begin; t < rows.end; ++t)
    memset(x + (int64_t)t * kp + width, 0, (size_t)(kp - width) * sizeof(float));
}

// out[r] = x[r], rows of `stride` floats, without padding.
QC_NOINLINE void copy_rows(Range rows, const float* x, int stride, int width, float* out) {
  for (int r = rows.begin; r < rows.end; ++r)
    memcpy(out + (int64_t)r * width, x + (int64_t)r * stride, (size_t)width * sizeof(float));
}
