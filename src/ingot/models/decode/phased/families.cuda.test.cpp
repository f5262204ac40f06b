// Models other than GPT-OSS on a GPU: the same cases as in the emulator.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/families/synthetic.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::download;
using testing::FamilyCase;
using testing::RandomModel;

class FamiliesDecodeCuda : public testing::GpuTest<> {};

void check_on_gpu(const FamilyCase& t, bool megakernel = false) {
  testing::check_family(t, [megakernel](const RandomModel& m, int64_t room) {
    const auto gpu = std::make_shared<DeviceModel>(
        m.spec, m.weights, DecoderOptions{.context = room, .wait_limit = testing::kEmulated ? 1000. : 2.});
    if (megakernel) EXPECT_TRUE(gpu->use_megakernel(true));
    const auto last = std::make_shared<size_t>(0);  // tokens of the last step
    const auto rows_of = [gpu, vocab = size_t(m.spec.vocab)](size_t count) {
      std::vector<float> all(count * vocab);
      gpu->logits(uint32_t(count), all.data());
      std::vector<std::vector<double>> rows;
      for (size_t i = 0; i < count; ++i) rows.emplace_back(&all[i * vocab], &all[i * vocab] + vocab);
      return rows;
    };
    return testing::DecodeUnderTest{
        .extend =
            [gpu, last, rows_of](std::span<const int32_t> ids) {
              *last = ids.size();
              gpu->extend(ids, uint32_t(ids.size()));
              return rows_of(ids.size());
            },
        .choices =
            [gpu, last](size_t i) {
              return int64_t(*last) > gpu->batch() ? testing::choices_of_row(*gpu, int64_t(*last), i)
                                                   : testing::choices_of(*gpu, i);
            },
        .state = [gpu] { return download(gpu->buffers().state, 1)[0]; },
        // of one row after a prompt by the matrix kernels
        .logits_of_token = [gpu, last, rows_of] { return rows_of(int64_t(*last) > gpu->batch() ? 1 : *last).back(); }};
  });
}

TEST_F(FamiliesDecodeCuda, EveryFamilyIsTheModel) {
  for (FamilyCase t : testing::family_cases()) {
    // Where an SM's memory has no room for small batches (99 KB), and the matrix kernels do not take the model, a
    // prompt is computed token by token.
    const RandomModel m(t.spec, t.dense, t.experts);
    if (DeviceModel(m.spec, m.weights, {.context = 24}).rows_batch() == 1) t.batches.clear();
    check_on_gpu(t);
  }
}

TEST_F(FamiliesDecodeCuda, EveryFamilyIsTheModelThroughTheMegakernel) {
  if (!testing::takes_family_megakernel()) GTEST_SKIP() << "the megakernel of the families needs the copy engine";
  for (const FamilyCase& t : testing::megakernel_family_cases()) {
    // The emulated tests have all cases.
    const bool short_case = t.name == "heads of 128, fp8" || t.name == "groups of 1" || t.name == "experts in fp8";
    if (testing::kEmulated && !short_case) continue;
    check_on_gpu(t, true);
  }
}

// Sizes at which all blocks have work and all rings fill, in runs that must be equal to the last bit; the phased path
// rounds the same numbers in another order.
TEST_F(FamiliesDecodeCuda, LayersOfPublishedShapesRepeatBitForBitAndAgreeWithPhases) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  if (!testing::takes_family_megakernel()) GTEST_SKIP() << "the megakernel of the families needs the copy engine";
  for (const std::string& name : synthetic_family_names()) {
    SCOPED_TRACE(name);
    DecoderSpec s = synthetic_family(name);
    s.layers = 3, s.layer.resize(3);
    DeviceModel gpu(s, decode::shapes_of(s, WeightFormat::bf16, WeightFormat::bf16), {.context = 2400}, 5);
    // Positions in one part of the keys and in many.
    for (const int64_t context : {int64_t(1), int64_t(700), int64_t(2300)}) {
      SCOPED_TRACE(context);
      testing::Definition::Choices chosen;  // of the last token
      const auto logits = [&](bool megakernel) {
        EXPECT_TRUE(gpu.use_megakernel(megakernel));
        gpu.fill_cache_with_random(context);
        std::vector<float> row(size_t(s.vocab));
        for (const int32_t id : {7, 1234, 40000}) gpu.extend({&id, 1}, 1);
        gpu.logits(1, row.data());
        if (s.experts > 0) chosen = testing::choices_of(gpu, 0);
        return row;
      };
      const std::vector<float> want = logits(false);
      const testing::Definition::Choices chosen_by_phases = chosen;
      const std::vector<float> first = logits(true);
      double error = 0, size = 0;
      for (size_t v = 0; v < want.size(); ++v)
        error += (first[v] - want[v]) * (first[v] - want[v]), size += want[v] * want[v];
      // Some twenty roundings to bf16 in a row, of 2^-9 each. A rounding may exchange the least of 8 chosen experts for
      // the next, which changes up to an eighth of an MLP's output.
      EXPECT_LT(std::sqrt(error / size), chosen == chosen_by_phases ? 0.04 : 0.15);
      for (int run = 0; run < 50; ++run) ASSERT_EQ(logits(true), first) << "run " << run;
    }
  }
}

