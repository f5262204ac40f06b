// Steps that start before the host knows the token to append. In a build with the emulator the GPU is emulated.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::DecodeModel;
using testing::download;

class GptOssStepAheadCuda : public testing::GpuTest<> {};

enum class Then { goes_on, another_token, other_options, more_tokens, rewound, greedy, with_another_slot };
constexpr Then kThen[] = {Then::goes_on, Then::another_token, Then::other_options,    Then::more_tokens,
                          Then::rewound, Then::greedy,        Then::with_another_slot};

struct Found {
  int32_t token, next;
  int64_t length;
  std::vector<float> logits;
  bool operator==(const Found&) const = default;
};
// Samples a token, with a step ahead or without one, then does `then`, and appends a token with its logits.
Found found_after(const DecodeModel& m, Then then, const SampleOptions& o, bool ahead) {
  DeviceModel gpu(m.config, m.weights, {.context = 40, .slots = 2});
  const std::vector<int32_t> prompt = {5, 9, 11};
  gpu.extend(prompt, 1, 0), gpu.extend(prompt, 1, 1);
  const SlotSample first{.slot = 0, .options = &o, .step = 0, .goes_on = ahead};
  Found found{.token = gpu.sample({&first, 1})[0].token.token, .next = -1, .length = 0, .logits = {}};
  gpu.synchronize();
  EXPECT_EQ(gpu.length(), 3);
  EXPECT_EQ(download(gpu.buffers().state, 1)[0].position, ahead ? 4 : 3);
  const auto extend = [&](std::vector<int32_t> ids, const SampleOptions& options) {
    const SlotSample next{.slot = 0, .options = &options, .step = 1};
    const auto how = decode::step_sampling_of(next, m.config.vocab);
    gpu.extend(ids, 1, 0, how.vocab, how.id_alone, how.noise);
    found.next = gpu.sample({&next, 1})[0].token.token;
  };
  const SampleOptions greedy{.sampling = {.temperature = 0}};
  const int slots[] = {0, 1};
  const int32_t ids[] = {found.token, 8};
  switch (then) {
    case Then::goes_on: extend({found.token}, o); break;
    case Then::another_token: extend({(found.token + 1) % 50}, o); break;
    case Then::other_options: extend({found.token}, greedy); break;
    case Then::more_tokens: extend({found.token, 3, 4}, o); break;
    case Then::rewound: gpu.rewind(2); break;
    case Then::greedy: gpu.extend({&found.token, 1}, 1), gpu.continue_greedily(2); break;
    case Then::with_another_slot: gpu.extend_sequences(slots, ids); break;
  }
  const int32_t last = 7;
  gpu.extend({&last, 1}, 1);
  found.length = gpu.length();
  found.logits.resize(size_t(m.config.vocab));
  gpu.logits(1, found.logits.data());
  EXPECT_EQ(download(gpu.buffers().state, 1)[0].position, found.length);
  return found;
}
TEST_F(GptOssStepAheadCuda, AStepAheadDoesNotChangeLaterResults) {
  testing::DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  const SampleOptions options[] = {{.sampling = {.temperature = 1.2}, .seed = 3},
                                   {.sampling = {.temperature = 2, .top_k = 20}, .seed = 4, .vocab = 40}};
  for (const SampleOptions& o : options)
    for (const Then then : kThen) {
      const Found with = found_after(m, then, o, true), without = found_after(m, then, o, false);
      EXPECT_TRUE(with == without) << int(then) << ": found " << with.token << " and " << with.next << ", expected "
                                   << without.token << " and " << without.next;
    }
}

// The same for steps of several slots, of which slot 4 takes no part in the first step. `matrix_kernels`: steps of
// several slots by the matrix kernels.
enum class ThenTogether { all, fewer, with_another_slot, another_token, rewound, prompts };
constexpr ThenTogether kThenTogether[] = {
    ThenTogether::all,           ThenTogether::fewer,   ThenTogether::with_another_slot,
    ThenTogether::another_token, ThenTogether::rewound, ThenTogether::prompts};
