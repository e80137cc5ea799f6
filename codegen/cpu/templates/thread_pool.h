// thread_pool.h: the threads of a model. One leader (the caller) and threads - 1 workers execute each step together.
//
// A step is one function run by every thread, with barriers inside. Between steps the workers spin for about 200 us, so
// that a decode loop never pays for waking them, then sleep on a futex.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
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

static inline void futex_wait(uint32_t* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
static inline void futex_wake(uint32_t* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// A counter with one writer and one waiter, on its own cache line.
struct alignas(64) Flag {
  uint32_t value, asleep;

  // The value is published before `asleep` is read, and a waiter sets `asleep` before it rereads the value (the kernel
  // rereads it once more), so at least one of the two sees the other.
  void raise(uint32_t to) {
    __atomic_exchange_n(&value, to, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST)) futex_wake(&value, 1);
  }
  bool reached(uint32_t target) const {
    return (int32_t)(__atomic_load_n(&value, __ATOMIC_ACQUIRE) - target) >= 0;
  }
  // Spins for up to `limit` iterations, then sleeps. Returns the seconds slept.
  double await(uint32_t target, int limit) {
    for (int turn = 0; turn < limit; ++turn) {
      if (reached(target)) return 0.0;
      cpu_relax();
    }
    const double start = now_seconds();
    __atomic_store_n(&asleep, 1, __ATOMIC_SEQ_CST);
    for (uint32_t seen; (int32_t)((seen = __atomic_load_n(&value, __ATOMIC_SEQ_CST)) - target) < 0;)
      futex_wait(&value, seen);
    __atomic_store_n(&asleep, 0, __ATOMIC_RELAXED);
    return now_seconds() - start;
  }
};

// One thread's barrier count, and its policy for how long to spin in a barrier before sleeping. Spinning is faster:
// waking takes up to 120 us on a virtual machine, and a thread that sleeps early makes the thread that waits for it
// sleep as well. But where other programs use the cores, spinning uses up this thread's share of them, and a sleeping
// thread is scheduled again as soon as it is woken. A long sleep indicates such contention. After one, the thread spins
// only briefly for a number of barriers; that number grows if long sleeps follow each other closely.
struct SpinPolicy {
  uint32_t episode;
  int short_spins, backoff, calm_waits;  // short waits left; those after the next long sleep; waits since it

  int spin_limit() const { return short_spins ? kShortSpin : kLongSpin; }
  void record(double slept) {
    if (slept > kLongSleep) {
      short_spins = backoff, backoff = backoff < kMaxBackoff ? backoff * 4 : backoff, calm_waits = 0;
    } else if (short_spins) {
      --short_spins;
    } else if (++calm_waits == kResetAfter) {
      backoff = kMinBackoff, calm_waits = 0;
    }
  }
  static constexpr double kLongSleep = 300e-6;                    // a time slice of another program is longer
  static constexpr int kShortSpin = 64, kLongSpin = 32768;  // iterations: about 1 us, 400 us
  static constexpr int kMinBackoff = 16, kMaxBackoff = 256, kResetAfter = 4096;
};

// Dissemination barrier (Hensgen, Finkel, Manber 1988): in round r thread i signals thread i + 2^r, so every thread has
// heard from every other after ceil(log2 n) rounds. Each flag has one writer and one reader and counts episodes, so it
// is never reset.
struct Barrier {
  int threads = 1, rounds = 0;
  Flag* flags = nullptr;  // [rounds][threads]

  bool open(int n) {
    threads = n;
    while ((1 << rounds) < n) ++rounds;
    void* p = nullptr;
    const size_t bytes = (size_t)(rounds ? rounds : 1) * (size_t)n * sizeof(Flag);
    if (posix_memalign(&p, 64, bytes)) return false;
    flags = (Flag*)memset(p, 0, bytes);
    return true;
  }
  void close() { free(flags); }

  inline __attribute__((always_inline)) void wait(int tid, SpinPolicy& me) {
    const uint32_t e = ++me.episode;
    for (int r = 0; r < rounds; ++r) {
      flags[r * threads + (tid + (1 << r)) % threads].raise(e);
      me.record(flags[r * threads + tid].await(e, me.spin_limit()));
    }
  }
};

struct ThreadPool {
  typedef void (*Job)(void* arg, int tid);
  struct alignas(64) Member {
    SpinPolicy spin;
    int tid;
    ThreadPool* pool;
    pthread_t thread;
  };

  int threads = 1, started = 0;
  Barrier barrier;
  Member* members = nullptr;
  Job job = nullptr;
  void* arg = nullptr;
  bool quit = false;
  alignas(64) uint32_t ticket = 0;    // counts jobs; workers wait for it to change
  alignas(64) uint32_t sleepers = 0;  // workers sleeping on the futex, or about to

  bool open(int n) {
    threads = n;
    if (!barrier.open(n)) return false;
    void* p = nullptr;
    if (posix_memalign(&p, 64, sizeof(Member) * (size_t)n)) return false;
    members = (Member*)memset(p, 0, sizeof(Member) * (size_t)n);
    for (int i = 0; i < n; ++i) members[i] = {{0, 0, SpinPolicy::kMinBackoff, 0}, i, this, {}};
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
    if (threads > 1) barrier.wait(tid, members[tid].spin);
  }

  // Runs job(arg, tid) on every thread; returns when all have finished.
  void run(Job j, void* a) {
    job = j;
    arg = a;
    if (threads > 1) publish();
    j(a, 0);
    sync(0);
  }

 private:
  // As Flag::raise, with many sleepers.
  void publish() {
    __atomic_fetch_add(&ticket, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) futex_wake(&ticket, threads);
  }

  void await(uint32_t seen) {
    const double deadline = now_seconds() + 200e-6;
    for (int turn = 1;; ++turn) {
      if (__atomic_load_n(&ticket, __ATOMIC_ACQUIRE) != seen) return;
      if (turn % 64) cpu_relax();
      else if (now_seconds() > deadline) break;
    }
    __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&ticket, __ATOMIC_SEQ_CST) == seen) futex_wait(&ticket, seen);
    __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
  }

  static void* enter(void* p) {
    Member& me = *(Member*)p;
    ThreadPool& pool = *me.pool;
    for (uint32_t seen = 0;; ++seen) {
      pool.await(seen);
      if (pool.quit) return nullptr;
      pool.job(pool.arg, me.tid);
      pool.sync(me.tid);
    }
  }
};
