#include "ingot/data/packer.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "ingot/core/rng.h"
#include "ingot/data/prefetch.h"
#include "ingot/io/file.h"
#include "ingot/testing/child_process.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

// Documents of heavy-tailed lengths; token i of document d is (d * 1000 + i) % 50000 + 2, after a bos of 1.
struct Sample {
  std::vector<int32_t> tokens;
  std::vector<int64_t> begins;
};
Sample make_sample(int documents, uint64_t seed, bool bos = true) {
  Sample s;
  const Rng rng(seed, Purpose::test);
  for (int d = 0; d < documents; ++d) {
    const int64_t length = 1 + int64_t(std::exp(rng.normal(uint64_t(d)) + 3));
    s.begins.push_back(int64_t(s.tokens.size()));
    if (bos) s.tokens.push_back(1);
    for (int64_t i = 0; i < length; ++i) s.tokens.push_back(int32_t((d * 1000 + i) % 50000 + 2));
  }
  return s;
}
std::shared_ptr<const TokenSource> in_memory(const Sample& s, bool bos = true) {
  return tokens_in_memory(s.tokens, s.begins, bos ? 1 : -1, 60000);
}

// The invariants of every batch.
void expect_well_formed(const Batch& b, int64_t n, int64_t max_segment) {
  ASSERT_EQ(b.size(), n);
  ASSERT_EQ(int64_t(b.targets.size()), n);
  ASSERT_EQ(int64_t(b.positions.size()), n);
  ASSERT_EQ(b.cu_seqlens.front(), 0);
  ASSERT_EQ(b.cu_seqlens.back(), n);
  for (int64_t t = 0; t + 1 < n; ++t) ASSERT_EQ(b.targets[size_t(t)], b.tokens[size_t(t) + 1]);
  for (size_t s = 0; s + 1 < b.cu_seqlens.size(); ++s) {
    const int32_t begin = b.cu_seqlens[s], end = b.cu_seqlens[s + 1];
    ASSERT_GT(end, begin);
    ASSERT_LE(end - begin, max_segment);
    for (int32_t t = begin; t < end; ++t) ASSERT_EQ(b.positions[size_t(t)], t - begin);
  }
}

TEST(pack_row, cuts_at_documents_and_at_the_longest_segment) {
  Batch b;
  pack_row({9, 9, 9, 1, 9, 9, 9, 9, 9, 1, 1, 9}, {3, 9, 10}, 4, b);
  EXPECT_EQ(b.cu_seqlens, (std::vector<int32_t>{0, 3, 7, 9, 10, 11}));
  EXPECT_EQ(b.positions, (std::vector<int32_t>{0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 0}));
  EXPECT_EQ(b.tokens, (std::vector<int32_t>{9, 9, 9, 1, 9, 9, 9, 9, 9, 1, 1}));
  EXPECT_EQ(b.targets, (std::vector<int32_t>{9, 9, 1, 9, 9, 9, 9, 9, 1, 1, 9}));
}

TEST(sequential, spans_follow_each_other_from_the_first_bos_of_each_shard) {
  Sample s = make_sample(60, 1);
  s.tokens.insert(s.tokens.begin(), {7, 7, 7});  // the end of a document from an earlier shard
  for (size_t i = 1; i < s.begins.size(); ++i) s.begins[i] += 3;
  const testing::TemporaryDirectory dir;
  const int64_t per_shard = 500, n = 40, world = 2;
  const auto source = open_shards(write_shards(dir / "s", *in_memory(s), 0, per_shard), 1, 60000);
  // The rule spelled out: for each shard, from its first bos, whole steps of world spans of n + 1 tokens.
  std::vector<std::vector<int32_t>> spans;
  for (int64_t shard = 0; shard * per_shard < int64_t(s.tokens.size()); ++shard) {
    const int64_t end = std::min(int64_t(s.tokens.size()), (shard + 1) * per_shard);
    int64_t cursor = std::find(s.tokens.begin() + shard * per_shard, s.tokens.begin() + end, 1) - s.tokens.begin();
    for (; cursor + world * (n + 1) <= end; cursor += world * (n + 1))
      for (int64_t r = 0; r < world; ++r)
        spans.emplace_back(s.tokens.begin() + cursor + r * (n + 1), s.tokens.begin() + cursor + (r + 1) * (n + 1));
  }
  ASSERT_GT(spans.size(), 10u);
  for (int rank = 0; rank < world; ++rank) {
    const Packer packer(
        source, {.order = BatchOrder::sequential, .tokens = n, .max_segment = 16, .rank = rank, .world = int(world)});
    EXPECT_EQ(packer.batches_per_epoch(), double(spans.size()) / world);
    Batch b;
    for (size_t k = 0; k < spans.size(); ++k) {  // two epochs
      packer.fill(int64_t(k), b);
      const std::vector<int32_t>& span = spans[(k * size_t(world) + size_t(rank)) % spans.size()];
      EXPECT_EQ(b.tokens, std::vector<int32_t>(span.begin(), span.end() - 1)) << k;
      EXPECT_EQ(b.targets, std::vector<int32_t>(span.begin() + 1, span.end())) << k;
      expect_well_formed(b, n, 16);
      for (int64_t t = 1; t < n; ++t) EXPECT_TRUE(span[size_t(t)] != 1 || b.positions[size_t(t)] == 0);
    }
  }
  EXPECT_THROW(Packer(source, {.order = BatchOrder::sequential, .tokens = 600}), Error);
}

