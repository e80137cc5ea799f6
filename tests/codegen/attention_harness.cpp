// attention_harness.cpp: a paged cache and attention over it behind C functions, for tests through ctypes.
#include "attention.h"

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

// The kv heads one by one, or tasks of `threads` threads, all done by the first.
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
#define LAYER(F) KvLayer<F>{base, table, stride, kv_heads, head_dim}

extern "C" {

int64_t harness_block_bytes(int format, int head_dim) { return kv_block_bytes((KvFormat)format, head_dim); }
size_t harness_attention_bytes(int head_dim) { return attention_scratch_bytes(kv_padded(kKv4, head_dim)); }

// Keys and values [tokens][kv_heads][head_dim] of a sequence's first positions.
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
}
