// ranks.h: the processes of a divided model, and their sums. Each has a part of the weights and of the KV cache.
//
// They share one block of memory: a header, the plan of the running step, and for each process two places for its part
// of a sum. Rank 0 writes the plan of each step, which the others read where it lies. Sums are in the order of ranks,
// so that their bits depend neither on timing nor on the number of rows.
//
// A process that waits looks at `failed`, too. Whoever sees a process end sets it, and all steps return.
#pragma once
#include "abi.h"
#include "model.h"
#include "thread_pool.h"

constexpr int kRanks = QC_RANKS;
constexpr int64_t kRankHeader = 4096;
constexpr int kMostPaths = 16;

// A counter of one process that others wait for.
struct alignas(64) SharedCount {
  uint32_t value, sleepers;

  void raise(uint32_t to) {
    __atomic_exchange_n(&value, to, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &value, FUTEX_WAKE, kRanks, nullptr, nullptr, 0);
  }
  bool reached(uint32_t target) const {
    return (int32_t)(__atomic_load_n(&value, __ATOMIC_SEQ_CST) - target) >= 0;
  }
};

struct RankHeader {
  uint32_t failed, ended;       // set by the processes' watchers, and by rank 0 when it closes the model
  SharedCount plan;             // steps that rank 0 has planned
  SharedCount done[kRanks];     // steps that each rank has finished
  SharedCount arrived[kRanks];  // sums to which each rank has written its part
};
constexpr int kBeats = 256;  // the runtime counts at the end of the header by what each process says that it runs
static_assert(sizeof(RankHeader) + kBeats * sizeof(uint32_t) <= kRankHeader && kRanks < kBeats, "they have to fit");

// The sizes of a step; its arrays follow, in the order of qc_batch. Then come the numbers of the `embedded` rows that have
// an embedding in place of their token's, and these embeddings.
struct RankPlan {
  int32_t tokens, sequences, outputs, block_stride, embedded;
};

struct Ranks {
  RankHeader* header;
  char* plan;
  float* parts;            // [2][kRanks][part_floats]
  int64_t part_floats;
  int rank;
  uint32_t steps, sums;    // this process's counts
  int other_count;         // paths that run on the same threads
  RankHeader* others[kMostPaths];
  const float** embeds;    // of the rows of a step that another rank has planned: [tokens]

  bool stopped() const {
    return __atomic_load_n(&header->failed, __ATOMIC_ACQUIRE) || __atomic_load_n(&header->ended, __ATOMIC_ACQUIRE);
  }
  float* part(int of, uint32_t turn) const { return parts + ((int64_t)(turn & 1) * kRanks + of) * part_floats; }

  // Waits until `count` has reached `target`; false if the ranks stop before. Spins for about 50 us, then sleeps.
  bool await(SharedCount& count, uint32_t target) const {
    for (int turn = 0; turn < 2048; ++turn) {
      if (count.reached(target)) return true;
      cpu_relax();
    }
    __atomic_fetch_add(&count.sleepers, 1, __ATOMIC_SEQ_CST);
    bool reached;
    while (!(reached = count.reached(target)) && !stopped()) {
      const uint32_t seen = __atomic_load_n(&count.value, __ATOMIC_SEQ_CST);
      const timespec patience{0, 100000000};  // then looks whether a rank has failed
      if (!count.reached(target)) syscall(SYS_futex, &count.value, FUTEX_WAIT, seen, &patience, nullptr, 0);
    }
    __atomic_fetch_sub(&count.sleepers, 1, __ATOMIC_SEQ_CST);
    return reached;
  }

  // Returns when the other ranks have finished all steps that rank 0 has planned of the path with this header.
  bool await_steps(RankHeader* path) const {
    const uint32_t planned = __atomic_load_n(&path->plan.value, __ATOMIC_ACQUIRE);
    bool all = true;
    for (int other = 1; other < kRanks; ++other) all = all && await(path->done[other], planned);
    return all;
  }

  // Returns when all ranks have written their parts of the sum; false if they never will.
  bool meet() {
    header->arrived[rank].raise(++sums);
    bool all = true;
    for (int other = 0; other < kRanks; ++other) all = all && await(header->arrived[other], sums);
    return all;
  }
};

// ---- sums -------------------------------------------------------------------------------------------

// out[0 .. count) = the sum of x over ranks. Each rank has two places for its part: when a process writes one again, all
// have read the sum in between, and so have finished reading this one.
QC_NOINLINE void all_reduce(const Step& s, const float* x, int64_t count, float* out) {
  Ranks& ranks = *s.m.ranks;
  const uint32_t turn = ranks.sums;  // changes once all threads have arrived below
  const int64_t lines = (count + 15) / 16;
  const int64_t begin = lines * s.w.tid / s.w.threads * 16, end = lines * (s.w.tid + 1) / s.w.threads * 16;
  memcpy(ranks.part(ranks.rank, turn) + begin, x + begin, (size_t)(end - begin) * sizeof(float));
  s.m.pool->sync(s.w.tid);
  if (s.w.tid == 0) ranks.meet();
  s.m.pool->sync(s.w.tid);
  for (int64_t i = begin; i < end; i += 16) {
    f32x16 sum = load<f32x16>(ranks.part(0, turn) + i);
    for (int rank = 1; rank < kRanks; ++rank) sum = sum + load<f32x16>(ranks.part(rank, turn) + i);
    store(out + i, sum);
  }
}

// ---- steps ------------------------------------------------------------------------------------------

