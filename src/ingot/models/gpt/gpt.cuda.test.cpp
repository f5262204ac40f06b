// Compares the model on a GPU with the CPU in fp64, with the same rounded matrices.
#include "ingot/models/gpt/gpt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/gpu/allocator.h"
#include "ingot/models/gpt/config/place.h"
#include "ingot/models/gpt/generate/device_weights.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::values;

const Device kGpu{Device::cuda, 0};

class GptCuda : public testing::GpuTest<> {};

struct Documents {
  explicit Documents(const GptConfig& c) {
    const std::vector<int> lengths =
        testing::kEmulated ? std::vector<int>{7, 1, 24} : std::vector<int>{7, 1, 24, 32, 13};
    for (int n : lengths) {
      for (int i = 0; i < n; ++i) positions.push_back(i);
      cu.push_back(int32_t(positions.size()));
    }
    const Rng rng(5, Purpose::test);
    for (uint64_t t = 0; t < positions.size(); ++t) {
      tokens.push_back(int32_t(rng.below(t, uint64_t(c.vocab))));
      targets.push_back(t == 1 ? -1 : int32_t(rng.below(t + 1000, uint64_t(c.vocab))));
    }
  }
  int64_t size() const { return int64_t(tokens.size()); }
  TokenBatch batch() {
    return {Tensor(tokens.data(), {size()}), Tensor(targets.data(), {size()}), Tensor(positions.data(), {size()}),
            Tensor(cu.data(), {int64_t(cu.size())})};
  }
  std::vector<int32_t> tokens, targets, positions, cu{0};
};
struct DeviceDocuments {
  explicit DeviceDocuments(Documents& d) : twin(d.batch()) {
    const auto send = [&](const Tensor& t) {
      DeviceBuffer& b = memory.emplace_back(DType::i32, t.shape);
      std::copy_n(t.ptr<int32_t>(), t.numel(), b.host().ptr<int32_t>());
      b.upload();
    };
    memory.reserve(4);
    for (const Tensor* t : {&twin.tokens, &twin.targets, &twin.positions, &twin.cu_seqlens}) send(*t);
  }
  TokenBatch batch() const {
    return {.tokens = memory[0],
            .targets = memory[1],
            .positions = memory[2],
            .cu_seqlens = memory[3],
            .host_positions = twin.positions,
            .host_cu_seqlens = twin.cu_seqlens};
  }
  TokenBatch twin;
  std::vector<DeviceBuffer> memory;
};

// Weights of realistic size, all random; matrices and tables hold numbers of bf16.
std::vector<double> random_weights(const ParameterLayout& layout, const GptConfig& c) {
  Buffer flat(DType::f32, {layout.padded_count()});
  fill_zero(flat);
  initialise(c, layout, flat, 3);
  for (const Parameter& p : layout.all()) {
    const Tensor w = layout.view(flat, p);
    const bool scalar = p.kind == ParameterKind::scalar;
    const auto start = values(w);
    Buffer rounded(scalar ? DType::f32 : DType::bf16, p.shape);
    testing::fill_normal(rounded, uint64_t(p.offset), scalar ? 0.2 : 1 / std::sqrt(double(p.shape[-1])));
    auto now = values(rounded);
    for (size_t i = 0; scalar && i < now.size(); ++i) now[i] += std::min(start[i], 2.0);
    testing::assign(w, now);
  }
  return values(flat);
}

double norm(const std::vector<double>& v) {
  double squares = 0;
  for (double x : v) squares += x * x;
  return std::sqrt(squares);
}

struct Numbers {
  std::vector<double> loss, grads;
};
Numbers on_cpu(const GptConfig& c, bool looping, const std::vector<double>& w, Documents& d) {
  const int64_t n = int64_t(w.size()), T = d.size();
  Buffer weights(DType::f64, {n}), grads(DType::f64, {n}), loss(DType::f64, {T}), dloss(DType::f64, {T});
  testing::assign(weights, w);
  testing::assign(dloss, std::vector<double>(size_t(T), 1.0 / double(T)));
  fill_zero(grads);
  Gpt model(c, DType::f64, {.capacity = T, .looping = looping, .training = true});
  model.losses_and_gradients(weights.tensor(), d.batch(), dloss, loss, grads);
  return {values(loss), values(grads)};
}
Numbers on_gpu(const GptConfig& c, bool looping, const std::vector<double>& w, Documents& d, bool keep_rows = true) {
  const int64_t n = int64_t(w.size()), T = d.size();
  Buffer host(DType::f32, {n});
  testing::assign(host, w);
  const DeviceWeights weights(host, kGpu, {});
  DeviceBuffer grads(DType::f32, {n}), loss(DType::f32, {T}), dloss(DType::f32, {T});
  testing::assign(grads.host(), std::vector<double>(size_t(n), 0));
  testing::assign(dloss.host(), std::vector<double>(size_t(T), 1.0 / double(T)));
  for (DeviceBuffer* b : {&grads, &loss, &dloss}) b->upload();
  const GptOptions options{
      .capacity = T + 3, .looping = looping, .training = true, .keep_rows = keep_rows, .device = kGpu};
  Gpt model(c, gpt_types(kGpu), options);
  model.losses_and_gradients(weights.weights(), DeviceDocuments(d).batch(), dloss, loss, grads);
  loss.download(), grads.download();
  return {values(loss.host()), values(grads.host())};
}

