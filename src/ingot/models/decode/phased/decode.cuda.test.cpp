// The cases of the emulated tests, and the published shapes of GPT-OSS, on a GPU.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/fixtures/on_host.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decode/model/trace.h"
#include "ingot/models/decode/phased/stages.h"
#include "ingot/models/host_sampling.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::choices_of;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::download;
using testing::OnHost;

class GptOssDecodeCuda : public testing::GpuTest<> {};

void check_cases(const std::vector<DecodeCase>& cases, bool megakernel) {
  for (DecodeCase t : cases) {
    // Where an SM's memory has no room for several tokens at once, every token is a step.
    if (!testing::holds_small_batches()) t.batches.clear();
    std::unique_ptr<DeviceModel> gpu;
    testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
      gpu =
          std::make_unique<DeviceModel>(m.config, m.weights, DecoderOptions{.context = room, .megakernel = megakernel});
      gpu->use_megakernel(megakernel);  // also where INGOT_MEGAKERNEL is 0
      return testing::DecodeUnderTest{.extend =
                                          [&, vocab = size_t(m.config.vocab)](std::span<const int32_t> ids) {
                                            gpu->extend(ids, uint32_t(ids.size()));
                                            std::vector<float> all(ids.size() * vocab);
                                            gpu->logits(uint32_t(ids.size()), all.data());
                                            std::vector<std::vector<double>> rows;
                                            for (size_t i = 0; i < ids.size(); ++i)
                                              rows.emplace_back(&all[i * vocab], &all[i * vocab] + vocab);
                                            return rows;
                                          },
                                      .choices = [&](size_t i) { return choices_of(*gpu, i); },
                                      .state = [&] { return download(gpu->buffers().state, 1)[0]; }};
    });
  }
}

TEST_F(GptOssDecodeCuda, EveryCaseIsTheModel) { check_cases(testing::decode_cases(), false); }
TEST_F(GptOssDecodeCuda, EveryCaseIsTheModelThroughTheMegakernel) { check_cases(testing::decode_cases(), true); }
// In several tests, which ctest runs side by side, because the definition in fp64 takes minutes of a core.
constexpr size_t kRandomTests = 6;
class GptOssDecodeRandomCuda : public GptOssDecodeCuda, public ::testing::WithParamInterface<size_t> {};
TEST_P(GptOssDecodeRandomCuda, RandomCasesAreTheModel) {
  const std::vector<DecodeCase> all = testing::random_cases(30);
  for (size_t i = GetParam(); i < all.size(); i += kRandomTests)
    for (const bool megakernel : {false, true}) check_cases({all[i]}, megakernel);
}
INSTANTIATE_TEST_SUITE_P(Part, GptOssDecodeRandomCuda, ::testing::Range<size_t>(0, kRandomTests));
// Rounded inputs need the phased path, also where the megakernel is requested.
TEST_F(GptOssDecodeCuda, EveryCaseOfRoundedInputsIsTheModel) { check_cases(testing::rounded_cases(), true); }

TEST_F(GptOssDecodeCuda, ALayerOfRoundedInputsIsRoundedNumberByNumber) {
  testing::for_rounded_layers([](const DecodeModel& m, const std::vector<int32_t>& ids) {
    if (ids.size() > 1 && !testing::holds_small_batches()) return;  // every token is a step
    DeviceModel gpu(m.config, m.weights, {.context = 16});
    gpu::copy_to_device(gpu.buffers().state->tokens, ids.data(), int64_t(ids.size()) * 4);
    testing::check_rounded_layer(
        m, gpu.buffers(), uint32_t(ids.size()),
        [&](uint32_t phases) {
          run(gpu.model(), gpu.buffers(), {.T = uint32_t(ids.size()), .capacity = 16, .phases = phases}, gpu.stream());
          gpu.synchronize();
        },
        [](const auto* from, int64_t n) { return download(from, n); });
  });
}

// A model with its own watch, so that a test can choose the grid of a launch and cause a fault.
struct OneKernel {
  DeviceModel model;
  gpu::WaitControl waits{0.05};

  OneKernel(const DecodeModel& m, int64_t room)
      : model(m.config, m.weights, {.context = room, .int8_prefilter = true}) {}
  std::vector<float> token(int32_t id, int64_t blocks, uint32_t missing = ~0u, const megakernel::Trace& trace = {},
                           bool prefiltered = false) {
    gpu::copy_to_device(model.buffers().state->tokens, &id, sizeof id);
    run_megakernel(model.model(), model.buffers(), {.capacity = uint32_t(model.context())},
                   {.layers = model.stages(),
                    .watch = waits.watch(),
                    .blocks = blocks,
                    .trace = trace,
                    .missing = missing,
                    .prefiltered = prefiltered},
                   model.stream());
    gpu::synchronize();
    std::vector<float> logits(size_t(model.config().vocab));
    gpu::copy_to_host(logits.data(), model.buffers().logits, int64_t(logits.size()) * 4);
    return logits;
  }
};

void check_grid(const DecodeCase& t, int64_t blocks) {
  SCOPED_TRACE(blocks);
  std::unique_ptr<OneKernel> one;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    one = std::make_unique<OneKernel>(m, room);
    return testing::DecodeUnderTest{.extend =
                                        [&](std::span<const int32_t> ids) {
                                          const std::vector<float> row = one->token(ids[0], blocks);
                                          return std::vector<std::vector<double>>{{row.begin(), row.end()}};
                                        },
                                    .choices = [&](size_t i) { return choices_of(one->model, i); },
                                    .state = [&] { return download(one->model.buffers().state, 1)[0]; }};
  });
}
// The grid determines which block adds which part of a sum; the results of the model do not depend on the grid.
TEST_F(GptOssDecodeCuda, TheMegakernelIsTheModelAtEveryGridSize) {
  for (int64_t blocks : testing::kEmulated ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 2, 3, 7, 132})
    check_grid(testing::decode_cases()[0], blocks);
}

