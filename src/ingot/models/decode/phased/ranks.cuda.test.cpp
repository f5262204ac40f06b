// GPT-OSS over two GPUs and over four; in a build with the emulator the GPUs are emulated.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/decode/fixtures/on_host.test.h"
#include "ingot/models/decode/fixtures/several_gpus.test.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using decode::RankedModel;
using decode::Split;
using testing::choices_of;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::download;
using testing::kPatience;
using testing::row_of;
using testing::state_of;

// Models that can be shared by so many GPUs.
std::vector<DecodeCase> cases(int gpus) {
  const GptOssConfig config = gpus == 2 ? testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5, 2)
                                        : testing::decode_config(96, 16, 4, 16, 288, 6, 2, 5, 2);
  std::vector<DecodeCase> all;
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    if (!testing::kEmulated || dense == WeightFormat::bf16)  // ranks.emulated.test.cpp has the other formats
      all.push_back({name_of(dense), config, dense, WeightFormat::mxfp4, 12, {9}});
  return all;
}
struct Small {
  explicit Small(int gpus) : count(gpus) {}
  const int count;
  DecodeCase t = cases(count)[0];
  DecodeModel m{t.config, t.dense, t.experts, 7};
  RankedModel make(double patience = kPatience) const {
    return {m.config, m.weights, DecoderOptions{.context = 64, .wait_limit = patience, .gpus = count}};
  }
};

class GptOssRanksCuda : public testing::SeveralGpus {
 protected:
  static void check_case(const DecodeCase& t, Split split, bool megakernel);
  static void check_prompts(GptOssConfig config, WeightFormat dense, Split split);
};
// Four emulated GPUs take minutes; ranks.emulated.test.cpp has some of these cases.
INSTANTIATE_TEST_SUITE_P(, GptOssRanksCuda,
                         ::testing::ValuesIn(testing::kEmulated ? std::vector<int>{2} : std::vector<int>{2, 4}),
                         testing::over_gpus);

void GptOssRanksCuda::check_case(const DecodeCase& t, Split split, bool megakernel) {
  SCOPED_TRACE(::testing::Message() << (megakernel ? "megakernel" : "phase by phase"));
  std::unique_ptr<RankedModel> gpus;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpus = std::make_unique<RankedModel>(
        m.config, m.weights,
        DecoderOptions{
            .context = room, .megakernel = megakernel, .wait_limit = kPatience, .gpus = ranks(), .split = split});
    return testing::DecodeUnderTest{.extend =
                                        [&, vocab = size_t(m.config.vocab)](std::span<const int32_t> ids) {
                                          gpus->extend(ids, uint32_t(ids.size()));
                                          std::vector<float> all(ids.size() * vocab);
                                          gpus->logits(uint32_t(ids.size()), all.data());
                                          std::vector<std::vector<double>> rows;
                                          for (size_t i = 0; i < ids.size(); ++i)
                                            rows.emplace_back(&all[i * vocab], &all[i * vocab] + vocab);
                                          return rows;
                                        },
                                    .choices =
                                        [&](size_t i) {
                                          const auto chosen = choices_of(gpus->rank(0), i);
                                          for (int r = 1; r < ranks(); ++r)
                                            EXPECT_EQ(choices_of(gpus->rank(r), i), chosen);
                                          return chosen;
                                        },
                                    .state = [&] { return state_of(*gpus, ranks() - 1); }};
  });
}
TEST_P(GptOssRanksCuda, SeveralGpusComputeTheModelPhaseByPhase) {
  for (const DecodeCase& t : cases(ranks())) check_case(t, Split::tensor, false);
}
TEST_P(GptOssRanksCuda, SeveralGpusComputeTheModelThroughTheMegakernel) {
  for (const DecodeCase& t : cases(ranks())) check_case(t, Split::tensor, true);
}
TEST_P(GptOssRanksCuda, AttentionOnOneGpuAndExpertsOnTheRemainingGpusComputeTheModel) {
  for (const bool megakernel : {true, false}) check_case(cases(ranks())[0], Split::attention_experts, megakernel);
}

