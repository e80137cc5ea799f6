// gemm_trellis.h: w2/w3/w4_trellis_g128 weights with bfloat16 activations, y = sum_g s_g sum(v x) over groups of 128
// inputs, with values v of states (qcompile/formats/trellis_code.py) and bfloat16 scales s_g (role group_scale,
// [nb][groups][16]). A sum within a group is one chain of multiply-adds in the order of inputs; products are exact in
// float. Included only by models that have such weights.
#pragma once

constexpr int kStateMask = 4095, kStateFactor = 2095692331, kStateAddend = (int)3164817360u, kStateCenter = 510;

// trellis_open<K>: lane i holds the bits of row i of all four blocks of a sequence of one input, from its lowest bit on,
// and those after them. i_window<S>: (lane >> S) & mask. i_bytes: sum of the bytes of a lane, less the center.
#if defined(QC_ISA_PORTABLE)
template <int K>
QC_INLINE I16 trellis_open(const uint8_t* bits) {
  u32x16 lanes;
  for (int i = 0; i < 16; ++i) {
    const int at = i * K / 2;
    uint32_t v = 0;
    for (int j = 0; j < 4; ++j) v |= (uint32_t)bits[(at + j) % (8 * K)] << (8 * j);
    lanes[i] = v >> (i * K % 2 * 4);
  }
  return (I16)lanes;
}
template <int S>
QC_INLINE I16 i_window(I16 v) { return (I16)((u32x16)v >> S) & kStateMask; }
QC_INLINE I16 i_bytes(I16 v) {
  const u32x16 u = (u32x16)v;
  return (I16)((u & 255) + (u >> 8 & 255) + (u >> 16 & 255) + (u >> 24)) - kStateCenter;
}
#else
// Where a 128-bit part of the lanes finds its bits: dwords of the column, and bytes of those for each lane.
template <int K>
struct alignas(64) TrellisPlaces {
  int32_t dwords[16] = {}, shifts[16] = {};
  uint8_t bytes[64] = {};
  constexpr TrellisPlaces() {
    for (int part = 0; part < 4; ++part) {
      const int first = part * 4 * K / 2 / 4;
      for (int d = 0; d < 4; ++d) dwords[part * 4 + d] = (first + d) % (2 * K);
      for (int lane = part * 4; lane < part * 4 + 4; ++lane) {
        for (int j = 0; j < 4; ++j) bytes[lane * 4 + j] = (uint8_t)(lane * K / 2 - first * 4 + j);
        shifts[lane] = lane * K % 2 * 4;
      }
    }
  }
};
template <int K>
constexpr TrellisPlaces<K> kTrellisPlaces{};
#if defined(QC_ISA_AVX512)
template <int K>
QC_INLINE I16 trellis_open(const uint8_t* bits) {
  const TrellisPlaces<K>& to = kTrellisPlaces<K>;
  const __m512i column = _mm512_castsi256_si512(_mm256_maskz_loadu_epi32((__mmask8)((1 << 2 * K) - 1), bits));
  const __m512i parts = _mm512_permutexvar_epi32(_mm512_load_si512(to.dwords), column);
  const __m512i lanes = _mm512_shuffle_epi8(parts, _mm512_load_si512(to.bytes));
  return K == 3 ? _mm512_srlv_epi32(lanes, _mm512_load_si512(to.shifts)) : lanes;
}
template <int S>
QC_INLINE I16 i_window(I16 v) {
  return _mm512_and_si512(S ? _mm512_srli_epi32(v, S) : v, _mm512_set1_epi32(kStateMask));
}
QC_INLINE I16 i_bytes(I16 v) { return _mm512_dpbusd_epi32(_mm512_set1_epi32(-kStateCenter), v, _mm512_set1_epi8(1)); }
#else
template <int K>
QC_INLINE I16 trellis_open(const uint8_t* bits) {
  const TrellisPlaces<K>& to = kTrellisPlaces<K>;
  const __m256i mask = _mm256_setr_epi32(-1, -1, -1, -1, -(K > 2), -(K > 2), -(K > 3), -(K > 3));
  const __m256i column = _mm256_maskload_epi32((const int*)bits, mask);
  I16 lanes;
  QC_UNROLL for (int h = 0; h < 2; ++h) {
    const __m256i parts = _mm256_permutevar8x32_epi32(column, _mm256_load_si256((const __m256i*)to.dwords + h));
    const __m256i half = _mm256_shuffle_epi8(parts, _mm256_load_si256((const __m256i*)to.bytes + h));
    (h ? lanes.b : lanes.a) = K == 3 ? _mm256_srlv_epi32(half, _mm256_load_si256((const __m256i*)to.shifts + h)) : half;
  }
  return lanes;
}
template <int S>
QC_INLINE I16 i_window(I16 v) {
  const __m256i mask = _mm256_set1_epi32(kStateMask);
  return {_mm256_and_si256(_mm256_srli_epi32(v.a, S), mask), _mm256_and_si256(_mm256_srli_epi32(v.b, S), mask)};
}
QC_INLINE __m256i bytes_ymm(__m256i v) {
  const __m256i pairs = _mm256_maddubs_epi16(v, _mm256_set1_epi8(1));
  return _mm256_sub_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(kStateCenter));
}
QC_INLINE I16 i_bytes(I16 v) { return {bytes_ymm(v.a), bytes_ymm(v.b)}; }
#endif
#endif

// The values of 16 rows of one input, of block `Block` of the four of a sequence.
template <int K, int Block>
QC_INLINE F16 trellis_values(I16 open) {
  return f_from_i(i_bytes(i_add(i_mul(i_window<K * Block>(open), i_set(kStateFactor)), i_set(kStateAddend))));
}

