#include "ingot/core/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/testing/child_process.h"

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

// Late workers find the run closed, or the next run open.
TEST(thread_pool, consecutive_runs_do_every_task_once_even_with_late_workers) {
  const int before = thread_count();
  set_thread_count(16);
  std::vector<int64_t> seen(40);
  int64_t runs = 0;
  for (int64_t tasks : {1, 2, 3, 16, 17, 40})
    for (int i = 0; i < 200; ++i, ++runs)
      parallel_tasks(tasks, [&](int64_t t) { seen[size_t(t)] += 1; });  // a data race if two threads had the same task
  set_thread_count(before);
  int64_t sum = 0;
  for (int64_t n : seen) sum += n;
  EXPECT_EQ(sum, 200 * (1 + 2 + 3 + 16 + 17 + 40));
  EXPECT_EQ(seen[0], runs);
}

// Sanitizers neither run threads in a forked child nor live with less memory.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(thread_pool, a_forked_child_has_threads_of_its_own) {
  const int before = thread_count();
  set_thread_count(3);
  const auto sum_of_tasks = [] {
    std::atomic<int64_t> sum{0};
    parallel_tasks(1000, [&](int64_t t) { sum += t; });
    return sum.load();
  };
  EXPECT_EQ(sum_of_tasks(), 999 * 1000 / 2);  // the parent's pool is there
  const int status = testing::status_of_child(60, [&] { return sum_of_tasks() == 999 * 1000 / 2 ? 0 : 1; });
  EXPECT_TRUE(WIFEXITED(status)) << "the child waited for threads that it does not have";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(sum_of_tasks(), 999 * 1000 / 2);
  set_thread_count(before);
}

TEST(thread_pool, threads_that_the_system_refuses_are_an_error_and_fewer_still_work) {
  const int status = testing::status_of_child(60, [] {
    testing::leave_memory(int64_t(64) << 20);
    std::atomic<int> count{0};
    const auto body = [&](int64_t) { ++count; };
    for (int attempt = 0; attempt < 2; ++attempt) {
      set_thread_count(900);
      try {
        parallel_tasks(8, body);
        return 1;
      } catch (const Error& e) {
        if (e.code != ErrorCode::io || std::string(e.what()).find("expected 900") == std::string::npos) return 2;
      }
    }
    set_thread_count(2);
    parallel_tasks(8, body);
    return count == 8 ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace ingot
