// Several GPUs that make a token together, each a thread whose kernels run on the CPU.
#include "ingot/models/gpt_oss/decode/ranks.h"

#include <gtest/gtest.h>

#include <exception>
#include <thread>

#include "ingot/gpu/emulation/grid.h"
#include "ingot/models/gpt_oss/decode/emulated_model.test.h"

namespace ingot {
namespace {

using gpt_oss_decode::Split;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;

// What `work` throws, in the first rank that throws.
void on_threads(size_t ranks, const std::function<void(size_t)>& work) {
  std::vector<std::exception_ptr> failed(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      emulation::settings().seed = r + 1;  // each GPU has its own pace
      try {
        work(r);
      } catch (...) { failed[r] = std::current_exception(); }
    });
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : failed)
    if (e) std::rethrow_exception(e);
}

struct EmulatedRanks {
  const GptOssConfig& c;
  std::vector<std::unique_ptr<Emulated>> ranks;
  std::vector<std::vector<char>> inboxes;

  EmulatedRanks(const DecodeModel& m, uint32_t room, int count, Split split) : c(m.config) {
    using namespace gpt_oss_decode;
    const std::vector<Slice> slices = slices_of(c, count, split);
    const uint32_t n = uint32_t(count);
    for (const Slice& s : slices) ranks.push_back(std::make_unique<Emulated>(m, room, s, n));
    for (uint32_t r = 0; r < n; ++r) inboxes.emplace_back(size_t(inbox_bytes(c, n)) + 256);
    epochs.resize(n);
    for (uint32_t r = 0; r < n; ++r) {
      Emulated& e = *ranks[r];
      Ranks& all = e.buffers.ranks;
      all.exchange.rank = r, all.exchange.words = inbox_words(c), all.exchange.epoch = &epochs[r];
      all.heads = all.channels = all.ids = 0;
      for (uint32_t q = 0; q < n; ++q) {
        all.exchange.inbox[q] = reinterpret_cast<uint64_t*>(Emulated::aligned(inboxes[q]));
        all.exchange.stop[q] = &ranks[q]->stop;
        if (slices[q].kv_heads.size() > 0) all.heads |= 1u << q;
        if (slices[q].channels.size() > 0) all.channels |= 1u << q;
        if (slices[q].ids.size() > 0) all.ids |= 1u << q;
      }
      all.first_id = uint32_t(slices[r].ids.begin);
      e.limit_ns = 1'000'000'000'000;  // threads may have to wait for a core
      all.watch = {.stop = &e.stop, .host_stop = &e.host_stop, .record = &e.record, .limit_ns = e.limit_ns};
      e.buffers.logits = ranks[0]->buffers.logits + slices[r].ids.begin;
      e.buffers.stop = &e.stop;
      e.stages = stages_of(e.model, e.buffers, e.capacity);
      e.blocks = 3 - r % 2;
    }
  }
  void set_limit(uint64_t ns) {
    for (auto& e : ranks) e->limit_ns = ns, e->buffers.ranks.watch.limit_ns = ns / 4 * 3;
  }
  // As after a launch that gave up.
  void reset() {
    for (size_t r = 0; r < ranks.size(); ++r) {
      Emulated& e = *ranks[r];
      e.stop = gpu::kRunning, e.host_stop = 0, e.record = {}, epochs[r] = 0;
      std::memset(e.buffers.handoff, 0, size_t(e.buffers.counter_bytes));
      std::fill(inboxes[r].begin(), inboxes[r].end(), char(0));
    }
  }
  void use_megakernel(bool wanted) {
    for (auto& e : ranks) e->megakernel = wanted;
  }
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids, uint32_t rows) {
    std::fill_n(ranks[0]->buffers.logits, rows * c.vocab, NAN);
    on_threads(ranks.size(), [&](size_t r) { ranks[r]->step(ids, rows); });
    return ranks[0]->rows_of_logits(rows);
  }
  std::vector<uint32_t> epochs;
};

void check_case(const DecodeCase& t, int count, Split split, bool megakernel) {
  SCOPED_TRACE(::testing::Message() << count << " ranks, " << (megakernel ? "megakernel" : "phase by phase"));
  std::unique_ptr<EmulatedRanks> gpus;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpus = std::make_unique<EmulatedRanks>(m, uint32_t(room), count, split);
    gpus->use_megakernel(megakernel);
    return testing::DecodeUnderTest{
        .extend =
            [&](std::span<const int32_t> ids) {
              const auto rows = gpus->extend(ids, uint32_t(ids.size()));
              const Emulated& first = *gpus->ranks[0];
              for (const auto& e : gpus->ranks) {
                EXPECT_EQ(std::memcmp(e->buffers.state, first.buffers.state, sizeof(gpt_oss_decode::State)), 0);
                if (ids.size() == 1) continue;
                for (size_t i = 0; i < ids.size(); ++i)  // the residual stream, bit for bit
                  EXPECT_EQ(std::memcmp(e->buffers.x + i * size_t(e->buffers.x_stride),
                                        first.buffers.x + i * size_t(first.buffers.x_stride), size_t(e->c.hidden) * 4),
                            0);
              }
              return rows;
            },
        .choices =
            [&](size_t i) {
              const auto chosen = testing::choices_of(gpus->ranks[0]->buffers, gpus->c.layers, i);
              for (const auto& e : gpus->ranks) EXPECT_EQ(testing::choices_of(e->buffers, e->c.layers, i), chosen);
              return chosen;
            },
        .state = [&] { return *gpus->ranks[0]->buffers.state; }};
  });
}

