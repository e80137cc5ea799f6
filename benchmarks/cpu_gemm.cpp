// cpu_gemm.cpp: GEMM kernel throughput compared with the machine's ceilings.
//
//   g++ -std=c++17 -O3 -march=native -ffp-contract=off -Wno-psabi -pthread -Icodegen/cpu/templates
//       benchmarks/cpu_gemm.cpp -o cpu_gemm && ./cpu_gemm THREADS MODE [FORMAT]
//
// decode: the five linear layers of a 1.1 B Llama at 1 to 8 tokens, cycling through copies so that weights come from
//         memory.
// verify: the same at 9 to 64 tokens, one copy. prefill: 512 tokens, without the output head.
// cached: the linear layers of a 26 M Llama, which stay in the L3 cache. cached-prefill: the same at 512 tokens.
// mix: mix_4_8 with a tenth of the rows in 8 bits alternating with w4_asym_g128, at two square-ish shapes.
// Prints, per format and M, the median over repeats: weight GB/s (codes and scales) and GOPS (2 M N K / t), next to the
// read bandwidth (memory, or L3 when cached) measured between the repeats. Peak arithmetic rates are measured first.
#include "gemm.h"

#include "gemm_trellis.h"
#include "gemm_w3.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace {

const char* kFormats[] = {"f32",          "bf16",     "w4_asym_g128_bf16", "w8_sym_channel",
                          "w4_asym_g128", "qoq_g128", "qoq_channel",       "mxfp4",
                          "mxfp4_x128",   "nested_8_4", "mix_4_8_x128",
                          "w3_asym_g128_bf16", "w4_trellis_g128_bf16", "w3_trellis_g128_bf16", "w2_trellis_g128_bf16"};
constexpr int kFormatCount = 15, kGroup4 = 4, kMxfp4 = 7, kMxfp4X128 = 8, kNested = 9, kMix = 10, kGroup3 = 11;
constexpr int kTrellis = 12;  // and those after it
constexpr size_t kArena = (size_t)1 << 30;
char* arena;
std::vector<void*> scratch;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Runs f(tid) on all threads at once; workers spin between jobs.
struct ThreadPool {
  int threads;
  std::atomic<int> generation{0}, left{0};
  void (*job)(void*, int) = nullptr;
  void* argument = nullptr;
  explicit ThreadPool(int n) : threads(n) {
    pin(0);
    for (int t = 1; t < n; ++t) {
      auto* start = new std::pair<ThreadPool*, int>(this, t);
      pthread_t id;
      pthread_create(&id, nullptr, work, start);
    }
  }
  static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  static void* work(void* p) {
    auto [pool, tid] = *(std::pair<ThreadPool*, int>*)p;
    pin(tid);
    for (int seen = 0;; ++seen) {
      while (pool->generation == seen) __builtin_ia32_pause();
      pool->job(pool->argument, tid);
      --pool->left;
    }
  }
  template <class Fn>
  void run(Fn fn) {
    job = [](void* f, int tid) { (*(Fn*)f)(tid); };
    argument = &fn;
    left = threads - 1;
    ++generation;
    fn(0);
    while (left) __builtin_ia32_pause();
  }
};

volatile float sink;
double read_rate(ThreadPool& pool, size_t bytes, int times) {
  double start = now();
  pool.run([&](int tid) {
    f32x16 sum[4] = {};
    const char* p = arena + bytes / pool.threads * tid;
    for (int t = 0; t < times; ++t)
      for (size_t i = 0; i < bytes / pool.threads; i += 256) {
        __builtin_prefetch(p + i + 4096), __builtin_prefetch(p + i + 4160);
        __builtin_prefetch(p + i + 4224), __builtin_prefetch(p + i + 4288);
        for (int j = 0; j < 4; ++j) sum[j] = bitcast<f32x16>(bitcast<i32x16>(sum[j]) | load<i32x16>(p + i + j * 64));
      }
    sink = sum[0][0] + sum[1][1] + sum[2][2] + sum[3][3];
  });
  return bytes * (double)times / (now() - start) / 1e9;
}

