// Compares generation on a GPU with the CPU, and with and without CUDA graphs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ingot/models/gpt/generate/decoder.h"
#include "ingot/models/gpt/generate/device_weights.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

const Device kGpu{Device::cuda, 0};

// The emulated GPU has the limits of an RTX 3090.
class DeviceDecoderCuda : public testing::GpuTest<> {
#ifdef INGOT_EMULATED_DEVICE
  const testing::EmulatedLimits limits_{"8.6"};
#endif
};
constexpr int kTokens = testing::kEmulated ? 3 : 8;  // of a call

// Weights of ordinary size: initial weights of training give even logits.
Buffer weights_of(const GptConfig& c) {
  const ParameterLayout layout(c);
  Buffer flat(DType::f32, {layout.padded_count()});
  fill_zero(flat);
  initialise(c, layout, flat, 3);
  for (const Parameter& p : layout.all())
    if (p.kind != ParameterKind::scalar) {
      Buffer random(DType::f32, p.shape);
      testing::fill_normal(random, uint64_t(p.offset) + 1, 1.5 / std::sqrt(double(p.shape[-1])));
      testing::assign(layout.view(flat, p), testing::values(random));
    }
  return flat;
}
std::vector<testing::Variant> models() {
  std::vector<testing::Variant> all = testing::variants();
  for (testing::Variant& v : all)
    if (v.config.factorised()) v.config.embed_dim = 16;
  if (testing::kEmulated) all.resize(2);  // seconds each
  return all;
}
const std::vector<int32_t> kPrompt{3, 1, 4, 1, 5};

// A document's adapters, each adding a third of a layer's output; rank 0: none.
struct Adapters {
  Adapters(const GptConfig& c, bool looping, int64_t rank) {
    if (rank == 0) return;
    const AdapterLayout layout(c, layer_program(c, looping), rank);
    numbers.resize(size_t(layout.numbers()));
    const Tensor flat(numbers.data(), {layout.numbers()});
    uint64_t seed = 1000;
    for (const NamedTensor& t : layout.named(flat)) {
      const bool first = t.name.ends_with(".a");
      testing::fill_normal(t.tensor, ++seed, (first ? 1 : 0.3) / std::sqrt(double(t.tensor.size(1))));
    }
    cpu = std::make_unique<DeviceAdapters>(layout, flat, Device(), Stream());
    gpu = std::make_unique<DeviceAdapters>(layout, flat, kGpu, Stream());
    gpu::synchronize(kGpu, {});
  }
  static const GptAdapters* of(const std::unique_ptr<DeviceAdapters>& a) { return a ? &a->views() : nullptr; }
  std::vector<float> numbers;
  std::unique_ptr<DeviceAdapters> cpu, gpu;
};

double apart(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += std::pow(double(a[i]) - double(b[i]), 2);
  return std::sqrt(squares / double(a.size()));
}

TEST_F(DeviceDecoderCuda, LogitsEqualTheCpusUpToRoundings) {
  for (const auto& [name, c, looping] : models()) {
    std::vector<float> plain;
    for (const int64_t rank : {0, 8, 3}) {
      if (testing::kEmulated && rank == 3) continue;
      SCOPED_TRACE(::testing::Message() << name << ", adapters of rank " << rank);
      const Buffer weights = weights_of(c);
      const Adapters adapters(c, looping, rank);
      std::vector<float> seen[2];
      for (const bool gpu : {false, true}) {
        const auto decoder = gpu ? make_device_decoder(c, weights, looping, kGpu, 1, Adapters::of(adapters.gpu))
                                 : make_decoder(c, weights, looping, Products::fp32, 1, Adapters::of(adapters.cpu));
        Sequence s(*decoder);
        const auto take = [&](int64_t, const Tensor& logits) {
          const float* from = logits.ptr<float>();
          seen[gpu].insert(seen[gpu].end(), from, from + logits.numel());
        };
        ASSERT_TRUE(s.extend(kPrompt, Decoder::Rows::all, take));
        ASSERT_TRUE(s.extend(std::vector<int32_t>{9, 2}, Decoder::Rows::all, take));  // continues in the cache
      }
      ASSERT_EQ(seen[0].size(), seen[1].size());
      // Each layer call rounds about 15 rows to bf16 before logits of size 2; with adapters five further products round
      // two more rows each.
      const double rows = double(layer_program(c, looping).layer_calls.size()) * (rank > 0 ? 25 : 15);
      const double allowed = testing::roundoff(DType::bf16) * std::sqrt(2 * rows) * 2, off = apart(seen[0], seen[1]);
      EXPECT_LT(off, allowed);
      std::printf("%s, rank %d: logits off by %.4f of %.4f allowed\n", name.c_str(), int(rank), off, allowed);
      if (rank == 0)
        plain = seen[0];
      else
        EXPECT_GT(apart(seen[0], plain), 2 * allowed) << "the adapters change nothing that would be seen";
    }
  }
}

