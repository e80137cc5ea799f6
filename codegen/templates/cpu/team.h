// team.h: the threads of a model. One leader (the caller) and threads - 1 workers run each step together.
//
// A step is one function run by every thread, with barriers inside. Between steps the workers spin for
// about 100 us, so that a decode loop never pays for waking them, then sleep on a futex.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static inline double now_seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct alignas(64) Line {  // one counter alone on its cache line
  uint32_t value;
};

// Spins politely: after `limit` pauses every further turn gives the core away, for the thread that is
// waited for may be the one that wants it.
struct Spin {
  int limit, turns = 0;
  explicit Spin(int limit_) : limit(limit_) {}
  void wait() {
    if (++turns < limit) cpu_relax();
    else sched_yield();
  }
};

// Dissemination barrier (Hensgen, Finkel, Manber 1988): in round r thread i signals thread i + 2^r, so
// after ceil(log2 n) rounds everyone has heard of everyone. No atomic read-modify-write; each flag has
// one writer and one reader, and counts episodes, so it is never reset.
struct Barrier {
  static constexpr int kRounds = 10;  // up to 1024 threads
  int threads = 1, rounds = 0, spin_limit = 1;
  Line* flags = nullptr;  // [rounds][threads]

  bool open(int n, int limit) {
    threads = n;
    spin_limit = limit;
    while ((1 << rounds) < n) ++rounds;
    if (rounds > kRounds) return false;
    void* p = nullptr;
    size_t bytes = (size_t)(rounds ? rounds : 1) * (size_t)n * sizeof(Line);
    if (posix_memalign(&p, 64, bytes)) return false;
    flags = (Line*)memset(p, 0, bytes);
    return true;
  }
  void close() { free(flags); }

  // `episode` is the caller's own count of barriers passed.
  inline __attribute__((always_inline)) void wait(int tid, uint32_t& episode) {
    const uint32_t e = ++episode;
    for (int r = 0; r < rounds; ++r) {
      const int peer = (tid + (1 << r)) % threads;
      __atomic_store_n(&flags[r * threads + peer].value, e, __ATOMIC_RELEASE);
      const uint32_t* mine = &flags[r * threads + tid].value;
      Spin spin(spin_limit);
      while ((int32_t)(__atomic_load_n(mine, __ATOMIC_ACQUIRE) - e) < 0) spin.wait();
    }
  }
};

struct Team {
  typedef void (*Job)(void* arg, int tid);
  struct alignas(64) Member {
    uint32_t episode;
    int tid;
    Team* team;
    pthread_t thread;
  };

  int threads = 1, started = 0;
  Barrier barrier;
  Member* members = nullptr;
  Job job = nullptr;
  void* arg = nullptr;
  bool quit = false;
  alignas(64) uint32_t ticket = 0;    // counts jobs; workers wait for it to move
  alignas(64) uint32_t sleepers = 0;  // workers in the futex, or about to be

  bool open(int n) {
    threads = n;
    cpu_set_t allowed;
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : n;
    if (!barrier.open(n, n <= cores ? 1000 : 16)) return false;
    void* p = nullptr;
    if (posix_memalign(&p, 64, sizeof(Member) * (size_t)n)) return false;
    members = (Member*)memset(p, 0, sizeof(Member) * (size_t)n);
    for (int i = 0; i < n; ++i) members[i].tid = i, members[i].team = this;
    for (started = 1; started < n; ++started)
      if (pthread_create(&members[started].thread, nullptr, enter, &members[started])) return false;
    return true;
  }

  void close() {
    quit = true;
    if (started > 1) publish();
    for (int i = 1; i < started; ++i) pthread_join(members[i].thread, nullptr);
    barrier.close();
    free(members);
  }

  inline __attribute__((always_inline)) void sync(int tid) {
    if (threads > 1) barrier.wait(tid, members[tid].episode);
  }

  // Run job(arg, tid) on every thread; returns when all have finished.
  void run(Job j, void* a) {
    job = j;
    arg = a;
    if (threads > 1) publish();
    j(a, 0);
    sync(0);
  }

 private:
  // The ticket moves before sleepers is read, and a sleeper counts itself before the kernel rereads the
  // ticket, so one of the two always sees the other.
  void publish() {
    __atomic_fetch_add(&ticket, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &ticket, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
  }

  void await(uint32_t seen) {
    const double deadline = now_seconds() + 100e-6;
    for (int turn = 1;; ++turn) {
      if (__atomic_load_n(&ticket, __ATOMIC_ACQUIRE) != seen) return;
      if (turn % 64) cpu_relax();
      else if (now_seconds() > deadline) break;
      else if (barrier.spin_limit < 64) sched_yield();
    }
    __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&ticket, __ATOMIC_SEQ_CST) == seen)
      syscall(SYS_futex, &ticket, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
  }

  static void* enter(void* p) {
    Member& me = *(Member*)p;
    Team& team = *me.team;
    for (uint32_t seen = 0;; ++seen) {
      team.await(seen);
      if (team.quit) return nullptr;
      team.job(team.arg, me.tid);
      team.sync(me.tid);
    }
  }
};