struct FoundTogether {
  std::vector<int32_t> tokens, next;
  std::vector<int64_t> lengths;
  std::vector<std::vector<float>> logits;
  bool operator==(const FoundTogether&) const = default;
};
FoundTogether found_together(const DecodeModel& m, ThenTogether then, bool matrix_kernels, bool ahead) {
  DeviceModel gpu(m.config, m.weights, {.context = 40, .slots = 5});
  if (matrix_kernels) gpu.limit_small_batch(0);
  const std::vector<int32_t> prompt = {5, 9, 11, 2, 3};
  for (int slot = 0; slot < 5; ++slot) gpu.extend(std::span(prompt).first(size_t(1 + slot)), 1, slot);
  const SampleOptions options[] = {{.sampling = {.temperature = 0}},
                                   {.sampling = {.temperature = 1.2}, .seed = 3},
                                   {.sampling = {.temperature = 2, .top_k = 20}, .seed = 4},
                                   {.sampling = {.temperature = 1}, .seed = 5, .logprobs = 2},
                                   {.sampling = {.temperature = 1}, .seed = 6}};
  const auto sampled = [&](const std::vector<int>& slots, uint32_t step, bool goes_on) {
    std::vector<SlotSample> samples;
    for (const int slot : slots)
      samples.push_back({.slot = slot, .options = &options[slot], .step = step, .goes_on = goes_on});
    std::vector<int32_t> tokens;
    for (const SlotSampled& s : gpu.sample(samples)) {
      EXPECT_TRUE(s.error == nullptr);
      tokens.push_back(s.token.token);
    }
    return tokens;
  };
  FoundTogether found{.tokens = sampled({2, 0, 3, 1}, 0, ahead)};
  gpu.synchronize();
  for (int slot = 0; slot < 5; ++slot) {
    EXPECT_EQ(gpu.length(slot), 1 + slot);
    EXPECT_EQ(download(gpu.buffers(slot).state, 1)[0].position, 1 + slot + (ahead && slot < 4 ? 1 : 0));
  }
  const auto token_of = [&](int slot) {
    return slot == 4 ? 8 : found.tokens[size_t(slot == 2 ? 0 : slot == 0 ? 1 : slot == 3 ? 2 : 3)];
  };
  std::vector<int> slots = {2, 0, 3, 1};
  if (then == ThenTogether::fewer) slots = {1, 3, 2};
  if (then == ThenTogether::with_another_slot) slots = {4, 2, 0, 3, 1};
  if (then == ThenTogether::rewound) gpu.rewind(1, 3);
  std::vector<int32_t> ids;
  for (const int slot : slots) ids.push_back(token_of(slot));
  if (then == ThenTogether::another_token) ids[1] = (ids[1] + 1) % 50;
  if (then == ThenTogether::prompts) {
    const std::vector<int32_t> parts[] = {{3, 4}, {7, 7, 1}};
    gpu.extend_parts(std::vector<Decoder::Part>{{0, parts[0]}, {3, parts[1]}});
    slots = {0, 3};
  } else {
    gpu.extend_sequences(slots, ids);
  }
  // Twice, so that the second step is ahead too.
  for (uint32_t step = 1; step < 3; ++step) {
    found.next = sampled(slots, step, ahead && step == 1);
    if (step == 1) gpu.extend_sequences(slots, found.next);
  }
  for (int slot = 0; slot < 5; ++slot) {
    const int32_t last = 7;
    gpu.extend({&last, 1}, 1, slot);
    found.lengths.push_back(gpu.length(slot));
    gpu.logits(1, found.logits.emplace_back(size_t(m.config.vocab)).data(), slot);
    EXPECT_EQ(download(gpu.buffers(slot).state, 1)[0].position, gpu.length(slot));
  }
  return found;
}
TEST_F(GptOssStepAheadCuda, AStepAheadOfSeveralSlotsDoesNotChangeLaterResults) {
  testing::DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  for (const bool matrix_kernels : {false, true})
    for (const ThenTogether then : kThenTogether) {
      const FoundTogether with = found_together(m, then, matrix_kernels, true),
                          without = found_together(m, then, matrix_kernels, false);
      EXPECT_TRUE(with == without) << int(then) << (matrix_kernels ? " by the matrix kernels" : "");
    }
}