// Prompts of the matrix kernels, beyond a window, with the logits of all tokens and of the last alone, and tokens after
// them.
void GptOssRanksCuda::check_prompts(GptOssConfig config, WeightFormat dense, Split split) {
  SCOPED_TRACE(::testing::Message() << name_of(dense) << (split == Split::tensor ? ", tensor" : ", attention-experts"));
  config.context = 300;
  const DecodeModel m(config, dense, WeightFormat::mxfp4, 7);
  const std::vector<int64_t> lengths = {70, 1, 200, 3, 17, 1};
  const int64_t V = config.vocab;
  std::vector<int32_t> ids(292);
  testing::fill_ids(Tensor(ids.data(), {292}), 3, V);
  RankedModel gpus(m.config, m.weights, {.context = 300, .gpus = ranks(), .split = split});
  if (gpus.prompt_batch() <= gpus.batch()) GTEST_SKIP() << "found a build without matrix kernels";
  testing::DecodeReference exact(m, false), chain(m, true);
  testing::LogitError of_chain, of_gpus;
  size_t at = 0;
  for (const int64_t n : lengths) {
    const std::span<const int32_t> part = std::span(ids).subspan(at, size_t(n));
    gpus.extend(part, uint32_t(n));
    std::vector<float> all(size_t(n * V));
    gpus.logits(uint32_t(n), all.data());
    for (int64_t i = 0; i < n; ++i, ++at) {
      testing::DecodeReference::Choices chosen;
      if (n <= gpus.batch()) {
        chosen = choices_of(gpus.rank(0), size_t(i));
        for (int r = 1; r < ranks(); ++r) EXPECT_EQ(choices_of(gpus.rank(r), size_t(i)), chosen);
      } else {
        const int64_t k = config.experts_per_token;
        for (int64_t l = 0; l < config.layers; ++l) {
          const auto of_rank = [&](int r) {
            return download(gpus.rank(r).prompt_buffers().chosen + (l * n + i) * k, k);
          };
          const auto first = of_rank(0);
          for (int r = 1; r < ranks(); ++r) ASSERT_EQ(of_rank(r), first) << "GPU " << r;
          chosen.emplace_back(first.begin(), first.end());
        }
      }
      const std::vector<double> want = exact.token(ids[at], chosen);
      of_chain.add(chain.token(ids[at], chosen), want);
      of_gpus.add({&all[size_t(i * V)], &all[size_t(i * V)] + V}, want);
      ASSERT_TRUE(std::isfinite(of_gpus.largest)) << "position " << at;
    }
    for (int r = 0; r < ranks(); ++r) EXPECT_EQ(state_of(gpus, r).position, int32_t(at));
  }
  EXPECT_LT(exact.worst_choice, 0.2);
  EXPECT_LE(of_gpus.rms(), 1.5 * of_chain.rms());
  EXPECT_LE(of_gpus.largest, 2 * of_chain.largest);
}
TEST_P(GptOssRanksCuda, PromptsAreTheModel) {
  const GptOssConfig config = cases(ranks())[0].config;
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    check_prompts(config, dense, Split::tensor);
  check_prompts(config, WeightFormat::bf16, Split::attention_experts);
}

TEST_P(GptOssRanksCuda, RunsAreBitIdenticalAndAllGpusHaveTheSameState) {
  const Small small(ranks());
  RankedModel gpus = small.make();
  const std::vector<int32_t> ids = {5, 6, 7, 8};
  std::vector<float> first;
  for (int run = 0; run < (testing::kEmulated ? 2 : 300); ++run) {
    gpus.rewind(0);
    gpus.extend(ids, 1);
    gpus.continue_greedily(3);
    const std::vector<float> row = row_of(gpus);
    if (run == 0) first = row;
    ASSERT_EQ(std::memcmp(row.data(), first.data(), row.size() * 4), 0) << "run " << run;
    const auto one = state_of(gpus, 0);
    for (int r = 1; r < ranks(); ++r) {
      const auto other = state_of(gpus, r);
      ASSERT_EQ(std::memcmp(&one, &other, sizeof one), 0) << "run " << run << ", GPU " << r;
    }
  }
}

