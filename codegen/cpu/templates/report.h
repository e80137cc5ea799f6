// report.h: what the log probabilities of a chosen token follow from, as runtime/sampling/logprobs.py reads it.
#pragma once
#include "sample.h"

// Writes report number `place`, that of `token`, chosen or known. x [n] are the logits before any option is applied,
// none of them NaN. A report has the largest logit, the sum of exp(x - largest), the token's logit, its rank from 1, the
// largest logits in falling order, and their tokens, of equal logits the lowest first.
static inline void report(Sampler& sampler, const float* x, int32_t token, const qc_sampling& d, int place) {
  const int n = sampler.n, most = d.alternatives;
  double *to = d.reports + (int64_t)place * (4 + 2 * most), *logits = to + 4, *tokens = logits + most;
  const float own = x[token];
  float peak = own;
  int above = 0, count = 0;
  for (int first = 0; first < n; first += kDrawBlock) {
    const int end = first + sampler.block_size(first);
    const float largest = Sampler::largest(x + first, end - first);
    peak = largest > peak ? largest : peak;
    if (largest > own)
      for (int i = first; i < end; ++i) above += x[i] > own;
    if (count == most && (most == 0 || !(largest > logits[most - 1]))) continue;
    for (int i = first; i < end; ++i) {
      if (count == most && !(x[i] > logits[most - 1])) continue;
      int at = count < most ? count++ : most - 1;
      for (; at > 0 && logits[at - 1] < x[i]; --at) logits[at] = logits[at - 1], tokens[at] = tokens[at - 1];
      logits[at] = x[i], tokens[at] = i;
    }
  }
  const float least = -__builtin_inff();
  to[0] = peak, to[1] = sampler.weigh(x, peak, least, 1.0), to[2] = own, to[3] = 1 + above;
}