// Few tokens of small models for compute-sanitizer, beyond a window: by the phased path, and by a megakernel of few
// blocks.
std::vector<DecodeCase> small_cases(const std::vector<int64_t>& batches) {
  std::vector<DecodeCase> all;
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    if (!testing::kEmulated || dense == WeightFormat::bf16)  // decode.emulated.test.cpp has the other formats
      all.push_back({name_of(dense), testing::decode_config(64, 4, 2, 32, 64, 3, 2, 2, 2), dense, WeightFormat::mxfp4,
                     5, batches});
  return all;
}
TEST_F(GptOssDecodeCuda, PhaseByPhaseIsTheModelSmall) {
  if (!testing::holds_small_batches()) GTEST_SKIP() << "an SM's memory has no room for small batches";
  check_cases(small_cases({3}), false);
}
TEST_F(GptOssDecodeCuda, TheMegakernelIsTheModelSmall) {
  for (const DecodeCase& t : small_cases({})) check_grid(t, 3);
}
TEST_F(GptOssDecodeCuda, ThePrefilterFindsTheIdOfTheWholeHeadSmall) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "the prefilter needs compute capability 9.0";
  const testing::PrefilteredModel m(testing::random_head(100, 64, 1));
  OneKernel one(m.model, 8);
  ASSERT_TRUE(one.model.has_prefilter());
  for (const int32_t id : {0, 5, 99}) {
    int32_t found[2];
    for (const bool prefiltered : {false, true}) {
      one.model.rewind(0);
      one.token(id, 3, ~0u, {}, prefiltered);
      found[prefiltered] = download(one.model.buffers().state, 1)[0].tokens[0];
    }
    EXPECT_EQ(found[1], found[0]) << "after " << id;
  }
  EXPECT_EQ(one.waits.report(), "");
}

TEST_F(GptOssDecodeCuda, ATracedTokenIsTheSameAndKeepsEveryBlocksTimes) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "a trace needs compute capability 9.0";
  const DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, WeightFormat::mxfp4, 7);
  OneKernel one(m, t.length), plain(m, t.length);
  const std::vector<float> want = plain.token(5, 4);
  megakernel::Trace trace = trace_of(one.model.model(), 4, nullptr);
  const int64_t numbers = int64_t(trace.blocks) * trace.words_of_block();
  const gpu::DeviceMemory memory(numbers * 8);
  trace.words = static_cast<uint64_t*>(memory.data());
  EXPECT_EQ(one.token(5, 4, ~0u, trace), want);
  const auto spans = decode::spans_of(trace, download(trace.words, numbers));
  EXPECT_EQ(spans.size(), size_t(4 * (5 * t.config.layers + 1)));
  EXPECT_LT(spans.back().on_ns - spans.front().begin_ns, uint64_t(60'000'000'000)) << "each was written";
}

// The counters keep their phase from launch to launch, also when the grid changes its size.
TEST_F(GptOssDecodeCuda, TenThousandLaunchesAndReplaysGiveTheSameWithoutAHang) {
  constexpr int kRuns = testing::kEmulated ? 6 : 10000, kTokens = 4;
  const DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  OneKernel one(m, t.length);
  std::map<int64_t, std::vector<float>> first;  // by grid, which determines the block that adds a part
  for (int run = 0; run < kRuns; ++run) {
    const int64_t blocks = 1 + run % 3;
    one.model.rewind(0);
    const std::vector<float> row = one.token(5, blocks);
    ASSERT_EQ(one.waits.report(), "") << "launch " << run;
    ASSERT_EQ(first.emplace(blocks, row).first->second, row) << "launch " << run;
  }
  std::vector<float> last, row(size_t(t.config.vocab));
  const int32_t id = 5;
  for (int run = 0; run < kRuns; run += kTokens) {
    one.model.rewind(0);
    one.model.extend({&id, 1}, 1);
    one.model.continue_greedily(kTokens - 1);
    one.model.likeliest();  // throws if a wait gave up
    one.model.logits(1, row.data());
    if (run == 0) last = row;
    ASSERT_EQ(last, row) << "replay " << run;
  }
}

TEST_F(GptOssDecodeCuda, AMissingGridBarrierIsNamedAndTheNextTokenIsRight) {
  const DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  OneKernel sound(m, t.length), one(m, t.length);
  const std::vector<float> want = sound.token(5, 4);
  for (const auto& [number, name] : {std::pair{0u, "queries, keys and values of layer 0"},
                                     {1u, "attention of layer 0"},
                                     {2u, "the output of layer 0"},
                                     {8u, "gate and up of layer 1"},
                                     {14u, "down of layer 2"}}) {
    one.token(5, 4, number);
    EXPECT_EQ(download(one.model.buffers().state, 1)[0].position, 0);
    const std::string found = decode::grid_barrier_report(one.waits);
    // Attention waits for the words of its own inputs, not for all blocks.
    const char* const counted = number == 0 ? ": found 0, expected 1 (timed out)" : ": found 3, expected 4 (timed out)";
    EXPECT_NE(found.find(std::string(" for ") + name + counted), std::string::npos) << found << ", planted " << name;
    decode::Buffers b = one.model.buffers();
    b.stop = one.waits.watch().stop;  // the watch of this test, not of the model
    for (const auto& [T, head_rows] : {std::pair{3u, 1u}, {2u, 0u}}) {
      if (T > decode::max_step_tokens(m.config)) continue;
      run(one.model.model(), b, {.T = T, .head_rows = head_rows, .capacity = uint32_t(one.model.context())},
          one.model.stream());
      gpu::synchronize();
      EXPECT_EQ(download(b.state, 1)[0].position, 0) << "queued after it, " << T << " tokens";
    }
    one.waits.reset(one.model.stream());
    gpu::fill_bytes(b.grid_barrier, 0, b.handover_bytes, one.model.stream());
  }
  const std::vector<float> got = one.token(5, 4);
  EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0);
  EXPECT_EQ(one.waits.report(), "");
}

