// model.h: the state of a step. Included after the constants of the model (see model.cpp.jinja).
//
//   Model  one opened model: threads, arenas, weights, the batch of the running step
//   Step   one thread's view of the running step: addresses of values, the thread's rows, barriers
#pragma once
#include "abi.h"
#include "attention.h"
#include "elementwise.h"
#include "rope.h"
#include "thread_pool.h"

enum RowKind { kTokens, kOutputs };

// Rows rounded up so that values of whole rows are aligned.
constexpr int whole_rows(int rows) { return (rows + 63) / 64 * 64; }

struct Model {
  ThreadPool* pool;
  ThreadPool own_pool;             // used unless the model was opened with that of another
  qc_batch batch;                  // of the running step
  const void* const* weights;
  char* kv;
  int64_t kv_pages;
  float* states;                   // [state_slots][kSlotNumbers]
  int64_t state_slots;
  int rows[2], capacity[2];        // by RowKind: maximum rows, and these rounded up by whole_rows
  char* arena[2];
  float* rope;                     // tables of cos and sin, [capacity][kRopeFloats]
  float* logits;                   // [outputs][vocab], used if the caller passes none
  BestLanes* best;                 // [threads][capacity of outputs]
  char* own;                       // [threads][kOwnBytes]: rows each thread computes redundantly
  char* scratch;                   // [threads][kScratchBytes]
  char* samplers;                  // [threads][Sampler::bytes(vocab)]
  int32_t* times;                  // [threads][vocab] zeros, for penalties
  float* hidden;                   // of qc_hidden: where the final hidden states go in place of logits; else null
  const float* features_given;     // of qc_connect: [tokens][kFeatures] that a draft head reads; else null
  float* features;                 // of qc_connect: where steps write theirs, [tokens][kFeatures]; null: nowhere
  float* plain;                    // [threads][vocab] logits before penalties, for reports
  uint32_t* masks;                 // [outputs][mask_words(vocab)] of the running step's rows that have one
  int32_t* feedback;               // token ids, positions and rows of qc_decode, [3][capacity]
  uint32_t next_task[kCalls];      // next attention task to assign, by call
  struct Ranks* ranks;             // what the processes of a divided model share; null: there is one process
  bool profiling;
  double seconds[kCalls];
  int64_t counts[kCalls];
  void* memory;
  size_t memory_bytes;
};

struct Step {
  Model& m;
  const qc_batch& b;
  Worker w;
  bool few[2];           // few rows: every thread computes all of them, which saves a barrier
  int64_t stride[2];     // rows of each value: of this step, so that values of few rows share pages of memory
  double time = 0;

  Step(Model& model, int tid)
      : m(model), b(model.batch), w{tid, model.pool->threads, model.scratch + (int64_t)tid * kScratchBytes},
        stride{whole_rows(b.tokens), whole_rows(b.outputs)} {
    few[kTokens] = w.threads > 1 && b.tokens <= kFewRows;
    few[kOutputs] = w.threads > 1 && b.outputs <= kFewRows;
    if (tid == 0 && m.profiling) time = now_seconds();
  }

  // Address of a value's first row; `offset` is bytes per row. With few rows, own values live in thread-local memory.
  char* place(RowKind kind, int64_t offset, bool own) const {
    if (own && few[kind])
      return m.own + w.tid * kOwnBytes + (kind == kOutputs ? kTokenBytes * kOwnRows : 0) + offset * kOwnRows;
    return m.arena[kind] + offset * stride[kind];
  }
  template <class T>
  T* rows(RowKind kind, int64_t offset, bool own) const {
    return (T*)place(kind, offset, own);
  }
  Q8Rows q8(RowKind kind, int64_t offset, bool own, int kp, Q8Kind how) const {
    const int64_t n = own && few[kind] ? kOwnRows : stride[kind];
    const int scales = (kp + how.scale_group - 1) / how.scale_group, groups = (kp + how.group - 1) / how.group;
    char* p = place(kind, offset, own);
    return {(int8_t*)p, (float*)(p + n * kp), (int32_t*)(p + n * (kp + 4 * scales)), how, groups, scales};
  }
  template <class T>
  const T* weight(int index) const {
    return (const T*)m.weights[index];
  }
  // The rows of a rowwise operator that this thread computes.
  Range mine(RowKind kind, bool own) const {
    const int n = kind == kTokens ? b.tokens : b.outputs;
    return own && few[kind] ? Range{0, n} : share(n, w);
  }

  KvLayer<kKv> layer(int index) const {
    const KvPlace& at = kLayers[index];
    return {m.kv + at.offset, kv_page_bytes(kKv, kLayers), b.block_table, b.block_stride, at.heads, at.head_dim};
  }
  // Each thread gets whole kv heads: a head's k and v are then read by the thread that wrote them.
  bool by_head(int kv_heads) const { return kv_heads % w.threads == 0; }

  // This thread's columns, if `units` units of `width` columns each are split over the threads.
  Range columns(int units, int width) const {
    const Range mine = share(units, w);
    return {mine.begin * width, mine.end * width};
  }
  // Whether every thread's columns are whole groups of `step` columns.
  bool whole(int units, int width, int step) const {
    bool all = true;
    for (int t = 1; t < w.threads; ++t) all &= (int64_t)units * t / w.threads * width % step == 0;
    return all;
  }

  void append(const RopeAppend& a, int index) const {
    const KvLayer<kKv> kv = layer(index);
    const bool heads = by_head(kv.kv_heads) || b.tokens < w.threads;
    rope_append<kKv>(a, kv, heads ? share(kv.kv_heads, w) : Range{0, kv.kv_heads},
                     heads ? Range{0, b.tokens} : share(b.tokens, w));
  }
  void attend(const AttentionArgs& a, int index, int call) const {
    const KvLayer<kKv> kv = layer(index);
    if (by_head(kv.kv_heads)) attention<kKv>(a, kv, share(kv.kv_heads, w), w.scratch);
    else attention_tasks<kKv>(a, kv, &m.next_task[call], w);
  }

  float* logits() const { return b.logits ? b.logits : m.logits; }

  // This thread's per-row maxima of the logits, cleared; null if the caller wants no argmax.
  BestLanes* best() const {
    if (!b.argmax) return nullptr;
    BestLanes* rows = m.best + (int64_t)w.tid * m.capacity[kOutputs];
    for (int r = 0; r < b.outputs; ++r) rows[r].clear();
    return rows;
  }
  // Updates them from logits in memory, each thread reading its share of the columns.
  void look_for_best() const {
    BestLanes* rows = best();
    const Range columns = share(kVocab, w);
    for (int r = 0; rows && r < b.outputs; ++r) {
      const float* x = logits() + (int64_t)r * kVocab;
      int i = columns.begin;
      for (; i + 16 <= columns.end; i += 16) rows[r].update(load<f32x16>(x + i), i + kLanes);
      for (; i < columns.end; ++i) rows[r].update(splat(x[i]), splat(i));
    }
  }

  // End of call `index`. `sync`: a barrier, as other threads need what the call wrote.
  void done(int index, bool sync) {
    if (sync) m.pool->sync(w.tid);
    if (w.tid == 0 && m.profiling) {
      const double now = now_seconds();
      m.seconds[index] += now - time;
      m.counts[index] += 1;
      time = now;
    }
  }
};