template <int K>
struct TrellisBf16 {
  using X = const uint16_t*;
  using Tile = FloatTile<float>;
  static constexpr int kTile = kSmallTile, kStreamFrom = kNever, kPanelFrom = kSmallTile + 1, kPanelLeast = kTile;
  static constexpr int kBytes = 8 * K;  // of a sequence of one input
  static size_t tile_bytes(int kp, int count) { return sizeof(float) * kp * count; }
  static size_t panel_bytes(int kp) { return (size_t)kp * 2 * 64; }
  static void copy(float* to, const uint16_t* from) {
    for (int i = 0; i < 32; ++i) to[i] = bf16_to_f32(from[i]);
  }
  template <TileKind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<float, uint16_t, copy>(gemm_kp(g.k), x, first, count, mem);
  }
  static const uint8_t* codes(const Gemm& g, int block) {
    return (const uint8_t*)g.codes + (int64_t)(block / 4) * gemm_kp(g.k) * kBytes;
  }
  static F16 scale(const Gemm& g, int block, int group) {
    const int groups = (gemm_kp(g.k) + 127) / 128;
    alignas(64) float s[16];
    store(s, bf16_to_f32(load<u16x16>((const uint16_t*)g.group_scale + ((int64_t)block * groups + group) * 16)));
    return f_load(s);
  }
  // Values of B blocks from the block `Block` of a sequence on, or from a panel [input][B][16].
  template <int Block, int B, bool Panel>
  QC_INLINE void values(F16 (&v)[B], const uint8_t* codes, const float* panel) {
    if constexpr (Panel) {
      QC_UNROLL for (int b = 0; b < B; ++b) v[b] = f_load(panel + b * 16);
    } else {
      const I16 open = trellis_open<K>(codes);
      v[0] = trellis_values<K, Block>(open);
      if constexpr (B == 2) v[1] = trellis_values<K, Block + 1>(open);
    }
  }
  template <int Block, int B, bool Panel, int M>
  static void blocks_by_tokens(const Gemm& g, int first, const float* panel, const float* x, float* out) {
    const uint8_t* bits = codes(g, first);
    int left = gemm_kp(g.k);
    F16 acc[B * M];
    QC_UNROLL for (int i = 0; i < B * M; ++i) acc[i] = f_set(0.0f);
    for (int group = 0; left > 0; ++group, left -= 128) {
      F16 part[B * M];
      QC_UNROLL for (int i = 0; i < B * M; ++i) part[i] = f_set(0.0f);
      for (int c = (left < 128 ? left : 128) / 32; c; --c, x += M * 32)
        for (int j = 0; j < 32; ++j, bits += kBytes, panel += B * 16) {
          F16 v[B];
          values<Block, B, Panel>(v, bits, panel);
          QC_UNROLL for (int b = 0; b < B; ++b)
            QC_UNROLL for (int m = 0; m < M; ++m) part[b * M + m] = f_dot(part[b * M + m], v[b], x + m * 32 + j);
        }
      QC_UNROLL for (int b = 0; b < B; ++b) {
        const F16 s = scale(g, first + b, group);
        QC_UNROLL for (int m = 0; m < M; ++m) acc[b * M + m] = f_fma(part[b * M + m], s, acc[b * M + m]);
      }
    }
    QC_UNROLL for (int b = 0; b < B; ++b)
      QC_UNROLL for (int m = 0; m < M; ++m) f_store(out + (b * kBufferRows + m) * 16, acc[b * M + m]);
  }
  template <int Block, int M>
  static void unit_at(const Gemm& g, int first, int blocks, const Tile& x, float* out) {
    if constexpr (2 * M <= kSmallTile)
      if (blocks == 2) return blocks_by_tokens<Block, 2, false, M>(g, first, nullptr, x.x, out);
    blocks_by_tokens<Block, 1, false, M>(g, first, nullptr, x.x, out);
    if (blocks == 2) blocks_by_tokens<Block + 1, 1, false, M>(g, first + 1, nullptr, x.x, out + kBufferRows * 16);
  }
  template <int M>
  static void unit(const Gemm& g, int first, int blocks, const Tile& x, float* out) {
    if (first % 4) unit_at<2, M>(g, first, blocks, x, out);
    else unit_at<0, M>(g, first, blocks, x, out);
  }
  template <int Block>
  static void unpack_at(const Gemm& g, int first, int blocks, float* panel) {
    const uint8_t* bits = codes(g, first);
    const int kp = gemm_kp(g.k);
    for (int k = 0; k < kp; ++k, bits += kBytes) {
      F16 v[2];
      values<Block, 2, false>(v, bits, nullptr);
      for (int b = 0; b < blocks; ++b) f_store(panel + ((int64_t)b * kp + k) * 16, v[b]);
    }
  }
  static void unpack(const Gemm& g, int first, int blocks, char* panel) {
    if (first % 4) unpack_at<2>(g, first, blocks, (float*)panel);
    else unpack_at<0>(g, first, blocks, (float*)panel);
  }
  static void panel_unit(const Gemm& g, int first, int blocks, char* panel, const Tile& x, const TilePass&,
                         float* out) {
    const int64_t one = (int64_t)gemm_kp(g.k) * 16;
    for (int b = 0; b < blocks; ++b)
      blocks_by_tokens<0, 1, true, kTile>(g, first + b, (const float*)panel + b * one, x.x, out + b * kBufferRows * 16);
  }
};

inline void gemm_w2_trellis_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) {
  run_gemm<TrellisBf16<2>>(g, x, w);
}
inline void gemm_w3_trellis_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) {
  run_gemm<TrellisBf16<3>>(g, x, w);
}
inline void gemm_w4_trellis_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) {
  run_gemm<TrellisBf16<4>>(g, x, w);
}
