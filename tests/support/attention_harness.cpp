// attention_harness.cpp: a paged cache and attention over it behind C functions, for tests (ctypes).
#include "attention.h"

#include <sys/wait.h>
#include <unistd.h>

template <KvFormat F>
static void fill(const KvLayer<F>& kv, int sequence, int tokens, const float* k, const float* v) {
  const int d = kv.head_dim, dp = kv_padded(F, d);
  alignas(64) float x[1024] = {}, y[1024] = {};
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < kv.kv_heads; ++h, k += d, v += d) {
      memcpy(x, k, sizeof(float) * d), memcpy(y, v, sizeof(float) * d);
      kv_append<F>(kv.block(sequence, t / kPage, h), t % kPage, x, y, dp);
    }
}

// Runs the kv heads one by one, or the tasks meant for `threads` threads, all on the first thread.
template <KvFormat F>
static void attend(const KvLayer<F>& kv, const AttentionArgs& a, int threads, void* scratch) {
  uint32_t next = 0;
  if (threads == 1) attention<F>(a, kv, {0, kv.kv_heads}, scratch);
  else attention_tasks<F>(a, kv, &next, {0, threads, scratch});
}

#define WITH_FORMAT(call)         \
  switch (format) {               \
    case kKv32: call(kKv32) break; \
    case kKv16: call(kKv16) break; \
    case kKv8: call(kKv8) break;   \
    case kKv4: call(kKv4) break;   \
  }
#define LAYER(F) KvLayer<F>{base, kv_heads * kv_block_bytes(F, head_dim), table, stride, kv_heads, head_dim}

extern "C" {

int64_t harness_block_bytes(int format, int head_dim) { return kv_block_bytes((KvFormat)format, head_dim); }
size_t harness_attention_bytes(int head_dim) { return attention_scratch_bytes(kv_padded(kKv4, head_dim)); }

// Appends keys and values [tokens][kv_heads][head_dim] at a sequence's first positions.
void harness_fill(int format, char* base, const int32_t* table, int stride, int kv_heads, int head_dim, int sequence,
                  int tokens, const float* k, const float* v) {
#define FILL(F) fill<F>(LAYER(F), sequence, tokens, k, v);
  WITH_FORMAT(FILL)
}

void harness_attend(int format, char* base, const int32_t* table, int stride, int kv_heads, int head_dim,
                    const AttentionArgs* a, int threads, void* scratch) {
#define ATTEND(F) attend<F>(LAYER(F), *a, threads, scratch);
  WITH_FORMAT(ATTEND)
}

// Runs the same in a child process. Returns its waitpid status: 0, or how it crashed on an invalid access.
int harness_attend_apart(int format, char* base, const int32_t* table, int stride, int kv_heads, int head_dim,
                         const AttentionArgs* a, int threads, void* scratch) {
  const pid_t child = fork();
  if (child == 0) {
    harness_attend(format, base, table, stride, kv_heads, head_dim, a, threads, scratch);
    _exit(0);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child ? status : -1;
}

// e^x; count is a multiple of 16.
void harness_vexp(const float* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 16) store(to + i, vexp(load<f32x16>(x + i)));
}

// e^x as computed between tile products; count is a multiple of 64.
#if defined(QC_AMX)
void harness_exp_below(const float* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 64) {
    __m512 part[4];
    for (int c = 0; c < 4; ++c) part[c] = load<f32x16>(x + i + 16 * c);
    exp_below(part);
    for (int c = 0; c < 4; ++c) store(to + i + 16 * c, (f32x16)part[c]);
  }
}
#endif
}
