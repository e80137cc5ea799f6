// sample.h: draws a token from a row of logits by temperature, top-k, min-p and top-p, as runtime/sampling/sampling.py does.
//
// Weights are double and are summed in an order that depends on the vocabulary alone.
#pragma once
#include "abi.h"
#include "vec.h"

constexpr int kDrawBins = 1 << 12, kDrawBlock = 64;

// e^x for x <= 0, within two units in the last place; 0 below -700. r is the rest of x after n ln2, ln2 in two parts.
QC_INLINE double exp64(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: its sum with a small number has the integer in its low bits
  const double inside = x < -700.0 ? -700.0 : x;
  const double t = inside * 1.4426950408889634 + magic, n = t - magic;
  const double r = (inside - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;  // Taylor's series: the next term is below 5e-18
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = (p * (r * r) + r) + 1.0;
  const double y = bitcast<double>(bitcast<int64_t>(p) + (int64_t)((uint64_t)bitcast<int64_t>(t) << 52));
  return x < -700.0 ? 0.0 : y;
}

// Integers in the order of the numbers.
QC_INLINE uint32_t order_of(float x) {
  const uint32_t bits = bitcast<uint32_t>(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

QC_INLINE float number_of(uint32_t order) { return bitcast<float>(order >> 31 ? order & 0x7fffffffu : ~order); }

// One thread's memory for drawing from n logits.
struct Sampler {
  int n;
  double *weight, *bins, *listed_weight;
  uint32_t* listed;
  float* top;  // [blocks] the largest logit of each

  static size_t bytes(int n) { return (size_t)(n + kDrawBlock) * 24 + kDrawBins * 8; }
  Sampler(int vocab, char* memory) : n(vocab) {
    const size_t rows = (size_t)(n + kDrawBlock);
    weight = (double*)memory, listed_weight = weight + rows, bins = listed_weight + rows;
    listed = (uint32_t*)(bins + kDrawBins), top = (float*)(listed + rows);
  }

  struct Limit {
    uint32_t order;  // of the smallest number that is kept
    double above;    // weight of all larger numbers
  };

  // The largest of x [size] such that those from it on weigh at least `goal`; w null: each weighs 1. Numbers below
  // `least`, or of a weight below it, are known not to be needed for that. Numbers that share the first 12 bits are
  // binned together, and the bin with the limit is searched by partitions.
  Limit limit(const float* x, const double* w, int size, double goal, double least) {
    memset(bins, 0, kDrawBins * sizeof(double));
    for (int i = 0; i < size; ++i)
      if ((w ? w[i] : x[i]) >= least) bins[order_of(x[i]) >> 20] += w ? w[i] : 1.0;
    double above = 0;
    uint32_t bin = kDrawBins - 1;
    while (bin > 0 && above + bins[bin] < goal) above += bins[bin--];
    int count = 0;
    for (int i = 0; i < size; ++i) {
      if (!((w ? w[i] : x[i]) >= least)) continue;
      const uint32_t order = order_of(x[i]);
      if (order >> 20 != bin) continue;
      listed[count] = order;
      listed_weight[count++] = w ? w[i] : 1.0;
    }
    Limit lowest = {0, above};
    while (count > 0) {
      const uint32_t pivot = listed[count / 2];
      double larger = 0, equal = 0;
      for (int i = 0; i < count; ++i) {
        larger += listed[i] > pivot ? listed_weight[i] : 0.0;
        equal += listed[i] == pivot ? listed_weight[i] : 0.0;
      }
      const bool up = above + larger >= goal;
      if (!up) {
        lowest = {pivot, above + larger};
        above += larger + equal;
        if (above >= goal) break;
      }
      int kept = 0;
      for (int i = 0; i < count; ++i) {
        listed[kept] = listed[i], listed_weight[kept] = listed_weight[i];
        kept += up ? listed[i] > pivot : listed[i] < pivot;
      }
      count = kept;
    }
    return lowest;
  }

  // The k-th largest logit. That of the blocks' largest is a lower bound, which most of the rest are below.
  float kth_largest(const float* x, int k) {
    const int blocks = (n + kDrawBlock - 1) / kDrawBlock;
    for (int i = 0; i < blocks; ++i) top[i] = largest(x + i * kDrawBlock, block_size(i * kDrawBlock));
    float least = -__builtin_inff();
    if (k <= blocks) least = number_of(limit(top, nullptr, blocks, k, least).order);
    return number_of(limit(x, nullptr, n, k, least).order);
  }

  // The first of the largest logits, none of which is NaN; -1 if it is not finite.
  int32_t best(const float* x) const {
    float peak = -__builtin_inff();
    int block = 0, i = 0;
    for (int first = 0; first < n; first += kDrawBlock) {
      const float most = largest(x + first, block_size(first));
      if (most > peak) peak = most, block = first;
    }
    if (__builtin_isinf(peak)) return -1;
    while (x[block + i] != peak) ++i;
    return block + i;
  }

  int block_size(int first) const { return n - first < kDrawBlock ? n - first : kDrawBlock; }
  static float largest(const float* x, int count) {
    f32x16 most = splat(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= count; i += 16) most = vmax(load<f32x16>(x + i), most);
    float best = reduce_max(most);
    for (; i < count; ++i) best = x[i] > best ? x[i] : best;
    return best;
  }

  // exp((x - peak) / temperature) of the numbers from `least` on, 0 for others. Returns their sum.
  double weigh(const float* x, float peak, float least, double temperature) {
    double total = 0;
    for (int first = 0; first < n; first += kDrawBlock) {
      const int count = block_size(first);
      double* to = weight + first;
      if (largest(x + first, count) < least) {
        memset(to, 0, (size_t)count * sizeof(double));
        continue;
      }
      float own[kDrawBlock] = {};
      memcpy(own, x + first, (size_t)count * sizeof(float));
      for (int i = 0; i < kDrawBlock; ++i) {
        const double y = exp64(((double)own[i] - (double)peak) / temperature);
        to[i] = own[i] >= least ? y : 0.0;
      }
      total += sum(to, count);
    }
    return total;
  }

  // The sum of at most kDrawBlock numbers by eight chains.
  static double sum(const double* x, int count) {
    double lane[8] = {};
    int i = 0;
    for (; i + 8 <= count; i += 8)
      for (int j = 0; j < 8; ++j) lane[j] += x[i + j];
    for (; i < count; ++i) lane[i % 8] += x[i];
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
  }

  // Sets the weights of tokens that top-p rules out to 0: of ties at its limit the last ones. `all` is their sum; it
  // returns what it is then.
  double keep(const float* x, double top_p, double all) {
    const double goal = top_p * all;
    // All tokens of a weight below (1 - top_p) / n of the sum together weigh less than what may be left out. Half of
    // that, as the sums are rounded.
    const double least = 0.5 * (1 - top_p) * all / n;
    const Limit lowest = limit(x, weight, n, goal, least > 0 ? least : 1e-310);
    double reached = lowest.above, total = 0;
    for (int first = 0; first < n; first += kDrawBlock) {
      const int count = block_size(first);
      for (int i = first; i < first + count; ++i) {
        if (weight[i] == 0) continue;
        const uint32_t order = order_of(x[i]);
        if (order > lowest.order) continue;
        if (order == lowest.order && reached < goal) reached += weight[i];
        else weight[i] = 0;
      }
      total += sum(weight + first, count);
    }
    return total;
  }

  // The token where the cumulative weight passes goal; the last with any weight if rounding leaves none.
  int32_t token_at(double goal) const {
    double reached = 0;
    int32_t last = 0;
    for (int first = 0; first < n; first += kDrawBlock) {
      const int count = block_size(first);
      const double more = sum(weight + first, count);
      if (more > 0) {
        double at = reached;
        const bool here = reached + more > goal;
        for (int i = 0; i < count; ++i) {
          if (weight[first + i] > 0) last = first + i;
          at += weight[first + i];
          if (here && at > goal) return first + i;
        }
        if (here) return last;
      }
      reached += more;
    }
    return last;
  }

  // The token drawn from logits x [n], of which the largest is at `best`, by the uniform random number.
  int32_t draw(const float* x, int32_t best, const qc_sampling& d, double uniform) {
    const float peak = x[best];
    float least = peak + (float)d.min_logit;
    if (d.top_k > 0 && d.top_k < n) {
      const float kth = kth_largest(x, d.top_k);
      least = kth > least ? kth : least;
    }
    double total = weigh(x, peak, least, d.temperature);
    if (d.top_p < 1) total = keep(x, d.top_p, total);
    return token_at(uniform * total);
  }
};
