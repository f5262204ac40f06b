// The prefiltered head of one GPU; in a build with the emulator the GPU is emulated.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/fixtures/prefilter_answers.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::download;

class GptOssPrefilterCuda : public testing::GpuTest<> {};

// For every head, the prefiltered head gives the id of the whole head and its logit, and no upper bound is below the
// logit.
TEST_F(GptOssPrefilterCuda, ThePrefilterFindsTheIdOfTheWholeHeadWhateverTheHead) {
  const int64_t rows = testing::kEmulated ? 200 : 1500, cols = testing::kEmulated ? 96 : 2880;
  for (const auto& [name, head] : testing::heads_to_prefilter(size_t(rows), size_t(cols))) {
    SCOPED_TRACE(name);
    const testing::PrefilteredModel m(head);
    DeviceModel usual(m.model.config, m.model.weights, {.context = 40, .int8_prefilter = false}),
        gpu(m.model.config, m.model.weights, {.context = 40, .int8_prefilter = true});
    ASSERT_TRUE(gpu.has_prefilter());
    const int64_t prompts = testing::kEmulated ? 2 : 30;
    for (int64_t i = 0; i < prompts; ++i) {
      const int32_t id = i % 2 == 0 ? 0 : int32_t(i * 7919 % rows);
      const uint32_t vocab = i % 5 == 4 ? uint32_t(rows / 3) : 0;
      usual.extend({&id, 1}, 1, 0, vocab);
      gpu.extend({&id, 1}, 1, 0, vocab, true);
      usual.synchronize(), gpu.synchronize();
      const decode::State got = download(gpu.buffers().state, 1)[0], want = download(usual.buffers().state, 1)[0];
      ASSERT_EQ(std::memcmp(&got, &want, sizeof got), 0)
          << "prompt " << i << ": found " << got.tokens[0] << ", expected " << want.tokens[0];
      const auto upper = download(gpu.buffers().logits, rows), logits = download(usual.buffers().logits, rows);
      const bool all = name == "so small that all are read" || name == "all rows alike";
      for (int64_t n = 0; n < (vocab > 0 ? vocab : rows); ++n) {
        ASSERT_FALSE(logits[size_t(n)] > upper[size_t(n)]) << "prompt " << i << ", row " << n;
        if (all || (want.flaw == 0 && n == want.tokens[0]))
          ASSERT_EQ(std::memcmp(&logits[size_t(n)], &upper[size_t(n)], 4), 0) << "prompt " << i << ", row " << n;
      }
    }
    EXPECT_NE(testing::error_of([&] {
                std::vector<float> row(static_cast<size_t>(rows));
                gpu.logits(1, row.data());
              }).find("expected its logits"),
              std::string::npos);
  }
}
TEST_F(GptOssPrefilterCuda, ADecodersAnswersAreTheSameWithAPrefilterAndWithout) {
  DecodeCase t = testing::decode_cases()[0];
  t.config.vocab = 300;
  const std::vector<LogitBias> bias = {{40, 2.5f}};
  const DrawOptions biased[] = {{.sampling = {.temperature = 0}, .bias = bias}};
  testing::check_prefilter_answers(DecodeModel(t.config, t.dense, t.experts, 7), 1, biased);
}
// A sequence of tokens with the published sizes, with graphs that take turns; the int8 prefilter leaves few rows.
TEST_F(GptOssPrefilterCuda, APrefilteredModelOfThePublishedShapesContinuesAsWithTheWholeHead) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(2, 32, 201088);
  const GptOssWeights shapes = decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4);
  DeviceModel usual(c, shapes, {.context = 1024, .int8_prefilter = false}, 5),
      gpu(c, shapes, {.context = 1024, .int8_prefilter = true}, 5);
  size_t most = 0;
  for (int32_t first = 0; first < 40; ++first) {
    const int32_t id = first * 4999;
    usual.extend({&id, 1}, 1);
    gpu.extend({&id, 1}, 1, 0, 0, true);
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(gpu.likeliest(), usual.likeliest()) << "prompt " << first << ", token " << i;
      usual.continue_greedily(1);
      gpu.continue_greedily(1, 0, i % 5 != 4);
    }
    usual.synchronize(), gpu.synchronize();  // the last token was computed with the whole head
    const auto logits = download(usual.buffers().logits, c.vocab), same = download(gpu.buffers().logits, c.vocab);
    ASSERT_EQ(std::memcmp(logits.data(), same.data(), logits.size() * 4), 0);
    usual.continue_greedily(1), gpu.continue_greedily(1, 0, true);
    usual.synchronize(), gpu.synchronize();
    const auto upper = download(gpu.buffers().logits, c.vocab), exact = download(usual.buffers().logits, c.vocab);
    size_t read = 0;  // rows read in bf16; in place of other logits are upper bounds
    for (size_t n = 0; n < exact.size(); ++n) {
      ASSERT_LE(exact[n], upper[n]);
      read += exact[n] == upper[n] ? 1 : 0;
    }
    most = std::max(most, read);
  }
  EXPECT_LT(most, 2000u) << "rows in bf16";  // 1 %; of weights and columns like these a few hundred
}

}  // namespace
}  // namespace ingot
#endif
