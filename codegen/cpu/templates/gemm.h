// gemm.h: y = W x for every weight format, called by all threads of a step at once.
//
// Calling convention (the rest of the file is the implementation).
//
//   Define one of QC_ISA_AVX512, QC_ISA_AVX2, QC_ISA_PORTABLE before including, or let the compiler flags decide.
//   Flags, always with -std=c++17 -O3 -ffp-contract=off -Wno-psabi:
//     avx512  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma, and where the CPU has them
//             -mavx512bf16 (without it bf16 runs at half speed), -mavx512vbmi (without it mxfp4 is a quarter slower),
//             and, where the OS has also granted the process AMX tile state, -mamx-tile -mamx-int8 -mamx-bf16:
//             products of 8-bit, 4-bit and bfloat16 weights then use AMX tiles (gemm_amx.h)
//     avx2    -mavx2 -mfma -mf16c   (and -mavxvnni where the CPU has it)
//     portable  nothing
//
//   Every thread calls the same function with its own Worker. Each call computes a contiguous share of the units
//   (pairs of 16-row blocks), or one share of each of g.parts, for all m tokens. There is no barrier inside: put one
//   after the call. An output row's bits depend only on its weights and its own x row, never on m or the thread count.
//
//   gemm_f32              (g, x, worker)   x: const float*    [m][kp]
//   gemm_bf16             (g, x, worker)   x: const uint16_t* [m][kp]  bfloat16
//   gemm_w4_asym_g128_bf16(g, x, worker)   x: const uint16_t* [m][kp]  bfloat16
//   gemm_w8_sym_channel   (g, q, worker)   q: Q8Act, group kp (one sum per row)
//   gemm_w4_asym_g128     (g, q, worker)   q: Q8Act, group 128
//   gemm_qoq_g128         (g, q, worker)   q: Q8Act, group 128
//   gemm_qoq_channel      (g, q, worker)   q: Q8Act, group kp
//   gemm_mxfp4            (g, q, worker)   q: Q8Act, group 32
//   gemm_nested_8_4       (g, q, worker)   q: Q8Act, group 128
//   gemm_mix_4_8          (g, q, worker)   q: Q8Act, group 128; row i of W goes to output column g.columns[i]
//   gemm_..._x128         (g, q, worker)   the same with one activation scale per 128 inputs; formats that otherwise
//                                          use one sum per row then use sums over 128 inputs
//   (names are "gemm_" + weight format, + "_bf16" for a 4-bit weight with bfloat16 activations)
//
//   kp = k rounded up to 32 is the row stride of every activation; elements k..kp-1 of x must be 0.
//   Activation and weight pointers are 64-byte aligned. The last group is short when kp % 128 != 0:
//   groups = ceil(kp / group). Activation codes lie in [-127, 127].
//
//   Epilogues: kStore  out[t][i] = y + bias
//              kAdd    out[t][i] = residual[t][i] + (y + bias)     (out may alias residual)
//              kLogits out[t][i] = y + bias, skipped if out is null; updates this thread's best[t] if best is given
//              kGated  out[t][i] = act(gate) * (up + offset), i < n/2, with gate clamped to at most limit and up to
//                      [-limit, limit]. 16-row blocks of W alternate gate, up; n = 2 * I, each half padded to 16 rows;
//                      bias, if any, is in packed row order.
//   Only columns below n (kGated: n/2) are written. bias, where given, has one float per padded row.
//
//   Scratch: Worker.scratch points to gemm_scratch_bytes(largest kp) bytes of thread-local memory, 64-byte aligned.
#pragma once
#include <stddef.h>

#include <type_traits>

#include "acts.h"
#include "vec.h"

#if !defined(QC_ISA_AVX512) && !defined(QC_ISA_AVX2) && !defined(QC_ISA_PORTABLE)
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QC_ISA_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define QC_ISA_AVX2 1
#else
#define QC_ISA_PORTABLE 1
#endif
#endif
#if defined(QC_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(QC_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
#ifndef QC_BF16_DOT
#include "simd_bf16_as_f32.h"
#endif
#if defined(QC_ISA_AVX512) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define QC_AMX 1
#include "simd_amx.h"
constexpr int kBufferRows = kTileTokens;  // tokens of the largest tile
#else
constexpr int kBufferRows = kPanelTile;
#endif

struct Q8Act {             // int8 activations
  const int8_t* q;         // [m][kp]
  const float* scale;      // [m][scales]
  const int32_t* sums;     // [m][groups] sum of q over each group of inputs
  int groups;              // ceil(kp / group)
  int scales;              // 1, or ceil(kp / 128)
};

enum EpilogueKind { kStore, kAdd, kGated, kLogits };

// The largest logit of a row seen by one thread, kept per lane (16 lanes), with the lowest column that holds it. NaN
// counts as infinite.
struct alignas(64) BestLanes {
  static constexpr int kParts = 64 / sizeof(f32part);
  f32part value[kParts];
  i32part column[kParts];