// A prefiltered head at every grid size, ten thousand times; and an error that names the block which does not publish
// its lower bound.
TEST_F(GptOssDecodeCuda, APrefilteredTokenRepeatsAndAMissingBlockIsNamed) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "the prefilter needs compute capability 9.0";
  constexpr int kRuns = testing::kEmulated ? 3 : 10000;
  const testing::PrefilteredModel m(testing::random_head(700, 96, 1));
  OneKernel one(m.model, 4);
  const auto id_of = [&](int64_t blocks, uint32_t missing, bool prefiltered) {
    one.model.rewind(0);
    one.token(5, blocks, missing, {}, prefiltered);
    return download(one.model.buffers().state, 1)[0].tokens[0];
  };
  const std::vector<int64_t> grids =
      testing::kEmulated ? std::vector<int64_t>{1, 4} : std::vector<int64_t>{1, 2, 7, 132};
  std::vector<int32_t> want;
  for (const int64_t blocks : grids) want.push_back(id_of(blocks, ~0u, false));
  for (int run = 0; run < kRuns; ++run) {
    const size_t g = size_t(run) % grids.size();
    ASSERT_EQ(id_of(grids[g], ~0u, true), want[g]) << "run " << run << ", " << grids[g] << " blocks";
    if (run % 1000 != 1) continue;
    id_of(grids[g], decode::kGridBarriersPerLayer, true);
    const std::string found = decode::grid_barrier_report(one.waits, 1);
    EXPECT_NE(found.find(" for the lower bounds of the largest logit: found 0, expected 1 (timed out)"),
              std::string::npos)
        << found;
    EXPECT_EQ(download(one.model.buffers().state, 1)[0].position, 0);
    one.waits.reset(one.model.stream());
    gpu::fill_bytes(one.model.buffers().grid_barrier, 0, one.model.buffers().handover_bytes, one.model.stream());
  }
  EXPECT_EQ(one.waits.report(), "");
}

// For all sampling options the GPU samples the same token as the CPU from the same logits and seed. The logprobs differ
// by the order of the sums of exponentials, which are in double precision.
TEST_F(GptOssDecodeCuda, SamplingWithBiasesMasksAndLogprobsEqualsTheCpu) {
  const DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  DeviceModel gpu(m.config, m.weights, {.context = 40, .megakernel = !testing::kEmulated});
  const int64_t V = t.config.vocab;
  const std::vector<LogitBias> bias = {{40, 1.5f}, {3, -2}, {40, 0.25f}, {11, -INFINITY}, {52, 9}};
  const std::vector<uint32_t> allowed = {0x5a5a'0ff7, 0xffff'ff31};
  std::vector<int32_t> ids = {5, 9, 1};  // a prompt, followed by the sampled tokens
  std::vector<float> row(static_cast<size_t>(V));
  uint32_t step = 0;
  for (const int64_t vocab : {int64_t(0), int64_t(50)})
    for (const SamplingOptions& sampling : {SamplingOptions{.temperature = 0},
                                            {.temperature = 1.5, .top_p = 0.9},
                                            {.temperature = 3, .top_k = 9, .min_p = 0.02}})
      for (int what = 0; what < 8; ++what, ++step) {
        if (testing::kEmulated && step % 17 != 7) continue;
        SCOPED_TRACE(::testing::Message() << "step " << step);
        SampleOptions o{.sampling = sampling, .seed = 4, .vocab = vocab};
        if ((what & 1) != 0) o.bias = bias;
        if ((what & 2) != 0) o.allowed = std::span(allowed).first(size_t((V - 1) / 32 + 1));
        o.logprobs = (what & 4) != 0 ? what : -1;
        if (step % 7 == 0) gpu.rewind(0);
        gpu.extend(ids, 1, 0, step % 2 == 0 ? 0 : uint32_t(vocab));
        gpu.logits(1, row.data());
        const SampledToken sampled = gpu.sample(o, step);
        const Tensor logits(row.data(), {V});
        EXPECT_EQ(sampled.token, sample_from(logits, o, step));
        ids = {sampled.token};
        if (o.logprobs < 0) continue;
        const TokenLogprobs want = logprobs_of(logits, vocab > 0 ? vocab : V, sampled.token, o.logprobs);
        EXPECT_NEAR(sampled.logprobs.sampled, want.sampled, 1e-12);
        ASSERT_EQ(sampled.logprobs.top.size(), want.top.size());
        for (size_t i = 0; i < want.top.size(); ++i) {
          EXPECT_EQ(sampled.logprobs.top[i].id, want.top[i].id);
          EXPECT_NEAR(sampled.logprobs.top[i].logprob, want.top[i].logprob, 1e-12);
        }
      }
  const std::vector<LogitBias> nothing = {{40, -INFINITY}};
  const std::vector<uint32_t> only = {0, 1u << 8};
  EXPECT_NE(testing::error_of([&] { gpu.sample({.bias = nothing, .allowed = only}, 0); }).find("only -inf logits"),
            std::string::npos);
  const std::vector<LogitBias> many(size_t(decode::kMostBiases + 1));
  EXPECT_NE(testing::error_of([&] { gpu.sample({.bias = many}, 0); }).find("expected at most 1024"), std::string::npos);
}

