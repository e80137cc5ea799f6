// state.h: recurrent states. Each sequence has a slot, with the layout of qcompile/formats/states.py:
//
//   convolution  ring [W - 1 + kLog][F] of its newest raw inputs, position p in entry p % (W - 1 + kLog)
//   recurrence   base [H * D], scales [H * D] of int8, state [H][K][D], logs of keys [L][Hk * K], of updates [L][H * D]
//                and of decay [L][H or H * K], each part from a multiple of 16 numbers on. If D is 1, the state is
//                [K][H]. L is kLog, and kStateBlock more if the state is stored in fewer bits (state_store.h).
//
// The base of a column is the number of positions that its state covers. A step replays the log from there, computes its
// rows in order, and stores the state after the last certain position (in fewer bits the last one that ends a block) as
// the new base; later rows go to the log. Every column of a state (and every feature of a convolution) is computed by the
// same operations in the same order however rows are divided into steps and columns into tiles.
#pragma once
#include "lanes.h"
#include "rowops.h"
#include "state_store.h"

constexpr int kLog = 32;            // LOG_TOKENS
constexpr int kRoundRows = 16;      // ROUND_TOKENS
constexpr int kStateVectors = 4;    // vectors of 16 columns in a tile of a state
constexpr int kStateTile = 16 * kStateVectors;
constexpr int64_t state_aligned(int64_t count) { return (count + 15) / 16 * 16; }

// The rows of one sequence in a step, and its part of a layer's states.
struct StateRows {
  int begin, start, end;  // first row; positions of the first row and after the last
  int certain;            // positions that are never taken back
  float* part;
};

struct StateBatch {
  int sequences;
  const int32_t *positions, *query_start, *slots, *certain;
  float* states;          // [slots][slot_numbers]
  int64_t slot_numbers;

  // Whether a sequence has more rows than a round of drafts.
  bool has_many() const {
    for (int s = 0; s < sequences; ++s)
      if (query_start[s + 1] - query_start[s] > kRoundRows) return true;
    return false;
  }
  StateRows rows(int s, int64_t offset) const {
    const int begin = query_start[s], count = query_start[s + 1] - begin, start = count ? positions[begin] : 0;
    return {begin, start, start + count, certain[s], states + slots[s] * slot_numbers + offset};
  }
};

// 16 floats of which only the first `n` are in memory; the others are 0.
QC_INLINE f32x16 load_part(const float* p, int n) {
  if (n >= 16) return load<f32x16>(p);
  f32x16 v{};
  memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
}
QC_INLINE void store_part(float* p, f32x16 v, int n) {
  if (n >= 16) store(p, v);
  else memcpy(p, &v, (size_t)n * sizeof(float));
}

// ---- causal convolution --------------------------------------------------------------------------------

struct ConvArgs {
  const float* x;       // [tokens][x_stride]
  int x_stride;
  float* out;           // [tokens][gemm_kp(features)], padded with zeros
  int features, width;
  const float* weight;  // [width][features rounded up to 16]
  const float* bias;    // [features] or null
  int64_t state;        // of the layer in a slot
};
constexpr int kMostTaps = 64;  // MOST_TAPS

// Computes the features of `blocks`, 16 each, of all rows.
QC_NOINLINE void conv_step(const ConvArgs& a, const StateBatch& b, Range blocks) {
  const int ring = a.width - 1 + kLog, np = (a.features + 15) / 16 * 16, kp = gemm_kp(a.features);
  const int first = blocks.begin * 16, last = blocks.end * 16 < a.features ? blocks.end * 16 : a.features;
  if (first >= last) return;
  for (int s = 0; s < b.sequences; ++s) {
    const StateRows rows = b.rows(s, a.state);
    for (int p = rows.start; p < rows.end; ++p) {
      const float* taps[kMostTaps];
      for (int j = 0; j < a.width; ++j) {
        const int from = p - a.width + 1 + j;
        taps[j] = from < 0             ? nullptr
                  : from >= rows.start ? a.x + (int64_t)(rows.begin + from - rows.start) * a.x_stride
                                       : rows.part + (int64_t)(from % ring) * a.features;
      }
      float* out = a.out + (int64_t)(rows.begin + p - rows.start) * kp;
      for (int i = first; i < last; i += 16) {
        const int n = last - i;
        f32x16 sum = a.bias ? load_part(a.bias + i, n) : splat(0.0f);
        for (int j = 0; j < a.width; ++j)
          if (taps[j]) sum = sum + load_part(taps[j] + i, n) * load<f32x16>(a.weight + (int64_t)j * np + i);
        store_part(out + i, sum, n);
      }
      if (last == a.features)
        for (int i = last; i < kp; ++i) out[i] = 0.0f;
    }
    for (int p = rows.end - ring > rows.start ? rows.end - ring : rows.start; p < rows.end; ++p)
      memcpy(rows.part + (int64_t)(p % ring) * a.features + first,
             a.x + (int64_t)(rows.begin + p - rows.start) * a.x_stride + first, (size_t)(last - first) * sizeof(float));
  }
}

