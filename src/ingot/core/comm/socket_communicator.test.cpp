#include "ingot/core/comm/socket_communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "ingot/core/comm/ranks.test.h"

namespace ingot {
namespace {

using testing::run_ranks;

constexpr double kDeadline = 20;  // seconds; only a failing test comes near this time

// Rank r's numbers: of mixed sizes, so the order of a sum shows in its last bits.
template <class T> std::vector<T> numbers_of(int rank, int64_t n) {
  std::vector<T> x(static_cast<size_t>(n));
  uint64_t state = 0x9e3779b97f4a7c15 * uint64_t(rank + 1);
  for (T& v : x) {
    state = state * 6364136223846793005 + 1442695040888963407;
    v = T((double(state >> 11) * 0x1p-53 - 0.5) * std::exp2(double((state >> 3) % 16)));
  }
  return x;
}
template <class T> std::vector<T> sum_in_order(int world, int64_t n) {
  std::vector<T> total = numbers_of<T>(0, n);
  for (int r = 1; r < world; ++r) {
    const std::vector<T> x = numbers_of<T>(r, n);
    for (size_t i = 0; i < total.size(); ++i) total[i] += x[i];
  }
  return total;
}
template <class T> Tensor view_of(std::vector<T>& x) { return Tensor(x.data(), {int64_t(x.size())}); }

void expect_no_error(const std::vector<std::string>& errors) {
  for (size_t r = 0; r < errors.size(); ++r) EXPECT_EQ(errors[r], "") << "rank " << r;
}

template <class T> void check_sums() {
  for (const int world : {1, 2, 3, 5})
    for (const int64_t n : {int64_t(0), int64_t(1), int64_t(7), int64_t(5000), int64_t(100003)}) {
      const std::vector<T> expected = sum_in_order<T>(world, n);
      expect_no_error(run_ranks(world, kDeadline, [&](SocketCommunicator& ranks) {
        std::vector<T> x = numbers_of<T>(ranks.rank(), n);
        ranks.all_reduce(view_of(x), {});
        EXPECT_EQ(x, expected) << world << " ranks, " << n;
        x = numbers_of<T>(ranks.rank(), n);
        const Parts parts = even_parts(n, world);
        ranks.reduce_scatter(view_of(x), parts, {});
        for (int64_t i = parts[size_t(ranks.rank())]; i < parts[size_t(ranks.rank()) + 1]; ++i)
          ASSERT_EQ(x[size_t(i)], expected[size_t(i)]) << i;
        ranks.all_gather(view_of(x), parts, {});
        EXPECT_EQ(x, expected);
      }));
    }
}
TEST(socket_communicator, sums_are_added_in_the_order_of_ranks_bit_for_bit) {
  check_sums<float>();
  check_sums<double>();
}

TEST(socket_communicator, parts_may_be_empty_and_uneven) {
  expect_no_error(run_ranks(3, kDeadline, [&](SocketCommunicator& ranks) {
    const std::vector<float> expected = sum_in_order<float>(3, 10);
    std::vector<float> x = numbers_of<float>(ranks.rank(), 10);
    const Parts parts{0, 9, 9, 10};
    ranks.reduce_scatter(view_of(x), parts, {});
    ranks.all_gather(view_of(x), parts, {});
    EXPECT_EQ(x, expected);
  }));
}

TEST(socket_communicator, one_rank_s_bytes_reach_all) {
  expect_no_error(run_ranks(3, kDeadline, [&](SocketCommunicator& ranks) {
    for (int root = 0; root < 3; ++root) {
      std::vector<double> x = numbers_of<double>(ranks.rank(), 20000);
      ranks.broadcast(view_of(x), root, {});
      EXPECT_EQ(x, numbers_of<double>(root, 20000));
    }
    std::string words = ranks.rank() == 0 ? "from rank 0" : "...........";
    ranks.broadcast_bytes(words.data(), int64_t(words.size()), 0);
    EXPECT_EQ(words, "from rank 0");
    const int32_t mine = 10 + ranks.rank();
    int32_t all[3] = {};
    ranks.gather_bytes(&mine, sizeof mine, all);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(all[r], 10 + r);
  }));
}

TEST(socket_communicator, no_rank_leaves_a_barrier_before_the_last_rank_arrives) {
  std::atomic<int> come{0};
  expect_no_error(run_ranks(3, kDeadline, [&](SocketCommunicator& ranks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30 * ranks.rank()));
    ++come;
    ranks.barrier(kDeadline);
    EXPECT_EQ(come.load(), 3);
  }));
}