// With logprobs the logits are copied to the host, which samples.
TEST_F(DeviceDecoderCuda, GraphsSampleTheTokensThatTheHostSamples) {
  for (const int64_t rank : {0, 8})
    for (const auto& [name, c, looping] : models()) {
      if (testing::kEmulated && (rank > 0 || looping)) continue;
      SCOPED_TRACE(::testing::Message() << name << ", adapters of rank " << rank);
      const Buffer weights = weights_of(c);
      const Adapters adapters(c, looping, rank);
      const auto decoder = make_device_decoder(c, weights, looping, kGpu, 1, Adapters::of(adapters.gpu));
      for (const SamplingOptions& o :
           {SamplingOptions{.temperature = 0}, SamplingOptions{}, SamplingOptions{.top_k = 5, .top_p = 0.9}}) {
        std::vector<int32_t> sampled[2];
        for (const bool host : {false, true}) {
          Sequence s(*decoder);
          ASSERT_TRUE(s.extend(kPrompt));
          for (int part = 0; part < 2; ++part) {  // a second call continues with the pending token
            const Sampled d = s.sample({.sampling = o,
                                        .seed = 7,
                                        .step = uint32_t(kTokens * part),
                                        .vocab = c.vocab - 2,
                                        .logprobs = host ? 0 : -1},
                                       kTokens);
            sampled[host].insert(sampled[host].end(), d.tokens.begin(), d.tokens.end());
          }
        }
        EXPECT_EQ(sampled[0], sampled[1]);
        EXPECT_EQ(sampled[0].size(), size_t(2 * kTokens));
        EXPECT_LT(*std::max_element(sampled[0].begin(), sampled[0].end()), c.vocab - 2);
      }
    }
}

TEST_F(DeviceDecoderCuda, SlotsDoNotSeeEachOtherAndAFullContextEnds) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptConfig c = testing::small_nano();
  const Buffer weights = weights_of(c);
  const auto decoder = make_device_decoder(c, weights, false, kGpu, 2);
  const SampleOptions greedy{.sampling = {.temperature = 0}};
  std::vector<int32_t> alone;
  {
    Sequence s(*decoder);
    s.extend(kPrompt);
    alone = s.sample(greedy, 100).tokens;
  }
  EXPECT_EQ(int64_t(alone.size()), c.context - int64_t(kPrompt.size()) + 1);  // the last token is pending
  Sequence a(*decoder), b(*decoder);
  a.extend(kPrompt), b.extend(std::vector<int32_t>{7, 7, 2});
  std::vector<int32_t> beside;
  for (int i = 0; i < 10; ++i) {
    const Sampled d = a.sample(greedy, 1);
    beside.push_back(d.tokens[0]);
    b.sample(greedy, 1);
  }
  EXPECT_EQ(beside, std::vector<int32_t>(alone.begin(), alone.begin() + 10));
  a.rewind(int64_t(kPrompt.size()) - 1);  // forgets the sampled tokens
  a.extend(std::vector<int32_t>{kPrompt.back()});
  EXPECT_EQ(a.sample(greedy, 3).tokens, std::vector<int32_t>(alone.begin(), alone.begin() + 3));
}

}  // namespace
}  // namespace ingot