// Each sequence of a step has the logits of the model, for any other sequences in the step: prompts of 1 to 5 tokens,
// then `steps` of these slots.
void check_sequences(const GptOssConfig& config, WeightFormat dense, WeightFormat experts, int slots,
                     const std::vector<std::vector<int>>& steps) {
  const DecodeModel m(config, dense, experts, 7);
  DeviceModel gpu(m.config, m.weights, {.context = 40, .slots = slots, .megakernel = false});
  const int64_t V = config.vocab;
  std::vector<testing::DecodeReference> exact(size_t(slots), {m, false}), chain(size_t(slots), {m, true});
  testing::LogitError of_chain, of_gpu;
  const auto compare = [&](int slot, int32_t id, const testing::DecodeReference::Choices& chosen, bool logits) {
    const std::vector<double> want = exact[size_t(slot)].token(id, chosen),
                              rounded = chain[size_t(slot)].token(id, chosen);
    if (!logits) return;
    std::vector<float> row(static_cast<size_t>(V));
    gpu.logits(1, row.data(), slot);
    of_gpu.add({row.begin(), row.end()}, want);
    of_chain.add(rounded, want);
    EXPECT_EQ(gpu.likeliest(slot), std::max_element(row.begin(), row.end()) - row.begin());
  };
  std::vector<int32_t> ids(60);
  testing::fill_ids(Tensor(ids.data(), {60}), 3, V);
  const int32_t* id = ids.data();
  std::vector<int64_t> length;
  // Where a block has 99 KB of shared memory, the matrix kernels compute these prompts and steps.
  for (int slot = 0; slot < slots; ++slot) {
    length.push_back(slot + 1);
    gpu.extend({id, size_t(slot + 1)}, 1, slot);
    gpu.synchronize();  // download() does not wait for the model's stream
    for (int t = 0; t <= slot; ++t, ++id)
      compare(slot, *id,
              slot < gpu.batch() ? choices_of(gpu, gpu.buffers(slot), size_t(t))
                                 : testing::choices_of_row(gpu, slot + 1, size_t(t)),
              t == slot);
  }
  for (const std::vector<int>& step : steps) {
    gpu.extend_sequences(step, {id, step.size()});
    gpu.synchronize();
    for (size_t j = 0; j < step.size(); ++j, ++id) {
      ++length[size_t(step[j])];
      compare(step[j], *id, testing::choices_of_step(gpu, step.size(), j), true);
    }
  }
  for (int slot = 0; slot < slots; ++slot) EXPECT_EQ(gpu.length(slot), length[size_t(slot)]);
  EXPECT_LE(of_gpu.rms(), 1.5 * of_chain.rms()) << "largest " << of_gpu.largest << ", " << of_chain.largest;
  EXPECT_LE(of_gpu.largest, 2 * of_chain.largest);
  EXPECT_NE(testing::error_of([&] {
              gpu.extend_sequences(std::vector<int>{0, 1}, std::vector<int32_t>{1, int32_t(V)});
            }).find(detail::concat("found id ", V, " for slot 1")),
            std::string::npos);
}
// Slots in any order; some take no part in a step; one continues alone.
TEST_F(GptOssDecodeCuda, EachSequenceOfAStepEqualsTheModel) {
  constexpr WeightFormat kBf16 = WeightFormat::bf16, kFp8 = WeightFormat::fp8, kMx = WeightFormat::mxfp4;
  const std::vector<std::tuple<GptOssConfig, WeightFormat, WeightFormat>> models = {
      {testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5), kBf16, kMx},
      {testing::decode_config(64, 4, 4, 32, 96, 4, 2, 7, 2), kMx, kFp8},
      {testing::decode_config(64, 4, 2, 32, 96, 4, 2, 7, 2), kFp8, kMx}};
  const std::vector<std::vector<int>> steps =
      testing::kEmulated ? std::vector<std::vector<int>>{{2, 0, 4}, {0, 1, 2, 3, 4}}
                         : std::vector<std::vector<int>>{{2, 0, 4},       {1, 3}, {0, 1, 2, 3, 4}, {4, 3, 2, 1, 0},
                                                         {0, 1, 2, 3, 4}, {3},    {2, 3},          {4, 2, 0, 1}};
  for (size_t i = 0; i < (testing::kEmulated ? 1 : models.size()); ++i) {
    SCOPED_TRACE(i);
    const auto& [config, dense, experts] = models[i];
    check_sequences(config, dense, experts, 5, steps);
  }
}
TEST_F(GptOssDecodeCuda, EachSequenceOfAStepEqualsTheModelSmall) {
  if (!testing::holds_small_batches()) GTEST_SKIP() << "an SM's memory has no room for small batches";
  check_sequences(testing::decode_config(64, 4, 2, 32, 64, 3, 2, 2, 2), WeightFormat::bf16, WeightFormat::mxfp4, 3,
                  {{2, 0, 1}, {1, 0}});
}

// The counter begins as if one block fewer had to arrive, so every wait except the first awaits a change that has
// already happened. The error names the sequence and its position; the other sequences of the step are unchanged.
TEST_F(GptOssDecodeCuda, ARouterOfASmallBatchWhoseWaitTimesOutIsNamedAndTheNextStepIsRight) {
  const DecodeModel m(testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5), WeightFormat::bf16, WeightFormat::mxfp4, 7);
  const DecoderOptions how{.context = 40, .slots = 3, .megakernel = false, .wait_limit = 0.1};
  DeviceModel sound(m.config, m.weights, how), harmed(m.config, m.weights, how);
  if (sound.batch() < 3) GTEST_SKIP() << "an SM's memory has no room for small batches";
  for (DeviceModel* model : {&sound, &harmed})
    for (const int slot : {0, 1, 2}) model->extend(std::vector<int32_t>(size_t(slot + 1), 7), 1, slot);
  harmed.synchronize();
  const std::vector<int> slots = {2, 1};
  const std::vector<int32_t> ids = {5, 9};
  const uint32_t planted = 0x7fffffff;
  gpu::copy_to_device(harmed.sequences_buffers().routed, &planted, 4);
  harmed.extend_sequences(slots, ids);
  const std::string found = testing::error_of([&] { harmed.synchronize(); });
  EXPECT_NE(found.find("gave up after position 2 of slot 1: "), std::string::npos) << found;
  EXPECT_NE(found.find(" for the router of layer 0: "), std::string::npos) << found;
  for (const int slot : {0, 1, 2}) EXPECT_EQ(harmed.length(slot), slot + 1);
  sound.extend_sequences(slots, ids), harmed.extend_sequences(slots, ids);
  std::vector<float> want(size_t(m.config.vocab)), got(want.size());
  for (const int slot : {0, 1, 2}) {
    EXPECT_EQ(harmed.likeliest(slot), sound.likeliest(slot));
    sound.logits(1, want.data(), slot), harmed.logits(1, got.data(), slot);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0) << "slot " << slot;
  }
}

