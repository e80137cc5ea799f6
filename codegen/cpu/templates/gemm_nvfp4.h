// gemm_nvfp4.h: nvfp4 weights, y = xs / t sum_g s_g sum(c x) over groups of 16 inputs, with E2M1 elements c, E4M3
// scales s_g (role group_scale, [nb][ceil(k / 16)][16]) and the tensor's scale t (role scale, the same for each row).
// Included only by models that have such weights.
#pragma once

struct Nvfp4Block {
  const uint8_t* codes;
  const uint8_t* scales;  // [groups][16]
  int groups;             // ceil(k / 16); inputs after the last group are zero
  Nvfp4Block(const Gemm& g, int block) : groups((g.k + 15) / 16) {
    const int64_t chunks = gemm_kp(g.k) / 32;
    codes = (const uint8_t*)g.codes + block * chunks * 256;
    scales = g.group_scale + (int64_t)block * groups * 16;
  }
  // The scales of 16 rows, times `factor`. The bits of E4M3 in a float's fields are 2^120 times too small.
  __attribute__((always_inline)) f32x16 scale(int group, float factor) const {
    i32x16 bits;
    for (int r = 0; r < 16; ++r) bits[r] = (int32_t)scales[group * 16 + r] << 20;
    return ((f32x16)bits * 0x1p120f) * factor;
  }
};

QC_INLINE F16 nv_vector(f32x16 v) {
  alignas(64) float out[16];
  store(out, v);
  return f_load(out);
}

// int8 activations. Sums are exact in int32 within a group; float operations run in the order of groups.
template <bool X128>
struct Nvfp4 {
  using X = Q8Act;
  using Tile = IntTile;
  static constexpr int kTile = kSmallTile, kStreamFrom = kNever, kPanelFrom = kNever, kPanelLeast = kTile;
  static size_t tile_bytes(int kp, int count) { return ((size_t)kp + kp / 16 * 4 + (kp + 127) / 128 * 4) * count + 256; }
  static size_t panel_bytes(int) { return 0; }
  template <TileKind>
  static IntTile prepare(const Gemm& g, const Q8Act& q, int first, int count, char*& mem) {
    const int kp = gemm_kp(g.k), groups = kp / 16;
    int32_t* start = (int32_t*)mem;
    mem += (groups * count * 4 + 63) / 64 * 64;
    float* scale = (float*)mem;
    mem += (q.scales * count * 4 + 63) / 64 * 64;
    int8_t* x = (int8_t*)mem;
    mem += (int64_t)kp * count;
    for (int m = 0; m < count; ++m) {
      const int8_t* from = q.q + (int64_t)(first + m) * kp;
      for (int i = 0; i < groups; ++i) {
        int32_t sum = 0;
        for (int j = 0; j < 16; ++j) sum += from[i * 16 + j];
        start[i * count + m] = -kMxOffset * sum;
      }
      for (int s = 0; s < q.scales; ++s) scale[s * count + m] = q.scale[(int64_t)(first + m) * q.scales + s];
      for (int c = 0; c < kp / 32; ++c) memcpy(x + ((int64_t)c * count + m) * 32, from + c * 32, 32);
    }
    return {x, start, scale};
  }
  template <int M>
  static void unit(const Gemm& g, int block, int blocks, const IntTile& t, float* out) {
    const float unit = 1.0f / g.scale[0];
    for (int b = 0; b < blocks; ++b) {
      const Nvfp4Block w(g, block + b);
      F16 acc[M];
      QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_set(0.0f);
      for (int i = 0; i < w.groups; ++i) {
        const uint8_t* lines = w.codes + i * 128;
        const int8_t* x = t.x + (int64_t)(i / 2) * M * 32 + i % 2 * 16;
        I16 part[M];
        QC_UNROLL for (int m = 0; m < M; ++m) part[m] = i_set(t.start[i * M + m]);
        QC_UNROLL for (int s = 0; s < 4; ++s) {
          const B64 v = MxCodes::operand(b_load(lines + s / 2 * 64), s % 2, {});
          QC_UNROLL for (int m = 0; m < M; ++m) part[m] = MxCodes::dot<false>(part[m], v, x + m * 32 + s * 4);
        }
        const f32x16 scale = w.scale(i, 0.5f);  // elements are doubled
        QC_UNROLL for (int m = 0; m < M; ++m)
          acc[m] = f_fma(f_from_i(part[m]), nv_vector(X128 ? scale * t.scale[i / 8 * M + m] : scale), acc[m]);
      }
      QC_UNROLL for (int m = 0; m < M; ++m)
        f_store(out + (b * kBufferRows + m) * 16, f_mul(acc[m], f_set(X128 ? unit : unit * t.scale[m])));
    }
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm&, int, int, char*, const IntTile&, const TilePass&, float*) {}
};

// bfloat16 activations: weights are unpacked to floats, exactly, and each output is one chain of multiply-adds.
struct Nvfp4Bf16 {
  using X = const uint16_t*;
  using Tile = FloatTile<float>;
  static constexpr int kTile = kSmallTile, kStreamFrom = kNever, kPanelFrom = kNever, kPanelLeast = kTile;
  static size_t tile_bytes(int kp, int count) { return sizeof(float) * kp * count; }
  static size_t panel_bytes(int) { return 0; }
  static void copy(float* to, const uint16_t* from) {
    for (int i = 0; i < 32; i += 16) store(to + i, bf16_to_f32(load<u16x16>(from + i)));
  }
  template <TileKind>
  static Tile prepare(const Gemm& g, X x, int first, int count, char*& mem) {
    return prepare_float<float, uint16_t, copy>(gemm_kp(g.k), x, first, count, mem);
  }
  template <int M>
  static void unit(const Gemm& g, int block, int blocks, const Tile& t, float* out) {
    const float unit = 1.0f / g.scale[0];
    for (int b = 0; b < blocks; ++b) {
      const Nvfp4Block w(g, block + b);
      F16 acc[M];
      QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_set(0.0f);
      for (int i = 0; i < w.groups; ++i) {
        const f32x16 scale = w.scale(i, 1.0f);
        const float* x = t.x + (int64_t)(i / 2) * M * 32 + i % 2 * 16;
        for (int l = 0; l < 2; ++l) {
          const i32x16 line = load<i32x16>(w.codes + i * 128 + l * 64);
          for (int j = 0; j < 8; ++j) {  // input j of eight: nibble j / 4 of byte j % 4
            const i32x16 code = line >> (j % 4 * 8 + j / 4 * 4);
            const i32x16 bits = ((code & 7) << 22) | ((code & 8) << 28);
            const F16 v = nv_vector(((f32x16)bits * 0x1p126f) * scale);
            QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_dot(acc[m], v, x + m * 32 + l * 8 + j);
          }
        }
      }
      QC_UNROLL for (int m = 0; m < M; ++m) f_store(out + (b * kBufferRows + m) * 16, f_mul(acc[m], f_set(unit)));
    }
  }
  static void unpack(const Gemm&, int, int, char*) {}
  static void panel_unit(const Gemm&, int, int, char*, const Tile&, const TilePass&, float*) {}
};

inline void gemm_nvfp4(const Gemm& g, const Q8Act& q, const Worker& w) { run_gemm<Nvfp4<false>>(g, q, w); }
inline void gemm_nvfp4_x128(const Gemm& g, const Q8Act& q, const Worker& w) { run_gemm<Nvfp4<true>>(g, q, w); }
inline void gemm_nvfp4_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<Nvfp4Bf16>(g, x, w); }