std::vector<DecodeCase> rank_cases() {
  constexpr WeightFormat kBf16 = WeightFormat::bf16, kFp8 = WeightFormat::fp8, kMx = WeightFormat::mxfp4;
  const GptOssConfig two = testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5, 2);
  return {{"bf16, mxfp4", two, kBf16, kMx, 12, {7}},
          {"fp8, mxfp4", two, kFp8, kMx, 12, {9}},
          {"mxfp4, mxfp4", two, kMx, kMx, 12, {9}}};
}
DecodeCase four_heads() {
  return {"four key heads",
          testing::decode_config(64, 16, 4, 16, 288, 4, 2, 5, 2),
          WeightFormat::bf16,
          WeightFormat::mxfp4,
          6,
          {3}};
}

TEST(GptOssRanksEmulated, TwoGpusAreTheModelPhaseByPhase) {
  for (const DecodeCase& t : rank_cases()) check_case(t, 2, Split::tensor, false);
}
TEST(GptOssRanksEmulated, TwoGpusAreTheModelThroughTheMegakernel) {
  for (const DecodeCase& t : rank_cases()) check_case(t, 2, Split::tensor, true);
}
TEST(GptOssRanksEmulated, FourGpusAreTheModel) {
  check_case(four_heads(), 4, Split::tensor, true);
  check_case(four_heads(), 4, Split::tensor, false);
}
TEST(GptOssRanksEmulated, OneGpuForAttentionAndOthersForTheExpertsAreTheModel) {
  check_case(four_heads(), 2, Split::attention_experts, true);
  check_case(four_heads(), 5, Split::attention_experts, true);
  check_case(four_heads(), 3, Split::attention_experts, false);
}

TEST(GptOssRanksEmulated, AGpuWhoseBlockStaysAwayEndsAllAndTheNextTokenIsRight) {
  const DecodeCase t = rank_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  EmulatedRanks sound(m, 9, 2, Split::tensor), gpus(m, 9, 2, Split::tensor);
  const int32_t id = 5;
  sound.use_megakernel(true), gpus.use_megakernel(true);
  const std::vector<std::vector<double>> want = sound.extend({&id, 1}, 1);
  gpus.set_limit(20'000'000);
  on_threads(2, [&](size_t r) {
    gpus.ranks[r]->buffers.state->tokens[0] = id;
    gpus.ranks[r]->run_one_kernel({.capacity = 9}, r == 1 ? 2 : ~0u);  // the second one's last block, at the output
  });
  // Whoever gave up first says so; both have ended, and appended nothing.
  int reports = 0;
  for (size_t r = 0; r < 2; ++r) {
    const gpu::WaitRecord& found = gpus.ranks[r]->record;
    EXPECT_NE(gpus.ranks[r]->stop, gpu::kRunning);
    EXPECT_EQ(gpus.ranks[r]->buffers.state->position, 0);
    if (found.state == gpu::kRunning) continue;
    ++reports;
    if (r == 1) EXPECT_EQ(found.what, 2u);                               // its other block waited for the hand-off
    if (r == 0) EXPECT_EQ(found.what, megakernel::wait_for_rank(4, 1));  // its sums of the output had come
  }
  EXPECT_GE(reports, 1);
  gpus.reset();
  gpus.set_limit(1'000'000'000'000);
  EXPECT_EQ(gpus.extend({&id, 1}, 1), want);
  EXPECT_EQ(gpus.ranks[1]->buffers.state->position, 1);
}

TEST(GptOssRanksEmulated, AGpuThatNeverBeginsIsNamed) {
  const DecodeCase t = rank_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  for (const bool megakernel : {true, false}) {
    EmulatedRanks gpus(m, 9, 2, Split::tensor);
    const std::vector<int32_t> ids = {5, 6};
    gpus.use_megakernel(megakernel);
    gpus.set_limit(20'000'000);
    const auto part = std::span(ids).first(megakernel ? 1 : 2);
    on_threads(2, [&](size_t r) {
      if (r == 0) gpus.ranks[r]->step(part, 1);
    });
    EXPECT_EQ(gpus.ranks[0]->record.state, gpu::kTimedOut);
    EXPECT_EQ(gpus.ranks[0]->record.what, megakernel::wait_for_rank(2, 1));
    EXPECT_EQ(gpus.ranks[0]->buffers.state->position, 0);
    EXPECT_EQ(gpus.ranks[1]->stop, gpu::kStoppedByPeer);
    // One that comes late finds itself stopped, and appends nothing.
    on_threads(2, [&](size_t r) {
      if (r == 1) gpus.ranks[r]->step(part, 1);
    });
    EXPECT_EQ(gpus.ranks[1]->buffers.state->position, 0);
    EXPECT_EQ(gpus.ranks[1]->record.state, gpu::kRunning);
  }
}

}  // namespace
}  // namespace ingot