// ---- linear recurrence ---------------------------------------------------------------------------------

// An operand: f32 rows `stride` floats apart.
struct StateInput {
  const float* p;
  int stride;
  const float* row(int t) const { return p + (int64_t)t * stride; }
};

struct RecurrenceArgs {
  StateInput q, k, v, decay, gain;  // gain.p null: 1
  float* out;                       // [tokens][gemm_kp(heads * value_dim)], padded with zeros
  int heads, key_heads, key_dim, value_dim;
  bool by_key, delta;               // by_key: decay has a number for each key feature
  const float* rates;               // [heads], by key [heads][key_dim], or null: 1. If value_dim is 1, by key
  bool rates_by_key;                // [key_dim][heads rounded up to 16]
  int64_t state;                    // of the layer in a slot
  StateFormat form;                 // of the state; kStateF32 if value_dim is 1

  // Whether keys and decay enter the log when all tiles are done. The log of a state in fewer bits also has certain rows,
  // and of many these may take the entries of positions before the step, which other tiles have yet to replay.
  bool logs_apart(const StateRows& rows) const { return form != kStateF32 && rows.end - rows.start > kRoundRows; }

  int block() const { return form == kStateF32 ? 1 : kStateBlock; }

  // The positions that the base covers after a step of `rows`, before which it covers `base`.
  int kept(const StateRows& rows, int base) const {
    const int certain = (rows.certain < rows.end ? rows.certain : rows.end) / block() * block();
    return certain > base ? certain : base;
  }
};

// Where the parts of a recurrence's state begin.
struct RecurrenceParts {
  float *base, *scales, *state, *keys, *updates, *decay;
  int key_count, update_count, decay_count;  // numbers of an entry of the logs
  int entries;

  RecurrenceParts(const RecurrenceArgs& a, float* part)
      : key_count(a.key_heads * a.key_dim),
        update_count(a.heads * a.value_dim),
        decay_count(a.heads * (a.by_key ? a.key_dim : 1)),
        entries(kLog + (a.form == kStateF32 ? 0 : kStateBlock)) {
    base = part;
    scales = base + state_aligned(update_count);
    state = a.form == kStateInt8 ? scales + state_aligned(update_count) : scales;
    keys = state + state_aligned(((int64_t)update_count * a.key_dim * a.form + 3) / 4);
    updates = keys + state_aligned((int64_t)entries * key_count);
    decay = updates + state_aligned((int64_t)entries * update_count);
  }
  const float* key(int p) const { return keys + (int64_t)(p % entries) * key_count; }
  const float* update(int p) const { return updates + (int64_t)(p % entries) * update_count; }
  const float* fading(int p) const { return decay + (int64_t)(p % entries) * decay_count; }

  // The base of the columns from `column` on. What is no number of positions, as in a slot that holds no state, counts
  // as the start, so that nothing is replayed.
  int covered(int column, int start) const {
    const float known = base[column];
    return start == 0 ? 0 : known >= 0.0f && known <= (float)start ? (int)known : start;
  }
  void log(int p, const float* from, float* log, int count, int at, int n) const {
    memcpy(log + (int64_t)(p % entries) * count + at, from, (size_t)n * sizeof(float));
  }
};

constexpr int kReplayed = 4;  // positions of a log that are replayed together

// What a thread needs for a tile: a copy of it, and the factors of the decay of tokens that are computed together.
constexpr size_t recurrence_scratch_bytes(int key_dim) {
  return sizeof(float) * ((size_t)key_dim * kStateTile + kReplayed * (size_t)state_aligned(key_dim));
}

