// draft_head.h: features in rounds with a draft head (EAGLE-3, arXiv 2503.01840).
//
// Row p of the head has the features of position p and the token at p + 1; it gives features and a draft for p + 2. The
// features are the target's where the target has computed the position, and the head's own after that.
#pragma once
#include <string.h>

#include "abi.h"

struct HeadFeatures {
  const qc_head* head;      // null: there is no head
  const int32_t* computed;  // [2][S] of the target and the head, as in qc_speculation
  int sequences;
  int32_t* rows;            // [S] first row of each sequence in the target's last step
  int32_t* last;            // [S] row in the head's last step
  int32_t* drafting;        // [S] whether the head drafts in this round

  static bool valid(const qc_speculation& q) {
    const qc_head& h = *q.head;
    if (!h.target || !h.own || !h.given || !h.known || h.width < 1 || h.room < 2 * qc_most_drafts) return false;
    if (!q.stage[1].step) return false;
    for (int s = 0; s < q.sequences; ++s) {
      const int known = q.computed[s] - q.computed[q.sequences + s];
      if (known < 0 || known > qc_most_drafts || q.gamma[s] >= qc_most_drafts) return false;
    }
    return true;
  }

  float* known(int s) const { return head->known + (int64_t)s * head->room * head->width; }
  // Rows that the head lacks and of which the target's features are known.
  int count(int s) const { return computed[s] - computed[sequences + s]; }
  void copy(float* to, const float* from, int count) const {
    memcpy(to, from, (size_t)count * (size_t)head->width * sizeof(float));
  }

  // Gives features to the rows of sequence s in the head's next step, from row `at` on. Returns the row after them.
  int give_known(int s, int at) const {
    copy(head->given + (int64_t)at * head->width, known(s), count(s));
    last[s] = at + count(s) - 1;
    return at + count(s);
  }
  int give_own(int s, int at) const {
    copy(head->given + (int64_t)at * head->width, head->own + (int64_t)last[s] * head->width, 1);
    last[s] = at;
    return at + 1;
  }

  // Keeps the features of the positions from `first` on that the target's last step has computed and not taken back.
  void keep(int s, int first) const {
    const int held = first - computed[sequences + s];
    copy(known(s) + (int64_t)held * head->width, head->target + (int64_t)rows[s] * head->width, computed[s] - first);
  }

  // The token of the target that the head's argmax means.
  int32_t token(int32_t argmax) const { return head->tokens ? head->tokens[token_after(argmax)] : token_after(argmax); }
};
