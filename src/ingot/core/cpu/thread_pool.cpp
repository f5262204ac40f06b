#include "ingot/core/cpu/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/core/cpu/cpu.h"

namespace ingot {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSpins = 4000;  // some tens of microseconds: longer than the gap between two ops of a training step

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  explicit Pool(int threads) : shares_(size_t(threads)) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& e) {
      const size_t started = workers_.size();
      stop();
      fail(ErrorCode::io, "threads: found room for ", started + 1, ", expected ", threads, " (", e.what(),
           "); INGOT_THREADS asks for fewer");
    }
  }
  ~Pool() { stop(); }
  int threads() const { return int(workers_.size()) + 1; }

  void run(int64_t tasks, void (*body)(void*, int64_t), void* context) {
    body_ = body;
    context_ = context;
    error_ = nullptr;
    for (int64_t t = 0, n = threads(); t < n; ++t) {
      shares_[size_t(t)].next.store(t * tasks / n, std::memory_order_relaxed);
      shares_[size_t(t)].end = (t + 1) * tasks / n;
    }
    entered_.store(kOpen, std::memory_order_release);
    {
      std::lock_guard lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load(std::memory_order_relaxed) > 0) wake_.notify_all();
    drain(0);
    // Every task has been taken. A late worker, whose core runs a different process, finds the run closed, and the
    // caller does not wait for this worker.
    entered_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; entered_.load(std::memory_order_acquire) > 0;)
      if (++spins < kSpins)
        relax();
      else
        std::this_thread::yield();
    if (error_) std::rethrow_exception(error_);
  }

  static thread_local bool inside_task;

 private:
  // Each thread begins with its own run of neighbouring tasks, and then takes tasks of slower threads. Ops number their
  // tasks along the tokens, so the results of an op are mostly in the same core's cache for the next op.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  void drain(int self) {
    inside_task = true;
    const int n = threads();
    for (int i = 0; i < n; ++i) {
      Share& share = shares_[size_t(self + i < n ? self + i : self + i - n)];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      for (int64_t task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) run_task(task);
    }
    inside_task = false;
  }
  void run_task(int64_t task) {
    try {
      body_(context_, task);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      for (Share& s : shares_) s.next.store(s.end, std::memory_order_relaxed);
    }
  }
  void work(int self) {
    for (uint64_t seen = 0;;) {
      for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen && spins < kSpins; ++spins) relax();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
        sleeping_.fetch_sub(1);
      }
      if (stop_) return;
      seen = epoch_.load(std::memory_order_acquire);  // before entering: a run beginning after this load is not missed
      if (!enter()) continue;
      drain(self);
      entered_.fetch_sub(1, std::memory_order_release);
    }
  }
  bool enter() {
    int now = entered_.load(std::memory_order_acquire);
    while (now & kOpen)
      if (entered_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  static constexpr int kOpen = 1 << 30;
  std::atomic<int> sleeping_{0}, entered_{0};  // entered_: workers at the tasks of a run, and whether more may come
  std::atomic<bool> stop_{false};
  std::vector<Share> shares_;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
};
thread_local bool Pool::inside_task = false;

std::mutex pool_mutex;  // held while a parallel call runs

int initial_threads() {
  const char* wish = std::getenv("INGOT_THREADS");
  if (wish == nullptr || *wish == 0) return std::min(cpu_count(), kMaxThreads);
  char* end = nullptr;
  const long n = std::strtol(wish, &end, 10);
  if (*end != 0 || n < 1 || n > kMaxThreads)
    fail(ErrorCode::usage, "INGOT_THREADS: found '", wish, "', expected a number from 1 to ", kMaxThreads);
  return int(n);
}
std::atomic<int>& wanted() {
  static std::atomic<int> n = initial_threads();
  return n;
}
Pool*& pool_slot() {
  static Pool* pool = nullptr;  // never destroyed: workers may outlive static destructors
  return pool;
}

// A child process has its parent's memory and none of its threads: the child begins without a pool, and with a free
// lock. The old pool stays in memory, because no thread is left to join.
void begin_anew_in_child() {
  static Pool* left_behind;
  left_behind = std::exchange(pool_slot(), nullptr);
  (void)left_behind;
  new (&pool_mutex) std::mutex;
}
Pool& pool_of(int threads) {
  [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, begin_anew_in_child);
  Pool*& pool = pool_slot();
  if (pool == nullptr || pool->threads() != threads) {
    delete std::exchange(pool, nullptr);
    pool = new Pool(threads);
  }
  return *pool;
}

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { ::operator delete(memory, std::align_val_t(64)); }
};

}  // namespace

int thread_count() { return wanted(); }
void set_thread_count(int n) {
  INGOT_CHECK(n >= 1 && n <= kMaxThreads, "threads: found ", n, ", expected 1 to ", kMaxThreads);
  wanted() = n;
}

void detail::parallel_tasks(int64_t tasks, void (*run)(void*, int64_t), void* context) {
  if (tasks <= 0) return;
  std::unique_lock lock(pool_mutex, std::defer_lock);
  if (thread_count() == 1 || Pool::inside_task || !lock.try_lock()) {
    for (int64_t task = 0; task < tasks; ++task) run(context, task);
    return;
  }
  pool_of(thread_count()).run(tasks, run, context);
}

void* thread_scratch(int slot, int64_t bytes) {
  thread_local Scratch slots[kScratchSlots];
  Scratch& s = slots[slot];
  if (s.bytes < bytes) {
    ::operator delete(s.memory, std::align_val_t(64));
    s.memory = nullptr;
    s.bytes = 0;
    s.memory = ::operator new(size_t(bytes), std::align_val_t(64));
    s.bytes = bytes;
  }
  return s.memory;
}

}  // namespace ingot
