// rope.h: rotary position embedding, and appending k and v to the cache.
#pragma once
#include "hadamard.h"
#include "kv.h"

typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

// cos and sin of 8 float angles, each within one unit in the last place of float for |angle| < 2^30. The angle is
// reduced by multiples of pi/2 in double (Cody and Waite: pi/2 in two parts, the first of 33 bits, so its product with
// the multiple is exact), then Taylor series on [-pi/4, pi/4].
QC_INLINE void sincos8(f32x8 angle, f32x8* cosine, f32x8* sine) {
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const f64x8 a = __builtin_convertvector(angle, f64x8);
  const f64x8 shifted = a * 0.63661977236758138 + magic;
  const i64x8 quadrant = bitcast<i64x8>(shifted);
  const f64x8 n = shifted - magic;
  const f64x8 r = (a - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
  const f64x8 z = r * r;
  f64x8 s = z * (1.0 / 6227020800.0) - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = s * z * r + r;
  f64x8 c = z * (1.0 / 479001600.0) - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = c * z + 1.0;
  const i64x8 swap = -(quadrant & 1), flip_sin = (quadrant & 2) << 62, flip_cos = ((quadrant + 1) & 2) << 62;
  const i64x8 si = bitcast<i64x8>(s), ci = bitcast<i64x8>(c);
  *sine = __builtin_convertvector(bitcast<f64x8>(((ci & swap) | (si & ~swap)) ^ flip_sin), f32x8);
  *cosine = __builtin_convertvector(bitcast<f64x8>(((si & swap) | (ci & ~swap)) ^ flip_cos), f32x8);
}

constexpr int rope_stride(int rotary_dim) { return 2 * ((rotary_dim / 2 + 7) / 8 * 8); }

// table[t] = cos of each frequency, then sin, both times `scaling`; [tokens][rope_stride(rotary_dim)]. The angle is
// float(position) * inv_freq in float, as in training.
QC_NOINLINE void rope_table(Range rows, const int32_t* positions, const float* inv_freq,
                                                 int rotary_dim, float scaling, float* table) {
  const int half = rotary_dim / 2, padded = rope_stride(rotary_dim) / 2;
  for (int t = rows.begin; t < rows.end; ++t) {
    float* to = table + (int64_t)t * 2 * padded;
    for (int i = 0; i < half; i += 8) {
      f32x8 c, s;
      sincos8(load<f32x8>(inv_freq + i) * (float)positions[t], &c, &s);
      store(to + i, c * scaling);
      store(to + padded + i, s * scaling);
    }
  }
}

struct RopeArgs {
  const float* table;  // from rope_table; null: no rotation
  int rotary_dim;
  bool interleaved;    // pairs (2i, 2i + 1) rather than (i, i + rotary_dim / 2)
  int block = 0;                  // > 0: then multiplies q and k by a Hadamard matrix in blocks of this size
  const float* center = nullptr;  // [kv_heads * head_dim] subtracted from k before that, or null
  const float* query_table = nullptr;   // [positions] factor of q by its position, applied before that, or null
  const float* query_weight = nullptr;  // [head_dim] factor of q by feature, applied likewise, or null
};

QC_INLINE void rotate(const RopeArgs& rope, int t, float* __restrict__ x) {
  if (!rope.table) return;
  const int half = rope.rotary_dim / 2, stride = rope_stride(rope.rotary_dim);
  const float* __restrict__ c = rope.table + (int64_t)t * stride;
  const float* __restrict__ s = c + stride / 2;
  if (rope.interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * c[i] - b * s[i];
      x[2 * i + 1] = b * c[i] + a * s[i];
    }
    return;
  }
  float* __restrict__ y = x + half;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = y[i];
    x[i] = a * c[i] - b * s[i];
    y[i] = b * c[i] + a * s[i];
  }
}

