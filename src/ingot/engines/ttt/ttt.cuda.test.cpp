// Compares adaptation on a GPU with the CPU in fp64, with the same rounded matrices.
#include <gtest/gtest.h>

#include <algorithm>

#include "ingot/engines/ttt/adaptation_case.test.h"
#include "ingot/io/formats/safetensors.h"
#include "ingot/models/gpt/generate/device_weights.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::ChunkLosses;
using Case = testing::AdaptationCase;

const Device kGpu{Device::cuda, 0};

class TttCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    if (testing::kEmulated && name != "ScoresEqualTheCpusInFp64") GTEST_SKIP() << "too much for the emulator";
  }
};

// Periodic documents with different periods, under a model with matrices of bf16 numbers.
struct Text : Case {
  Text(const GptConfig& c, std::vector<int64_t> lengths) : Case(c, std::move(lengths)) {
    for (size_t d = 0; d < begins.size(); ++d)
      for (int64_t t = 1; t < this->lengths[d]; ++t)
        tokens[size_t(begins[d] + t)] = 1 + int32_t((t * t) % (5 + int64_t(d)) + 3 * int64_t(d));
    host.resize(memory.size());
    for (const Parameter& p : layout.all()) {
      const bool matrix = p.kind != ParameterKind::scalar;
      for (int64_t i = p.offset; i < p.offset + p.shape.numel(); ++i) {
        const float x = float(memory[size_t(i)]);
        memory[size_t(i)] = host[size_t(i)] = matrix ? float(bf16(x)) : x;
      }
    }
  }
  AdaptationOptions default_options() const {
    AdaptationOptions o;
    o.adapters = {.rank = 8, .lr = 1e-2};
    o.chunk = 4, o.window = 16, o.documents = 3;
    return o;
  }
  ChunkLosses on_cpu(const AdaptationOptions& o) const {
    return testing::chunk_losses(*this, Tensor(const_cast<double*>(memory.data()), flat.shape), o);
  }
  ChunkLosses on_gpu(const AdaptationOptions& o) const {
    const DeviceWeights there(Tensor(const_cast<float*>(host.data()), flat.shape), kGpu, o.stream);
    return testing::chunk_losses(*this, there.weights(), o);
  }
  std::vector<float> host;
};

const std::vector<int64_t> kLengths =
    testing::kEmulated ? std::vector<int64_t>{45, 13} : std::vector<int64_t>{45, 13, 30, 21, 6, 38};

double sum(const ChunkLosses& of) {
  double all = 0;
  for (const auto& [document, chunks] : of)
    for (double x : chunks) all += x;
  return all;
}
// Root mean square of the difference between two scores of a chunk.
double apart(const ChunkLosses& a, const ChunkLosses& b) {
  double squares = 0;
  int64_t count = 0;
  for (const auto& [document, chunks] : a)
    for (size_t c = 0; c < chunks.size(); ++c, ++count) squares += std::pow(chunks[c] - b.at(document)[c], 2);
  return std::sqrt(squares / double(count));
}

// The error of a chunk's score from bf16 alone, as in GptCuda: each layer call rounds some 60 rows at random, logits
// are of size 5, and a chunk adds up four losses with partly common errors.
double of_rounding(const Text& k, bool looping) {
  const double layer_calls = double(layer_program(k.config, looping).layer_calls.size());
  return 4 * 5 * testing::roundoff(DType::bf16) * std::sqrt(60 * layer_calls);
}

TEST_F(TttCuda, ScoresEqualTheCpusInFp64) {
  for (const auto& [name, config, looping] : testing::variants()) {
    if (testing::kEmulated && name != "golf") continue;  // 20 seconds each
    SCOPED_TRACE(name);
    GptConfig c = config;
    if (c.factorised()) c.embed_dim = 16;
    const Text k(c, kLengths);
    AdaptationOptions o = k.default_options();
    o.looping = looping;
    AdaptationOptions still = o;
    still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
    const ChunkLosses want = k.on_cpu(o), got = k.on_gpu(o), unadapted = k.on_cpu(still);
    const double rounding = of_rounding(k, looping), learnt = apart(want, unadapted);
    // The first chunks are scored before any adapter has learnt.
    for (const auto& [document, chunks] : want) {
      ASSERT_EQ(got.at(document).size(), chunks.size());
      EXPECT_NEAR(got.at(document)[0], chunks[0], rounding) << "document " << document;
    }
    // In later chunks AdamW without a first moment follows the signs of the gradients, and rounding decides the signs
    // of nearly zero gradients. The effect of adaptation must agree up to a fraction of the effect.
    EXPECT_LT(sum(want), 0.9 * sum(unadapted)) << "the test's documents are not learnt";
    EXPECT_LT(apart(got, want), rounding + 0.15 * learnt);
    EXPECT_NEAR(sum(got), sum(want), 0.05 * (sum(unadapted) - sum(want)));
    std::printf("%s: apart %.4f, rounding %.4f, learnt %.4f; sums %.3f, %.3f, unadapted %.3f\n", name.c_str(),
                apart(got, want), rounding, learnt, sum(got), sum(want), sum(unadapted));
  }
}

