#pragma once
// The process's worker threads. Work is cut into tasks by the caller, by sizes alone, so results never depend on the
// number of threads; reductions write a partial per task and add the partials in task order.
#include <cstdint>
#include <type_traits>

namespace ingot {

// The number of threads for tasks, the caller included: INGOT_THREADS, else every CPU this process may use.
int thread_count();
void set_thread_count(int n);

namespace detail {
void parallel_tasks(int64_t tasks, void (*run)(void*, int64_t), void* context);
}

// Calls body(task) for each task in [0, tasks), in any order, on all threads; returns when all are done. The first
// exception is rethrown. A call from inside a task, or while another thread's call is running, runs in the calling
// thread. A forked child starts its own threads. An Error of code io reports threads that the system refuses to start.
template <class Body> void parallel_tasks(int64_t tasks, Body&& body) {
  if (tasks == 1) {
    body(int64_t(0));
    return;
  }
  detail::parallel_tasks(
      tasks, [](void* context, int64_t task) { (*static_cast<std::remove_reference_t<Body>*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Calls body(begin, end) over [0, n) in chunks of `grain` (the last may be shorter).
template <class Body> void parallel_for(int64_t n, int64_t grain, Body&& body) {
  if (n <= 0) return;
  const int64_t tasks = (n + grain - 1) / grain;
  parallel_tasks(tasks, [&](int64_t task) {
    const int64_t begin = task * grain, end = begin + grain < n ? begin + grain : n;
    body(begin, end);
  });
}

// 64-byte aligned memory of the calling thread, valid until its next thread_scratch() call with the same slot. The
// memory grows to the largest request and stays, so CPU kernels allocate nothing in the steady state.
void* thread_scratch(int slot, int64_t bytes);
constexpr int kScratchSlots = 8;  // slots 0 to 3 are free for ops
// kernels/linear keeps its packed operands here, so any op can call a product.
constexpr int kSharedProductSlot = 6, kTaskProductSlot = 7;

}  // namespace ingot
