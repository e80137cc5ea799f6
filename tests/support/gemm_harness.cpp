// gemm_harness.cpp: the GEMM kernels behind one C function, for tests (ctypes) and benchmarks.
#include "gemm.h"

#include "gemm_groups.h"
#include "gemm_nvfp4.h"
#include "gemm_trellis.h"
#include "gemm_w3.h"
#include "penalties.h"
#include "report.h"
#include "rowops.h"
#include "sample.h"

#include <stdlib.h>

extern "C" {

// Quantizes float rows [rows][gemm_kp(width)] to integers with scales.
void harness_quantize(int rows, const float* x, int width, const Q8Rows* out) { quantize({0, rows}, x, width, *out); }

// Draws a token from x [n], of which the largest is at `best`; -1 if there is no memory.
int harness_draw(const float* x, int n, int best, const qc_sampling* sampling) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, Sampler::bytes(n))) return -1;
  const int token = Sampler(n, (char*)memory).draw(x, best, *sampling, sampling->uniforms[0]);
  free(memory);
  return token;
}

// Applies the penalties of a row at `position` to x [n]. Returns the largest's index; -2 if there is no memory, or if
// memory of zeros was not left so.
int harness_penalize(float* x, int n, const qc_sampling* sampling, int position) {
  int32_t* times = (int32_t*)calloc((size_t)n, sizeof(int32_t));
  if (!times) return -2;
  penalize(x, n, *sampling, position, times);
  bool zeros = true;
  for (int i = 0; i < n; ++i) zeros &= times[i] == 0;
  free(times);
  return zeros ? Sampler(n, nullptr).best(x) : -2;
}

// Applies a mask to x [n]. Returns the largest's index.
int harness_mask(float* x, int n, const uint32_t* mask) {
  apply_mask(x, n, mask);
  return Sampler(n, nullptr).best(x);
}

// Writes the report of `token`, chosen from x [n], for the first position. Returns 1 if there is no memory.
int harness_report(const float* x, int n, int token, const qc_sampling* sampling) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, Sampler::bytes(n))) return 1;
  Sampler sampler(n, (char*)memory);
  report(sampler, x, token, *sampling, 0);
  free(memory);
  return 0;
}

size_t harness_scratch_bytes(int kp) { return gemm_scratch_bytes(kp); }

// Computes thread `tid`'s share of one GEMM. format: index of the weight format, as in the cases below; x is float or
// bfloat16 (uint16), q is int8 activations, by format. Returns 0, or 1 for an unknown format.
int harness_gemm(int format, const Gemm* g, const void* x, const Q8Act* q, int tid, int threads, void* scratch) {
  const Worker worker{tid, threads, scratch};
  switch (format) {
    case 0: gemm_f32(*g, (const float*)x, worker); return 0;
    case 1: gemm_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 2: gemm_w4_asym_g128_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 3: gemm_w8_sym_channel(*g, *q, worker); return 0;
    case 4: gemm_w4_asym_g128(*g, *q, worker); return 0;
    case 5: gemm_qoq_g128(*g, *q, worker); return 0;
    case 6: gemm_qoq_channel(*g, *q, worker); return 0;
    case 7: gemm_mxfp4(*g, *q, worker); return 0;
    case 8: gemm_w8_sym_channel_x128(*g, *q, worker); return 0;
    case 9: gemm_w4_asym_g128_x128(*g, *q, worker); return 0;
    case 10: gemm_qoq_g128_x128(*g, *q, worker); return 0;
    case 11: gemm_qoq_channel_x128(*g, *q, worker); return 0;
    case 12: gemm_mxfp4_x128(*g, *q, worker); return 0;
    case 13: gemm_nested_8_4(*g, *q, worker); return 0;
    case 14: gemm_nested_8_4_x128(*g, *q, worker); return 0;
    case 15: gemm_mix_4_8(*g, *q, worker); return 0;
    case 16: gemm_mix_4_8_x128(*g, *q, worker); return 0;
    case 17: gemm_nvfp4(*g, *q, worker); return 0;
    case 18: gemm_nvfp4_x128(*g, *q, worker); return 0;
    case 19: gemm_nvfp4_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 20: gemm_w4_asym_g32(*g, *q, worker); return 0;
    case 21: gemm_w4_asym_g64(*g, *q, worker); return 0;
    case 22: gemm_w8_sym_g32(*g, *q, worker); return 0;
    case 23: gemm_w8_sym_g128(*g, *q, worker); return 0;
    case 24: gemm_w4_asym_g32_x128(*g, *q, worker); return 0;
    case 25: gemm_w8_sym_g64_x128(*g, *q, worker); return 0;
    case 26: gemm_w4_asym_g32_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 27: gemm_w4_asym_g64_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 28: gemm_w3_asym_g128_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 29: gemm_w2_trellis_g128_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 30: gemm_w3_trellis_g128_bf16(*g, (const uint16_t*)x, worker); return 0;
    case 31: gemm_w4_trellis_g128_bf16(*g, (const uint16_t*)x, worker); return 0;
  }
  return 1;
}

// The lowest column with the largest logit of each row; the threads' shares run one after another. best: [threads][m].
int harness_logits(int format, Gemm* g, const void* x, const Q8Act* q, int threads, void* scratch, void* best, int32_t* found) {
  BestLanes* lanes = (BestLanes*)best;
  for (int tid = 0; tid < threads; ++tid) {
    g->best = lanes + tid * g->m;
    for (int r = 0; r < g->m; ++r) g->best[r].clear();
    if (harness_gemm(format, g, x, q, tid, threads, scratch)) return 1;
  }
  for (int r = 0; r < g->m; ++r) {
    for (int t = 1; t < threads; ++t) lanes[r].merge(lanes[t * g->m + r]);
    found[r] = lanes[r].index();
  }
  return 0;
}
}
