#include "ingot/models/gpt/artifact/artifact.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "ingot/core/rng.h"
#include "ingot/io/codecs/byte_coder.h"
#include "ingot/io/codecs/crc32c.h"
#include "ingot/io/codecs/integer_coder.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;

Artifact random_artifact(const GptConfig& config, ArtifactCoder coder = ArtifactCoder::range) {
  Artifact a{.run_config = "{\"model\": " + to_json(config) + ", \"train\": {\"products\": \"bf16\"}}",
             .config = config,
             .looping = true,
             .step = 12,
             .tokenizer_hash = 77,
             .coder = coder};
  const Rng rng(5, Purpose::test);
  uint64_t at = 0;
  const ParameterLayout layout(config);
  for (const Parameter& p : layout.all()) {
    ArtifactTensor t;
    if (p.kind != ParameterKind::scalar) t.bits = 4 + int(rng.below(at++, 5));
    const int64_t qmax = (1 << (t.bits - 1)) - 1, numbers = t.bits == 16 ? p.shape.numel() : p.shape[0];
    for (int64_t i = 0; i < numbers; ++i) t.numbers.push_back(f16(float(rng.below(at++, 1000)) / 256 - 1));
    if (t.bits != 16)
      for (int64_t i = 0; i < p.shape.numel(); ++i)
        t.values.push_back(int8_t(int64_t(rng.below(at++, uint64_t(2 * qmax + 1))) - qmax));
    a.tensors.push_back(t);
  }
  return a;
}

bool has(ArtifactCoder c) {
  return c == ArtifactCoder::range || has_byte_coder(c == ArtifactCoder::brotli ? ByteCoder::brotli : ByteCoder::lzma);
}
constexpr ArtifactCoder kCoders[] = {ArtifactCoder::range, ArtifactCoder::brotli, ArtifactCoder::lzma};

TEST(artifact, a_written_model_is_read_and_dequantised) {
  size_t turn = 0;
  for (const testing::Variant& v : testing::variants()) {
    const ArtifactCoder coder = kCoders[turn++ % std::size(kCoders)];
    if (!has(coder)) continue;
    const Artifact a = random_artifact(v.config, coder);
    const Artifact b = parse_artifact(artifact_bytes(a), "a");
    EXPECT_EQ(b.coder, coder);
    EXPECT_EQ(to_json(b.config), to_json(a.config));
    EXPECT_EQ(std::tuple(b.looping, b.step, b.tokenizer_hash), std::tuple(a.looping, a.step, a.tokenizer_hash));
    EXPECT_NE(b.run_config.find("\"products\":\"bf16\""), std::string::npos) << b.run_config;
    ASSERT_EQ(b.tensors.size(), a.tensors.size());
    const ParameterLayout layout(v.config);
    std::vector<float> flat(size_t(layout.padded_count()), NAN);
    const Tensor weights(flat.data(), {layout.padded_count()});
    dequantize(b, layout, weights);
    for (size_t i = 0; i < a.tensors.size(); ++i) {
      const Parameter& p = layout.all()[i];
      const ArtifactTensor& t = a.tensors[i];
      EXPECT_EQ(b.tensors[i].values, t.values) << p.name;
      for (int64_t n = 0; n < p.shape.numel(); ++n) {
        const int64_t row = t.bits == 16 ? n : n / p.shape[-1];
        const float expected = float(t.numbers[size_t(row)]) * (t.bits == 16 ? 1 : float(t.values[size_t(n)]));
        ASSERT_EQ(layout.view(weights, p).ptr<float>()[n], expected) << p.name << " " << n;
      }
    }
  }
}

TEST(artifact, a_cut_lengthened_or_altered_file_is_refused) {
  GptConfig config = testing::small_nano();
  config.layers = 1;
  for (const ArtifactCoder coder : kCoders) {
    if (!has(coder)) continue;
    const std::string whole = artifact_bytes(random_artifact(config, coder));
    const auto refused = [](const std::string& bytes) {
      const std::string error = error_of([&] { parse_artifact(bytes, "a.ingot"); });
      return error.find("a.ingot: ") != std::string::npos && error.find('\n') == std::string::npos;
    };
    EXPECT_FALSE(refused(whole));
    EXPECT_TRUE(refused(whole + "x"));
    for (size_t n = 0; n < whole.size(); n += n < 2000 ? 1 : 37) EXPECT_TRUE(refused(whole.substr(0, n))) << n;
    for (size_t n = 0; n < whole.size(); n += n < 2000 ? 1 : 37)
      for (const int bit : {1, 128}) {
        std::string altered = whole;
        altered[n] = char(altered[n] ^ bit);
        EXPECT_TRUE(refused(altered)) << name_of(coder) << ' ' << n;
      }
  }
}