// Each rank's message, after a call that one of the ranks leaves out.
TEST(socket_communicator, a_rank_that_ends_is_named_by_all_other_ranks) {
  const std::vector<std::string> errors = run_ranks(3, kDeadline, [](SocketCommunicator& ranks) {
    std::vector<float> x(100000, 1);
    ranks.all_reduce(view_of(x), {});
    if (ranks.rank() == 1) return;  // its sockets close
    ranks.all_reduce(view_of(x), {});
  });
  EXPECT_EQ(errors[1], "");
  for (const int r : {0, 2})
    EXPECT_NE(errors[size_t(r)].find("rank 1 went away"), std::string::npos) << errors[size_t(r)];
}

TEST(socket_communicator, a_rank_that_does_not_answer_is_named_within_the_deadline) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> ended{0};
  const std::vector<std::string> errors = run_ranks(3, 1, [&](SocketCommunicator& ranks) {
    struct Count {
      std::atomic<int>& n;
      ~Count() { ++n; }
    } const count{ended};
    std::vector<float> x(100000, 1);
    ranks.all_reduce(view_of(x), {});
    if (ranks.rank() == 2)  // the rank lives, and does nothing until the first two ranks have given up
      while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    else
      ranks.all_reduce(view_of(x), {});
  });
  for (const int r : {0, 1})
    EXPECT_NE(errors[size_t(r)].find("rank 2 does not answer"), std::string::npos) << errors[size_t(r)];
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
}

// With all numbers on GPUs, a rank watches the connections of all ranks while waiting for its own numbers.
TEST(socket_communicator, check_alive_reports_an_ended_rank_and_the_reason) {
  const std::vector<std::string> errors = run_ranks(3, kDeadline, [](SocketCommunicator& ranks) {
    ranks.check_alive();
    ranks.barrier(kDeadline);
    if (ranks.rank() == 2) return;
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < std::chrono::seconds(20)) {
      // The message of the ended rank comes first: rank 0 waits for no rank, and learns the reason from rank 1 or from
      // the connection.
      if (ranks.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ranks.check_alive();
    }
  });
  EXPECT_EQ(errors[2], "");
  for (const int r : {0, 1})
    EXPECT_NE(errors[size_t(r)].find("rank 2 went away"), std::string::npos) << errors[size_t(r)];
}
TEST(socket_communicator, a_roll_call_names_missing_ranks_or_the_reason_of_the_failure) {
  for (const std::string& e :
       run_ranks(3, kDeadline, [](SocketCommunicator& ranks) { ranks.fail_by_roll_call("stuck"); }))
    EXPECT_EQ(e, "stuck");
  const std::vector<std::string> errors = run_ranks(3, kDeadline, [](SocketCommunicator& ranks) {
    if (ranks.rank() != 1) ranks.fail_by_roll_call("stuck");
  });
  for (const int r : {0, 2})
    EXPECT_NE(errors[size_t(r)].find("rank 1 went away"), std::string::npos) << errors[size_t(r)];
}

// Rank 2 answers one rank, then no rank: the rank that waits for rank 2 is late through no fault of its own, and is not
// blamed.
TEST(socket_communicator, a_rank_that_waits_for_another_is_not_named) {
  std::atomic<int> ended{0};
  const std::vector<std::string> errors = run_ranks(3, 1, [&](SocketCommunicator& ranks) {
    struct Count {
      std::atomic<int>& n;
      ~Count() { ++n; }
    } const count{ended};
    int64_t number = ranks.rank(), all[3] = {};
    if (ranks.rank() == 1) ranks.broadcast_bytes(&number, sizeof number, 2);  // rank 2 never comes
    if (ranks.rank() == 0) ranks.broadcast_bytes(&number, sizeof number, 0);
    if (ranks.rank() == 2)
      while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    else
      ranks.gather_bytes(&number, sizeof number, all);
  });
  for (const int r : {0, 1})
    EXPECT_NE(errors[size_t(r)].find("rank 2 does not answer"), std::string::npos) << errors[size_t(r)];
}