TEST_F(GptCuda, LossesAndGradientsEqualTheCpusInFp64) {
  std::vector<testing::Variant> all = testing::variants();
  for (testing::Variant& v : testing::parity_variants()) all.push_back(std::move(v));
  ASSERT_EQ(all.size(), 42u);
  for (size_t i = 0; i < all.size(); ++i) {
    if (testing::kEmulated && i % 20 != 0) continue;  // seconds each
    const auto& [name, config, looping] = all[i];
    SCOPED_TRACE(name);
    GptConfig c = config;
    if (c.factorised()) c.embed_dim = (c.embed_dim + 7) / 8 * 8;
    const ParameterLayout layout(c);
    Documents d(c);
    const auto w = random_weights(layout, c);
    const Numbers want = on_cpu(c, looping, w, d), got = on_gpu(c, looping, w, d);
    // Each layer call rounds some 30 rows of activations and gradients to bf16, at random, once each way; the gradient
    // of a parameter carries all these roundings.
    const double layer_calls = double(layer_program(c, looping).layer_calls.size());
    const double relative = testing::roundoff(DType::bf16) * std::sqrt(60 * layer_calls);
    // Where a slope jumps at 0, an argument of size 1 with error e has the wrong sign with a chance of e / pi, and the
    // whole gradient of such an element is wrong. e: some 16 roundings.
    const bool jumps = c.activation == "relu" || c.activation == "leaky_relu";
    const double turned = jumps ? std::sqrt(2 * 4 * testing::roundoff(DType::bf16) / M_PI) : 0;
    double off = 0;
    for (size_t t = 0; t < want.loss.size(); ++t) off = std::max(off, std::abs(got.loss[t] - want.loss[t]));
    EXPECT_LT(off, relative * 5);  // logits of size 5
    const auto part = [&](const std::vector<double>& v, const Parameter& p) {
      return std::vector<double>(v.begin() + p.offset, v.begin() + p.offset + p.shape.numel());
    };
    double worst = 0;
    for (const Parameter& p : layout.all()) {
      const auto g = part(got.grads, p), e = part(want.grads, p);
      std::vector<double> difference(g.size());
      for (size_t i = 0; i < g.size(); ++i) difference[i] = g[i] - e[i];
      // Sums over tokens have terms of either sign: a vector's gradient may be a tenth of its terms.
      const double allowed = (relative + turned) * (p.kind == ParameterKind::scalar ? 4 : 2) * (norm(e) + 1e-3);
      EXPECT_LT(norm(difference), allowed) << p.name << ", of norm " << norm(e);
      worst = std::max(worst, norm(difference) / allowed);
    }
    std::printf("%s: losses off by %.4f, gradients by %.2f of what is allowed\n", name.c_str(), off, worst);
  }
}

TEST_F(GptCuda, KeptRowsChangeNoBit) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  for (const auto& [name, config, looping] : testing::variants()) {
    SCOPED_TRACE(name);
    GptConfig c = config;
    if (c.factorised()) c.embed_dim = (c.embed_dim + 7) / 8 * 8;
    Documents d(c);
    const auto w = random_weights(ParameterLayout(c), c);
    const Numbers kept = on_gpu(c, looping, w, d, true), formed = on_gpu(c, looping, w, d, false);
    EXPECT_EQ(kept.loss, formed.loss);
    EXPECT_EQ(kept.grads, formed.grads);
  }
}

TEST_F(GptCuda, RepeatsBitForBit) {
  const GptConfig c = testing::small_golf();
  const ParameterLayout layout(c);
  Documents d(c);
  const auto w = random_weights(layout, c);
  const Numbers first = on_gpu(c, true, w, d);
  for (int i = 0; i < (testing::kEmulated ? 1 : 20); ++i) {
    const Numbers again = on_gpu(c, true, w, d);
    EXPECT_EQ(again.loss, first.loss);
    EXPECT_EQ(again.grads, first.grads);
  }
}

TEST(GptPlace, AModelThatAGpuCannotRunStaysOnTheCpuOrIsRefusedByName) {
  GptConfig c = testing::small_golf();
  c.head_dim = 12;
  EXPECT_EQ(place_of_gpt(c, DeviceChoice::cpu).device, Device{});
  EXPECT_EQ(place_of_gpt(c, DeviceChoice::automatic).device, Device{});
  try {
    place_of_gpt(c, DeviceChoice::cuda);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("device cuda: found "), std::string::npos) << e.what();
  }
}

#ifdef INGOT_EMULATED_DEVICE
TEST(GptPlace, EveryGpuFromComputeCapability80OnRunsAModel) {
  const GptConfig c = testing::small_golf();
  gpu::Limits turing = gpu::limits_of("8.6");
  turing.capability = 75;
  for (const char* capability : {"8.0", "8.6", "8.9", "10.0", "12.0"}) {
    const testing::EmulatedLimits limits(capability);
    EXPECT_EQ(place_of_gpt(c, DeviceChoice::cuda).device, kGpu) << capability;
  }
  const testing::EmulatedLimits limits(turing);
  EXPECT_EQ(place_of_gpt(c, DeviceChoice::automatic).note,
            "on the CPU: found emulated GPU of compute capability 7.5, expected 8.0 or later");
}
#endif

}  // namespace
}  // namespace ingot