// More launches than a stream queues at once.
TEST_P(GptOssRanksCuda, ManyTokensAreStartedAtOnce) {
  if (testing::kEmulated) GTEST_SKIP() << "whose launches are done when they return";
  GptOssConfig config = cases(ranks())[0].config;
  config.context = 4000;
  const DecodeModel m(config, WeightFormat::bf16, WeightFormat::mxfp4, 7);
  RankedModel gpus(m.config, m.weights, {.context = 4000, .gpus = ranks()});
  const int32_t id = 5;
  gpus.extend({&id, 1}, 1);
  gpus.continue_greedily(3000);
  EXPECT_GE(gpus.likeliest(), 0);
  EXPECT_EQ(gpus.length(), 3001);
  EXPECT_NE(testing::error_of([&] { gpus.continue_greedily(1000); }).find("expected at most 4000"), std::string::npos);
}

TEST_P(GptOssRanksCuda, APromptThatAGpuDoesNotTakePartInEndsAndTheNextOneIsRight) {
  const Small small(ranks());
  RankedModel gpus = small.make(0.05);
  if (gpus.prompt_batch() <= gpus.batch()) GTEST_SKIP() << "found a build without matrix kernels";
  const std::vector<int32_t> ids(40, 7);
  gpus.extend(ids, 1);
  const std::vector<float> want = row_of(gpus);
  gpus.rewind(0);
  for (int r = 0; r < ranks(); ++r)
    if (r != 1) gpus.rank(r).extend(ids, 1);  // GPU 1 is not launched
  const std::string found = testing::error_of([&] { gpus.likeliest(); });
  EXPECT_NE(found.find("for GPU 1 and its part of the output of layer 0"), std::string::npos) << found;
  EXPECT_EQ(gpus.length(), 0);
  gpus.extend(ids, 1);
  EXPECT_EQ(row_of(gpus), want);
}

TEST_P(GptOssRanksCuda, ATracedTokenIsTheTokenAndShowsEveryExchangeOnAllGpus) {
  if (testing::kEmulated) GTEST_SKIP() << "ranks.emulated.test.cpp has it";
  const Small small(ranks());
  RankedModel gpus = small.make();
  const std::vector<int32_t> ids = {5, 6, 7};
  const auto last = [&](bool traced) {
    gpus.rewind(0);
    gpus.extend(ids, 1);
    std::vector<decode::StageSpan> spans;
    if (traced)
      spans = gpus.trace_token(2);
    else
      gpus.continue_greedily(1);
    return std::pair(row_of(gpus), spans);
  };
  const std::vector<float> want = last(false).first;
  const auto [row, spans] = last(true);
  EXPECT_EQ(row, want);
  EXPECT_EQ(gpus.length(), 4);
  EXPECT_EQ(spans.size(), size_t(ranks()) * 2 * size_t(5 * small.t.config.layers + 1));
  std::vector<size_t> exchanges(static_cast<size_t>(ranks()));
  for (const auto& s : spans) exchanges.at(s.gpu) += s.came_ns > s.sent_ns;
  for (const size_t of_gpu : exchanges) EXPECT_GT(of_gpu, 0u);
}

// A decoder over several GPUs samples the same tokens as one GPU, greedy and random.
TEST_P(GptOssRanksCuda, TheDecoderSamplesTheTokensOfOneGpu) {
  const Small small(ranks());
  const auto sampled = [&](int64_t gpus, double temperature) {
    const auto d = make_gpu_decoder(small.m.config, small.m.weights, {.context = 64, .gpus = gpus});
    Sequence s(*d);
    const std::vector<int32_t> prompt = {5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22};
    for (size_t at = 0; at < prompt.size(); at += size_t(d->batch()))
      s.extend(std::span(prompt).subspan(at, std::min(size_t(d->batch()), prompt.size() - at)));
    return s.sample({.sampling = {.temperature = float(temperature)}, .seed = 3}, testing::kEmulated ? 3 : 12).tokens;
  };
  if (!testing::kEmulated) EXPECT_EQ(sampled(ranks(), 0), sampled(1, 0));
  EXPECT_EQ(sampled(ranks(), 0.7), sampled(1, 0.7));
}