TEST_F(TttCuda, NoScoreSeesATokenAfterIt) {
  const Text k(testing::small_golf(), kLengths);
  const ChunkLosses before = k.on_gpu(k.default_options());
  for (const int64_t t : {5, 17, 40}) {
    Text changed = k;
    for (int64_t i = t + 1; i < kLengths[0]; ++i) changed.tokens[size_t(i)] = 1 + (k.tokens[size_t(i)] + 3) % 5;
    const ChunkLosses after = changed.on_gpu(k.default_options());
    for (const auto& [document, chunks] : before)
      for (size_t c = 0; c < chunks.size(); ++c) {
        const int64_t end = std::min<int64_t>(kLengths[size_t(document)], int64_t(c + 1) * 4);
        if (document != 0 || end <= t)
          EXPECT_EQ(after.at(document)[c], chunks[c]) << "document " << document << ", chunk " << c;
        else
          EXPECT_NE(after.at(document)[c], chunks[c]) << "chunk " << c << ": the test changed nothing";
      }
  }
}

// The library chooses products by the number of rows, so sums may run in another order: only the last bits differ.
TEST_F(TttCuda, ScoresDependOnTheGroupingByRoundingAlone) {
  const Text k(testing::small_golf(), kLengths);
  const ChunkLosses together = k.on_gpu(k.default_options());
  AdaptationOptions still = k.default_options();
  still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
  const double learnt = apart(together, k.on_gpu(still));
  for (const int64_t documents : {1, 2, 6}) {
    AdaptationOptions o = k.default_options();
    o.documents = documents;
    const ChunkLosses other = k.on_gpu(o);
    EXPECT_LT(apart(other, together), of_rounding(k, false) + 0.15 * learnt) << documents << " side by side";
    std::printf("%d side by side: apart %.5f\n", int(documents), apart(other, together));
  }
}

TEST_F(TttCuda, RepeatsBitForBit) {
  const Text k(testing::small_golf(), kLengths);
  AdaptationOptions o = k.default_options();
  o.looping = true;
  const ChunkLosses first = k.on_gpu(o);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(k.on_gpu(o), first);
}

TEST_F(TttCuda, AnyOrderOfSumsChangesScoresByRoundingAlone) {
  const Text k(testing::small_golf(), kLengths);
  AdaptationOptions still = k.default_options(), any = k.default_options();
  still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
  any.any_order = true;
  const ChunkLosses fixed = k.on_gpu(k.default_options());
  const double learnt = apart(fixed, k.on_gpu(still));
  for (const int64_t documents : {1, 3, 6}) {
    any.documents = documents;
    EXPECT_LT(apart(k.on_gpu(any), fixed), of_rounding(k, false) + 0.15 * learnt) << documents << " side by side";
  }
}

TEST_F(TttCuda, InexactMethodsAgreeWithTheCpu) {
  const Text k(testing::small_golf(), kLengths);
  for (const Inexact way : {Inexact::stale_keys, Inexact::chunk_gradients}) {
    AdaptationOptions o = k.default_options();
    o.inexact = way;
    AdaptationOptions still = o;
    still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
    const ChunkLosses want = k.on_cpu(o), got = k.on_gpu(o);
    const double learnt = apart(want, k.on_cpu(still));
    EXPECT_LT(apart(got, want), of_rounding(k, false) + 0.2 * learnt) << int(way);
    std::printf("%d: apart %.4f, learnt %.4f\n", int(way), apart(got, want), learnt);
  }
}

// Adapters trained on a GPU lower the text's losses as much as adapters trained on the CPU: both score the text on the
// CPU, without further training.
TEST_F(TttCuda, LearnsATextAsTheCpuDoes) {
  const Text k(testing::small_golf(), {45});
  const testing::TemporaryDirectory dir;
  const std::vector<int32_t> text(k.tokens.begin(), k.tokens.begin() + 45);
  const Tensor exact(const_cast<double*>(k.memory.data()), k.flat.shape);
  const DeviceWeights there(Tensor(const_cast<float*>(k.host.data()), k.flat.shape), kGpu, {});
  AdaptationOptions o = k.default_options(), still = o;
  still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
  const double before = adapt(k.config, exact, text, still).loss;
  const auto after = [&](const GptWeights& weights, const std::string& name) {
    const Adapted done = adapt(k.config, weights, text, o, 2);
    EXPECT_EQ(done.updates, 22);
    save_safetensors(dir.path() + name, done.adapters->saved(0).tensors);
    const SafetensorsFile file(dir.path() + name);
    AdaptationOptions with = still;
    with.begin_from = &file;
    return adapt(k.config, exact, text, with).loss;
  };
  const double cpu = after(exact, "/cpu.safetensors"), gpu = after(there.weights(), "/gpu.safetensors");
  EXPECT_LT(cpu, 0.9 * before) << "the text is not learnt";
  EXPECT_NEAR(gpu, cpu, 0.1 * (before - cpu));
  std::printf("loss %.4f, learnt on the CPU %.4f, on the GPU %.4f\n", before, cpu, gpu);
}

// Rows of adapters at addresses other than multiples of 16 bytes.
TEST_F(TttCuda, TakesAnyRank) {
  const Text k(testing::small_golf(), {30, 13});
  for (const int64_t rank : {1, 3, 20}) {
    AdaptationOptions o = k.default_options(), still = o;
    o.adapters.rank = rank;
    still.adapters.lr = 1e-30, still.adapters.weight_decay = 0;
    const ChunkLosses want = k.on_cpu(o), got = k.on_gpu(o);
    EXPECT_LT(apart(got, want), of_rounding(k, false) + 0.2 * apart(want, k.on_cpu(still))) << "rank " << rank;
  }
}

}  // namespace
}  // namespace ingot
