// probe.h: measures the hardware ceilings that kernels are compared with, using the model's own threads. Each probe
// takes about 0.3 s and reports the best of several rounds, as other programs can only slow it down.
#pragma once
#include <sys/mman.h>

#include "gemm.h"
#include "thread_pool.h"

struct Probe {
  ThreadPool& pool;
  int what;
  char* memory;
  size_t bytes;
  double work;       // bytes or operations per round, all threads together
  double seconds;    // of the fastest round
  int32_t sink[64];  // keeps results alive
};

#if defined(__AVX512F__)
constexpr int kProbeChains = 12;
#else
constexpr int kProbeChains = 6;
#endif
constexpr int kProbeSteps = 400000;

// Reads one thread's share, summing into 8 independent accumulators, with the kernels' prefetch distance.
static int32_t probe_read(const Probe& p, int tid) {
  const size_t lines = p.bytes / 64 / (size_t)p.pool.threads;
  const char* from = p.memory + (size_t)tid * lines * 64;
  i32x16 sum[8]{};
  for (size_t i = 0; i + 8 <= lines; i += 8)
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; ++j) {
      __builtin_prefetch(from + (i + j) * 64 + kPrefetchBytes);
      sum[j] += load<i32x16>(from + (i + j) * 64);
    }
  for (int j = 1; j < 8; ++j) sum[0] += sum[j];
  return sum[0][0];
}

// Independent chains of one instruction on registers; `keep` hides values from the optimizer.
template <class T>
QC_INLINE void keep(T& v) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}
template <class T, class F>
QC_INLINE int32_t probe_chains(T zero, const F& f) {
  T acc[kProbeChains];
  for (T& a : acc) a = zero;
  for (int i = 0; i < kProbeSteps / kProbeChains; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kProbeChains; ++c) acc[c] = f(acc[c]);
  int32_t out = 0;
  for (T& a : acc) keep(a), out += load<int32_t>(&a);
  return out;
}

#if defined(QC_AMX)
constexpr int kProbeSums = 4, kProbeDots = kProbeSteps / 8;
template <class Op>
static int32_t probe_tiles() {
  shape_tiles(64);
  for (int i = 0; i < kProbeDots / kProbeSums; ++i)
    Op::template dot<0, 4, 6>(), Op::template dot<1, 4, 7>(), Op::template dot<2, 5, 6>(), Op::template dot<3, 5, 7>();
  release_tiles();
  return 0;
}
// Operations per round.
static double probe_work(int what) {
  const double each[] = {0, 16 * 16 * 64 * 2, 0, 16 * 16 * 32 * 2};
  return what == 2 ? 16.0 * 2 * (kProbeSteps / kProbeChains * kProbeChains)
                   : each[what] * (kProbeDots / kProbeSums * kProbeSums);
}
#else
static double probe_work(int what) {
  const double each[] = {0, 16 * 4 * 2, 16 * 2, 16 * 2 * 2};  // int8, float, bfloat16 operations per instruction
  return each[what] * (kProbeSteps / kProbeChains * kProbeChains);
}
#endif

static int32_t probe_round(const Probe& p, int tid) {
  alignas(64) static const int8_t ones[64] = {};
  B64 w = b_load(ones);
  float x = 0.0f;
  if (p.what == 0) return probe_read(p, tid);
#if defined(QC_AMX)
  if (p.what == 1) return probe_tiles<TileSigned>();
  if (p.what == 3) return probe_tiles<TileBf16>();
#endif
  if (p.what == 1) return probe_chains(i_set(0), [&](I16 a) { return dot_small(a, w, ones); });
  if (p.what == 3) return probe_chains(f_set(0), [&](F16 a) { return bf_dot(a, w, (const BfX*)ones); });
  F16 v = f_set(0);
  keep(v);
  return probe_chains(f_set(0), [&](F16 a) { return f_dot(a, v, &x); });
}

static void probe_thread(void* arg, int tid) {
  Probe& p = *(Probe*)arg;
  if (p.what == 0) {  // first-touch the pages on the thread that reads them
    const size_t share = p.bytes / (size_t)p.pool.threads;
    memset(p.memory + share * (size_t)tid, 1, share);
  }
  const double deadline = now_seconds() + 0.25;
  for (int round = 0; round < 100; ++round) {
    p.pool.sync(tid);
    const double start = now_seconds();
    p.sink[tid % 64] = probe_round(p, tid);
    p.pool.sync(tid);
    if (tid == 0) {
      const double took = now_seconds() - start;
      if (took < p.seconds) p.seconds = took;
      if (now_seconds() > deadline) p.what = -1 - p.what;  // the next barrier publishes it
    }
    p.pool.sync(tid);
    if (p.what < 0) return;
  }
}

// In units of 1e9 bytes or operations per second; 0 if `what` is unknown or memory is unavailable.
static double probe(ThreadPool& pool, int what) {
  if (what < 0 || what > 3) return 0.0;
  Probe p{pool, what, nullptr, (size_t)256 << 20, 0.0, 1e9, {}};
  if (what == 0) {
    void* q = mmap(nullptr, p.bytes + kPrefetchBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (q == MAP_FAILED) return 0.0;
    madvise(q, p.bytes, MADV_HUGEPAGE);
    p.memory = (char*)q;
    p.work = (double)p.bytes;
  } else {
    p.work = probe_work(what) * pool.threads;
  }
  pool.run(probe_thread, &p);
  if (p.memory) munmap(p.memory, p.bytes + kPrefetchBytes);
  return p.work / p.seconds * 1e-9;
}
