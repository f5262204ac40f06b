// The rows of draft steps: their logits are the model's, and the same bits whatever the rows of their step.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <memory>

#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/fixtures/draft_steps.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::by_draft_steps;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::download;
using testing::FamilyCase;
using testing::ForcedStep;
using testing::RandomModel;
using testing::take;
using Ids = std::vector<int32_t>;
using Rows = std::vector<std::vector<float>>;

// With the first value the row kernel computes the draft steps of the models that it takes, and the kernels of small
// batches compute all other draft steps; with the second value the kernels of small batches compute all draft steps.
constexpr decode::RowKernelUse kPaths[] = {decode::RowKernelUse::where_faster, decode::RowKernelUse::none};
class DraftRowsCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (!testing::holds_small_batches()) GTEST_SKIP() << "an SM's memory has no room for small batches";
  }
};

TEST_F(DraftRowsCuda, EveryFamilyIsTheModel) {
  for (const FamilyCase& t : testing::family_cases())
    testing::check_family(t, [](const RandomModel& m, int64_t room) {
      return by_draft_steps(std::make_shared<DeviceModel>(m.spec, m.weights, DecoderOptions{.context = room}));
    });
}
TEST_F(DraftRowsCuda, EveryCaseOfGptOssIsTheModel) {
  std::vector<DecodeCase> cases = testing::decode_cases();
  for (const DecodeCase& t : testing::rounded_cases()) cases.push_back(t);
  for (const decode::RowKernelUse path : kPaths)
    for (const DecodeCase& t : cases) {
      if (testing::kEmulated && t.length > 40) continue;
      testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
        const auto gpu = std::make_shared<DeviceModel>(m.config, m.weights, DecoderOptions{.context = room});
        gpu->use_row_kernel(path);
        return by_draft_steps(gpu);
      });
    }
}

// Slots 0 and 1 hold different tokens. Slot 0 takes its tokens in steps of these numbers of rows, alone or beside rows
// of slot 1, which follow or come first.
template <class M>
void check_independence(const DecoderSpec& spec, const M& m, decode::RowKernelUse path = decode::RowKernelUse::none) {
  constexpr size_t kTokens = 14;
  const auto id = [&](size_t i) { return int32_t((i * 7919 + 13) % size_t(spec.vocab)); };
  Ids ids, others;
  for (size_t i = 0; i < kTokens; ++i) ids.push_back(id(i)), others.push_back(id(50 + i));
  Rows want;
  for (const bool shared : {false, true})
    for (const std::vector<size_t>& sizes : std::vector<std::vector<size_t>>{
             {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {8, 6}, {2, 3, 4, 5}, {7, 1, 6}}) {
      DeviceModel gpu(m.config, m.weights, {.context = 32, .slots = 2});
      gpu.use_row_kernel(path);
      Rows found;
      for (size_t at = 0, of_others = 0, turn = 0; at < kTokens; ++turn) {
        std::vector<ForcedStep> steps = {ForcedStep(0, std::span(ids).subspan(at, sizes[turn]), spec.vocab)};
        const size_t room = std::min({size_t(gpu.draft_rows()) - sizes[turn], 1 + turn % 3, kTokens - of_others});
        at += sizes[turn];
        const bool first = turn % 2 == 1;
        if (shared && room > 0)
          steps.insert(first ? steps.begin() : steps.end(),
                       ForcedStep(1, std::span(others).subspan(of_others, room), spec.vocab));
        const Rows rows = take(gpu, steps);
        const size_t skipped = shared && room > 0 && first ? room : 0;
        if (shared) of_others += room;
        found.insert(found.end(), rows.begin() + int64_t(skipped), rows.begin() + int64_t(skipped + sizes[turn]));
      }
      if (want.empty()) want = found;
      EXPECT_EQ(found, want) << "steps of " << ::testing::PrintToString(sizes)
                             << (shared ? " beside another slot" : "");
    }
}
struct FamilyModel {
  const DecoderSpec& config;
  const DecoderWeights& weights;
};
TEST_F(DraftRowsCuda, TheNumbersOfARowDependNeitherOnItsStepNorOnFurtherSlots) {
  const std::vector<FamilyCase> cases = testing::family_cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    const FamilyCase& t = cases[i];
    if (testing::kEmulated && (i % 3 != 0 || t.length > 30)) continue;
    SCOPED_TRACE(t.name);
    const RandomModel m(t.spec, t.dense, t.experts);
    check_independence(t.spec, FamilyModel{m.spec, m.weights});
  }
  const DecodeModel m(testing::decode_config(320, 8, 2, 16, 288, 6, 2, 5, 2), WeightFormat::bf16, WeightFormat::mxfp4,
                      7);
  for (const decode::RowKernelUse path : kPaths) check_independence(m.config, m, path);
}

// The step ends each slot behind the last accepted token, and the next step begins there.
TEST_F(DraftRowsCuda, RowsAfterAWrongTokenLeaveNoTrace) {
  const FamilyCase t = testing::family_cases()[4];  // windows
  const RandomModel m(t.spec, t.dense, t.experts);
  const size_t V = size_t(t.spec.vocab);
  DeviceModel gpu(m.spec, m.weights, {.context = 40}), alone(m.spec, m.weights, {.context = 40});
  Ids ids;
  for (int32_t i = 0; i < 24; ++i) ids.push_back((i * 11 + 3) % int32_t(V));
  for (size_t at = 0, turn = 0; at < ids.size(); ++turn) {
    const size_t right = std::min(1 + turn % 5, ids.size() - at);
    ForcedStep step(0, std::span(ids).subspan(at, right), t.spec.vocab);
    for (size_t i = right; i < 8; ++i) step.ids.push_back((ids[at] + 29 + int32_t(i)) % int32_t(V));
    step.masks.resize(8);
    step.masks[right - 1].assign((V + 31) / 32, ~0u);  // all but the first wrong id
    step.masks[right - 1][size_t(step.ids[right] / 32)] &= ~(1u << (step.ids[right] % 32));
    std::vector<size_t> kept;
    const Rows rows = take(gpu, {&step, 1}, &kept);
    ASSERT_EQ(kept[0], right);
    at += right;
    EXPECT_EQ(gpu.length(), int64_t(at));
    EXPECT_EQ(download(gpu.buffers().state, 1)[0].position, int32_t(at));
    for (size_t i = 0; i < right; ++i) {
      const ForcedStep single(0, std::span(ids).subspan(at - right + i, 1), t.spec.vocab);
      EXPECT_EQ(rows[i], take(alone, {&single, 1})[0]) << "row " << i << " of the step that ends at " << at;
    }
  }
}

}  // namespace
}  // namespace ingot
#endif
