#include "ingot/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "ingot/core/check.h"

namespace ingot {
namespace {

TEST(thread_pool, every_task_runs_once_for_any_number_of_threads) {
  const int before = thread_count();
  for (int threads : {1, 2, 3, 7}) {
    set_thread_count(threads);
    for (int64_t tasks : {0, 1, 2, 100, 1001}) {
      std::vector<std::atomic<int>> hits(size_t(tasks) + 1);
      parallel_tasks(tasks, [&](int64_t t) { ++hits[size_t(t)]; });
      for (int64_t t = 0; t < tasks; ++t) EXPECT_EQ(hits[size_t(t)], 1);
    }
  }
  set_thread_count(before);
}

TEST(thread_pool, an_exception_reaches_the_caller_and_the_pool_works_on) {
  EXPECT_THROW(parallel_tasks(64, [](int64_t t) { INGOT_CHECK(t != 33, "task ", t); }), Error);
  std::atomic<int64_t> sum{0};
  parallel_for(1000, 7, [&](int64_t begin, int64_t end) {
    for (auto i = begin; i < end; ++i) sum += i;
  });
  EXPECT_EQ(sum, 999 * 1000 / 2);
}

TEST(thread_pool, nested_calls_run_in_the_calling_thread) {
  std::atomic<int> count{0};
  parallel_tasks(8, [&](int64_t) { parallel_tasks(8, [&](int64_t) { ++count; }); });
  EXPECT_EQ(count, 64);
}

}  // namespace
}  // namespace ingot
