// penalties.h: biases, and penalties on the tokens of a text so far, as runtime/sampling/penalties.py defines them; and
// masks of the tokens that a grammar allows.
#pragma once
#include "abi.h"
#include "vec.h"

// Keeps the tokens of a step's rows that follow those listed, for this and later steps of the same call.
static inline void keep_recent(const qc_batch& b) {
  for (int s = 0; s < b.sequences; ++s) {
    const qc_sampling& d = b.sampling[s];
    for (int t = b.query_start[s]; d.room > 0 && t < b.query_start[s + 1]; ++t) {
      const int at = b.positions[t] - d.first - 1;
      if (at >= 0 && at < d.room) d.recent[at] = b.token_ids[t];
    }
  }
}

// Applies the biases and penalties of a row at `position` to its logits x [n]. times [n] must be zeros, and is left so.
static inline void penalize(float* x, int n, const qc_sampling& d, int position, int32_t* times) {
  const int after = position - d.first, recent = after < 0 ? 0 : after < d.room ? after : d.room;
  const float factor = (float)d.repetition;
  const auto inside = [&](int32_t token) { return token >= 0 && token < n; };
  const auto apply = [&](int32_t token, int32_t count) {
    const float y = x[token] > 0.0f ? x[token] / factor : x[token] * factor;
    x[token] = count > 0 ? y - (float)(d.frequency * (double)count + d.presence) : y;
  };
  for (int i = 0; i < d.biased; ++i)
    if (inside(d.bias_tokens[i])) x[d.bias_tokens[i]] += d.bias_values[i];
  if (d.repetition == 0) return;
  for (int i = 0; i < recent; ++i)
    if (inside(d.recent[i])) ++times[d.recent[i]];
  for (int i = 0; i < d.listed; ++i) {
    const int32_t token = d.seen[i];
    if (!inside(token)) continue;
    apply(token, d.counts[i] + times[token]);
    times[token] = 0;
  }
  for (int i = 0; i < recent; ++i) {  // those left are not listed
    const int32_t token = d.recent[i];
    if (!inside(token) || times[token] == 0) continue;
    apply(token, times[token]);
    times[token] = 0;
  }
}

constexpr int mask_words(int n) { return (n + 31) / 32; }

// Writes the mask of a row at `position`, if it has one.
static inline void fill_mask(const qc_sampling& d, int position, uint32_t* mask, int words) {
  const int after = position - d.first;
  if (!d.fill_mask || after < 0) return;
  memset(mask, 0, (size_t)words * sizeof(uint32_t));
  d.fill_mask(d.grammar, d.recent, after < d.room ? after : d.room, mask, words);
}

// Whether the mask of a row at `position` is asked for only if it leaves out the argmax: where nothing else changes the
// argmax, one token is checked far faster than a mask is computed. `chosen` is whether the caller reads no logits.
static inline bool mask_later(const qc_sampling& d, int position, bool chosen) {
  const bool changed = d.temperature > 0 || d.repetition != 0 || d.biased > 0 || d.reported > 0 || d.known > 0;
  return d.fill_mask && position >= d.first && chosen && !changed;
}

// Whether a token may be chosen at `position`, as far as that is known without the mask.
static inline bool allowed(const qc_sampling& d, int position, int32_t token) {
  const int after = position - d.first;
  return d.fill_mask(d.grammar, d.recent, after < d.room ? after : d.room, nullptr, token) == 1;
}

// Makes the logits x [n] of the tokens that a mask leaves out minus infinity.
static inline void apply_mask(float* x, int n, const uint32_t* mask) {
  for (int first = 0; first < n; first += 32) {
    const uint32_t word = mask[first / 32];
    const int count = n - first < 32 ? n - first : 32;
    if (word == 0xffffffffu) continue;
    for (int i = 0; i < count; ++i) x[first + i] = word >> i & 1 ? x[first + i] : -__builtin_inff();
  }
}