// The first rank to see the difference reports it to the second rank with unread bytes still on the connection; `late`
// delays one rank.
TEST(socket_communicator, ranks_that_make_different_calls_get_an_error) {
  for (const int late : {-1, 0, 1})
    for (const int64_t n : {10, 10, 10, 4000}) {
      const std::vector<std::string> errors = run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
        std::vector<float> x(size_t(n + ranks.rank()), 1);
        if (ranks.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ranks.all_reduce(view_of(x), {});
      });
      for (const std::string& e : errors)
        for (const std::string& part : {std::string(": found it at call 1, all_reduce of "),
                                        detail::concat(" ", 4 * n, " bytes"), detail::concat(" ", 4 * n + 4, " bytes")})
          EXPECT_NE(e.find(part), std::string::npos) << late << ", " << n << ": " << e;
    }
}
// All bytes of a rank that only sends are read, and its next call reports the reason.
TEST(socket_communicator, pending_messages_are_read_before_a_rank_ends) {
  const std::vector<std::string> errors = run_ranks(2, kDeadline, [&](SocketCommunicator& ranks) {
    std::vector<float> x(size_t(1) << 20, 1);
    if (ranks.rank() == 1) ranks.broadcast(view_of(x), 1, {});
    ranks.barrier(kDeadline);
  });
  EXPECT_NE(errors[0].find("rank 1: found it at call 1, broadcast of 4194304 bytes"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find(": found it at call 1, b"), std::string::npos) << errors[1];  // the reason received, or seen
                                                                                         // on the connection
}

TEST(socket_communicator, a_rank_that_never_connects_is_named) {
  const LocalListener meet = listen_locally();
  try {
    SocketCommunicator ranks({.rank = 0, .world = 3, .port = meet.port, .listener = meet.descriptor, .seconds = 0.3},
                             1);
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).substr(0, 45), "ranks 1, 2: found no connection within 0.3 s,") << e.what();
  }
}

// A rank of another run, one of four ranks, connects again and again; the two ranks of this run still meet.
TEST(socket_communicator, connections_of_other_programs_do_not_disturb) {
  const LocalListener meet = listen_locally();
  std::atomic<bool> done{false};
  std::thread stranger([&] {
    while (!done) {
      SocketCommunicator* none = nullptr;
      try {
        // Another run, of another number of ranks.
        none = new SocketCommunicator({.rank = 1, .world = 4, .port = meet.port, .seconds = 0.05}, 1);
      } catch (const Error&) {}
      delete none;
    }
  });
  std::string errors[2];
  std::thread other([&] {
    try {
      SocketCommunicator ranks({.rank = 1, .world = 2, .port = meet.port, .seconds = 20}, kDeadline);
      ranks.barrier(kDeadline);
    } catch (const Error& e) { errors[1] = e.what(); }
  });
  try {
    SocketCommunicator ranks({.rank = 0, .world = 2, .port = meet.port, .listener = meet.descriptor, .seconds = 20},
                             kDeadline);
    ranks.barrier(kDeadline);
  } catch (const Error& e) { errors[0] = e.what(); }
  other.join();
  done = true;
  stranger.join();
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
}

using Variables = std::vector<std::pair<const char*, const char*>>;
struct Environment {
  explicit Environment(Variables v) : variables(std::move(v)) {
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  }
  ~Environment() {
    for (const auto& [name, value] : variables) ::unsetenv(name);
  }
  Variables variables;
};
TEST(rendezvous, places_come_from_torchrun_s_variables) {
  EXPECT_EQ(rank_place_from_environment().world, 1);
  {
    const Environment e(
        {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "2000"}});
    const RankPlace p = rank_place_from_environment();
    EXPECT_EQ(p.rank, 3);
    EXPECT_EQ(p.world, 4);
    EXPECT_EQ(p.local_rank, 1);
    EXPECT_EQ(p.address, "host");
    EXPECT_EQ(p.port, 2000);
    const Environment store(Variables{{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    EXPECT_EQ(rank_place_from_environment().port, 2001);  // torchrun itself listens on the first
  }
  for (const auto& [rank, found] : {std::pair{"4", "RANK: found '4'"}, {"x", "RANK: found 'x'"}}) {
    const Environment e(Variables{{"RANK", rank}, {"WORLD_SIZE", "4"}});
    try {
      rank_place_from_environment();
      ADD_FAILURE() << "expected an Error";
    } catch (const Error& error) { EXPECT_EQ(std::string(error.what()).substr(0, 15), found) << error.what(); }
  }
}

}  // namespace
}  // namespace ingot
