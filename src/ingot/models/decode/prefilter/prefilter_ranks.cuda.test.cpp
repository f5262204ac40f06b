// The prefiltered head over several GPUs; in a build with the emulator the GPUs are emulated.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ingot/gpu/allocator.h"
#include "ingot/models/decode/fixtures/prefilter_answers.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"
#include "ingot/models/decode/fixtures/several_gpus.test.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using decode::RankedModel;
using decode::Split;
using testing::DecodeModel;
using testing::download;
using testing::kPatience;
using testing::row_of;
using testing::state_of;

class GptOssPrefilterRanksCuda : public testing::SeveralGpus {
 protected:
  static void check_prefiltered(const std::string& name, const testing::HeadRows& head, Split split);
};
// prefilter_ranks.emulated.test.cpp covers more than two GPUs.
INSTANTIATE_TEST_SUITE_P(, GptOssPrefilterRanksCuda,
                         ::testing::ValuesIn(testing::kEmulated ? std::vector<int>{2} : std::vector<int>{2, 4}),
                         testing::over_gpus);

// A model that four GPUs can share.
GptOssConfig small_config(int64_t vocab) {
  GptOssConfig c = testing::decode_config(96, 16, 4, 16, 288, 6, 2, 5, 2);
  c.vocab = vocab;
  return c;
}

// Each GPU finds the largest of its own sums with its own int8 prefilter. Together they find the token of the whole
// head and of the CPU, for every head. For a greedy token no logit is above the row's upper bound, which stays in the
// memory of its GPU.
void GptOssPrefilterRanksCuda::check_prefiltered(const std::string& name, const testing::HeadRows& head, Split split) {
  SCOPED_TRACE(name);
  const testing::PrefilteredModel m(head, ranks());
  RankedModel gpus(m.model.config, m.model.weights,
                   {.context = 40, .int8_prefilter = true, .wait_limit = kPatience, .gpus = ranks(), .split = split});
  for (int r = 0; r < ranks(); ++r) ASSERT_EQ(gpus.rank(r).has_prefilter(), r == 0 || split == Split::tensor);
  const int64_t rows = int64_t(head.size()), tokens = testing::kEmulated ? 2 : 20;
  const auto noises = testing::noises_to_prefilter();
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t id = i % 2 == 0 ? 0 : int32_t(i * 7919 % rows);
    const uint32_t vocab = i % 5 == 4 ? uint32_t(i % 10 == 9 ? rows / 3 : 2 * rows / 3) : 0;
    sampling::RowNoise noise = noises[size_t(i) % noises.size()];
    noise.seed += uint64_t(i);
    const auto feed = [&](bool id_alone) {
      gpus.rewind(0);
      gpus.extend({&id, 1}, 1, 0, vocab, id_alone, noise);
      gpus.synchronize();
    };
    feed(false);
    const decode::State want = state_of(gpus, 0);
    const std::vector<float> logits = row_of(gpus);
    testing::expect_sampled(want, logits.data(), vocab > 0 ? vocab : rows, noise);
    feed(true);
    for (int r = 0; r < ranks(); ++r) {
      const decode::State got = state_of(gpus, r);
      ASSERT_EQ(std::memcmp(&got, &want, sizeof got), 0)
          << "token " << i << ", GPU " << r << ": found " << got.tokens[0] << ", expected " << want.tokens[0];
      const DeviceModel& gpu = gpus.rank(r);
      const int64_t first = gpu.buffers().ranks.first_id, own = gpu.model().head.rows;
      const auto upper = download(gpu.buffers().own_logits, std::max<int64_t>(1, own));
      for (int64_t n = 0; n < own && first + n < (vocab > 0 ? vocab : rows); ++n) {
        if (noise.temperature == 0)
          ASSERT_FALSE(logits[size_t(first + n)] > upper[size_t(n)]) << "token " << i << ", id " << first + n;
        if (want.flaw == 0 && first + n == want.tokens[0])
          ASSERT_EQ(std::memcmp(&logits[size_t(first + n)], &upper[size_t(n)], 4), 0) << "token " << i;
      }
    }
  }
  EXPECT_NE(testing::error_of([&] { row_of(gpus); }).find("expected a step with logits"), std::string::npos);
}
TEST_P(GptOssPrefilterRanksCuda, ThePrefilterFindsTheIdOfTheWholeHeadForEveryHead) {
  const size_t rows = testing::kEmulated ? 100 : 1000, cols = testing::kEmulated ? 96 : 2880;
  for (const auto& [name, head] : testing::heads_to_prefilter(rows, cols)) {
    check_prefiltered(name, head, Split::tensor);
    if (name == "near ties") check_prefiltered(name, head, Split::attention_experts);
  }
  for (const size_t at : {size_t(1), rows / 2 - 17, rows / 2 + 17, rows - 3}) {
    testing::HeadRows head = testing::random_head(rows, cols, 2, 1e-3);
    testing::mislead(head, at, at + 2);
    check_prefiltered("row " + std::to_string(at) + " misleads", head, Split::tensor);
  }
}

