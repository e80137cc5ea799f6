// gemm.h: y = W x for every weight format, called by all threads of a step at once.
//
// How to call (K2 reads this block; the rest of the file is the machinery).
//
//   #define one of QC_ISA_AVX512, QC_ISA_AVX2, QC_ISA_PORTABLE before including, or let the compiler flags
//   decide. Flags, always with -std=c++17 -O3 -ffp-contract=off -Wno-psabi:
//     avx512  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mfma
//     avx2    -mavx2 -mfma -mf16c   (and -mavxvnni where the CPU has it)
//     portable  nothing
//
//   Each thread calls the same function with its own Worker; the function computes a contiguous share of
//   the 16-row blocks (pairs of blocks) for all m tokens. No barrier inside: put one after the call.
//   An output row's bits depend on its weights and its own x row alone, never on m or the thread count.
//
//   gemm_f32              (g, x, worker)   x: const float*    [m][kp]
//   gemm_bf16             (g, x, worker)   x: const uint16_t* [m][kp]  bfloat16
//   gemm_w4_asym_g128_bf16(g, x, worker)   x: const uint16_t* [m][kp]  bfloat16
//   gemm_w8_sym_channel   (g, q, worker)   q: Q8Act, group kp (one sum a row)
//   gemm_w4_asym_g128     (g, q, worker)   q: Q8Act, group 128
//   gemm_qoq_g128         (g, q, worker)   q: Q8Act, group 128
//   gemm_qoq_channel      (g, q, worker)   q: Q8Act, group kp
//   gemm_mxfp4            (g, q, worker)   q: Q8Act, group 32
//   (the name is "gemm_" + weight format, + "_bf16" for a 4-bit weight with bfloat16 activations)
//
//   kp = k rounded up to 32 is the row stride of every activation; elements k..kp-1 of x must be 0.
//   Activation and weight pointers are 64-byte aligned; a group is short at the end when kp % 128 != 0:
//   groups = ceil(kp / group). Activation codes lie in [-127, 127].
//
//   Epilogues: kStore  out[t][i] = y + bias             (also logits: out = batch.logits, out_stride = vocab)
//              kAdd    out[t][i] = residual[t][i] + (y + bias)     (out may be residual)
//              kSiluMul out[t][i] = silu(gate) * up, i < n/2; 16-row blocks of W alternate gate, up;
//                       n = 2 * I, each half padded to 16 rows; bias, if any, in the order of the packed rows.
//   Only columns below n (n/2) are written. bias, where given, has one float for every padded row.
//
//   Scratch: Worker.scratch points to gemm_scratch_bytes(largest kp) bytes of the thread's own, 64-byte aligned.
#pragma once
#include <stddef.h>

#include "vec.h"

struct Q8Act {             // int8 activations, one scale a row
  const int8_t* q;         // [m][kp]
  const float* scale;      // [m]
  const int32_t* sums;     // [m][groups] sum of q over each group of inputs
  int groups;              // ceil(kp / group)
};

enum EpilogueKind { kStore, kAdd, kSiluMul };

struct Gemm {
  int m, n, k;                          // tokens, output rows (2 * I for kSiluMul), inputs
  const void* codes;                    // packed weights; the layouts are in qcompile/numerics.py
  const float* scale = nullptr;         // w8, qoq: [np]; w4_asym_g128: [nb][groups][16]
  const uint8_t* zero = nullptr;        // w4_asym_g128, qoq_g128: [nb][groups][16]; qoq_channel: [np]
  const uint8_t* group_scale = nullptr; // qoq_g128: [nb][groups][16]
  const uint8_t* exponent = nullptr;    // mxfp4: [nb][kp/32][16]
  EpilogueKind epilogue = kStore;
  const float* bias = nullptr;          // [np] or null
  const float* residual = nullptr;      // [m][residual_stride], kAdd only
  int64_t residual_stride = 0;          // floats
  float* out = nullptr;                 // [m][out_stride]
  int64_t out_stride = 0;               // floats
};

struct Worker {
  int tid, threads;
  void* scratch;
};

constexpr int gemm_kp(int k) { return (k + 31) / 32 * 32; }
// Two row blocks unpacked to at most 4 bytes a weight, and the tokens of one tile converted to float.
constexpr size_t gemm_scratch_bytes(int kp) { return (size_t)kp * 16 * 2 * 4 + (size_t)kp * 64 * 4 + 65536; }