// A tile of `columns` columns of a state matrix [key_dim][...], its rows `stride` floats apart.
struct StateTile {
  float* p;
  int64_t stride;
  int key_dim, columns;

  void copy(const StateTile& from) const {
    for (int i = 0; i < key_dim; ++i) {
      float* to = p + i * stride;
      memcpy(to, from.p + i * from.stride, (size_t)columns * sizeof(float));
      for (int c = columns; c < (columns + 15) / 16 * 16; ++c) to[c] = 0.0f;  // only in scratch, where there is room
    }
  }
  void clear() const {
    for (int i = 0; i < key_dim; ++i) memset(p + i * stride, 0, (size_t)columns * sizeof(float));
  }
  void write(const StateTile& to) const {
    for (int i = 0; i < key_dim; ++i) memcpy(to.p + i * to.stride, p + i * stride, (size_t)columns * sizeof(float));
  }
};

// u = (F S)^T k, with F the factors [key_dim] of the rows, or [1] for all of them.
template <int V, bool kByKey>
QC_INLINE void recall(const StateTile& s, const float* factors, const float* k, float* u) {
  F16 sum[V];
  for (int v = 0; v < V; ++v) sum[v] = f_set(0.0f);
  for (int i = 0; i < s.key_dim; ++i) {
    const F16 f = f_set(factors[kByKey ? i : 0]);
    const float* row = s.p + i * s.stride;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[v] = f_dot(sum[v], f_mul(f_load(row + 16 * v), f), k + i);
  }
  for (int v = 0; v < V; ++v) f_store(u + 16 * v, sum[v]);
}

// S = F S + k w^T and y = S^T q.
template <int V, bool kByKey>
QC_INLINE void absorb(const StateTile& s, const float* factors, const float* k, const float* w, const float* q, float* y) {
  F16 sum[V], update[V];
  for (int v = 0; v < V; ++v) sum[v] = f_set(0.0f), update[v] = f_load(w + 16 * v);
  for (int i = 0; i < s.key_dim; ++i) {
    const F16 f = f_set(factors[kByKey ? i : 0]);
    float* row = s.p + i * s.stride;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const F16 x = f_dot(f_mul(f_load(row + 16 * v), f), update[v], k + i);
      f_store(row + 16 * v, x);
      sum[v] = f_dot(sum[v], x, q + i);
    }
  }
  for (int v = 0; v < V; ++v) f_store(y + 16 * v, sum[v]);
}

// S = F S + k w^T for N tokens, one after the other, with the factors of each `next` behind those before.
template <int V, bool kByKey, int N>
QC_INLINE void absorb_all(const StateTile& s, const float* factors, int64_t next, const float* const* k,
                          const float (*w)[kStateTile]) {
  for (int i = 0; i < s.key_dim; ++i) {
    float* row = s.p + i * s.stride;
    F16 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = f_load(row + 16 * v);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const F16 f = f_set(factors[n * next + (kByKey ? i : 0)]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = f_dot(f_mul(x[v], f), f_load(w[n] + 16 * v), k[n] + i);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) f_store(row + 16 * v, x[v]);
  }
}

// The tile of head `head` that starts at column `first` of it, for all rows of a sequence.
template <int V>
struct RecurrenceTile {
  const RecurrenceArgs& a;
  const StateRows& rows;
  const RecurrenceParts parts;
  const int head, first, columns, at;  // `at`: the first column among those of all heads
  float* const factors;                // [key_dim] or [1]
  StateTile own, tile;                 // in the slot, and where the tile is computed
  StateTile copy;
  const StoredTile stored;             // in the slot, in fewer bits

  RecurrenceTile(const RecurrenceArgs& args, const StateRows& rows, int head, int first, int columns, float* scratch)
      : a(args),
        rows(rows),
        parts(args, rows.part),
        head(head),
        first(first),
        columns(columns),
        at(head * args.value_dim + first),
        factors(scratch + (int64_t)args.key_dim * kStateTile),
        own{parts.state + (int64_t)head * a.key_dim * a.value_dim + first, a.value_dim, a.key_dim, columns},
        tile(own),
        copy{scratch, kStateTile, a.key_dim, columns},
        stored{a.form, (uint8_t*)parts.state + ((int64_t)head * a.key_dim * a.value_dim + first) * a.form,
               parts.scales + at, a.value_dim, a.key_dim, columns} {}