// The logits of a step of several slots, of which some have a step ahead or, without `goes_on`, none. Steps of more
// than `small_batch` slots take the matrix kernels.
std::vector<std::vector<float>> logits_of_step(const DecodeModel& m, int64_t small_batch, const std::vector<int>& ahead,
                                               const std::vector<int>& step, bool goes_on) {
  DeviceModel gpu(m.config, m.weights, {.context = 16, .slots = 4});
  gpu.limit_small_batch(small_batch);
  std::vector<int32_t> ids = {5, 9, 11, 2};
  gpu.extend_sequences(std::vector<int>{0, 1, 2, 3}, ids);
  const SampleOptions options{.sampling = {.temperature = 1}, .seed = 3};
  std::vector<SlotSample> samples;
  for (const int slot : ahead) samples.push_back({.slot = slot, .options = &options, .goes_on = goes_on});
  const std::vector<SlotSampled> sampled = gpu.sample(samples);
  for (size_t i = 0; i < ahead.size(); ++i) ids[size_t(ahead[i])] = sampled[i].token.token;
  std::vector<int32_t> next;
  for (const int slot : step) next.push_back(ids[size_t(slot)]);
  gpu.extend_sequences(step, next);
  std::vector<std::vector<float>> logits;
  for (const int slot : step) {
    gpu.logits(1, logits.emplace_back(size_t(m.config.vocab)).data(), slot);
    EXPECT_EQ(gpu.length(slot), 2);
    EXPECT_EQ(download(gpu.buffers(slot).state, 1)[0].position, 2);
  }
  return logits;
}
// The number of slots of a step chooses between the row kernel, the small-batch kernels and the matrix kernels. Five
// weight tiles of a row are enough for each of them to round differently. One slot alone has no small batch, and a GPU
// without memory for small batches computes every step of several slots by the matrix kernels.
TEST_F(GptOssStepAheadCuda, AStepOfSlotsWithAndWithoutAStepAheadTakesThePathOfItsNumberOfSlots) {
  const DecodeModel m(testing::decode_config(320, 4, 2, 32, 96, 4, 2, 8, 1), WeightFormat::bf16, WeightFormat::mxfp4,
                      7);
  const std::vector<int> three = {2, 0, 1}, four = {3, 0, 1, 2};
  testing::with_limits_of_gpus([&] {
    for (const auto& [small_batch, ahead, step] : {std::tuple{16, three, four}, {3, three, four}, {3, four, three}})
      EXPECT_EQ(logits_of_step(m, small_batch, ahead, step, true), logits_of_step(m, small_batch, ahead, step, false))
          << ahead.size() << " slots ahead of a step of " << step.size() << ", small batches of at most "
          << small_batch;
  });
}

// A step ahead after a row of logits without numbers has no valid token, and is dropped.
TEST_F(GptOssStepAheadCuda, AnErrorOfTheTokenDropsTheStepAhead) {
  testing::HeadRows head = testing::random_head(60, 96, 9);
  head[17][1] = NAN;
  const testing::PrefilteredModel m(head);
  DeviceModel gpu(m.model.config, m.model.weights, {.context = 20});
  const SampleOptions options[] = {{.sampling = {.temperature = 1}},
                                   {.sampling = {.temperature = 1, .top_k = 5}},
                                   {.sampling = {.temperature = 1}, .vocab = 17}};
  for (const SampleOptions& o : options) {
    gpu.rewind(0);
    const int32_t id = 4;
    gpu.extend({&id, 1}, 1);
    const SlotSample one{.slot = 0, .options = &o, .step = 0, .goes_on = true};
    const SlotSampled found = gpu.sample({&one, 1})[0];
    EXPECT_TRUE(found.error != nullptr);  // the step of the prompt read the logits of all ids
    EXPECT_EQ(gpu.length(), 1);
    const decode::State state = download(gpu.buffers().state, 1)[0];
    EXPECT_EQ(state.position, 1);
    EXPECT_EQ(state.flaw, 0u);
  }
}

// All ids of one of four slots are forbidden. The other slots take their steps ahead.
TEST_F(GptOssStepAheadCuda, AnErrorOfASlotDropsItsStepAheadAlone) {
  testing::DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  std::vector<LogitBias> none;
  for (int32_t id = 0; id < m.config.vocab; ++id) none.push_back({.id = id, .bias = -HUGE_VALF});
  const SampleOptions plain{.sampling = {.temperature = 1}}, forbidden{.sampling = {.temperature = 1}, .bias = none};
  for (const bool matrix_kernels : {false, true}) {
    std::vector<float> logits[2];
    for (const bool ahead : {false, true}) {
      DeviceModel gpu(m.config, m.weights, {.context = 40, .slots = 4});
      if (matrix_kernels) gpu.limit_small_batch(0);
      const std::vector<int32_t> prompt = {5, 9, 11};
      std::vector<SlotSample> samples;
      for (int slot = 0; slot < 4; ++slot) {
        gpu.extend(prompt, 1, slot);
        samples.push_back({.slot = slot, .options = slot == 2 ? &forbidden : &plain, .goes_on = ahead});
      }
      const std::vector<SlotSampled> found = gpu.sample(samples);
      std::vector<int32_t> ids;
      for (int slot = 0; slot < 4; ++slot) {
        EXPECT_EQ(found[size_t(slot)].error != nullptr, slot == 2);
        if (slot != 2) ids.push_back(found[size_t(slot)].token.token);
      }
      EXPECT_EQ(download(gpu.buffers(2).state, 1)[0].position, 3);
      const int others[] = {0, 1, 3};
      gpu.extend_sequences(others, ids);
      for (const int slot : others) {
        std::vector<float> row(size_t(m.config.vocab));
        gpu.logits(1, row.data(), slot);
        logits[ahead].insert(logits[ahead].end(), row.begin(), row.end());
      }
    }
    EXPECT_EQ(logits[1], logits[0]);
  }
}

}  // namespace
}  // namespace ingot
#endif