TEST(shuffled, each_epoch_holds_every_document_once_in_a_new_order) {
  const Sample s = make_sample(50, 2);
  const int64_t n = 64, size = int64_t(s.tokens.size());
  const auto source = in_memory(s);
  const Packer packer(source, {.order = BatchOrder::shuffled, .tokens = n, .max_segment = 32, .seed = 9});
  std::vector<int32_t> row;
  Batch b;
  for (int64_t k = 0; int64_t(row.size()) < 3 * size; ++k) {
    packer.fill(k, b);
    expect_well_formed(b, n, 32);
    EXPECT_TRUE(k == 0 || row.back() == b.tokens[0]);  // the shared token: nothing is lost between batches
    row.insert(row.end(), b.tokens.begin() + (k > 0), b.tokens.end());
    row.push_back(b.targets.back());
    for (int64_t t = 1; t < n; ++t) EXPECT_TRUE(b.tokens[size_t(t)] != 1 || b.positions[size_t(t)] == 0);
  }
  std::vector<std::string> orders;
  for (int64_t e = 0; e < 3; ++e) {
    // Split the epoch's row at bos; the multiset of the parts equals the documents.
    std::multiset<std::vector<int32_t>> found, want;
    std::string order;
    for (int64_t t = e * size; t < (e + 1) * size;) {
      int64_t end = t + 1;
      while (end < (e + 1) * size && row[size_t(end)] != 1) ++end;
      found.insert(std::vector<int32_t>(row.begin() + t, row.begin() + end));
      order += std::to_string(row[size_t(t) + 1]) + " ";
      t = end;
    }
    for (size_t d = 0; d < s.begins.size(); ++d)
      want.insert(std::vector<int32_t>(s.tokens.begin() + s.begins[d],
                                       d + 1 < s.begins.size() ? s.tokens.begin() + s.begins[d + 1] : s.tokens.end()));
    EXPECT_EQ(found, want) << e;
    orders.push_back(order);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(shuffled, batches_longer_than_an_epoch_wrap_more_than_once) {
  const auto source = tokens_in_memory({1, 5, 6, 1, 7}, {0, 3}, 1, 10);
  const Packer packer(source, {.order = BatchOrder::shuffled, .tokens = 23, .max_segment = 2});
  Batch b;
  packer.fill(3, b);
  expect_well_formed(b, 23, 2);
  EXPECT_EQ(std::count(b.tokens.begin(), b.tokens.end(), 6) + std::count(b.tokens.begin(), b.tokens.end(), 7), 9);
}

TEST(segments, each_epoch_scores_every_token_once_within_its_document) {
  const Sample s = make_sample(50, 3);
  const int64_t n = 64, size = int64_t(s.tokens.size());
  const Packer packer(in_memory(s), {.order = BatchOrder::segments, .tokens = n, .max_segment = 16, .seed = 9});
  std::map<int32_t, int32_t> next;  // the token after each (tokens differ, except bos)
  for (int64_t i = 0; i < size; ++i)
    if (s.tokens[size_t(i)] != 1) next[s.tokens[size_t(i)]] = i + 1 < size ? s.tokens[size_t(i) + 1] : 1;
  std::map<int32_t, int> seen;
  std::vector<int32_t> row;
  Batch b;
  for (int64_t k = 0; k * n < size; ++k) {
    packer.fill(k, b);
    for (int64_t t = 0; t < n && k * n + t < size; ++t) {
      const int32_t token = b.tokens[size_t(t)];
      row.push_back(token);
      ++seen[token];
      if (token != 1) { EXPECT_EQ(b.targets[size_t(t)], next[token]); }
    }
    for (size_t i = 0; i + 1 < b.cu_seqlens.size(); ++i) {
      ASSERT_LE(b.cu_seqlens[i + 1] - b.cu_seqlens[i], 16);
      for (int32_t t = b.cu_seqlens[i]; t < b.cu_seqlens[i + 1]; ++t) {
        ASSERT_EQ(b.positions[size_t(t)], t - b.cu_seqlens[i]);
        if (t + 1 < b.cu_seqlens[i + 1]) { ASSERT_EQ(b.targets[size_t(t)], b.tokens[size_t(t) + 1]); }
      }
    }
  }
  EXPECT_EQ(seen[1], 50);
  for (const auto& [token, after] : next) EXPECT_EQ(seen[token], 1) << token;
  EXPECT_NE(row, s.tokens);
}

TEST(segments, without_bos_a_documents_end_has_no_target) {
  const auto source = tokens_in_memory({5, 6, 7, 8, 9}, {0, 3}, -1, 10);
  const Packer packer(source, {.order = BatchOrder::segments, .tokens = 5, .max_segment = 2});
  Batch b;
  packer.fill(0, b);
  std::map<int32_t, int32_t> target;
  for (size_t t = 0; t < 5; ++t) target[b.tokens[t]] = b.targets[t];
  EXPECT_EQ(target, (std::map<int32_t, int32_t>{{5, 6}, {6, 7}, {7, -1}, {8, 9}, {9, -1}}));
}

TEST(packer, without_bos_no_target_belongs_to_another_document_and_valid_targets_are_counted) {
  const Sample s = make_sample(40, 6, false);
  std::map<int32_t, bool> begins_document;  // by token: ids of different documents differ
  for (const int64_t begin : s.begins) begins_document[s.tokens[size_t(begin)]] = true;
  for (const BatchOrder order : {BatchOrder::shuffled, BatchOrder::segments, BatchOrder::sequential}) {
    const Packer packer(in_memory(s, false), {.order = order, .tokens = 50, .max_segment = 16});
    Batch b;
    for (int64_t k = 0; k < 60; ++k) {
      packer.fill(k, b);
      int64_t targets = 0;
      for (size_t t = 0; t < b.tokens.size(); ++t) {
        if (b.targets[t] < 0) continue;
        ++targets;
        EXPECT_FALSE(begins_document[b.targets[t]]) << name_of(order) << " " << k;
        EXPECT_EQ(b.targets[t], b.tokens[t] + 1) << name_of(order) << " " << k;
      }
      EXPECT_EQ(packer.targets(k), targets) << name_of(order) << " " << k;
    }
  }
  const Packer with_bos(in_memory(make_sample(40, 6)), {.order = BatchOrder::shuffled, .tokens = 50});
  EXPECT_EQ(with_bos.targets(3), 50);
  const auto ones = tokens_in_memory({5, 6, 7}, {0, 1, 2}, -1, 10);
  EXPECT_THROW(Packer(ones, {.order = BatchOrder::segments, .tokens = 2}), Error);
}

TEST(windows, are_contiguous_and_start_anywhere) {
  std::vector<int32_t> tokens(100);
  for (int i = 0; i < 100; ++i) tokens[size_t(i)] = i;
  const auto source = tokens_in_memory(tokens, {0}, -1, 100);
  const Packer packer(source, {.order = BatchOrder::windows, .tokens = 96, .max_segment = 8, .seed = 1});
  Batch b;
  std::map<int32_t, int> starts;
  for (int64_t k = 0; k < 300; ++k) {
    packer.fill(k, b);
    ASSERT_EQ(b.segments(), 12);
    for (size_t w = 0; w < 12; ++w) {
      ++starts[b.tokens[w * 8]];
      for (size_t i = 0; i < 8; ++i) {
        ASSERT_EQ(b.tokens[w * 8 + i], b.tokens[w * 8] + int32_t(i));
        ASSERT_EQ(b.targets[w * 8 + i], b.tokens[w * 8] + int32_t(i) + 1);
        ASSERT_EQ(b.positions[w * 8 + i], int32_t(i));
      }
    }
  }
  EXPECT_EQ(starts.size(), 92u);  // every offset whose last target exists: 0 .. 91
  EXPECT_EQ(starts.rbegin()->first, 91);
  EXPECT_THROW(Packer(source, {.order = BatchOrder::windows, .tokens = 95, .max_segment = 8}), Error);
  EXPECT_THROW(Packer(source, {.order = BatchOrder::windows, .tokens = 100, .max_segment = 100}), Error);
}

TEST(packer, a_batch_depends_on_its_number_only) {
  const auto source = in_memory(make_sample(80, 4));
  for (const BatchOrder order :
       {BatchOrder::sequential, BatchOrder::shuffled, BatchOrder::segments, BatchOrder::windows}) {
    const PackOptions options{.order = order, .tokens = 128, .max_segment = 32, .seed = 6};
    const Packer one(source, options), two(source, options);
    std::vector<Batch> forwards(40);
    for (int64_t k = 0; k < 40; ++k) one.fill(k, forwards[size_t(k)]);
    Batch b;
    for (int64_t k = 39; k >= 0; --k) {
      two.fill(k, b);
      EXPECT_EQ(b.tokens, forwards[size_t(k)].tokens);
      EXPECT_EQ(b.cu_seqlens, forwards[size_t(k)].cu_seqlens);
    }
  }
}

TEST(packer, ranks_split_a_step_without_overlap) {
  const auto source = in_memory(make_sample(80, 4));
  for (const BatchOrder order :
       {BatchOrder::sequential, BatchOrder::shuffled, BatchOrder::segments, BatchOrder::windows}) {
    const Packer zero(source, {.order = order, .tokens = 64, .max_segment = 32, .rank = 0, .world = 2});
    const Packer one(source, {.order = order, .tokens = 64, .max_segment = 32, .rank = 1, .world = 2});
    Batch a, b;
    zero.fill(1, a);
    one.fill(1, b);
    EXPECT_NE(a.tokens, b.tokens) << name_of(order);
    // A step of sequential batches is a span of each rank within a shard, and windows are random.
    if (order == BatchOrder::sequential || order == BatchOrder::windows) continue;
    const Packer alone(source, {.order = order, .tokens = 64, .max_segment = 32});
    for (int64_t step = 0; step < 9; ++step)
      for (const Packer* rank : {&zero, &one}) {
        rank->fill(step, a);
        alone.fill(2 * step + (rank == &one), b);
        EXPECT_EQ(a.tokens, b.tokens) << name_of(order) << ", step " << step;
        EXPECT_EQ(a.targets, b.targets);
        EXPECT_EQ(a.cu_seqlens, b.cu_seqlens);
      }
  }
  EXPECT_THROW(Packer(source, {.tokens = 64, .rank = 2, .world = 2}), Error);
  EXPECT_THROW(Packer(source, {.tokens = 0}), Error);
  EXPECT_EQ(batch_order("windows"), BatchOrder::windows);
  EXPECT_THROW(batch_order("random"), Error);
}

TEST(prefetch, delivers_the_same_batches_from_any_start) {
  auto packer = std::make_shared<Packer>(in_memory(make_sample(80, 4)), PackOptions{.tokens = 100, .max_segment = 32});
  Prefetch prefetch(packer, 17, 2);
  Batch got, want;
  for (int64_t k = 17; k < 60; ++k) {
    prefetch.next(got);
    packer->fill(k, want);
    EXPECT_EQ(got.tokens, want.tokens) << k;
    EXPECT_EQ(got.positions, want.positions) << k;
  }
}

TEST(prefetch, an_exception_is_thrown_in_place_of_its_batch) {
  Prefetch prefetch(
      [](int64_t k, Batch& b) {
        if (k == 3) fail(ErrorCode::bad_data, "shard x");
        b.tokens.assign(1, int32_t(k));
      },
      0, 8);
  Batch b;
  for (int32_t k = 0; k < 3; ++k) {
    prefetch.next(b);
    EXPECT_EQ(b.tokens[0], k);
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(testing::error_of([&] { prefetch.next(b); }), "bad data: shard x");
}

TEST(prefetch, stops_at_once_when_it_is_full_idle_or_failed) {
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> made{0};
    Prefetch prefetch([&](int64_t, Batch&) { ++made; }, 0, 2);
    Batch b;
    if (i % 2 == 0) prefetch.next(b);
    if (i % 3 == 0) std::this_thread::yield();
    EXPECT_LE(made, 4);
  }
}

// Sanitizers neither run threads in a forked child nor live with less memory.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(prefetch, a_thread_that_the_system_refuses_is_an_error_and_signals_stay_as_they_were) {
  const int result = testing::status_of_child(60, [] {
    testing::leave_memory(int64_t(64) << 20);
    int status = 1;
    std::vector<std::unique_ptr<Prefetch>> held;
    try {
      for (int i = 0; i < 100; ++i) held.push_back(std::make_unique<Prefetch>([](int64_t, Batch&) {}, 0, 1));
    } catch (const Error& e) { status = e.code == ErrorCode::io ? 0 : 2; }
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    return ::sigismember(&blocked, SIGINT) ? 3 : status;
  });
  EXPECT_EQ(result, 0);
}
#endif

}  // namespace
}  // namespace ingot