// The number of sequences of a step chooses its path. Within a path the numbers of a row depend neither on the other
// rows nor on how many there are, on every GPU.
TEST_F(GptOssDecodeCuda, ARowOfAStepHasTheSameBitsBesideAnyNumberOfRowsOfItsPath) {
  constexpr int kSlots = 14;
  std::vector<int> all(kSlots);
  std::iota(all.begin(), all.end(), 0);
  const DecodeModel m(testing::decode_config(320, 4, 2, 32, 96, 4, 2, 8, 1), WeightFormat::bf16, WeightFormat::mxfp4,
                      7);
  testing::with_limits_of_gpus([&] {
    for (const bool megakernel : {false, true}) {  // with the megakernel, Hopper has the row kernel
      DeviceModel gpu(m.config, m.weights, {.context = 16, .slots = kSlots, .megakernel = megakernel});
      if (!megakernel) gpu.limit_small_batch(kSlots);
      gpu.extend_sequences(all, std::vector<int32_t>(all.begin(), all.end()));
      std::map<std::pair<bool, int>, std::vector<float>> seen;  // by path and slot
      for (const int T : {14, 13, 8, 2}) {
        std::vector<int> slots;
        std::vector<int32_t> ids;
        for (int j = 0; j < T; ++j) slots.push_back((5 * j + T) % kSlots), ids.push_back(slots.back() + 20);
        gpu.extend_sequences(slots, ids);
        for (const int slot : slots) {
          std::vector<float> row(size_t(m.config.vocab));
          gpu.logits(1, row.data(), slot);
          const auto before = seen.try_emplace({gpu.takes_matrix_kernels(T), slot}, row).first->second;
          EXPECT_EQ(row, before) << "slot " << slot << " in a step of " << T << ", megakernel " << megakernel;
          gpu.rewind(1, slot);
        }
      }
    }
  });
}

// Sixteen sequences, the most of a step by the small-batch kernels, of the published shapes. Each sequence is compared
// with the same sequence alone, and repeats bit for bit beside any other sequences. Where an SM's memory holds smaller
// batches only, larger steps take the matrix kernels, which have their own bits. Except for near ties (other experts in
// some layer) two paths differ by roundings to 8 bits, as the two paths of one sequence do (see
// TheMegakernelAndThePhasedPathDifferOnlyByExpertsOnANearTie).
TEST_F(GptOssDecodeCuda, SequencesOfThePublishedShapesEqualTheSequencesAloneAndRepeatBitForBit) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr int kSlots = 16, kRuns = 100;
  static_assert(kSlots == decode::kMostSmallBatch);
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(name_of(dense));
    const GptOssConfig c = testing::published_config(4, 32, 2000);
    DeviceModel gpu(c, decode::shapes_of(c, dense, WeightFormat::mxfp4),
                    {.context = 1024, .slots = kSlots, .megakernel = false}, 5);
    gpu.limit_small_batch(kSlots);
    std::vector<int32_t> ids(kSlots * 3);
    testing::fill_ids(Tensor(ids.data(), {kSlots * 3}), 4, c.vocab);
    const auto in_order =
        [](testing::DecodeReference::Choices c) {  // the single token's experts are in the order of its choice
          for (auto& layer : c) std::sort(layer.begin(), layer.end());
          return c;
        };
    const auto prompt = [&](int slot) { gpu.fill_cache_with_random(1 + 63 * slot, slot); };
    const auto row_of = [&](int slot) {
      std::vector<float> row(static_cast<size_t>(c.vocab));
      gpu.logits(1, row.data(), slot);
      return row;
    };
    std::vector<std::vector<float>> alone;
    std::vector<testing::DecodeReference::Choices> chosen;
    for (int slot = 0; slot < kSlots; ++slot) {
      prompt(slot);
      gpu.extend(std::span(ids).subspan(size_t(slot), 1), 1, slot);
      alone.push_back(row_of(slot));
      chosen.push_back(in_order(choices_of(gpu, gpu.buffers(slot), 0)));
    }
    int same = 0;
    double largest = 0;
    // of each slot's step, by whether the matrix kernels computed it; must not depend on the other slots of the step
    std::map<std::pair<bool, int>, std::vector<float>> shared;
    for (const int T : {16, 12, 8, 5, 2}) {
      std::vector<int> slots;
      for (int j = 0; j < T; ++j) slots.push_back((5 * j + T) % kSlots);
      std::vector<int32_t> first;
      for (const int slot : slots) first.push_back(ids[size_t(slot)]);
      std::vector<std::vector<float>> rows(size_t(T) * 2);
      for (int run = 0; run < kRuns; ++run) {
        for (const int slot : slots) prompt(slot);
        gpu.extend_sequences(slots, first);
        if (run > 0 && run % 10 == 0) gpu.continue_sequences(slots, 1);
        for (size_t j = 0; j < slots.size(); ++j) {
          const std::vector<float> row = row_of(slots[j]);
          std::vector<float>& before = rows[j + (run > 0 && run % 10 == 0 ? size_t(T) : 0)];
          if (before.empty()) before = row;
          ASSERT_EQ(std::memcmp(row.data(), before.data(), row.size() * 4), 0) << "run " << run << ", sequence " << j;
        }
        if (run > 0) continue;
        for (size_t j = 0; j < slots.size(); ++j) {
          const std::pair<bool, int> key{gpu.takes_matrix_kernels(T), slots[j]};
          const std::vector<float>& first_seen = shared.try_emplace(key, rows[j]).first->second;
          EXPECT_EQ(std::memcmp(rows[j].data(), first_seen.data(), rows[j].size() * 4), 0)
              << "slot " << slots[j] << " in a step of " << T;
        }
        for (size_t j = 0; j < slots.size(); ++j) {
          const size_t slot = size_t(slots[j]);
          if (in_order(testing::choices_of_step(gpu, slots.size(), j)) != chosen[slot]) continue;
          double error = 0, size = 0;
          for (size_t v = 0; v < alone[slot].size(); ++v)
            error += std::pow(double(rows[j][v]) - double(alone[slot][v]), 2),
                size += std::pow(double(alone[slot][v]), 2);
          ++same, largest = std::max(largest, std::sqrt(error / size));
          EXPECT_EQ(gpu.likeliest(int(slot)), std::max_element(rows[j].begin(), rows[j].end()) - rows[j].begin());
        }
      }
    }
    std::printf("dense %s: %d of 43 sequences took the experts they take alone; those differ by at most %.4f\n",
                name_of(dense), same, largest);
    EXPECT_GE(same, 28);
    EXPECT_LT(largest, 0.03);
  }
}