// Calls f with the address and the number of entries of each array of a plan, in order.
template <class F>
static void plan_arrays(const qc_batch& b, const F& f) {
  f(b.token_ids, b.tokens);
  f(b.positions, b.tokens);
  f(b.query_start, b.sequences + 1);
  f(b.block_table, (int64_t)b.sequences * b.block_stride);
  f(b.output_rows, b.outputs);
  f(b.state_slots, kSlotNumbers ? b.sequences : 0);
  f(b.certain, kSlotNumbers ? b.sequences : 0);
}

// Rank 0 writes the plan of step `b`, once all have finished the step before, also of other paths: a process runs all
// paths on the same threads. False if a rank has failed.
static bool begin_step(Model& m, qc_batch& b) {
  if (!m.ranks) return false;
  Ranks& ranks = *m.ranks;
  if (ranks.rank) return !ranks.stopped();
  if (!ranks.await_steps(ranks.header)) return false;
  for (int path = 0; path < ranks.other_count; ++path)
    if (!ranks.await_steps(ranks.others[path])) return false;
  int32_t embedded = 0;
  for (int row = 0; kEmbedWidth && b.embeds && row < b.tokens; ++row) embedded += b.embeds[row] != nullptr;
  *(RankPlan*)ranks.plan = {b.tokens, b.sequences, b.outputs, b.block_stride, embedded};
  int32_t* to = (int32_t*)(ranks.plan + sizeof(RankPlan));
  plan_arrays(b, [&](const int32_t* from, int64_t count) {
    if (count) memcpy(to, from, (size_t)count * sizeof(int32_t));
    to += count;
  });
  float* values = (float*)(to + embedded);
  for (int row = 0; embedded && row < b.tokens; ++row)
    if (b.embeds[row]) {
      *to++ = row;
      memcpy(values, b.embeds[row], kEmbedWidth * sizeof(float));
      values += kEmbedWidth;
    }
  ranks.header->plan.raise(++ranks.steps);
  return !ranks.stopped();
}

static int status(const Model& m) { return m.ranks && !m.ranks->stopped() ? 0 : 2; }

static void run_batch(Model& m, const qc_batch& b);

static int64_t plan_bytes(const Model& m) {
  const int64_t tokens = m.rows[kTokens], table = tokens * kv_entries(kKv, kMaxPosition);
  const int64_t numbers = 7 * tokens + 1 + table, embedded = tokens * (1 + kEmbedWidth);
  return ((int64_t)sizeof(RankPlan) + (int64_t)sizeof(int32_t) * (numbers + embedded) + 4095) / 4096 * 4096;
}
static int64_t part_floats(const Model& m) { return (int64_t)m.capacity[kTokens] * kSumFloats; }

QC_API int64_t qc_rank_bytes(void* model) {
  const Model& m = *(const Model*)model;
  return kRankHeader + plan_bytes(m) + 2 * kRanks * part_floats(m) * (int64_t)sizeof(float);
}

QC_API int qc_join(void* model, const qc_ranks* c) {
  if (!model || !c || !c->memory || c->ranks != kRanks || c->rank < 0 || c->rank >= kRanks) return 1;
  Model& m = *(Model*)model;
  if (m.ranks || c->bytes < qc_rank_bytes(model) || c->other_count < 0 || c->other_count > kMostPaths) return 1;
  m.ranks = (Ranks*)malloc(sizeof(Ranks) + (size_t)m.rows[kTokens] * sizeof(float*));
  if (!m.ranks) return 1;
  char *plan = (char*)c->memory + kRankHeader, *parts = plan + plan_bytes(m);
  *m.ranks = {(RankHeader*)c->memory, plan, (float*)parts, part_floats(m), c->rank, 0, 0, c->other_count, {},
              (const float**)(m.ranks + 1)};
  for (int path = 0; path < c->other_count; ++path) m.ranks->others[path] = (RankHeader*)c->other_paths[path];
  return 0;
}

QC_API int qc_follow(void* model) {
  if (!model || !((Model*)model)->ranks || !((Model*)model)->ranks->rank) return 1;
  Model& m = *(Model*)model;
  Ranks& ranks = *m.ranks;
  for (;;) {
    if (!ranks.await(ranks.header->plan, ranks.steps + 1))
      return __atomic_load_n(&ranks.header->failed, __ATOMIC_ACQUIRE) ? 2 : 0;
    const RankPlan& plan = *(const RankPlan*)ranks.plan;
    const int32_t* at = (const int32_t*)(ranks.plan + sizeof(RankPlan));
    auto take = [&](int64_t count) { return at += count, at - count; };
    qc_batch b{};
    b.tokens = plan.tokens, b.sequences = plan.sequences, b.outputs = plan.outputs, b.block_stride = plan.block_stride;
    b.token_ids = take(b.tokens), b.positions = take(b.tokens), b.query_start = take(b.sequences + 1);
    b.block_table = take((int64_t)b.sequences * b.block_stride), b.output_rows = take(b.outputs);
    if (kSlotNumbers) b.state_slots = take(b.sequences), b.certain = take(b.sequences);
    if (plan.embedded) {
      const int32_t* rows = take(plan.embedded);
      const float* values = (const float*)take((int64_t)plan.embedded * kEmbedWidth);
      for (int row = 0; row < b.tokens; ++row) ranks.embeds[row] = nullptr;
      for (int i = 0; i < plan.embedded; ++i) ranks.embeds[rows[i]] = values + (int64_t)i * kEmbedWidth;
      b.embeds = ranks.embeds;
    }
    if (!kLateSums) b.outputs = 0;  // rank 0 alone computes the logits
    run_batch(m, b);
    ranks.header->done[ranks.rank].raise(++ranks.steps);
  }
}