  void clear() {
    for (int i = 0; i < kParts; ++i) value[i] = f32part{} - __builtin_inff(), column[i] = i32part{};
  }
  void update(f32x16 logits, i32x16 columns) {
    f32part y[kParts];
    i32part at[kParts];
    memcpy(y, &logits, 64), memcpy(at, &columns, 64);
    for (int i = 0; i < kParts; ++i) {
      y[i] = y[i] == y[i] ? y[i] : f32part{} + __builtin_inff();
      const i32part better = (y[i] > value[i]) | ((y[i] == value[i]) & (at[i] < column[i]));
      value[i] = better ? y[i] : value[i];
      column[i] = better ? at[i] : column[i];
    }
  }
  void merge(const BestLanes& other) { update(load<f32x16>(other.value), load<i32x16>(other.column)); }
  // The argmax column; -1 if the maximum is not finite, as no token can follow such a row.
  int32_t index() const {
    const f32x16 v = load<f32x16>(value);
    const i32x16 c = load<i32x16>(column);
    int best = 0;
    for (int i = 1; i < 16; ++i)
      if (v[i] > v[best] || (v[i] == v[best] && c[i] < c[best])) best = i;
    return v[best] - v[best] == 0 ? c[best] : -1;
  }
};

struct Gemm {
  int m, n, k;                          // tokens, output rows (2 * I for kGated), inputs
  const void* codes;                    // packed weights; the layouts are in qcompile/formats/blocks.py
  const float* scale = nullptr;         // w8, qoq: [np]; w4_asym_g128: [nb][groups][16]
  const uint8_t* zero = nullptr;        // w4_asym_g128, qoq_g128: [nb][groups][16]; qoq_channel: [np]
  const uint8_t* group_scale = nullptr; // qoq_g128: [nb][groups][16]
  const uint8_t* exponent = nullptr;    // mxfp4: [nb][kp/32][16]
  const uint8_t* low = nullptr;         // nested_8_4: lower nibbles, as codes
  const int32_t* columns = nullptr;     // mix_4_8: [blocks][16] output column of each row, trailing -1: none
  const int32_t* starts = nullptr;      // mix_4_8: [blocks + 1] offset of each block's codes, in 4-bit blocks
  int blocks = 0;                       // mix_4_8: 16-row blocks; a gate and its up block have the same columns
  EpilogueKind epilogue = kStore;
  UnaryKind act = kSilu;                // kGated
  float limit = __builtin_inff(), offset = 0;
  const float* bias = nullptr;          // [np] or null
  const float* residual = nullptr;      // [m][residual_stride], kAdd only
  int64_t residual_stride = 0;          // floats
  float* out = nullptr;                 // [m][out_stride]
  int64_t out_stride = 0;               // floats
  int parts[3] = {0, 0, 0};             // units (32 rows) of the leading parts; each, and the rest, is split alone
  BestLanes* best = nullptr;            // kLogits: [m] of this thread, or null
};

struct Worker {
  int tid, threads;
  void* scratch;
};

constexpr int gemm_kp(int k) { return (k + 31) / 32 * 32; }

// Prefetch distance for weights, into L2. A core has few slots for its own outstanding requests; its hardware
// prefetcher has others. Where a line takes few cycles of arithmetic, prefetching every second or fourth line in
// software lets the hardware prefetcher fetch the rest. Where a line takes many cycles, the hardware prefetcher stops,
// and every line is prefetched in software. (Measured on Zen 4.)
constexpr int64_t kPrefetchBytes = 8192;

#include "gemm_run.h"
#include "gemm_float.h"
#include "gemm_int.h"
#if defined(QC_AMX)
#include "gemm_amx.h"
#include "gemm_amx_w4.h"
#endif
#include "gemm_formats.h"
#include "gemm_mix.h"

// Bytes of scratch per thread for weights of up to kp inputs in any format: the result buffer, two unpacked row blocks
// of at most 4 bytes per weight, and a token block of at least one tile with at most 4 bytes per element.
constexpr size_t gemm_scratch_bytes(int kp) {
  const size_t most = kPanelTile * 4 > kBufferRows * 2 ? kPanelTile * 4 : kBufferRows * 2;  // f32: vector kernels only
  const size_t tile = (size_t)(kp + 32) * most, tiles = tile > kTokenBlockBytes ? tile : kTokenBlockBytes;
  return 2 * kBufferRows * 64 + (size_t)kp * 16 * 2 * 4 + tiles + tiles / 8 + 65536;
}

inline void gemm_f32(const Gemm& g, const float* x, const Worker& w) { run_gemm<F32>(g, x, w); }
#if defined(QC_AMX)
inline void gemm_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<Bf16Tiles>(g, x, w); }
inline void gemm_w4_asym_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<W4Bf16Tiles>(g, x, w); }
#else
inline void gemm_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<Bf16>(g, x, w); }
inline void gemm_w4_asym_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) {
  run_gemm<W4AsymG128Bf16>(g, x, w);
}
#endif
#define QC_INT_FORMAT(name, Format)                                                                  \
  inline void gemm_##name(const Gemm& g, const Q8Act& q, const Worker& w) { run_gemm<Format<false>>(g, q, w); } \
  inline void gemm_##name##_x128(const Gemm& g, const Q8Act& q, const Worker& w) { run_gemm<Format<true>>(g, q, w); }
QC_INT_FORMAT(w8_sym_channel, W8SymChannel)
QC_INT_FORMAT(w4_asym_g128, W4AsymG128)
QC_INT_FORMAT(qoq_g128, QoqG128)
QC_INT_FORMAT(qoq_channel, QoqChannel)
QC_INT_FORMAT(mxfp4, Mxfp4)
QC_INT_FORMAT(nested_8_4, Nested84)
QC_INT_FORMAT(mix_4_8, QC_MIX_KERNELS)
#undef QC_INT_FORMAT