// Multiplies q [d] by its position's factor and by the feature weights, where given.
QC_INLINE void scale_query(const RopeArgs& rope, int d, int position, float* q) {
  if (rope.query_table) {
    const float factor = rope.query_table[position];
    for (int i = 0; i < d; ++i) q[i] *= factor;
  }
  if (rope.query_weight)
    for (int i = 0; i < d; ++i) q[i] *= rope.query_weight[i];
}

// Subtracts `center` from x [d] unless null, then applies the blockwise Hadamard transform, if any.
QC_INLINE void center_and_transform(const RopeArgs& rope, int d, const float* center, float* x) {
  if (center)
    for (int i = 0; i < d; ++i) x[i] -= center[i];
  if (!rope.block) return;
  float from[1024];
  memcpy(from, x, sizeof(float) * (size_t)d);
  for (int i = 0; i < d; i += rope.block) hadamard_block<1>(from + i, rope.block, nullptr, x + i);
}

struct RopeHeads {
  float* x;                           // [tokens][stride]
  int stride, offset, heads, head_dim;
  RopeArgs rope;                      // center: [heads * head_dim]
  const int32_t* positions;           // [tokens]
};

// Changes heads of x in place as rope_append changes those of q, and subtracts the center.
QC_NOINLINE void rope_heads(const RopeHeads& a, Range tokens) {
  const int d = a.head_dim;
  for (int t = tokens.begin; t < tokens.end; ++t)
    for (int h = 0; h < a.heads; ++h) {
      float* x = a.x + (int64_t)t * a.stride + a.offset + h * d;
      rotate(a.rope, t, x);
      scale_query(a.rope, d, a.positions[t], x);
      center_and_transform(a.rope, d, a.rope.center ? a.rope.center + h * d : nullptr, x);
    }
}

struct RopeAppend {
  float* qkv;                         // [tokens][stride]
  int stride, q_offset, k_offset, v_offset, heads;
  RopeArgs rope;
  const int32_t* positions;           // [tokens]
  const int32_t* query_start;         // [sequences + 1]
};

// Rotates q in place and writes rotated k and v to the cache, for kv heads `heads` of tokens `tokens` (and the query
// heads that share them).
template <KvFormat F>
QC_NOINLINE void rope_append(const RopeAppend& a, const KvLayer<F>& kv, Range heads,
                                                  Range tokens) {
  const int d = kv.head_dim, dp = kv_padded(F, d), group = a.heads / kv.kv_heads;
  alignas(64) float k[1024], v[1024];
  memset(k, 0, sizeof(float) * (size_t)dp);
  memset(v, 0, sizeof(float) * (size_t)dp);
  for (int h = heads.begin; h < heads.end; ++h) {
    int sequence = 0;
    for (int t = tokens.begin; t < tokens.end; ++t) {
      while (a.query_start[sequence + 1] <= t) ++sequence;
      float* row = a.qkv + (int64_t)t * a.stride;
      const float* center = a.rope.center ? a.rope.center + h * d : nullptr;
      for (int g = 0; g < group; ++g) {
        float* q = row + a.q_offset + (h * group + g) * d;
        rotate(a.rope, t, q);
        scale_query(a.rope, d, a.positions[t], q);
        center_and_transform(a.rope, d, nullptr, q);
      }
      if constexpr (F >= kKvHier) {  // attention appends to these caches, group by group
        rotate(a.rope, t, row + a.k_offset + h * d);
        center_and_transform(a.rope, d, center, row + a.k_offset + h * d);
        continue;
      }
      memcpy(k, row + a.k_offset + h * d, sizeof(float) * (size_t)d);
      memcpy(v, row + a.v_offset + h * d, sizeof(float) * (size_t)d);
      rotate(a.rope, t, k);
      center_and_transform(a.rope, d, center, k);
      const int p = a.positions[t];
      if constexpr (F < kKvHier) kv_append<F>(kv.block(sequence, p / kPage, h), p % kPage, k, v, dp);
    }
  }
}
