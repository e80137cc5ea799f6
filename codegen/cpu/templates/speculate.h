// speculate.h: speculative decoding without returning to the caller between steps.
//
// A stage proposes tokens. The stage above computes them all in one step and keeps those it would have chosen itself,
// plus one more (Leviathan et al. 2023, greedy case). A stage that is not the last drafts by the same rule with the
// stage below (ML-SpecQD 3.2), so any stage's proposal is its own greedy continuation. Where the text repeats itself at
// length, a lookup stage at the end proposes to the target directly, bypassing the stages between. A draft head as stage
// 1 drafts alone (draft_head.h).
#pragma once
#include "abi.h"
#include "draft_head.h"
#include "rowops.h"
#include "thread_pool.h"

struct Speculator {
  const qc_speculation& q;
  int32_t *ids, *positions, *rows, *argmax;  // [max_rows] of the running step
  int32_t *query_start, *tables, *outs;      // [S + 1], [S][block_stride], [S] output rows per sequence in the step
  int32_t *want, *draft_start;               // [stages][S] tokens still wanted; where the round's drafts begin
  int32_t *slots, *certain, *settled;        // [S] of the running step; [S] positions of the text without drafts
  float* logits;                             // [S][vocab], for thresholds
  qc_sampling* sampling;                     // [S] of the running step
  HeadFeatures features;                     // of a draft head as stage 1

  // Tokens that must recur before a lookup proposes what followed them; the second where a model could draft instead.
  static constexpr int kShortestMatch = 3, kConfidentMatch = 4;

  int32_t* text(int s) const { return q.tokens + (int64_t)s * q.stride; }
  int32_t& computed(int k, int s) const { return q.computed[k * q.sequences + s]; }
  bool any(const int32_t* counts) const {
    for (int s = 0; s < q.sequences; ++s)
      if (counts[s] > 0) return true;
    return false;
  }

  bool is_head(int k) const { return k == 1 && q.head; }

  // One step of stage k over the tokens missing from its cache. The last outs[s] rows of sequence s give argmax; 0:
  // sequence s is not in the step. A row of a draft head has the position of its features, one before its token's.
  bool run(int k, bool need_logits) {
    const qc_stage& stage = q.stage[k];
    const int before = is_head(k);
    int tokens = 0, outputs = 0, n = 0;
    query_start[0] = 0;
    for (int s = 0; s < q.sequences; ++s) {
      if (!outs[s]) continue;
      const int begin = computed(k, s) - q.first[s], end = q.length[s] - before;
      if (begin < 0 || end - begin < outs[s] || tokens + end - begin > q.max_rows) return false;
      if (k == 0 && q.head) features.rows[s] = tokens;
      for (int i = begin; i < end; ++i, ++tokens)
        ids[tokens] = token_after(text(s)[i + before]), positions[tokens] = q.first[s] + i;
      for (int i = tokens - outs[s]; i < tokens; ++i) rows[outputs++] = i;
      memcpy(tables + (int64_t)n * q.block_stride, q.block_table + (int64_t)s * q.block_stride,
             (size_t)q.block_stride * sizeof(int32_t));
      if (q.state_slots) slots[n] = q.state_slots[s];
      certain[n] = k && !stage.cache ? 0 : settled[s];  // a stage over the target's states leaves their base alone
      if (q.sampling) sampling[n] = q.sampling[s];
      if (q.sampling && k > 0) sampling[n].reported = 0;  // only the target's rows tell what is appended
      if (q.sampling && before) by_numbers_of_head(sampling[n]);
      query_start[++n] = tokens;
      computed(k, s) = q.first[s] + end;
    }
    const qc_batch batch = {tokens, n, outputs, q.block_stride, ids, positions, query_start, tables, rows,
                            need_logits ? logits : nullptr, argmax, q.sampling ? sampling : nullptr,
                            q.state_slots ? slots : nullptr, certain};
    const double start = now_seconds();
    const bool done = stage.step(stage.model, &batch) == 0;
    q.seconds[k] += now_seconds() - start;
    return done;
  }

  // Appends want[k][s] tokens to every sequence, fewer where a lookup or a threshold ends the draft.
  bool extend(int k) {
    if (!q.stage[k].step) return look_up(k);
    if (is_head(k)) return extend_by_head();
    return k + 1 < q.stages ? extend_by_rounds(k) : extend_alone(k);
  }