// 1e9 operations per second (a multiply and an add are two) of 8 independent chains of one primitive with register
// operands.
template <class A, class Dot>
double peak_rate(ThreadPool& pool, double ops, A zero, Dot dot) {
  constexpr int kIterations = 400000;
  double start = now();
  pool.run([&](int) {
    A start_at[8] = {zero, zero, zero, zero, zero, zero, zero, zero};
    asm volatile("" : "+m"(start_at));  // keeps the compiler from merging equal chains
    A a = start_at[0], b = start_at[1], c = start_at[2], d = start_at[3];
    A e = start_at[4], f = start_at[5], g = start_at[6], h = start_at[7];
    for (int t = 0; t < kIterations; ++t) {
      a = dot(a), b = dot(b), c = dot(c), d = dot(d), e = dot(e), f = dot(f), g = dot(g), h = dot(h);
    }
    A all[8] = {a, b, c, d, e, f, g, h};
    asm volatile("" : : "m"(all));
  });
  return 8.0 * kIterations * ops * pool.threads / (now() - start) / 1e9;
}

struct Case {
  int format, m, n, k;
  std::vector<Gemm> copies;
  std::shared_ptr<char> memory;  // activations, then results
  Q8Act q{};
  size_t bytes = 0;
};

size_t round64(size_t n) { return (n + 63) / 64 * 64; }

