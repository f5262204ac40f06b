// Steps that start before the host knows the token to append. In a build with the emulator the GPU is emulated.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ingot
#endif