// If a rounding decides the router's choice, the two paths differ for a token or two; the median token shows whether
// both compute the same model. The logits pass some 20 roundings to 8 bits, and each adds a relative error of 2^-9 to
// 2^-8.
TEST_F(GptOssDecodeCuda, TwoLayersOfThePublishedShapesAreTheCpuEngine) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  for (const auto& [dense, experts] : {std::pair{WeightFormat::bf16, WeightFormat::mxfp4},
                                       {WeightFormat::fp8, WeightFormat::mxfp4},
                                       {WeightFormat::mxfp4, WeightFormat::mxfp4}}) {
    const GptOssConfig c = testing::published_config(2, 8, 2000);
    DeviceModel gpu(c, decode::shapes_of(c, dense, experts), {.context = 512}, 5);
    const OnHost host(gpu);
    constexpr int64_t kTokens = 180;
    std::vector<int32_t> ids(kTokens);
    testing::fill_ids(Tensor(ids.data(), {kTokens}), 4, c.vocab);
    GptOss engine(c, host.weights, {.batch = kTokens, .positions = kTokens});
    GptOssCache cache(c, c.layers, kTokens, kTokens);
    std::vector<float> want(size_t(kTokens * c.vocab));
    engine.logits(engine.extend(ids, cache), Tensor(want.data(), {kTokens, c.vocab}));
    std::vector<double> errors;
    for (int64_t at = 0; at < kTokens;) {
      const int64_t n = at < 160 ? 16 : 1;
      gpu.extend(std::span(ids).subspan(size_t(at), size_t(n)), uint32_t(n));
      std::vector<float> got(size_t(n * c.vocab));
      gpu.logits(uint32_t(n), got.data());
      for (int64_t i = 0; i < n; ++i, ++at) {
        double error = 0, size = 0;
        for (int64_t v = 0; v < c.vocab; ++v) {
          const double w = want[size_t(at * c.vocab + v)], e = got[size_t(i * c.vocab + v)] - w;
          error += e * e, size += w * w;
        }
        errors.push_back(std::sqrt(error / size));
      }
    }
    std::vector<double> alone(errors.end() - 20, errors.end());
    std::sort(errors.begin(), errors.end()), std::sort(alone.begin(), alone.end());
    std::printf(
        "dense %s: relative error of the median token %.4f, of those decoded alone %.4f, 90%% %.4f, worst %.4f\n",
        name_of(dense), errors[errors.size() / 2], alone[10], errors[errors.size() * 9 / 10], errors.back());
    EXPECT_LT(errors[errors.size() / 2], 0.02);
    EXPECT_LT(alone[10], 0.02);
  }
}

// Prompts of several lengths one after the other, across the ends of windows, with single tokens between them. For some
// prompts the logits of all rows.
void check_prompts(const GptOssConfig& config, WeightFormat dense, WeightFormat experts) {
  SCOPED_TRACE(::testing::Message() << "dense " << name_of(dense) << ", experts " << name_of(experts) << ", heads of "
                                    << config.head_dim << ", window " << config.window);
  const std::vector<int64_t> parts = {20, 1, 33, 70, 1, 1, 17, 64, 1, 40};
  int64_t length = 0;
  for (int64_t n : parts) length += n;
  const DecodeModel m(config, dense, experts, 7);
  DeviceModel gpu(m.config, m.weights, {.context = length, .prompt_kernels = true});
  ASSERT_GT(gpu.prompt_batch(), 70);
  std::vector<int32_t> ids(static_cast<size_t>(length));
  testing::fill_ids(Tensor(ids.data(), {length}), 3, config.vocab);
  testing::DecodeReference exact(m, false), chain(m, true);
  testing::LogitError of_chain, of_gpu;
  int64_t at = 0;
  for (int64_t n : parts) {
    const int64_t rows = n == 33 || n == 64 ? n : 1;
    gpu.extend(std::span(ids).subspan(size_t(at), size_t(n)), uint32_t(rows));
    std::vector<float> got(static_cast<size_t>(rows * config.vocab));
    gpu.logits(uint32_t(rows), got.data());
    const float* row = got.data();
    for (int64_t i = 0; i < n; ++i, ++at) {
      const auto chosen = n > 1 ? testing::choices_of_row(gpu, n, size_t(i)) : choices_of(gpu, 0);
      const std::vector<double> want = exact.token(ids[size_t(at)], chosen),
                                rounded = chain.token(ids[size_t(at)], chosen);
      if (i < n - rows) continue;
      of_chain.add(rounded, want);
      of_gpu.add({row, row + config.vocab}, want);
      row += config.vocab;
    }
    ASSERT_TRUE(std::isfinite(of_gpu.largest)) << "position " << at;
    const auto last = got.end() - config.vocab;
    EXPECT_EQ(gpu.likeliest(), std::max_element(last, got.end()) - last);
    EXPECT_EQ(download(gpu.buffers().state, 1)[0].position, at);
  }
  std::printf("prompts: error %.4f, of the chain %.4f; largest %.4f, %.4f; worst choice %.3f\n", of_gpu.rms(),
              of_chain.rms(), of_gpu.largest, of_chain.largest, exact.worst_choice);
  EXPECT_LT(exact.worst_choice, 0.2);
  EXPECT_LE(of_gpu.rms(), 1.5 * of_chain.rms());
  EXPECT_LE(of_gpu.largest, 2 * of_chain.largest);
}

TEST_F(GptOssDecodeCuda, PromptsAreTheModel) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr WeightFormat kBf16 = WeightFormat::bf16, kFp8 = WeightFormat::fp8, kMx = WeightFormat::mxfp4;
  check_prompts(testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5), kBf16, kMx);
  check_prompts(testing::decode_config(64, 8, 1, 8, 32, 3, 3, 70, 2), kBf16, kMx);
  const GptOssConfig formats = testing::decode_config(64, 4, 2, 64, 96, 4, 2, 37, 2);
  check_prompts(formats, kFp8, kMx);
  check_prompts(formats, kMx, kMx);
  check_prompts(formats, kMx, kFp8);
  check_prompts(formats, kBf16, kBf16);
}

TEST_F(GptOssDecodeCuda, PromptsAreTheModelSmall) {
  check_prompts(testing::decode_config(64, 4, 2, 16, 64, 4, 2, 37, 2), WeightFormat::bf16, WeightFormat::mxfp4);
}

