// kv.h: the paged KV cache. Arena [page][layer][kv head]; layers may differ in heads and head size. Each block holds K,
// then V, of 64 positions:
//
//   kv32  K f32 [Dp][64], V f32 [64][Dp]             (Dp = head_dim rounded up to 16; to 32 for kv4)
//   kv16  the same in bf16
//   kv8   K u8 [Dp][64],  V u8 [64][Dp], then f32 [64] each: K scale, K zero, V scale, V zero
//   kv4   K u8 [Dp/2][64], V u8 [64][Dp/2], low nibble d, high nibble d + Dp/2; then as kv8
//
//   hier  see attention_hier.h
//
//   latent32 to latent4: values are features of the keys (attention_latent.h), so K is as above and there is no V. With 8
//   and 4 bits, a scale [64] and a zero [64] follow for each kLatentGroup features of K.
//
// K is [dim][position], so that the scores of 64 positions are vertical sums over dim, in order. kv8 and kv4 are
// asymmetric per position and head: value = (code - zero) * scale; the range always includes 0.
#pragma once
#include "rowops.h"

enum KvFormat { kLatent32 = -4, kLatent16, kLatent8, kLatent4, kKv32, kKv16, kKv8, kKv4, kKvHier, kKvHier4 };  // kKvHier4: kKvHier, upper nibbles only
constexpr int kPage = 64;
constexpr int kHierGroup = 128;              // positions with keys that share scales
constexpr int kRingPages = 3 * kHierGroup / kPage;  // kKvHier: pages in the ring, two table entries each

constexpr int kLatentGroup = 64;             // features of a latent that share a scale

constexpr bool is_latent(KvFormat f) { return f < kKv32; }
constexpr int kv_padded(KvFormat f, int head_dim) {
  return f >= kKv4 || f == kLatent4 ? (head_dim + 31) / 32 * 32 : (head_dim + 15) / 16 * 16;
}
constexpr int64_t kv_part_bytes(KvFormat f, int head_dim) {  // K or V, without scales and zeros
  const int64_t n = (int64_t)kPage * kv_padded(f, head_dim);
  if (is_latent(f)) return f == kLatent32 ? 4 * n : f == kLatent16 ? 2 * n : f == kLatent4 ? n / 2 : n;
  return f == kKv32 ? 4 * n : f == kKv16 ? 2 * n : f == kKv4 ? n / 2 : n;
}
constexpr int64_t kv_block_bytes(KvFormat f, int head_dim) {
  const int64_t groups = f < kLatent8 ? 0 : (kv_padded(f, head_dim) + kLatentGroup - 1) / kLatentGroup;
  if (is_latent(f)) return kv_part_bytes(f, head_dim) + groups * 2 * kPage * (int64_t)sizeof(float);
  const int64_t parameters = f >= kKvHier ? 2 * kPage + kv_padded(f, head_dim) : f >= kKv8 ? 4 * kPage : 0;
  return 2 * kv_part_bytes(f, head_dim) + parameters * (int64_t)sizeof(float);
}
// Block table entries that a sequence of `positions` positions needs.
constexpr int kv_entries(KvFormat f, int positions) {
  const int pages = (positions + kPage - 1) / kPage;
  if (f < kKvHier) return pages;
  if (positions <= 2 * kHierGroup) return 2 * pages;
  return 2 * kRingPages + ((positions - 1) / kHierGroup - 1) * (kHierGroup / kPage);
}

struct KvBlock {  // one (layer, page, kv head)
  char* k;
  char* v;
  float* parameters;  // K scale [64], K zero [64], V scale [64], V zero [64]
};

template <KvFormat F>
struct KvLayer {
  char* base;                  // first block of the layer in the first page
  int64_t page_bytes;          // of all layers
  const int32_t* block_table;  // [sequences][block_stride]
  int block_stride, kv_heads, head_dim;

  char* at(int sequence, int entry, int head) const {
    const int64_t page = block_table[(int64_t)sequence * block_stride + entry];
    return base + page * page_bytes + head * kv_block_bytes(F, head_dim);
  }
  KvBlock block(int sequence, int page, int head) const {
    char* p = at(sequence, page, head);
    const int64_t part = kv_part_bytes(F, head_dim);
    if (is_latent(F)) return {p, nullptr, (float*)(p + part)};
    return {p, p + part, (float*)(p + 2 * part)};
  }
};

struct KvPlace {   // a layer's part of each page
  int heads, head_dim;
  int64_t offset;  // bytes of all layers before it
};
template <int N>
constexpr int64_t kv_page_bytes(KvFormat f, const KvPlace (&layers)[N]) {  // of all layers
  int64_t bytes = 0;
  for (const KvPlace& at : layers) bytes += at.heads * kv_block_bytes(f, at.head_dim);
  return bytes;
}