  void run() {
    const int base = parts.covered(at, rows.start), kept = a.kept(rows, base);
    if (rows.start == 0) clear(), mark(0);
    if (columns % 16 || a.form != kStateF32) compute_in_copy();
    for (int p = base; p < rows.end;) {
      if (p == kept) compute_in_copy();
      if (p < rows.start) p += replay(p, kept);
      else compute(p, p >= kept), ++p;
      if (p % a.block() == 0) settle(p == kept);
      if (p == kept) mark(kept);
    }
  }

 private:
  void clear() const {
    if (a.form == kStateF32) own.clear();
    else stored.clear();
  }
  void compute_in_copy() {
    if (tile.p == copy.p) return;
    if (a.form == kStateF32) copy.copy(own);
    else stored.widen(copy.p, kStateTile);
    tile = copy;
  }
  // Rounds the state where a block ends, and puts it into the slot if it is `kept`.
  void settle(bool kept) const {
    if (a.form != kStateF32) stored.round(copy.p, kStateTile, kept);
    else if (kept && tile.p == copy.p) copy.write(own);
  }
  void mark(int covered) const {
    for (int c = 0; c < columns; ++c) parts.base[at + c] = (float)covered;
  }
  const float* of_head(const float* keys) const { return keys + (int64_t)(head / (a.heads / a.key_heads)) * a.key_dim; }
  bool has_factors() const { return a.by_key || a.rates_by_key; }

  // Factors exp(decay * rates) of a token, for its decay.
  void fade(const float* decay, float* factors) const {
    const float* d = decay + (int64_t)head * (a.by_key ? a.key_dim : 1);
    const float* r = a.rates ? a.rates + (int64_t)head * (a.rates_by_key ? a.key_dim : 1) : nullptr;
    if (!has_factors()) {
      factors[0] = vexp(splat(r ? *d * *r : *d))[0];
      return;
    }
    for (int i = 0; i < a.key_dim; i += 16) {
      const int n = a.key_dim - i;
      f32x16 e = a.by_key ? load_part(d + i, n) : splat(*d);
      if (r) e = e * (a.rates_by_key ? load_part(r + i, n) : splat(*r));
      store(factors + i, vexp(e));
    }
  }

  // Replays positions from p on: at most kReplayed, to the next one after which the state is kept or rounded. Returns
  // their number.
  int replay(int p, int kept) {
    int end = rows.start < p + kReplayed ? rows.start : p + kReplayed;
    if (p < kept && kept < end) end = kept;
    const int rounded = (p / a.block() + 1) * a.block();
    if (a.form != kStateF32 && rounded < end) end = rounded;
    alignas(64) float w[kReplayed][kStateTile] = {};
    const float* k[kReplayed] = {};
    const int64_t next = state_aligned(a.key_dim);
    for (int n = 0; n < end - p; ++n) {
      memcpy(w[n], parts.update(p + n) + at, (size_t)columns * sizeof(float));
      k[n] = of_head(parts.key(p + n));
      fade(parts.fading(p + n), factors + n * next);
    }
    if (has_factors()) replay_all<true>(end - p, next, k, w);
    else replay_all<false>(end - p, next, k, w);
    return end - p;
  }

  template <bool kByKey>
  void replay_all(int count, int64_t next, const float* const* k, const float (*w)[kStateTile]) const {
    switch (count) {
      case 1: return absorb_all<V, kByKey, 1>(tile, factors, next, k, w);
      case 2: return absorb_all<V, kByKey, 2>(tile, factors, next, k, w);
      case 3: return absorb_all<V, kByKey, 3>(tile, factors, next, k, w);
      default: return absorb_all<V, kByKey, kReplayed>(tile, factors, next, k, w);
    }
  }

