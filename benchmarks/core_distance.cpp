// core_distance.cpp: how far two cores are from each other, in nanoseconds that a written line takes to be seen.
//
//   g++ -std=c++17 -O2 -shared -fPIC -pthread benchmarks/core_distance.cpp -o core_distance.so
//
// A virtual machine's cores may share a last-level cache or not, and be moved from one moment to the next; threads that
// wait for each other several times a layer, as ours do, are faster or slower for it.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

constexpr int kTurns = 500, kBlocks = 9;
struct alignas(128) Line {
  std::atomic<int> turn{0};
};
Line ping, pong;

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

// Median over blocks of turns. The calling thread's affinity is as before afterwards.
extern "C" double core_distance(int core, int other) {
  cpu_set_t before;
  pthread_getaffinity_np(pthread_self(), sizeof before, &before);
  ping.turn = pong.turn = 0;
  std::thread answers([other] {
    pin(other);
    for (int i = 1; i <= kTurns * kBlocks; ++i) {
      while (ping.turn.load(std::memory_order_acquire) < i) __builtin_ia32_pause();
      pong.turn.store(i, std::memory_order_release);
    }
  });
  pin(core);
  double found[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = b * kTurns + 1; i <= (b + 1) * kTurns; ++i) {
      ping.turn.store(i, std::memory_order_release);
      while (pong.turn.load(std::memory_order_acquire) < i) __builtin_ia32_pause();
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    found[b] = taken.count() / (2 * kTurns);
  }
  answers.join();
  pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  std::sort(found, found + kBlocks);
  return found[kBlocks / 2];
}