// The inputs of the last layer's products have been rounded: a second rounding changes nothing.
TEST_F(GptOssDecodeCuda, PromptsOfRoundedInputsTakeRoundedNumbers) {
  constexpr int64_t kLength = 40;
  GptOssConfig c = testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5);
  c.e4m3_inputs = true;
  const DecodeModel m(c, WeightFormat::bf16, WeightFormat::mxfp4, 7);
  DeviceModel gpu(m.config, m.weights, {.context = kLength, .prompt_kernels = true});
  ASSERT_GE(gpu.prompt_batch(), kLength);
  std::vector<int32_t> ids(static_cast<size_t>(kLength));
  testing::fill_ids(Tensor(ids.data(), {kLength}), 3, c.vocab);
  gpu.extend(ids, 1);
  gpu.synchronize();
  const int64_t rows = kLength * c.experts_per_token;
  for (const auto& [from, width] :
       {std::pair{gpu.prompt_buffers().gathered, c.hidden}, {gpu.prompt_buffers().hidden, c.intermediate}}) {
    const int64_t stride = weight_tile_padded_cols(width);
    const std::vector<bf16> all = download(from, rows * stride);
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> row(all.begin() + r * stride, all.begin() + r * stride + width), again = row;
      round_to_e4m3_blocks(again.data(), width);
      ASSERT_EQ(again, row) << "row " << r;
    }
  }
}

// The tolerances are those of TwoLayersOfThePublishedShapesAreTheCpuEngine: prompts, and a token after each.
TEST_F(GptOssDecodeCuda, PromptsOfThePublishedShapesEqualTheCpuEngineAndRepeatBitForBit) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    const GptOssConfig c = testing::published_config(2, 8, 2000);
    DeviceModel gpu(c, decode::shapes_of(c, dense, WeightFormat::mxfp4), {.context = 512, .prompt_kernels = true}, 5);
    const OnHost host(gpu);
    constexpr int64_t kTokens = 330;
    std::vector<int32_t> ids(kTokens);
    testing::fill_ids(Tensor(ids.data(), {kTokens}), 4, c.vocab);
    GptOss engine(c, host.weights, {.batch = kTokens, .positions = kTokens});
    GptOssCache cache(c, c.layers, kTokens, kTokens);
    std::vector<float> want(size_t(kTokens * c.vocab));
    engine.logits(engine.extend(ids, cache), Tensor(want.data(), {kTokens, c.vocab}));
    std::vector<double> errors;
    std::vector<float> first;
    for (int run = 0; run < 3; ++run) {
      gpu.rewind(0);
      std::vector<float> rows;
      int64_t at = 0;
      for (int64_t n : {17, 1, 40, 1, 101, 1, 30, 1, 20, 1, 36, 1, 19, 1, 59, 1}) {
        gpu.extend(std::span(ids).subspan(size_t(at), size_t(n)), 1);
        at += n;
        std::vector<float> got(size_t(c.vocab));
        gpu.logits(1, got.data());
        rows.insert(rows.end(), got.begin(), got.end());
        double error = 0, size = 0;
        for (int64_t v = 0; v < c.vocab; ++v) {
          const double w = want[size_t((at - 1) * c.vocab + v)], e = got[size_t(v)] - w;
          error += e * e, size += w * w;
        }
        if (run == 0) errors.push_back(std::sqrt(error / size));
      }
      if (run == 0) first = rows;
      ASSERT_EQ(std::memcmp(rows.data(), first.data(), rows.size() * 4), 0) << "run " << run;
    }
    std::sort(errors.begin(), errors.end());
    std::printf("prompts, dense %s: relative error of the median token %.4f, worst %.4f\n", name_of(dense),
                errors[errors.size() / 2], errors.back());
    EXPECT_LT(errors[errors.size() / 2], 0.02);
  }
}

TEST_F(GptOssDecodeCuda, RunsAreBitIdenticalAndRewindingGivesTheSame) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(4, 8, 2000);
  DeviceModel gpu(c, decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4), {.context = 512}, 5);
  std::vector<int32_t> ids(16);
  testing::fill_ids(Tensor(ids.data(), {16}), 4, c.vocab);
  std::vector<float> first;
  for (int run = 0; run < 300; ++run) {
    gpu.rewind(0);
    gpu.extend(ids, 1);
    gpu.continue_greedily(3);
    std::vector<float> row(size_t(c.vocab));
    gpu.logits(1, row.data());
    if (run == 0) first = row;
    ASSERT_EQ(std::memcmp(row.data(), first.data(), row.size() * 4), 0) << "run " << run;
  }
  gpu.likeliest();
}

TEST_F(GptOssDecodeCuda, TheMegakernelOfThePublishedShapesIsThePhasedPathAndRepeatsItself) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(4, 8, 2000);
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    DeviceModel gpu(c, decode::shapes_of(c, dense, WeightFormat::mxfp4), {.context = 512}, 5);
    std::vector<int32_t> ids(19);
    testing::fill_ids(Tensor(ids.data(), {19}), 4, c.vocab);
    std::vector<float> phased, first;
    for (int run = 0; run < 301; ++run) {
      gpu.use_megakernel(run > 0);
      gpu.rewind(0);
      gpu.extend(std::span(ids).first(16), 1);
      for (size_t i = 16; i < 19; ++i) gpu.extend(std::span(ids).subspan(i, 1), 1);
      std::vector<float> row(size_t(c.vocab));
      gpu.logits(1, row.data());
      if (run == 0) {
        phased = row;
        continue;
      }
      if (run == 1) {
        first = row;
        double error = 0, size = 0;
        for (size_t v = 0; v < row.size(); ++v)
          error += std::pow(double(row[v]) - double(phased[v]), 2), size += std::pow(double(phased[v]), 2);
        EXPECT_LT(std::sqrt(error / size), 0.02) << name_of(dense);
      }
      ASSERT_EQ(std::memcmp(row.data(), first.data(), row.size() * 4), 0) << name_of(dense) << ", run " << run;
    }
    gpu.likeliest();
  }
}

// --- where the megakernel and the phased path choose different experts