// Quantizes one head of K or V at one position. x: [dp], zero-padded; `levels` is 255 or 15.
QC_INLINE void kv_quantize(const float* x, int dp, float levels, uint8_t* codes, float* scale, float* zero) {
  f32x16 low{}, high{};
  for (int d = 0; d < dp; d += 16) {
    const f32x16 v = load<f32x16>(x + d);
    low = vmin(v, low);
    high = vmax(v, high);
  }
  const float lo = -reduce_max(-low), hi = reduce_max(high);
  float step = (hi - lo) / levels;
  if (!(step > 1e-37f)) step = 1.0f;
  const float z = __builtin_rintf(-lo / step);
  for (int d = 0; d < dp; d += 16) {
    const f32x16 q = round_even(load<f32x16>(x + d) / step) + z;
    store(codes + d, __builtin_convertvector(round_to_i32(vmin(vmax(q, splat(0.0f)), splat(levels))), u8x16));
  }
  *scale = step;
  *zero = z;
}

// Writes a latent key k ([dp], zero-padded), which is a value too, into slot `slot` of a block.
template <KvFormat F>
QC_INLINE void latent_append(const KvBlock& block, int slot, const float* k, int dp) {
  if constexpr (F == kLatent32) {
    for (int d = 0; d < dp; ++d) ((float*)block.k)[d * kPage + slot] = k[d];
  } else if constexpr (F == kLatent16) {
    uint16_t row[1024];
    for (int d = 0; d < dp; d += 16) store(row + d, f32_to_bf16(load<f32x16>(k + d)));
    for (int d = 0; d < dp; ++d) ((uint16_t*)block.k)[d * kPage + slot] = row[d];
  } else {
    uint8_t row[1024], *to = (uint8_t*)block.k + slot;
    for (int d = 0; d < dp; d += kLatentGroup) {
      float* p = block.parameters + d / kLatentGroup * 2 * kPage + slot;
      const int n = dp - d < kLatentGroup ? dp - d : kLatentGroup;
      kv_quantize(k + d, n, F == kLatent8 ? 255.0f : 15.0f, row + d, p, p + kPage);
    }
    if (F == kLatent8)
      for (int d = 0; d < dp; ++d) to[d * kPage] = row[d];
    else
      for (int d = 0; d < dp / 2; ++d) to[d * kPage] = (uint8_t)(row[d] | row[d + dp / 2] << 4);
  }
}

// Writes one head's k and v ([dp], zero-padded) into slot `slot` of its block.
template <KvFormat F>
QC_INLINE void kv_append(const KvBlock& block, int slot, const float* k, const float* v, int dp) {
  if constexpr (is_latent(F)) {
    latent_append<F>(block, slot, k, dp);
  } else if constexpr (F == kKv32) {
    float* to = (float*)block.k + slot;
    for (int d = 0; d < dp; ++d) to[d * kPage] = k[d];
    memcpy((float*)block.v + slot * dp, v, (size_t)dp * sizeof(float));
  } else if constexpr (F == kKv16) {
    uint16_t row[1024];
    for (int d = 0; d < dp; d += 16) store(row + d, f32_to_bf16(load<f32x16>(k + d)));
    uint16_t* to = (uint16_t*)block.k + slot;
    for (int d = 0; d < dp; ++d) to[d * kPage] = row[d];
    for (int d = 0; d < dp; d += 16)
      store((uint16_t*)block.v + slot * dp + d, f32_to_bf16(load<f32x16>(v + d)));
  } else {
    constexpr float levels = F == kKv8 ? 255.0f : 15.0f;
    uint8_t row[1024];
    uint8_t *to = (uint8_t*)block.k + slot, *to_v = (uint8_t*)block.v;
    float* p = block.parameters + slot;
    kv_quantize(k, dp, levels, row, p, p + kPage);
    if (F == kKv8)
      for (int d = 0; d < dp; ++d) to[d * kPage] = row[d];
    else
      for (int d = 0; d < dp / 2; ++d) to[d * kPage] = (uint8_t)(row[d] | row[d + dp / 2] << 4);
    kv_quantize(v, dp, levels, row, p + 2 * kPage, p + 3 * kPage);
    if (F == kKv8)
      memcpy(to_v + slot * dp, row, (size_t)dp);
    else
      for (int d = 0; d < dp / 2; ++d)
        to_v[slot * (dp / 2) + d] = (uint8_t)(row[d] | row[d + dp / 2] << 4);
  }
}