  void compute(int p, bool logged) {
    alignas(64) float w[kStateTile] = {}, u[kStateTile], y[kStateTile];
    const int t = rows.begin + p - rows.start;
    const float *k = of_head(a.k.row(t)), *q = of_head(a.q.row(t)), *decay = a.decay.row(t);
    memcpy(w, a.v.row(t) + at, (size_t)columns * sizeof(float));
    fade(decay, factors);
    if (a.delta) {
      if (has_factors()) recall<V, true>(tile, factors, k, u);
      else recall<V, false>(tile, factors, k, u);
      for (int v = 0; v < V; ++v) f_store(w + 16 * v, f_sub(f_load(w + 16 * v), f_load(u + 16 * v)));
    }
    if (a.gain.p) {
      const F16 gain = f_set(a.gain.row(t)[head]);
      for (int v = 0; v < V; ++v) f_store(w + 16 * v, f_mul(f_load(w + 16 * v), gain));
    }
    if (has_factors()) absorb<V, true>(tile, factors, k, w, q, y);
    else absorb<V, false>(tile, factors, k, w, q, y);
    float* out = a.out + (int64_t)t * gemm_kp(a.heads * a.value_dim);
    memcpy(out + at, y, (size_t)columns * sizeof(float));
    if (!logged) return;
    parts.log(p, w, parts.updates, parts.update_count, at, columns);
    if (first || a.logs_apart(rows)) return;  // what the tiles and heads share is logged once
    const int fading = a.by_key ? a.key_dim : 1, group = a.heads / a.key_heads;
    parts.log(p, decay + (int64_t)head * fading, parts.decay, parts.decay_count, head * fading, fading);
    if (head % group == 0) parts.log(p, k, parts.keys, parts.key_count, head / group * a.key_dim, a.key_dim);
  }
};

// ---- a recurrence of vectors (value_dim 1): the columns are the heads ------------------------------------------

// 16 heads from `first` on, for all rows of a sequence.
struct ScanTile {
  const RecurrenceArgs& a;
  const StateRows& rows;
  const RecurrenceParts parts;
  const int first, columns, np;
  const bool together;  // all heads of the tile read the same key head
  float* const tile;    // [key_dim][16]

  ScanTile(const RecurrenceArgs& args, const StateRows& rows, int first, float* scratch)
      : a(args),
        rows(rows),
        parts(args, rows.part),
        first(first),
        columns(args.heads - first < 16 ? args.heads - first : 16),
        np((args.heads + 15) / 16 * 16),
        together(key_head(first) == key_head(first + columns - 1)),
        tile(scratch) {}

  void run() {
    const int base = parts.covered(first, rows.start), kept = a.kept(rows, base);
    for (int i = 0; i < a.key_dim; ++i)
      store(tile + i * 16, rows.start ? load_part(parts.state + (int64_t)i * a.heads + first, columns) : splat(0.0f));
    if (rows.start == 0) keep(0);
    for (int p = base; p < rows.end; ++p) {
      if (p < rows.start) step<false>(parts.key(p), nullptr, parts.fading(p), load_part(parts.update(p) + first, columns));
      else compute(p, p >= kept);
      if (p + 1 == kept) keep(kept);
    }
  }

 private:
  int key_head(int head) const { return head / (a.heads / a.key_heads); }

  void keep(int covered) const {
    for (int i = 0; i < a.key_dim; ++i)
      store_part(parts.state + (int64_t)i * a.heads + first, load<f32x16>(tile + i * 16), columns);
    store_part(parts.base + first, splat((float)covered), columns);
  }

  // Element i of the keys (or queries) of each head, of a row `from` of all key heads.
  f32x16 each(const float* from, int i) const {
    if (together) return splat(from[(int64_t)key_head(first) * a.key_dim + i]);
    f32x16 v{};
    for (int c = 0; c < columns; ++c) v[c] = from[(int64_t)key_head(first + c) * a.key_dim + i];
    return v;
  }
  f32x16 factor(const float* decay, int i) const {
    f32x16 e{};
    if (a.by_key)
      for (int c = 0; c < columns; ++c) e[c] = decay[(int64_t)(first + c) * a.key_dim + i];
    else e = load_part(decay + first, columns);
    if (a.rates_by_key) e = e * load<f32x16>(a.rates + (int64_t)i * np + first);
    else if (a.rates) e = e * load_part(a.rates + first, columns);
    return vexp(e);
  }

  // S = F S + k w^T; returns S^T q if there are queries.
  template <bool kReads>
  f32x16 step(const float* k, const float* q, const float* decay, f32x16 w) {
    f32x16 y{};
    const bool alike = !a.by_key && !a.rates_by_key;
    f32x16 f = factor(decay, 0);
    for (int i = 0; i < a.key_dim; ++i) {
      if (i && !alike) f = factor(decay, i);
      const f32x16 x = load<f32x16>(tile + i * 16) * f + each(k, i) * w;
      store(tile + i * 16, x);
      if (kReads) y = y + x * each(q, i);
    }
    return y;
  }