// A sequence of tokens with the published sizes; the int8 prefilters leave few rows.
TEST_P(GptOssPrefilterRanksCuda, APrefilteredModelOfThePublishedShapesContinuesAsWithTheWholeHead) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(2, 8, 201088);
  RankedModel gpus(c, decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4),
                   {.context = 1024, .int8_prefilter = true, .gpus = ranks()}, 5);
  size_t most = 0;
  for (int32_t first = 0; first < 20; ++first) {
    const int32_t id = first * 9999;
    const auto chain = [&](bool prefiltered) {
      gpus.rewind(0);
      gpus.extend({&id, 1}, 1, 0, 0, prefiltered);
      std::vector<int32_t> ids;
      for (int i = 0; i < 20; ++i) {
        ids.push_back(gpus.likeliest());
        gpus.continue_greedily(1, 0, prefiltered && i % 5 != 4);
      }
      return std::pair(ids, row_of(gpus));  // the last token was computed with the whole head
    };
    const auto [ids, logits] = chain(false);
    const auto [prefiltered_ids, same] = chain(true);
    ASSERT_EQ(prefiltered_ids, ids) << "prompt " << first;
    ASSERT_EQ(std::memcmp(logits.data(), same.data(), logits.size() * 4), 0) << "prompt " << first;
    gpus.rewind(0);  // computes all tokens again, now with the last token prefiltered
    gpus.extend({&id, 1}, 1, 0, 0, true);
    gpus.continue_greedily(20, 0, true);
    gpus.synchronize();
    size_t read = 0;  // counts the rows read in bf16; the other rows have upper bounds in place of logits
    for (int r = 0; r < ranks(); ++r) {
      const int64_t begin = gpus.rank(r).buffers().ranks.first_id, own = gpus.rank(r).model().head.rows;
      const auto upper = download(gpus.rank(r).buffers().own_logits, own);
      for (int64_t n = 0; n < own; ++n) {
        ASSERT_LE(logits[size_t(begin + n)], upper[size_t(n)]) << "prompt " << first << ", id " << begin + n;
        read += logits[size_t(begin + n)] == upper[size_t(n)] ? 1 : 0;
      }
    }
    most = std::max(most, read);
  }
  EXPECT_LT(most, 4000u) << "rows in bf16";  // 2 %; random weights and vectors like these leave a few hundred per GPU
}

// Queues more launches than a stream holds at once.
TEST_P(GptOssPrefilterRanksCuda, ManyTokensAreStartedAtOnce) {
  if (testing::kEmulated) GTEST_SKIP() << "whose launches are done when they return";
  GptOssConfig c = small_config(333);
  c.context = 3001;
  const DecodeModel m(c, WeightFormat::bf16, WeightFormat::mxfp4, 7);
  RankedModel gpus(m.config, m.weights, {.context = 3001, .int8_prefilter = true, .gpus = ranks()});
  const int32_t id = 5;
  decode::State last[2];
  for (const bool id_alone : {false, true}) {
    gpus.rewind(0);
    gpus.extend({&id, 1}, 1, 0, 0, id_alone);
    gpus.continue_greedily(3000, 0, id_alone);
    EXPECT_GE(gpus.likeliest(), 0);
    last[id_alone] = state_of(gpus, ranks() - 1);
  }
  EXPECT_EQ(std::memcmp(&last[1], &last[0], sizeof last[0]), 0);
}
TEST_P(GptOssPrefilterRanksCuda, AGpuThatDoesNotTakePartIsNamedAndTheNextTokenIsRight) {
  if (testing::kEmulated) GTEST_SKIP() << "prefilter_ranks.emulated.test.cpp has it, with the emulator's clock";
  const DecodeModel m(small_config(333), WeightFormat::bf16, WeightFormat::mxfp4, 7);
  RankedModel gpus(m.config, m.weights, {.context = 64, .int8_prefilter = true, .wait_limit = 0.05, .gpus = ranks()});
  const int32_t id = 5;
  const auto next = [&] {
    gpus.extend({&id, 1}, 1, 0, 0, true);
    return gpus.likeliest();
  };
  const int32_t want = next();
  gpus.rewind(0);
  for (int r = 0; r < ranks(); ++r)
    if (r != 1) gpus.rank(r).extend({&id, 1}, 1, 0, 0, true);  // GPU 1 is not launched
  const std::string found = testing::error_of([&] { gpus.likeliest(); });
  EXPECT_NE(found.find("for GPU 1 and its part of the output of layer 0"), std::string::npos) << found;
  EXPECT_EQ(gpus.length(), 0);
  EXPECT_EQ(next(), want);
}

TEST_P(GptOssPrefilterRanksCuda, ADecodersAnswersAreTheSameWithAPrefilterAndWithout) {
  testing::check_prefilter_answers(DecodeModel(small_config(300), WeightFormat::bf16, WeightFormat::mxfp4, 7), ranks());
}

// Where the memory of one GPU has no room for its part, no GPU builds a prefilter.
TEST_P(GptOssPrefilterRanksCuda, APrefilterTakesNoMemoryThatTheModelNeeds) {
  if (testing::kEmulated) GTEST_SKIP() << "whose memory has no end";
  const GptOssConfig c = small_config(300);
  const GptOssWeights shapes = decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4);
  const auto uses_prefilter = [&](int gpus, int64_t slots) {
    return DeviceModel::fit_to_memory(c, shapes, {.context = 64, .slots = slots, .int8_prefilter = true, .gpus = gpus})
        .int8_prefilter;
  };
  EXPECT_TRUE(uses_prefilter(1, 1));
  EXPECT_TRUE(uses_prefilter(ranks(), 1));
  EXPECT_FALSE(uses_prefilter(ranks(), 10'000'000));
  const gpu::DeviceGuard guard(ranks() - 1);
  const gpu::DeviceMemory all_but_some(gpu::device_memory(ranks() - 1).available() - (int64_t(1) << 28));
  EXPECT_TRUE(uses_prefilter(1, 1));
  EXPECT_FALSE(uses_prefilter(ranks(), 1));
}

}  // namespace
}  // namespace ingot
#endif