  bool extend_alone(int k) {
    const qc_stage& stage = q.stage[k];
    int32_t* left = want + k * q.sequences;
    while (any(left)) {
      for (int s = 0; s < q.sequences; ++s) outs[s] = left[s] > 0;
      if (!run(k, stage.threshold > 0)) return false;
      for (int s = 0, at = 0; s < q.sequences; ++s) {
        if (!outs[s]) continue;
        text(s)[q.length[s]++] = token_after(argmax[at]);
        --left[s];
        if (stage.threshold > 0 && top_probability(logits + (int64_t)at * stage.vocab, stage.vocab) < stage.threshold)
          left[s] = 0;
        ++at;
      }
    }
    return true;
  }

  // Appends what a draft head proposes: its first step reads the features that are known of the target, and each step
  // after it its own.
  bool extend_by_head() {
    int32_t* left = want + q.sequences;
    for (int s = 0; s < q.sequences; ++s) {
      if (!features.count(s)) left[s] = 0;  // the target has computed nothing yet
      features.drafting[s] = left[s] > 0;
    }
    for (bool first = true; any(left); first = false) {
      for (int s = 0, at = 0; s < q.sequences; ++s) {
        outs[s] = left[s] > 0;
        if (outs[s]) at = first ? features.give_known(s, at) : features.give_own(s, at);
      }
      if (!run(1, false)) return false;
      for (int s = 0, at = 0; s < q.sequences; ++s)
        if (outs[s]) text(s)[q.length[s]++] = features.token(argmax[at++]), --left[s];
    }
    for (int s = 0; s < q.sequences; ++s)
      if (features.drafting[s]) computed(1, s) = computed(0, s);  // rows of its own features are computed again
    return true;
  }

  // Lets the head compute rows that it lacks where they are many: a lookup has proposed in its place. The last of them
  // is computed again to draft.
  bool fill_head() {
    const int each = q.max_rows / q.sequences, room = q.head->room - qc_most_drafts, most = each < room ? each : room;
    for (int s = 0; s < q.sequences; ++s) {
      const int count = features.count(s);
      if (count <= 1 || count <= most) continue;
      for (int other = 0; other < q.sequences; ++other) outs[other] = other == s;
      features.give_known(s, 0);
      if (!run(1, false)) return false;
      features.copy(features.known(s), features.known(s) + (int64_t)(count - 1) * q.head->width, 1);
      computed(1, s) = computed(0, s) - 1;
    }
    return true;
  }

  bool extend_by_rounds(int k) {
    const int n = q.sequences;
    int32_t *left = want + k * n, *below = left + n, *start = draft_start + k * n;
    const bool shortcut = k == 0 && q.stages > 2 && !q.stage[q.stages - 1].step;
    for (int round = 0; any(left) && (k > 0 || round < q.rounds); ++round) {
      if (k == 0 && q.head && !fill_head()) return false;
      for (int s = 0; s < n; ++s) {
        const int gamma = k ? q.stage[k + 1].gamma : q.gamma[s];
        start[s] = q.length[s];
        if (k == 0) settled[s] = q.first[s] + q.length[s];
        below[s] = left[s] <= 0 ? 0 : gamma < left[s] ? gamma : left[s] - 1;
        if (shortcut && below[s] > 0 && propose_by_lookup(s, left[s] - 1)) below[s] = 0;
      }
      if (any(below) && !extend(k + 1)) return false;
      for (int s = 0; s < n; ++s) outs[s] = left[s] > 0 ? q.length[s] - start[s] + 1 : 0;
      if (!run(k, false)) return false;
      for (int s = 0, at = 0; s < n; ++s) {
        if (!outs[s]) continue;
        left[s] -= accept(k, s, argmax + at);
        if (k == 0 && q.head) features.keep(s, positions[features.rows[s]]);
        at += outs[s];
      }
    }
    return true;
  }

  // Keeps the drafts of sequence s that match `chosen`, plus the first token of `chosen` that differs or follows.
  // Returns the number of tokens.
  int accept(int k, int s, const int32_t* chosen) {
    const int start = draft_start[k * q.sequences + s], drafts = q.length[s] - start;
    int32_t* draft = text(s) + start;
    int kept = 0;
    while (kept < drafts && draft[kept] == chosen[kept]) ++kept;
    draft[kept] = k ? token_after(chosen[kept]) : chosen[kept];
    q.length[s] = start + kept + 1;
    const int valid = q.first[s] + start + kept;  // the last token is not in any cache yet
    computed(k, s) = valid;
    for (int c = k + 1; c < q.stages; ++c)
      if (q.stage[c].cache == q.stage[k].cache || computed(c, s) > valid) computed(c, s) = valid;
    if (k == 0) {
      ++q.rounds_done[s];
      for (int i = 0; i < drafts && i < qc_most_drafts; ++i) {
        q.drafted[s * qc_most_drafts + i] += 1;
        q.accepted[s * qc_most_drafts + i] += i < kept;
      }
    }
    return kept + 1;
  }

