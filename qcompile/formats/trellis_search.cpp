// The cheapest path of each cyclic sequence through a trellis; formats/trellis_search.py has the definition, and the same
// computation in torch, which gives the same path to the bit.
#include <stdint.h>
#include <string.h>

#include <thread>
#include <vector>

namespace {
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));

inline F16 load(const float* p) {
  F16 v;
  memcpy(&v, p, 64);
  return v;
}
inline void store(float* p, F16 v) { memcpy(p, &v, 64); }
// Vectors of half the width where there are no wider registers: the compiler compares others lane by lane.
#if defined(__AVX512F__)
inline F16 least(F16 a, F16 b) { return a < b ? a : b; }
#else
inline F16 least(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a[i] = a[i] < b[i] ? a[i] : b[i];
  return a;
}
#endif
// Lanes of a and b in alternation: the first 16, and the last.
inline F16 mixed_low(F16 a, F16 b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return __builtin_shuffle(a, b, I16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}
inline F16 mixed_high(F16 a, F16 b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return __builtin_shuffle(a, b, I16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

template <int K>
struct Search {
  static constexpr int kBranches = 1 << K;
  const float* planes;          // [branch][overlap] values
  int length, overlaps, parts;  // positions of a sequence; overlaps; overlaps / branches
  std::vector<float> costs;     // [length + 1][overlap]; the lowest bits of a cost name the branch it came by

  Search(const float* planes, int state_bits, int length)
      : planes(planes), length(length), overlaps(1 << (state_bits - K)), parts(overlaps >> K) {
    costs.resize((size_t)(length + 1) * overlaps);
  }
  // Costs after one more position, of which the value nears `target`.
  void step(const float* before, float* after, float target, float weight) const {
    for (int q = 0; q < parts; q += 16) {
      F16 best[kBranches], mixed[kBranches];
#pragma GCC unroll 16
      for (int j = 0; j < kBranches; ++j) {
        const float* values = planes + (size_t)j * overlaps + q;
#pragma GCC unroll 16
        for (int i = 0; i < kBranches; ++i) {
          const F16 d = target - load(values + i * parts);
          const F16 cost = load(before + i * parts + q) + d * d * weight;
          const F16 marked = (F16)(((I16)cost & -kBranches) | i);
          best[j] = i ? least(marked, best[j]) : marked;
        }
      }
#pragma GCC unroll 4
      for (int stage = 0; stage < K; ++stage) {  // to the order of overlaps, (q << K) | j
#pragma GCC unroll 8
        for (int j = 0; j < kBranches / 2; ++j) {
          mixed[2 * j] = mixed_low(best[j], best[j + kBranches / 2]);
          mixed[2 * j + 1] = mixed_high(best[j], best[j + kBranches / 2]);
        }
        for (int j = 0; j < kBranches; ++j) best[j] = mixed[j];
      }
      for (int j = 0; j < kBranches; ++j) store(after + q * kBranches + 16 * j, best[j]);
    }
  }
  // Positions last, last - 1, ... of a whole round; from any overlap, or from `begin` if it is not negative.
  void round(const float* targets, const float* weights, int last, int begin) {
    float* cost = costs.data();
    for (int p = 0; p < overlaps; ++p) cost[p] = begin < 0 || begin == p ? 0.0f : 1e30f;
    for (int t = 0; t < length; ++t, cost += overlaps) {
      const int at = (last - t + length) % length;
      step(cost, cost + overlaps, targets[at], weights[at]);
    }
  }
  // Back over `steps` positions of a round from the overlap at its end to the one before them; states may be null.
  int back(int end, int steps, int last, uint16_t* states) const {
    for (int t = length; t > length - steps; --t) {
      uint32_t cost;
      memcpy(&cost, &costs[(size_t)t * overlaps + end], 4);
      const int state = (int)(cost & (kBranches - 1)) * overlaps + end;
      if (states) states[(last - t + 1 + length) % length] = (uint16_t)state;
      end = state >> K;
    }
    return end;
  }
  int cheapest() const {
    const float* cost = &costs[(size_t)length * overlaps];
    int best = 0;
    for (int p = 1; p < overlaps; ++p)
      if (cost[p] < cost[best]) best = p;
    return best;
  }
  void path(const float* targets, const float* weights, uint16_t* states) {
    round(targets, weights, length / 2 - 1, -1);
    const int middle = back(cheapest(), length - length / 2, 0, nullptr);
    round(targets, weights, length - 1, middle);
    back(middle, length, length - 1, states);
  }
};

template <int K>
void search(int state_bits, const float* planes, const float* targets, const float* weights, int64_t sequences,
            int length, int threads, uint16_t* states) {
  const auto share = [=](int64_t begin, int64_t end) {
    Search<K> search(planes, state_bits, length);
    for (int64_t at = begin * length; at < end * length; at += length)
      search.path(targets + at, weights + at, states + at);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(share, sequences * i / threads, sequences * (i + 1) / threads);
  share(0, sequences / threads);
  for (std::thread& other : others) other.join();
}
}  // namespace

extern "C" void trellis_search(int bits, int state_bits, const float* planes, const float* targets,
                               const float* weights, int64_t sequences, int length, int threads, uint16_t* states) {
  if (bits == 2) search<2>(state_bits, planes, targets, weights, sequences, length, threads, states);
  if (bits == 3) search<3>(state_bits, planes, targets, weights, sequences, length, threads, states);
  if (bits == 4) search<4>(state_bits, planes, targets, weights, sequences, length, threads, states);
}
