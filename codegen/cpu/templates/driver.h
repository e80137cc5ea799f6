// driver.h: implements the C interface on top of the generated model's step(). Included last.
#pragma once
#include <sys/mman.h>

#include "model.h"
#include "penalties.h"
#include "probe.h"
#include "report.h"
#include "sample.h"

static void run_step(void* model, int tid) { step(*(Model*)model, tid); }

// ---- memory -----------------------------------------------------------------------------------------

// Carves the model's arenas from one mapping. Called twice: with a null base to measure, then to assign pointers.
static size_t carve(Model& m, char* base) {
  size_t at = 0;
  auto take = [&](size_t bytes) {
    char* p = base + at;
    at += (bytes + 4095) / 4096 * 4096;
    return p;
  };
  const size_t tokens = (size_t)m.capacity[kTokens], outputs = (size_t)m.capacity[kOutputs];
  const size_t threads = (size_t)m.pool->threads;
  m.arena[kTokens] = take((size_t)kTokenBytes * tokens);
  m.arena[kOutputs] = take((size_t)kOutputBytes * outputs);
  m.rope = (float*)take((size_t)kRopeFloats * tokens * sizeof(float));
  m.logits = (float*)take((size_t)kVocab * outputs * sizeof(float));
  m.best = (BestLanes*)take(threads * outputs * sizeof(BestLanes));
  m.own = take(threads * kOwnBytes);
  m.scratch = take(threads * kScratchBytes);
  m.samplers = take(threads * Sampler::bytes(kVocab));
  m.times = (int32_t*)take(threads * kVocab * sizeof(int32_t));
  m.plain = (float*)take(threads * kVocab * sizeof(float));
  m.masks = (uint32_t*)take(outputs * mask_words(kVocab) * sizeof(uint32_t));
  m.feedback = (int32_t*)take(3 * tokens * sizeof(int32_t));
  return at;
}