  // Lets a lookup in the last stage propose to the target; returns whether it did. The tokens that the stages between
  // then lack in their own caches must still fit into one step.
  bool propose_by_lookup(int s, int room) {
    const qc_stage& last = q.stage[q.stages - 1];
    const int rows = q.max_rows / q.sequences - 2, most = last.gamma < rows ? last.gamma : rows;
    for (int k = 1; k < q.stages - 1; ++k)
      if (q.stage[k].cache && q.first[s] + q.length[s] - computed(k, s) > rows - 2 * qc_most_drafts) return false;
    return append_match(last, s, most < room ? most : room, kConfidentMatch) > 0;
  }

  // Prompt lookup (Saxena 2023): finds the longest suffix of the text, of at least `shortest` tokens, that occurs
  // before (the latest occurrence of that length) and appends the `most` tokens that followed. Returns the number of
  // tokens appended, 0 without a match.
  int append_match(const qc_stage& stage, int s, int most, int shortest) {
    int32_t* t = text(s);
    const int end = q.length[s];
    int next = 0, longest = shortest - 1;
    for (int i = end - 2; i >= longest && longest < stage.match; --i) {
      int size = 0;
      while (size < stage.match && size <= i && t[i - size] == t[end - 1 - size]) ++size;
      if (size > longest) longest = size, next = i + 1;
    }
    if (!next || most <= 0) return 0;
    for (int i = 0; i < most; ++i) t[end + i] = t[next + i];
    q.length[s] = end + most;
    return most;
  }

  bool look_up(int k) {
    for (int s = 0; s < q.sequences; ++s)
      if (want[k * q.sequences + s] > 0)
        append_match(q.stage[k], s, want[k * q.sequences + s], k > 1 ? kConfidentMatch : kShortestMatch);
    return true;
  }

  // For a head, which numbers tokens in its own way and knows none before: temperature and limits alone. Its row of
  // position p draws what the target's row of p + 1 draws.
  static void by_numbers_of_head(qc_sampling& d) {
    d.room = 0, d.biased = 0, d.known = 0, d.fill_mask = nullptr;
    d.first -= 1;
  }

  static float top_probability(const float* x, int n) {
    float top = x[0], sum = 0;
    for (int i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
    int i = 0;
    f32x16 sums = splat(0.0f);
    for (; i + 16 <= n; i += 16) sums = sums + vexp(load<f32x16>(x + i) - top);
    for (int j = 0; j < 16; ++j) sum += sums[j];
    for (; i < n; ++i) sum += vexp(splat(x[i] - top))[0];
    return 1.0f / sum;
  }

  // Carves the work arrays from one block; called with null to measure. Returns bytes.
  size_t carve(char* base) {
    size_t at = 0;
    auto take = [&](size_t count) {
      char* p = base + at;
      at += (count * 4 + 63) / 64 * 64;
      return (int32_t*)p;
    };
    const size_t n = (size_t)q.sequences, most = (size_t)q.max_rows, stages = (size_t)q.stages;
    size_t vocab = 0;
    for (int k = 1; k < q.stages; ++k)
      if (q.stage[k].threshold > 0 && (size_t)q.stage[k].vocab > vocab) vocab = (size_t)q.stage[k].vocab;
    ids = take(most), positions = take(most), rows = take(most), argmax = take(most);
    query_start = take(n + 1), tables = take(n * (size_t)q.block_stride), outs = take(n);
    want = take(stages * n), draft_start = take(stages * n);
    slots = take(n), certain = take(n), settled = take(n);
    logits = (float*)take(n * vocab);
    sampling = (qc_sampling*)take(n * sizeof(qc_sampling) / 4);
    features = {q.head, q.computed, q.sequences, take(n), take(n), take(n)};
    return at;
  }
};

QC_API int qc_speculate(const qc_speculation* q) {
  if (!q || q->stages < 2 || q->sequences < 1 || !q->stage[0].step) return 1;
  if (q->head && !HeadFeatures::valid(*q)) return 1;
  Speculator speculator{*q};
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, speculator.carve(nullptr))) return 1;
  speculator.carve((char*)memory);
  const int stage = q->rounds ? 0 : 1;
  for (int s = 0; s < q->sequences; ++s) {
    const int room = q->limit[s] - q->length[s];
    speculator.want[stage * q->sequences + s] = stage && q->gamma[s] < room ? q->gamma[s] : room;
    speculator.settled[s] = q->first[s] + q->length[s];
  }
  const bool done = speculator.extend(stage);
  free(memory);
  return !done;
}