// The experts of the first token in a layer after a step, with their weights.
std::map<int32_t, float> weights_of(const DeviceModel& m, int64_t layer) {
  const routing::Lists lists = m.buffers().lists_of(size_t(layer));
  const uint32_t n = download(lists.count, 1)[0];
  const auto expert = download(lists.expert, n);
  const auto weight = download(lists.weight, int64_t(n) * routing::kTokens);
  std::map<int32_t, float> all;
  for (uint32_t i = 0; i < n; ++i) all[expert[i]] = weight[i * routing::kTokens];
  return all;
}
// A router's logits as the phased path computes them.
std::vector<double> router_logits(const DeviceModel& m, int64_t layer, int32_t id, int64_t position) {
  decode::Model front = m.model();
  front.layers.resize(size_t(layer + 1));
  const decode::State state{.tokens = {id}, .position = int32_t(position), .flaw = 0};
  gpu::copy_to_device(m.buffers().state, &state, sizeof state);
  run(front, m.buffers(), {.capacity = uint32_t(m.context()), .phases = ~uint32_t(decode::kHead)}, m.stream());
  gpu::synchronize();
  const auto& l = front.layers.back();
  const int64_t E = l.router.rows, C = l.router.cols, splits = decode::splits_of(l.router.weight_tiles);
  const auto part = download(m.buffers().router_part, splits * routing::kTokens * E);
  const auto squares = download(m.buffers().router_squares, splits * routing::kTokens);
  const auto bias = download(l.b_router, E);
  double sum = 0;
  for (int64_t s = 0; s < splits; ++s) sum += double(squares[size_t(s * routing::kTokens)]);
  std::vector<double> logits;
  for (int64_t e = 0; e < E; ++e) {
    double dot = 0;
    for (int64_t s = 0; s < splits; ++s) dot += double(part[size_t(s * routing::kTokens * E + e)]);
    logits.push_back(dot / std::sqrt(sum / double(C) + m.config().norm.eps) + double(bias[size_t(e)]));
  }
  return logits;
}

// The input of a router has passed some 20 roundings to 8 bits. Each rounding adds a relative error of 2^-9 / sqrt(3),
// and the errors of the two paths are independent: in all, at most 1 % per layer. The logits of the router have a
// standard deviation of 2 here, so one logit differs by 0.02 (one sigma), and the difference of two logits on two paths
// by twice that. If the logits of a position differ by more than a few such roundings, the two paths chose different
// experts in some layer. In the first such layer, the experts that only one path chose are within 6 sigma of each
// other, and the weights of the experts that both chose are as close. A fault in a grid barrier or in a part of a
// product would exceed these bounds.
TEST_F(GptOssDecodeCuda, TheMegakernelAndThePhasedPathDifferOnlyByExpertsOnANearTie) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr double kSigma = 0.04, kSame = 0.03;
  int positions = 0, differ = 0;
  double most_without = 0, least_with = 1e9, widest = 0;
  for (const int64_t experts : {int64_t(32), int64_t(128)})
    for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
      const GptOssConfig c = testing::published_config(4, experts, 2000);
      DeviceModel gpu(c, decode::shapes_of(c, dense, WeightFormat::mxfp4), {.context = 4600}, 5);
      for (const int64_t context : {3, 100, 127, 128, 500, 1500, 4500})
        for (int32_t id = 11; id < 2000; id += 331) {
          SCOPED_TRACE(::testing::Message() << experts << " experts, dense " << name_of(dense) << ", id " << id
                                            << " after " << context << " tokens");
          ++positions;
          std::vector<float> row[2];
          std::vector<std::map<int32_t, float>> chosen[2];
          for (const int path : {0, 1}) {
            gpu.use_megakernel(path == 1);
            gpu.fill_cache_with_random(context);
            gpu.extend({&id, 1}, 1);
            row[path].resize(size_t(c.vocab));
            gpu.logits(1, row[path].data());
            for (int64_t l = 0; l < c.layers; ++l) chosen[path].push_back(weights_of(gpu, l));
          }
          double error = 0, size = 0;
          for (size_t v = 0; v < row[0].size(); ++v)
            error += std::pow(double(row[1][v]) - double(row[0][v]), 2), size += std::pow(double(row[0][v]), 2);
          error = std::sqrt(error / size);
          const auto same = [&](size_t l) {
            return std::equal(chosen[0][l].begin(), chosen[0][l].end(), chosen[1][l].begin(), chosen[1][l].end(),
                              [](const auto& a, const auto& b) { return a.first == b.first; });
          };
          size_t first = 0;
          while (first < chosen[0].size() && same(first)) ++first;
          if (first == chosen[0].size()) {
            most_without = std::max(most_without, error);
            EXPECT_LT(error, kSame) << "with the same experts in every layer";
            continue;
          }
          ++differ;
          least_with = std::min(least_with, error);
          const std::vector<double> logits = router_logits(gpu, int64_t(first), id, context);
          double margin = 0;
          std::vector<double> ratios;
          for (const auto& [e, weight] : chosen[0][first]) {
            const auto there = chosen[1][first].find(e);
            if (there != chosen[1][first].end()) ratios.push_back(std::log(double(weight) / double(there->second)));
            if (there == chosen[1][first].end())
              for (const auto& [other, unused] : chosen[1][first])
                if (!chosen[0][first].contains(other))
                  margin = std::max(margin, logits[size_t(e)] - logits[size_t(other)]);
          }
          for (const double r : ratios) EXPECT_LT(std::abs(r - ratios[0]), 6 * kSigma) << "weights of the same experts";
          EXPECT_LT(margin, 6 * kSigma) << "layer " << first;
          widest = std::max(widest, margin);
          std::printf(
              "%lld experts, dense %s, id %d after %lld: layer %zu, experts %.4f apart, logits differ by %.3f\n",
              static_cast<long long>(experts), name_of(dense), id, static_cast<long long>(context), first, margin,
              error);
        }
    }
  std::printf(
      "%d of %d positions have other experts, at most %.4f apart; logits differ by at most %.4f without, at "
      "least %.4f with\n",
      differ, positions, widest, most_without, least_with);
  EXPECT_LT(differ, positions / 4);
}

}  // namespace
}  // namespace ingot
#endif