static bool allocate(Model& m) {
  m.memory_bytes = carve(m, nullptr);
  void* p = mmap(nullptr, m.memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
  m.memory = p;
  // Only a hint: small pages work as well. A draft path has few rows and would waste most of each huge page.
  if (m.pool == &m.own_pool) madvise(p, m.memory_bytes, MADV_HUGEPAGE);
  carve(m, (char*)p);
  return true;
}

QC_API void qc_close(void* model) {
  if (!model) return;
  Model& m = *(Model*)model;
  if (m.pool == &m.own_pool) m.pool->close();
  if (m.memory) munmap(m.memory, m.memory_bytes);
  free(m.ranks);
  free(model);
}

QC_API void* qc_open(const qc_config* c) {
  if (!c || c->threads < 1 || c->max_tokens < 1 || c->max_outputs < 0 || c->kv_pages < 1 || !c->kv || !c->weights)
    return nullptr;
  if (kSlotNumbers && (!c->states || c->state_slots < 1)) return nullptr;
  void* p = nullptr;
  if (posix_memalign(&p, 64, sizeof(Model))) return nullptr;
  Model& m = *(Model*)memset(p, 0, sizeof(Model));
  m.weights = c->weights;
  m.kv = (char*)c->kv;
  m.kv_pages = c->kv_pages;
  m.states = (float*)c->states;
  m.state_slots = c->state_slots;
  m.rows[kTokens] = c->max_tokens;
  m.rows[kOutputs] = c->max_outputs;
  for (int kind = 0; kind < 2; ++kind) m.capacity[kind] = whole_rows(m.rows[kind]);
  m.pool = c->thread_pool ? (ThreadPool*)c->thread_pool : &m.own_pool;
  if ((!c->thread_pool && !m.pool->open(c->threads)) || !allocate(m)) {
    qc_close(p);
    return nullptr;
  }
  return p;
}

#ifndef QC_RANKS
static bool begin_step(Model&, qc_batch&) { return true; }
static int status(const Model&) { return 0; }
#endif

QC_API int qc_connect(void* model, const float* given, float* features) {
  if (!model || !kFeatures) return 1;
  Model& m = *(Model*)model;
  m.features_given = given, m.features = features;
  return 0;
}

QC_API void* qc_thread_pool(void* model) { return model ? ((Model*)model)->pool : nullptr; }

// ---- steps ------------------------------------------------------------------------------------------

static bool valid_sequence(const Model& m, const qc_batch& b, int s, int steps) {
  const int begin = b.query_start[s], end = b.query_start[s + 1];
  if (begin > end || end > b.tokens) return false;
  if (begin == end) return true;
  const int first = b.positions[begin], last = first + (end - begin) - 1 + (steps - 1);
  if (first < 0 || last >= kMaxPosition || kv_entries(kKv, last + 1) > b.block_stride) return false;
  for (int t = begin; t < end; ++t)
    if (b.positions[t] != first + (t - begin)) return false;
  const int32_t* pages = b.block_table + (int64_t)s * b.block_stride;
  for (int i = 0; i < kv_entries(kKv, last + 1); ++i)
    if (pages[i] < 0 || pages[i] >= m.kv_pages) return false;
  return true;
}

static bool valid_sampling(const qc_sampling& d) {
  if (d.temperature > 0 && (d.count < 1 || !d.uniforms)) return false;
  const bool reports = d.reported > 0 || d.known > 0;
  if (reports && (!d.reports || d.alternatives < 0 || d.alternatives > kVocab)) return false;
  if (d.known > 0 && !d.known_next) return false;
  for (int i = 0; i < d.known; ++i)
    if (d.known_next[i] < 0 || d.known_next[i] >= kVocab) return false;
  if (d.biased > 0 && (!d.bias_tokens || !d.bias_values)) return false;
  if (d.fill_mask && (d.room < 1 || !d.recent)) return false;
  return d.room < 1 || (d.recent && d.listed >= 0 && (d.listed == 0 || (d.seen && d.counts)));
}

// Whether the slots of a batch are distinct slots of the model, and the rows that may be taken back fit into a log.
static bool valid_states(const Model& m, const qc_batch& b) {
  if (!kSlotNumbers) return true;
  if (!b.state_slots || !b.certain) return false;
  for (int s = 0; s < b.sequences; ++s) {
    if (b.state_slots[s] < 0 || b.state_slots[s] >= m.state_slots) return false;
    for (int other = 0; other < s; ++other)
      if (b.state_slots[other] == b.state_slots[s]) return false;
    const int begin = b.query_start[s], end = b.query_start[s + 1];
    if (begin == end) continue;
    const int start = b.positions[begin], kept = b.certain[s] > start ? b.certain[s] : start;
    if (start + (end - begin) - kept > kLoggedRows) return false;
  }
  return true;
}

// Whether `steps` steps starting from batch b stay within the limits the model was opened with.
static bool valid(const Model& m, const qc_batch* batch, int steps) {
  if (!batch) return false;
  const qc_batch& b = *batch;
  if (b.tokens < 1 || b.tokens > m.rows[kTokens] || b.sequences < 1 || b.sequences > b.tokens) return false;
  if (b.outputs < 0 || b.outputs > m.rows[kOutputs] || (b.outputs && !b.output_rows)) return false;
  if (!b.token_ids || !b.positions || !b.query_start || !b.block_table) return false;
  if (kReadsFeatures && !m.features_given) return false;
  if (b.query_start[0] != 0 || b.query_start[b.sequences] != b.tokens) return false;
  for (int t = 0; t < b.tokens; ++t)
    if (b.token_ids[t] < 0 || b.token_ids[t] >= kTokenIds) return false;
  for (int r = 0; r < b.outputs; ++r)
    if (b.output_rows[r] < 0 || b.output_rows[r] >= b.tokens) return false;
  for (int s = 0; s < b.sequences; ++s) {
    if (!valid_sequence(m, b, s, steps)) return false;
    if (b.sampling && !valid_sampling(b.sampling[s])) return false;
  }
  return valid_states(m, b);
}

// For this thread's share of the rows: replaces the argmax by the token that biases, penalties, a mask or a temperature
// choose, and reports its log probability, or that of the known next token.
static void choose_rows(void* model, int tid) {
  Model& m = *(Model*)model;
  const qc_batch& b = m.batch;
  Sampler sampler(kVocab, m.samplers + (size_t)tid * Sampler::bytes(kVocab));
  for (int r = tid, s = 0; r < b.outputs; r += m.pool->threads) {
    const int row = b.output_rows[r];
    if (row < b.query_start[s]) s = 0;
    while (row >= b.query_start[s + 1]) ++s;
    const qc_sampling& d = b.sampling[s];
    float* x = b.logits + (int64_t)r * kVocab;
    const float* plain = x;
    const int place = b.positions[row] - d.first;
    if (place < 0 && place >= -d.known) {
      const int at = place + d.known;
      if (b.argmax[r] >= 0) report(sampler, x, d.known_next[at], d, at);
      continue;
    }
    const bool reported = place >= 0 && place < d.reported;
    if ((d.room > 0 || d.biased > 0) && b.argmax[r] >= 0) {
      if (reported) plain = (float*)memcpy(m.plain + (int64_t)tid * kVocab, x, kVocab * sizeof(float));
      penalize(x, kVocab, d, b.positions[row], m.times + (int64_t)tid * kVocab);
      if (d.fill_mask && place >= 0) apply_mask(x, kVocab, m.masks + (int64_t)r * mask_words(kVocab));
      b.argmax[r] = sampler.best(x);
    }
    if (d.temperature > 0 && b.argmax[r] >= 0) {
      const int at = place < 0 ? 0 : place < d.count ? place : d.count - 1;
      b.argmax[r] = sampler.draw(x, b.argmax[r], d, d.uniforms[at]);
    }
    if (reported && b.argmax[r] >= 0) report(sampler, plain, b.argmax[r], d, place + d.known);
  }
}

// Asks for the masks of the rows that have one: before the argmax of each row is known, and, with `later`, for those rows
// of which that decides whether the mask is needed. A mask that is not needed leaves no token out.
static void fill_masks(const Model& m, const qc_batch& b, bool logits, bool later) {
  for (int r = 0, s = 0; r < b.outputs; ++r) {
    const int row = b.output_rows[r], words = mask_words(kVocab);
    if (row < b.query_start[s]) s = 0;
    while (row >= b.query_start[s + 1]) ++s;
    const qc_sampling& d = b.sampling[s];
    const int position = b.positions[row];
    if (mask_later(d, position, !logits && b.argmax) != later) continue;
    uint32_t* mask = m.masks + (int64_t)r * words;
    if (later && b.argmax[r] >= 0 && allowed(d, position, b.argmax[r])) memset(mask, 255, (size_t)words * sizeof(uint32_t));
    else fill_mask(d, position, mask, words);
  }
}

static void run_batch(Model& m, const qc_batch& b) {
  m.batch = b;
  bool chosen = false;
  for (int s = 0; b.argmax && b.sampling && s < b.sequences; ++s) {
    const qc_sampling& d = b.sampling[s];
    chosen |= d.temperature > 0 || d.room > 0 || d.biased > 0 || d.reported > 0 || d.known > 0;
  }
  if (!begin_step(m, m.batch)) return;
  if (chosen && !b.logits) m.batch.logits = m.logits;
  if (chosen) keep_recent(b), fill_masks(m, b, b.logits, false);
  memset(m.next_task, 0, sizeof m.next_task);
  m.pool->run(run_step, &m);
  for (int r = 0; b.argmax && r < b.outputs; ++r) {
    BestLanes& row = m.best[r];
    for (int t = 1; t < m.pool->threads; ++t) row.merge(m.best[(int64_t)t * m.capacity[kOutputs] + r]);
    b.argmax[r] = row.index();
  }
  if (chosen) fill_masks(m, b, b.logits, true), m.pool->run(choose_rows, &m);
}

QC_API int qc_step(void* model, const qc_batch* batch) {
  if (!model || !valid(*(Model*)model, batch, 1)) return 1;
  run_batch(*(Model*)model, *batch);
  return status(*(Model*)model);
}

QC_API int qc_hidden(void* model, const qc_batch* batch, float* out) {
  if (!kHidden || !model || !out || !valid(*(Model*)model, batch, 1)) return 1;
  Model& m = *(Model*)model;
  qc_batch b = *batch;
  b.argmax = nullptr, b.sampling = nullptr;
  m.hidden = out;
  run_batch(m, b);
  m.hidden = nullptr;
  return status(m);
}

QC_API int qc_decode(void* model, const qc_batch* batch, int32_t steps, int32_t* out) {
  if (!model || !out || steps < 1 || !valid(*(Model*)model, batch, steps)) return 1;
  Model& m = *(Model*)model;
  qc_batch b = *batch;
  const int n = b.tokens;
  if (b.sequences != n || b.outputs != n || b.embeds) return 1;
  int32_t *ids = m.feedback, *positions = ids + n, *rows = positions + n;
  for (int s = 0; s < n; ++s) {
    if (b.query_start[s] != s) return 1;
    ids[s] = b.token_ids[s];
    positions[s] = b.positions[s];
    rows[s] = s;
  }
  b.token_ids = ids;
  b.positions = positions;
  b.output_rows = rows;
  float* const features = m.features;
  for (int i = 0; i < steps; ++i) {
    b.argmax = out + (int64_t)i * n;
    if (features) m.features = features + (int64_t)i * n * kFeatures;
    run_batch(m, b);
    m.features = features;
    if (status(m)) return status(m);
    for (int s = 0; s < n; ++s) ids[s] = token_after(b.argmax[s]), ++positions[s];
  }
  return 0;
}

// ---- description and measurement --------------------------------------------------------------------

QC_API const char* qc_describe(void) { return kDescription; }

QC_API int qc_profile(void* model, int32_t on) {
  if (!model) return 1;
  Model& m = *(Model*)model;
  m.profiling = on != 0;
  memset(m.seconds, 0, sizeof m.seconds);
  memset(m.counts, 0, sizeof m.counts);
  return 0;
}

QC_API int qc_profile_read(void* model, double* seconds, int64_t* counts, int32_t n) {
  if (!model || !seconds || !counts || n != kCalls) return 1;
  memcpy(seconds, ((Model*)model)->seconds, sizeof(double) * kCalls);
  memcpy(counts, ((Model*)model)->counts, sizeof(int64_t) * kCalls);
  return 0;
}

QC_API double qc_probe(void* model, int32_t what) { return model ? probe(*((Model*)model)->pool, what) : 0.0; }