TEST_P(GptOssRanksCuda, AGpuThatDoesNotTakePartIsNamedAndTheNextTokenIsRight) {
  const Small small(ranks());
  RankedModel gpus = small.make(0.05);
  const int32_t id = 5;
  if (testing::kEmulated) GTEST_SKIP() << "ranks.emulated.test.cpp has it, with the emulator's clock";
  gpus.extend({&id, 1}, 1);
  const std::vector<float> want = row_of(gpus);
  for (const bool megakernel : {true, false}) {
    gpus.use_megakernel(megakernel);
    gpus.rewind(0);
    gpus.extend({&id, 1}, 1);
    const std::vector<float> sound = row_of(gpus);
    gpus.rewind(0);
    const auto start = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks(); ++r)
      if (r != 1) gpus.rank(r).extend({&id, 1}, 1);  // GPU 1 is not launched
    const std::string found = testing::error_of([&] { gpus.likeliest(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_NE(found.find("for GPU 1 and its part of the output of layer 0"), std::string::npos) << found;
    EXPECT_EQ(gpus.length(), 0);
    gpus.extend({&id, 1}, 1);
    EXPECT_EQ(row_of(gpus), sound);
  }
  gpus.use_megakernel(true);
  gpus.rewind(0);
  gpus.extend({&id, 1}, 1);
  EXPECT_EQ(row_of(gpus), want);
}

#ifndef INGOT_EMULATED_DEVICE
// An error in a kernel ends its GPU for the process; here an id without a row in the embedding.
[[noreturn]] void lose_a_gpu(int gpus_there, bool while_another_waits) {
  const Small small(gpus_there);
  RankedModel gpus = small.make(0.2);
  const int32_t id = 5, wild = INT32_MAX;
  gpus.extend({&id, 1}, 1);
  gpus.likeliest();
  if (while_another_waits) gpus.rank(0).extend({&id, 1}, 1);
  {
    const gpu::DeviceGuard guard(1);
    gpu::copy_to_device(gpus.rank(1).buffers().state->tokens, &wild, sizeof wild);
  }
  gpus.rank(1).continue_greedily(1);
  const std::string found = testing::error_of([&] {
    if (!while_another_waits) gpus.extend({&id, 1}, 1);
    gpus.likeliest();
  });
  std::fprintf(stderr, "%s\n", found.c_str());
  std::_Exit(0);
}
TEST_P(GptOssRanksCuda, AGpuThatIsLostIsNamedAndOtherProcessesGoOn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process of its own
  const Small small(ranks());
  RankedModel gpus = small.make();
  const int32_t id = 5;
  gpus.extend({&id, 1}, 1);
  const std::vector<float> want = row_of(gpus);
  const auto fine = ::testing::ExitedWithCode(0);
  EXPECT_EXIT(lose_a_gpu(ranks(), true), fine, "GPU 0: .*for GPU 1 .*; GPU 1: .*cudaErrorIllegalAddress");
  EXPECT_EXIT(lose_a_gpu(ranks(), false), fine, "GPU 1: .*cudaErrorIllegalAddress");
  gpus.rewind(0);
  gpus.extend({&id, 1}, 1);
  EXPECT_EQ(row_of(gpus), want);
}
#endif

TEST_P(GptOssRanksCuda, AModelThatCannotBeSharedIsRefusedBeforeAnythingIsLoaded) {
  const Small small(ranks());
  EXPECT_NE(decode::ranks_unsupported_reason(9).find("expected 1 to 8"), std::string::npos);
  const int more = gpu::device_count() + 1;
  if (more <= 8)
    EXPECT_NE(decode::ranks_unsupported_reason(more).find("expected " + std::to_string(more)), std::string::npos);
  GptOssConfig one_head = small.m.config;
  one_head.kv_heads = 1;
  EXPECT_NE(gpus_unsupported_reason(one_head, {.gpus = ranks()})
                .find("found " + std::to_string(ranks()) + " GPUs, expected at most 1"),
            std::string::npos);
  const int32_t id = -1;
  RankedModel gpus = small.make();
  EXPECT_NE(testing::error_of([&] { gpus.extend({&id, 1}, 1); }).find("found id -1"), std::string::npos);
  const int32_t good = 3;
  gpus.extend({&good, 1}, 1);
  EXPECT_GE(gpus.likeliest(), 0);
}

#ifdef INGOT_EMULATED_DEVICE
TEST_P(GptOssRanksCuda, GpusThatDoNotReachEachOtherAreRefusedBeforeAnythingIsLoaded) {
  const Small small(ranks());
  emulation::set_device_count(ranks(), false);
  const std::string want = "found no peer access from cuda:0 to cuda:1";
  EXPECT_NE(decode::ranks_unsupported_reason(ranks()).find(want), std::string::npos);
  EXPECT_EQ(decode::ranks_unsupported_reason(1), "");
  // Without memory behind the tensors, so that an access shows that loading has begun.
  const GptOssWeights nothing = decode::shapes_of(small.m.config, small.t.dense, small.t.experts);
  const auto made = [&] { RankedModel(small.m.config, nothing, DecoderOptions{.context = 64, .gpus = ranks()}); };
  EXPECT_NE(testing::error_of(made).find(want), std::string::npos);
}
#endif

TEST_P(GptOssRanksCuda, TooLittleMemoryOnAGpuIsReportedBeforeAnyIsTaken) {
  if (testing::kEmulated) GTEST_SKIP() << "whose memory has no end";
  const Small small(ranks());
  const std::string found =
      gpu_unsupported_reason(small.m.config, small.m.weights, {.context = 256, .slots = 10'000'000, .gpus = ranks()});
  EXPECT_NE(found.find(" bytes free on "), std::string::npos) << found;
  EXPECT_NE(found.find(", cuda:0, expected "), std::string::npos) << found;
}

// Every matrix on a GPU is the slice that slices.h cuts, and the slices together are the model.
TEST_P(GptOssRanksCuda, EachGpuHoldsItsSlicesAndNothingElse) {
  using namespace decode;
  for (const DecodeCase& t : cases(ranks()))
    for (const Split split : {Split::tensor, Split::attention_experts}) {
      SCOPED_TRACE(t.name);
      const DecodeModel m(t.config, t.dense, t.experts, 7);
      const GptOssConfig& c = m.config;
      const RankedModel gpus(c, m.weights, {.context = 64, .gpus = ranks(), .split = split});
      const std::vector<Slice> slices = slices_of(c, ranks(), split);
      int64_t experts_of_all = 0;
      for (int r = 0; r < ranks(); ++r) {
        const Slice& s = slices[size_t(r)];
        const decode::Model& held = gpus.rank(r).model();
        const auto same = [&](const Matrix& on_gpu, const WeightMatrix& from, const Cut& cut) {
          const int64_t matrices = from.is_bank() ? from.data.size(0) : 1, bytes = cut_bytes(from.format, cut);
          ASSERT_EQ(on_gpu.matrix_bytes, on_gpu.row_tiles > 0 ? bytes : 0);
          std::vector<uint8_t> want(static_cast<size_t>(bytes));
          for (int64_t e = 0; e < matrices && on_gpu.row_tiles > 0; ++e) {
            cut_weight_tiles(from.is_bank() ? from.at(e) : from, cut, want.data());
            to_device_order(weight_tiles_at(want.data(), from.format, 0, on_gpu.rows, on_gpu.cols));
            ASSERT_EQ(download(on_gpu.data + e * bytes, bytes), want) << "GPU " << r << ", matrix " << e;
          }
        };
        for (size_t l = 0; l < held.layers.size(); ++l) {
          const GptOssLayer& w = m.weights.layers[l];
          same(held.layers[l].qkv, w.qkv, qkv_cut(c, s));
          same(held.layers[l].o, w.o, output_cut(c, s));
          same(held.layers[l].gate_up, w.gate_up, gate_up_cut(c, s));
          same(held.layers[l].down, w.down, down_cut(c, s));
          experts_of_all += held.layers[l].gate_up.matrix_bytes * c.experts;
        }
        same(held.head, m.weights.head, head_cut(c, s));
      }
      EXPECT_EQ(experts_of_all, int64_t(m.weights.layers.size()) * m.weights.layers[0].gate_up.data.bytes());
    }
}

// The largest anonymous memory of this process during the object's life.
class MostMemory {
 public:
  MostMemory()
      : before_(now()), thread_([this] {
          while (!stop_)
            most_ = std::max(most_.load(), now()), std::this_thread::sleep_for(std::chrono::microseconds(200));
        }) {}
  ~MostMemory() { stop_ = true, thread_.join(); }
  int64_t grown() const { return most_ - before_; }

 private:
  static int64_t now() {
    std::ifstream in("/proc/self/status");
    for (std::string word; in >> word;)
      if (word == "RssAnon:") return in >> word, std::stoll(word) * 1024;
    return 0;
  }
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> most_ = 0;
  const int64_t before_;
  std::thread thread_;
};
// From files and from an archive's mapping, a slice is copied to its GPU in chunks.
TEST_P(GptOssRanksCuda, LoadingTakesLittleOfTheHostsMemory) {
  if (testing::kEmulated) GTEST_SKIP() << "whose GPUs' memory is the host's";
  const GptOssConfig c = testing::published_config(4, 16, 2000);
  const RankedModel one(c, decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4), {.context = 64}, 5);
  const testing::OnHost host(one.rank(0));
  const auto loaded = [&] { return RankedModel(c, host.weights, {.context = 64, .gpus = ranks()}).weight_bytes(); };
  loaded();  // the memory of the driver is allocated from now on
  const MostMemory most;
  const int64_t bytes = loaded();
  std::printf("%lld MB of weights, %lld MB of the host's memory\n", (long long)(bytes >> 20),
              (long long)(most.grown() >> 20));
  EXPECT_GT(bytes, int64_t(700) << 20);
  EXPECT_LT(most.grown(), int64_t(64) << 20);
}

// Layers of the published shapes: equal to one GPU, up to the rounding of sums in another order.
TEST_P(GptOssRanksCuda, LayersOfThePublishedShapesEqualOneGpusAndRepeatBitForBit) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(4, 8, 2000);
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(name_of(dense));
    std::vector<int32_t> ids(319);
    testing::fill_ids(Tensor(ids.data(), {319}), 4, c.vocab);
    const auto logits_after = [&](RankedModel& gpus, bool prompt) {
      gpus.rewind(0);
      if (prompt && gpus.prompt_batch() >= 300) gpus.extend(std::span(ids).first(300), 0);
      gpus.extend(std::span(ids).subspan(300, 16), 1);
      for (size_t i = 316; i < 319; ++i) gpus.extend(std::span(ids).subspan(i, 1), 1);
      return row_of(gpus);
    };
    RankedModel one(c, decode::shapes_of(c, dense, WeightFormat::mxfp4), {.context = 512}, 5);
    const testing::OnHost host(one.rank(0));
    for (const Split split : {Split::tensor, Split::attention_experts}) {
      RankedModel several(c, host.weights, {.context = 512, .gpus = ranks(), .split = split});
      for (const bool prompt : {false, true}) {
        const std::vector<float> want = logits_after(one, prompt), first = logits_after(several, prompt);
        double error = 0, size = 0;
        for (size_t v = 0; v < want.size(); ++v)
          error += std::pow(double(first[v]) - double(want[v]), 2), size += std::pow(double(want[v]), 2);
        std::printf("%s, %s%s: relative difference from one GPU %.4f\n", name_of(dense),
                    split == Split::tensor ? "tensor" : "attention-experts", prompt ? ", after a prompt of 300" : "",
                    std::sqrt(error / size));
        EXPECT_LT(std::sqrt(error / size), 0.02);
        for (int run = 0; run < (split == Split::attention_experts ? 20
                                 : dense == WeightFormat::bf16     ? 300
                                                                   : 50);
             ++run)
          ASSERT_EQ(logits_after(several, prompt), first) << "run " << run;
      }
      several.likeliest();
    }
  }
}

}  // namespace
}  // namespace ingot
#endif