// Greedy and sampled tokens of the published shapes with the int8 prefilter are those of the whole head.
TEST_F(FamiliesDecodeCuda, ThePrefilterGivesTheTokensOfTheWholeHeadInPublishedShapes) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "the prefilter needs compute capability 9.0";
  for (const std::string& name : synthetic_family_names()) {
    SCOPED_TRACE(name);
    DecoderSpec s = synthetic_family(name);
    s.layers = 2, s.layer.resize(2);
    const DecoderWeights shapes = decode::shapes_of(s, WeightFormat::bf16, WeightFormat::bf16);
    DeviceModel whole(s, shapes, {.context = 64, .int8_prefilter = false}, 5), gpu(s, shapes, {.context = 64}, 5);
    ASSERT_TRUE(gpu.has_prefilter());
    for (const float temperature : {0.f, 0.6f, 1.f})
      for (uint64_t seed = 0; seed < 3; ++seed) {
        whole.rewind(0), gpu.rewind(0);
        int32_t id = int32_t(seed) * 4999;
        for (sampling::RowNoise noise{.seed = seed, .step = 0, .temperature = temperature}; noise.step < 30;
             ++noise.step) {
          whole.extend({&id, 1}, 1, 0, 0, false, noise);
          gpu.extend({&id, 1}, 1, 0, 0, true, noise);
          id = whole.likeliest();
          ASSERT_EQ(gpu.likeliest(), id) << "temperature " << temperature << ", seed " << seed << ", token "
                                         << noise.step;
        }
      }
  }
}

// A prompt by the matrix kernels, a token, and a second prompt.
TEST_F(FamiliesDecodeCuda, EveryFamilyIsTheModelInLongPrompts) {
  for (FamilyCase t : testing::family_cases()) {
    const RandomModel m(t.spec, t.dense, t.experts);
    // this model's prompts use small batches
    if (DeviceModel(m.spec, m.weights, {.context = 80}).prompt_batch() < 80) continue;
    t.length = 64, t.batches = {37, 1, 23};
    check_on_gpu(t);
  }
}

// Sequences of different lengths in one step, by small batches and by matrix kernels.
TEST_F(FamiliesDecodeCuda, SequencesOfAStepAreTheSequencesAlone) {
  for (const FamilyCase& t : testing::family_cases()) {
    if (t.length > 30) continue;
    SCOPED_TRACE(t.name);
    const RandomModel m(t.spec, t.dense, t.experts);
    if (DeviceModel(m.spec, m.weights, {.context = 24, .slots = 3}).batch() < 3) continue;  // one sequence a step
    for (const int64_t small_batches : {int64_t(16), int64_t(0)}) {
      DeviceModel together(m.spec, m.weights, {.context = 24, .slots = 3}), alone(m.spec, m.weights, {.context = 24});
      together.limit_small_batch(small_batches);
      std::vector<std::vector<int32_t>> ids(3);
      for (int slot = 0; slot < 3; ++slot)
        for (int n = 0; n <= 4 * slot; ++n) {
          ids[size_t(slot)].push_back((7 * n + 5 * slot + 3) % int32_t(t.spec.vocab));
          together.extend({&ids[size_t(slot)].back(), 1}, 1, slot);
        }
      const int slots[] = {2, 0, 1};
      const int32_t next[] = {4, 9, 17};
      together.extend_sequences(slots, next);
      for (size_t j = 0; j < 3; ++j) {
        std::vector<float> got(size_t(t.spec.vocab)), want(got.size());
        together.logits(1, got.data(), slots[j]);
        alone.rewind(0);
        for (const int32_t id : ids[size_t(slots[j])]) alone.extend({&id, 1}, 1);
        alone.extend({&next[j], 1}, 1);
        alone.logits(1, want.data());
        // The logits have a standard deviation of 1.5 and are computed by other kernels in 8 bits.
        for (size_t v = 0; v < want.size(); ++v) EXPECT_NEAR(got[v], want[v], 0.1) << "slot " << slots[j];
      }
    }
  }
}

TEST_F(FamiliesDecodeCuda, AModelThatNeedsSeveralGpusOrAPropertyThatNoneHasIsRefusedByName) {
  DecoderSpec s = testing::family_spec({64, 4, 2, 32, 70});
  EXPECT_EQ(gpus_unsupported_reason(s, {}), "");
  s.rope[0].interleaved = true;
  EXPECT_EQ(gpus_unsupported_reason(s, {}), "found interleaved RoPE, which the phased path does not compute");
}

}  // namespace
}  // namespace ingot
#endif