// Memory in huge pages where the system provides them, as for a model.
char* huge_pages(size_t bytes) {
  constexpr size_t kPage = (size_t)2 << 20;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  char* p = (char*)aligned_alloc(kPage, bytes);
  madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

// Every tenth of n rows is in 8-bit blocks; the narrow (4-bit) blocks come first, as in qcompile.formats.mix.
struct MixOrder {
  std::vector<int32_t> columns, starts{0};
  int narrow = 0;  // pairs of narrow blocks
  explicit MixOrder(int n) {
    std::vector<int32_t> rows[2];
    for (int i = 0; i < n; ++i) rows[i % 10 == 3].push_back(i);
    for (int wide = 0; wide < 2; ++wide) {
      rows[wide].resize((rows[wide].size() + 15) / 16 * 16, -1);
      columns.insert(columns.end(), rows[wide].begin(), rows[wide].end());
      for (size_t i = 0; i < rows[wide].size() / 16; ++i) starts.push_back(starts.back() + 1 + wide);
    }
    narrow = (int)rows[0].size() / 32;
  }
};

// Makes as many copies of one matrix as fit in `budget` bytes (at least one), in the layout of an artifact.
void place(Case& c, size_t budget, size_t& used) {
  const size_t kp = gemm_kp(c.k), np = (c.n + 15) / 16 * 16, groups = (kp + 127) / 128;
  const double code[] = {4, 2, 0.5, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.375, 0.5, 0.375, 0.25};
  const MixOrder mix(c.format == kMix ? c.n : 0);
  const size_t rows = c.format == kMix ? mix.columns.size() : np;
  const size_t codes = c.format == kMix ? mix.starts.back() * kp * 8 : (size_t)(np * kp * code[c.format]);
  const bool grouped = c.format == 2 || c.format == kGroup4 || c.format == kNested ||
                       c.format == kMix || c.format == kGroup3;
  const bool mx = c.format == kMxfp4 || c.format == kMxfp4X128;
  const bool trellis = c.format >= kTrellis;
  const size_t scale = c.format < 2 || mx || trellis ? 0 : (grouped ? rows * groups : np) * 4;
  const size_t zero = grouped || c.format == 5 ? rows * groups : c.format == 6 ? np : 0;
  const size_t group_scale = c.format == 5 ? np * groups : trellis ? np * groups * 2 : 0;
  const size_t exponent = mx ? np * kp / 32 : 0;
  const size_t low = c.format == kNested ? np * kp / 2 : 0;
  c.bytes = codes + scale + zero + group_scale + exponent + low;
  const size_t count = std::max<size_t>(1, budget / c.bytes);
  for (size_t i = 0; i < count; ++i) {
    Gemm g{};
    g.m = c.m, g.n = c.n, g.k = c.k, g.out_stride = c.n;
    auto take = [&](size_t n, int fill) -> char* {
      if (!n) return nullptr;
      char* p = arena + used;
      used += (n + 4095) / 4096 * 4096;
      if (used > kArena) abort();
      if (fill >= 0) memset(p, fill, n);
      return p;
    };
    g.codes = take(codes, c.format < 2 ? 0x3c : -1);
    g.scale = (float*)take(scale, 0x3c);
    g.zero = (uint8_t*)take(zero, 7);
    g.group_scale = (uint8_t*)take(group_scale, trellis ? 0x3c : 5);
    g.exponent = (uint8_t*)take(exponent, 120);
    g.low = (uint8_t*)take(low, -1);
    if (c.format == kMix) {
      g.columns = (int32_t*)memcpy(take(rows * 4, 0), mix.columns.data(), rows * 4);
      g.starts = (int32_t*)memcpy(take(mix.starts.size() * 4, 0), mix.starts.data(), mix.starts.size() * 4);
      g.blocks = (int)rows / 16, g.parts[0] = mix.narrow;
    }
    c.copies.push_back(g);
  }
  const size_t x_bytes = round64(c.m * kp * 8 + 128);
  c.memory = {huge_pages(x_bytes + (size_t)c.m * c.n * 4), free};
  char* x = c.memory.get();
  for (size_t i = 0; i < c.m * kp; ++i) {
    if (c.format == 0) ((float*)x)[i] = (float)(i % 13) - 6;
    else if (c.format < 3 || c.format >= kGroup3) ((uint16_t*)x)[i] = 0x3f80 + (i % 7);
    else ((int8_t*)x)[i] = (int8_t)(i % 251 - 125);
  }
  const int group = mx ? 32 : grouped || c.format == 5 ? 128 : (int)kp;
  const int scales = c.format == kMxfp4X128 || c.format == kMix ? (int)groups : 1;
  c.q = {(int8_t*)x, (float*)(x + c.m * kp), (int32_t*)(x + c.m * kp + c.m * scales * 4),
         (int)((kp + group - 1) / group), scales};
  for (int i = 0; i < c.m * scales; ++i) ((float*)c.q.scale)[i] = 0.01f;
  for (auto& g : c.copies) g.out = (float*)(x + x_bytes);
}

void call(const Case& c, const Gemm& g, const Worker& w) {
  const void* x = c.q.q;
  switch (c.format) {
    case 0: return gemm_f32(g, (const float*)x, w);
    case 1: return gemm_bf16(g, (const uint16_t*)x, w);
    case 2: return gemm_w4_asym_g128_bf16(g, (const uint16_t*)x, w);
    case 3: return gemm_w8_sym_channel(g, c.q, w);
    case 4: return gemm_w4_asym_g128(g, c.q, w);
    case 5: return gemm_qoq_g128(g, c.q, w);
    case 6: return gemm_qoq_channel(g, c.q, w);
    case kMxfp4: return gemm_mxfp4(g, c.q, w);
    case kMxfp4X128: return gemm_mxfp4_x128(g, c.q, w);
    case kNested: return gemm_nested_8_4(g, c.q, w);
    case kMix: return gemm_mix_4_8_x128(g, c.q, w);
    case kGroup3: return gemm_w3_asym_g128_bf16(g, (const uint16_t*)x, w);
    case kTrellis: return gemm_w4_trellis_g128_bf16(g, (const uint16_t*)x, w);
    case kTrellis + 1: return gemm_w3_trellis_g128_bf16(g, (const uint16_t*)x, w);
    case kTrellis + 2: return gemm_w2_trellis_g128_bf16(g, (const uint16_t*)x, w);
  }
}

// Seconds for one call per copy of every case.
double pass(ThreadPool& pool, const std::vector<Case>& cases) {
  double start = now();
  for (const Case& c : cases)
    for (const Gemm& g : c.copies) pool.run([&](int tid) { call(c, g, {tid, pool.threads, scratch[tid]}); });
  return now() - start;
}

struct Shape2 {
  int n, k;
};

struct Mode {
  const char* name;
  std::vector<Shape2> shapes;
  std::vector<int> tokens;
  size_t copies_bytes;  // bytes of copies per matrix
  int passes;           // passes timed together
  size_t read_bytes;    // working set of the read bandwidth measurement
};

void measure(ThreadPool& pool, const Mode& mode, int format, int m) {
  std::vector<Case> cases;
  size_t used = 0;
  for (Shape2 s : mode.shapes) {
    cases.push_back({format, m, s.n, s.k, {}, {}, {}, 0});
    place(cases.back(), mode.copies_bytes, used);
  }
  double bytes = 0, ops = 0;
  for (const Case& c : cases)
    bytes += (double)c.bytes * c.copies.size(), ops += 2.0 * c.m * c.n * c.k * c.copies.size();
  pass(pool, cases);
  std::vector<double> seconds, reads;
  for (int r = 0; r < 9; ++r) {
    double t = 0;
    for (int i = 0; i < mode.passes; ++i) t += pass(pool, cases);
    seconds.push_back(t / mode.passes);
    reads.push_back(read_rate(pool, mode.read_bytes, (int)(((size_t)256 << 20) / mode.read_bytes)));
  }
  const double t = median(seconds), rate = bytes / t / 1e9, read = median(reads);
  printf("%-14s %-20s M=%-3d %8.2f GB/s (%3.0f%% of read %6.2f)  %8.1f GOPS\n", mode.name, kFormats[format], m, rate,
         100 * rate / read, read, ops / t / 1e9);
  fflush(stdout);
}

// Time of mix_4_8 (int8 activations, scale per 128) relative to w4_asym_g128 (per token), from memory if M is small.
void compare_mix(ThreadPool& pool) {
  for (Shape2 s : {Shape2{4096, 4096}, Shape2{11008, 4096}})
    for (int m : {1, 8, 64, 512}) {
      size_t used = 0;
      std::vector<Case> cases[2];
      for (int i = 0; i < 2; ++i) {
        cases[i].push_back({i ? kMix : kGroup4, m, s.n, s.k, {}, {}, {}, 0});
        place(cases[i][0], m > 8 ? 0 : (size_t)160 << 20, used);
        pass(pool, cases[i]);
      }
      std::vector<double> seconds[2], ratios;
      for (int r = 0; r < 15; ++r) {
        for (int i = 0; i < 2; ++i) seconds[i].push_back(pass(pool, cases[i]) / cases[i][0].copies.size());
        ratios.push_back(seconds[1].back() / seconds[0].back());
      }
      printf("mix N=%-6d K=%d M=%-4d w4a8 %9.1f us  mix_4_8 %9.1f us  ratio %.3f  (bytes %.3f)\n", s.n, s.k, m,
             median(seconds[0]) * 1e6, median(seconds[1]) * 1e6, median(ratios),
             (double)cases[1][0].bytes / cases[0][0].bytes);
      fflush(stdout);
    }
}

std::vector<Mode> modes() {
  const std::vector<Shape2> llama = {{2560, 2048}, {2048, 2048}, {11264, 2048}, {2048, 5632}, {32000, 2048}};
  const std::vector<Shape2> small = {{1024, 512}, {512, 512}, {2560, 512}, {512, 1280}, {8192, 512}};
  const std::vector<Shape2> layers(llama.begin(), llama.end() - 1);
  const size_t mb = (size_t)1 << 20;
  return {{"decode", llama, {1, 2, 3, 4, 5, 6, 7, 8}, 64 * mb, 1, 256 * mb},
          {"verify", llama, {9, 12, 16, 17, 24, 32, 64}, 0, 1, 256 * mb},
          {"prefill", layers, {512}, 0, 1, 256 * mb},
          {"cached", small, {1, 2, 4, 8}, 0, 200, 8 * mb},
          {"cached-prefill", small, {512}, 0, 20, 8 * mb}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return fprintf(stderr, "usage: cpu_gemm THREADS MODE [FORMAT]\n"), 2;
#if defined(QC_AMX)
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return fprintf(stderr, "cpu_gemm: the system grants no AMX tiles\n"), 5;
#endif
  ThreadPool pool(atoi(argv[1]));
  const std::string wanted = argv[2], only = argc > 3 ? argv[3] : "";
  arena = (char*)mmap(nullptr, kArena + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  arena = (char*)(((size_t)arena + (2 << 20) - 1) & ~(((size_t)2 << 20) - 1));
  madvise(arena, kArena, MADV_HUGEPAGE);
  uint64_t seed = 1;
  for (size_t i = 0; i < kArena / 8; ++i)
    ((uint64_t*)arena)[i] = seed = seed * 6364136223846793005u + 1442695040888963407u;
  for (int t = 0; t < pool.threads; ++t) scratch.push_back(huge_pages(gemm_scratch_bytes(5632)));
  alignas(64) static uint8_t w[64];
  alignas(64) static float x[16] = {1, 2, 3};
  printf("int8 %.0f GOPS, bf16 %.0f, f32 %.0f GFLOPS\n",
         peak_rate(pool, 128, i_set(0), [](I16 a) { return dot_small(a, b_load(w), (const int8_t*)x); }),
         peak_rate(pool, 64, f_set(0), [](F16 a) { return bf_dot(a, b_load(w), (const BfX*)x); }),
         peak_rate(pool, 32, f_set(0), [](F16 a) { return f_dot(a, f_load((float*)w), x); }));
  if (wanted == "mix") compare_mix(pool);
  for (const Mode& mode : modes())
    for (int f = 0; f < kFormatCount && wanted == mode.name; ++f)
      for (int m : mode.tokens)
        if (only.empty() || only == kFormats[f]) measure(pool, mode, f, m);
  _exit(0);  // the workers never stop spinning
}