  f32x16 recalled(const float* k, const float* decay) const {
    f32x16 u{};
    for (int i = 0; i < a.key_dim; ++i) u = u + load<f32x16>(tile + i * 16) * factor(decay, i) * each(k, i);
    return u;
  }

  void compute(int p, bool logged) {
    const int t = rows.begin + p - rows.start;
    const float *k = a.k.row(t), *q = a.q.row(t), *decay = a.decay.row(t);
    f32x16 w = load_part(a.v.row(t) + first, columns);
    if (a.delta) w = w - recalled(k, decay);
    if (a.gain.p) w = w * load_part(a.gain.row(t) + first, columns);
    store_part(a.out + (int64_t)t * gemm_kp(a.heads) + first, step<true>(k, q, decay, w), columns);
    if (!logged) return;
    store_part(parts.updates + (int64_t)(p % parts.entries) * a.heads + first, w, columns);
    const int fading = a.by_key ? a.key_dim : 1;
    parts.log(p, decay + (int64_t)first * fading, parts.decay, parts.decay_count, first * fading, columns * fading);
    for (int c = 0; c < columns; ++c)
      if ((first + c) % (a.heads / a.key_heads) == 0) {
        const int at = key_head(first + c) * a.key_dim;
        parts.log(p, k + at, parts.keys, parts.key_count, at, a.key_dim);
      }
  }
};

// ---- all tiles ---------------------------------------------------------------------------------------------------

template <int V>
QC_NOINLINE void run_recurrence_tile(const RecurrenceArgs& a, const StateRows& rows, int head, int first, int columns,
                                     float* scratch) {
  RecurrenceTile<V>(a, rows, head, first, columns, scratch).run();
}

static void recurrence_tile(const RecurrenceArgs& a, const StateRows& rows, int tile, float* scratch) {
  if (a.value_dim == 1) return ScanTile(a, rows, 16 * tile, scratch).run();
  const int tiles = (a.value_dim + kStateTile - 1) / kStateTile, head = tile / tiles;
  const int first = tile % tiles * kStateTile;
  const int columns = a.value_dim - first < kStateTile ? a.value_dim - first : kStateTile;
  switch ((columns + 15) / 16) {
    case 1: return run_recurrence_tile<1>(a, rows, head, first, columns, scratch);
    case 2: return run_recurrence_tile<2>(a, rows, head, first, columns, scratch);
    case 3: return run_recurrence_tile<3>(a, rows, head, first, columns, scratch);
    default: return run_recurrence_tile<4>(a, rows, head, first, columns, scratch);
  }
}

// Computes this thread's share of the tiles of all sequences.
static void recurrence_step(const RecurrenceArgs& a, const StateBatch& b, const Worker& w) {
  const int each = a.value_dim == 1 ? (a.heads + 15) / 16 : a.heads * ((a.value_dim + kStateTile - 1) / kStateTile);
  const Range mine = share(b.sequences * each, w);
  const int width = a.heads * a.value_dim, kp = gemm_kp(width);
  for (int i = mine.begin; i < mine.end; ++i) {
    const StateRows rows = b.rows(i / each, a.state);
    if (rows.start == rows.end) continue;
    recurrence_tile(a, rows, i % each, (float*)w.scratch);
    if (i % each == each - 1)
      for (int t = 0; t < rows.end - rows.start; ++t)
        for (int c = width; c < kp; ++c) a.out[(int64_t)(rows.begin + t) * kp + c] = 0.0f;
  }
}

// Logs the keys and decay of sequences with many rows, after a barrier behind recurrence_step.
static void recurrence_log(const RecurrenceArgs& a, const StateBatch& b, const Worker& w) {
  const Range mine = share(b.sequences, w);
  for (int s = mine.begin; s < mine.end; ++s) {
    const StateRows rows = b.rows(s, a.state);
    if (!a.logs_apart(rows)) continue;
    const RecurrenceParts parts(a, rows.part);
    const int base = (int)parts.base[0];
    for (int p = base > rows.start ? base : rows.start; p < rows.end; ++p) {
      const int t = rows.begin + p - rows.start;
      parts.log(p, a.k.row(t), parts.keys, parts.key_count, 0, parts.key_count);
      parts.log(p, a.decay.row(t), parts.decay, parts.decay_count, 0, parts.decay_count);
    }
  }
}
