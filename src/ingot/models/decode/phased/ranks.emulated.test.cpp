// Several GPUs that compute a token together; each is a thread whose kernels run on the CPU.
#include "ingot/models/decode/phased/ranks.h"

#include <gtest/gtest.h>

#include "ingot/models/decode/fixtures/emulated_ranks.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/models/decode/model/trace.h"

namespace ingot {
namespace {

using decode::Split;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;
using testing::EmulatedRanks;
using testing::on_threads;

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
                EXPECT_EQ(std::memcmp(e->buffers.state, first.buffers.state, sizeof(decode::State)), 0);
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
  const int64_t length = testing::kSanitized ? 11 : 12;  // a batch comes first, and at least two tokens after it
  return {{"bf16, mxfp4", two, kBf16, kMx, length, {7}},
          {"fp8, mxfp4", two, kFp8, kMx, length, {9}},
          {"mxfp4, mxfp4", two, kMx, kMx, length, {9}}};
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
  for (const DecodeCase& t : rank_cases())
    if (!testing::kSanitized || t.dense == WeightFormat::mxfp4)  // the tests of one GPU have all formats
      check_case(t, 2, Split::tensor, false);
}
TEST(GptOssRanksEmulated, TwoGpusAreTheModelThroughTheMegakernel) {
  for (const DecodeCase& t : rank_cases()) check_case(t, 2, Split::tensor, true);
}
TEST(GptOssRanksEmulated, FourGpusAreTheModel) {
  check_case(four_heads(), 4, Split::tensor, true);
  // Under sanitizers the test of eight GPUs covers this path.
  if (!testing::kSanitized) check_case(four_heads(), 4, Split::tensor, false);
}
TEST(GptOssRanksEmulated, EightGpusAreTheModel) {
  GptOssConfig eight_heads = testing::decode_config(64, 16, 8, 32, 544, 3, 2, 5, 1);
  eight_heads.vocab = 121;  // a part of the ids for each
  const DecodeCase eight = {"eight key heads", eight_heads, WeightFormat::bf16, WeightFormat::mxfp4, 3, {2}};
  check_case(eight, 8, Split::tensor, true);
  check_case(eight, 8, Split::tensor, false);
}
TEST(GptOssRanksEmulated, AttentionOnOneGpuAndExpertsOnTheRemainingGpusComputeTheModel) {
  if (!testing::kSanitized) check_case(four_heads(), 2, Split::attention_experts, true);  // one rank has experts only
  check_case(four_heads(), 5, Split::attention_experts, true);
  check_case(four_heads(), 3, Split::attention_experts, false);
}

TEST(GptOssRanksEmulated, TracedTokensAreTheTokensAndShowEveryExchange) {
  const DecodeCase t = rank_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  const int32_t id = 5;
  EmulatedRanks plain(m, 9, 2, Split::tensor), traced(m, 9, 2, Split::tensor);
  plain.use_megakernel(true);
  const std::vector<std::vector<double>> want = plain.extend({&id, 1}, 1);
  std::vector<std::vector<uint64_t>> words(2);
  std::vector<megakernel::Trace> traces;
  for (size_t r = 0; r < 2; ++r) {
    megakernel::Trace trace = trace_of(traced.ranks[r]->model, uint32_t(traced.ranks[r]->blocks), nullptr);
    words[r].resize(size_t(trace.blocks) * trace.words_of_block());
    trace.words = words[r].data();
    traces.push_back(trace);
  }
  on_threads(2, [&](size_t r) {
    traced.ranks[r]->buffers.state->tokens[0] = id;
    traced.ranks[r]->run_one_kernel({.capacity = 9}, ~0u, traces[r]);
  });
  EXPECT_EQ(traced.ranks[0]->rows_of_logits(1), want);
  for (size_t r = 0; r < 2; ++r) {
    const auto spans = decode::spans_of(traces[r], words[r]);
    EXPECT_EQ(int64_t(spans.size()), traced.ranks[r]->blocks * (5 * t.config.layers + 1));
    for (const auto& s : spans) EXPECT_EQ(s.sent_ns > 0, s.stage == 2 || s.stage == 4);
  }
}

TEST(GptOssRanksEmulated, AGpuWithAMissingBlockEndsAllGpusAndTheNextTokenIsRight) {
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
  // The rank that gave up first has the record; both ranks have ended and appended nothing.
  int reports = 0;
  for (size_t r = 0; r < 2; ++r) {
    const gpu::WaitRecord& found = gpus.ranks[r]->record;
    EXPECT_NE(gpus.ranks[r]->stop, gpu::kRunning);
    EXPECT_EQ(gpus.ranks[r]->buffers.state->position, 0);
    if (found.state == gpu::kRunning) continue;
    ++reports;
    if (r == 1) EXPECT_EQ(found.what, 2u);                               // its other block waited for the grid barrier
    if (r == 0) EXPECT_EQ(found.what, megakernel::wait_for_rank(4, 1));  // its own sums of the output were complete
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
    // A late rank finds itself stopped and appends nothing.
    on_threads(2, [&](size_t r) {
      if (r == 1) gpus.ranks[r]->step(part, 1);
    });
    EXPECT_EQ(gpus.ranks[1]->buffers.state->position, 0);
    EXPECT_EQ(gpus.ranks[1]->record.state, gpu::kRunning);
  }
}

// A dense model with norms of heads, and a mixture without biases beside a dense MLP.
TEST(FamiliesRanksEmulated, SeveralGpusComputeTheModel) {
  DecoderSpec dense = testing::family_spec({96, 8, 2, 32, 130}), mixed = testing::family_spec({64, 8, 2, 32, 130});
  dense.qk_norm = dense.qkv_bias = true, dense.layer[0].window = 5, dense.embedding_scale = 3;
  mixed.layer[1].experts = true, mixed.experts = 5, mixed.experts_per_token = 2;
  for (const testing::FamilyCase& t : {testing::FamilyCase{"dense", dense, 12, {9}}, {"mixed", mixed, 12, {1, 9}}})
    for (const Split split : {Split::tensor, Split::attention_experts}) {
      SCOPED_TRACE(split == Split::tensor ? "tensor" : "attention and experts");
      testing::check_family(t, [&](const testing::RandomModel& m, int64_t room) {
        const auto gpus = std::make_shared<EmulatedRanks>(m.spec, m.weights, uint32_t(room), 2, split);
        return testing::DecodeUnderTest{
            .extend =
                [gpus](std::span<const int32_t> ids) {
                  const auto rows = gpus->extend(ids, uint32_t(ids.size()));
                  const Emulated &first = *gpus->ranks[0], &second = *gpus->ranks[1];
                  EXPECT_EQ(std::memcmp(first.buffers.state, second.buffers.state, sizeof(decode::State)), 0);
                  return rows;
                },
            .choices = [gpus](size_t i) { return testing::choices_of(gpus->ranks[0]->buffers, gpus->c.layers, i); },
            .state = [gpus] { return *gpus->ranks[0]->buffers.state; }};
      });
    }
}

}  // namespace
}  // namespace ingot