// Versions 1 and 2 did not code fp16 numbers, and version 1 had no coder's byte.
std::string bytes_of_version(int version, const Artifact& a) {
  const std::string now = artifact_bytes(a);
  uint32_t length = 0;
  std::memcpy(&length, &now[12], 4);
  std::string out = now.substr(0, 20 + length), tensors;
  out[8] = char(version);
  if (version > 1) out.push_back(char(a.coder));
  const auto put = [&](uint32_t n) { out.append(reinterpret_cast<const char*>(&n), 4); };
  for (const ArtifactTensor& t : a.tensors) {
    std::string of_tensor(reinterpret_cast<const char*>(t.numbers.data()), 2 * t.numbers.size());
    if (t.bits != 16) of_tensor += encode_integers(t.values, t.bits);
    out.push_back(char(t.bits)), put(uint32_t(of_tensor.size())), put(crc32c(of_tensor));
    tensors += of_tensor;
  }
  put(crc32c(out));
  return out + tensors;
}
TEST(artifact, the_versions_before_are_read) {
  const Artifact a = random_artifact(testing::small_nano());
  for (const int version : {1, 2}) {
    const Artifact b = parse_artifact(bytes_of_version(version, a), "a");
    EXPECT_EQ(b.coder, ArtifactCoder::range);
    for (size_t i = 0; i < a.tensors.size(); ++i) {
      EXPECT_EQ(b.tensors[i].values, a.tensors[i].values);
      for (size_t n = 0; n < a.tensors[i].numbers.size(); ++n)
        ASSERT_EQ(b.tensors[i].numbers[n].bits, a.tensors[i].numbers[n].bits);
    }
  }
}

// The upper bytes of the scales of similar rows compress to almost nothing.
TEST(artifact, numbers_of_similar_size_take_fewer_bytes) {
  Artifact a = random_artifact(testing::small_nano());
  const Rng rng(6, Purpose::test);
  for (ArtifactTensor& t : a.tensors)
    for (size_t n = 0; n < t.numbers.size(); ++n) t.numbers[n] = f16(float(0.5 + 0.4 * rng.uniform(n)));
  size_t numbers = 0;
  for (const ArtifactTensor& t : a.tensors) numbers += t.numbers.size();
  const size_t before = bytes_of_version(2, a).size(), now = artifact_bytes(a).size();
  EXPECT_LT(now + numbers / 2, before);
}

TEST(artifact, a_stream_that_would_expand_too_far_is_refused) {
  for (const ArtifactCoder coder : {ArtifactCoder::brotli, ArtifactCoder::lzma}) {
    if (!has(coder)) continue;
    GptConfig config = testing::small_nano();
    config.vocab = 40000;
    Artifact a = random_artifact(config, coder);
    for (ArtifactTensor& t : a.tensors) {
      std::fill(t.values.begin(), t.values.end(), int8_t(0));
      std::fill(t.numbers.begin(), t.numbers.end(), f16(1.f));
    }
    EXPECT_NE(error_of([&] {
                artifact_bytes(a);
              }).find("artifact: found weights that are all alike, expected coder range for them"),
              std::string::npos);
  }
}

TEST(artifact, a_model_far_larger_than_the_file_is_refused_before_it_takes_memory) {
  const std::string whole = artifact_bytes(random_artifact(testing::small_nano()));
  uint32_t length = 0;
  std::memcpy(&length, &whole[12], 4);
  std::string text = whole.substr(20, length);
  const size_t at = text.find("\"vocab\":37");
  ASSERT_NE(at, std::string::npos);
  text.replace(at, 10, "\"vocab\":16000000");
  const uint32_t longer = uint32_t(text.size()), sum = crc32c(text);
  std::string bytes = whole.substr(0, 12) + std::string(8, 0) + text + whole.substr(20 + length);
  std::memcpy(&bytes[12], &longer, 4);
  std::memcpy(&bytes[16], &sum, 4);
  EXPECT_NE(error_of([&] { parse_artifact(bytes, "a"); }).find(" for 384000000 numbers of "), std::string::npos)
      << error_of([&] { parse_artifact(bytes, "a"); });
}

}  // namespace
}  // namespace ingot
