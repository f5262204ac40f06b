#include "ingot/engines/generate/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "ingot/testing/temporary_directory.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"

namespace ingot {
namespace {

struct Fixture {
  explicit Fixture(int64_t vocab = 10) : config(gpt_preset("golf")), tokenizer(CharTokenizer::from_text("abcdefghij")) {
    config.vocab = vocab;
    config.dim = 24;
    config.layers = 4;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = 8;
    config.mlp_hidden = 32;
    config.context = 16;
    config.rotary_dim = 4;
    config.xsa_layers = 2;
    config.lane_start = 3;
    config.loop_first = config.loop_last = 1;
    const ParameterLayout layout(config);
    memory.resize(size_t(layout.padded_count()));
    weights = Tensor(memory.data(), {layout.padded_count()});
    const Rng rng(4, Purpose::test);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = float(0.5 * rng.normal(i));
  }
  GptConfig config;
  CharTokenizer tokenizer;
  std::vector<float> memory;
  Tensor weights;
};

TEST(generator, greedy_text_equals_the_choices_of_the_full_forward_pass) {
  Fixture f;
  Generator generator(f.config, f.weights, true);
  std::vector<int32_t> all{3, 1, 4};
  const auto made = generator.generate(f.tokenizer, all, {.tokens = 13, .sampling = {.temperature = 0}}).tokens;
  ASSERT_EQ(made.size(), 13u);
  Gpt model(f.config, DType::f32, {.capacity = 16, .looping = true});
  for (int32_t token : made) {
    std::vector<int32_t> positions(all.size());
    std::iota(positions.begin(), positions.end(), 0);
    const int64_t n = int64_t(all.size());
    int32_t cu[2] = {0, int32_t(n)}, row[1] = {int32_t(n - 1)};
    float logits[10];
    model.logits(
        f.weights,
        {.tokens = Tensor(all.data(), {n}), .positions = Tensor(positions.data(), {n}), .cu_seqlens = Tensor(cu, {2})},
        Tensor(row, {1}), Tensor(logits, {1, 10}));
    EXPECT_EQ(token, std::max_element(logits, logits + 10) - logits);
    all.push_back(token);
  }
}

TEST(generator, the_seed_decides_and_the_context_may_overflow) {
  Fixture f;
  Generator generator(f.config, f.weights, false);
  const std::vector<int32_t> prompt(40, 2);  // longer than the context
  const GenerateOptions options{.tokens = 50, .seed = 9};
  const auto first = generator.generate(f.tokenizer, prompt, options).tokens,
             second = generator.generate(f.tokenizer, prompt, options).tokens;
  EXPECT_EQ(first.size(), 50u);
  EXPECT_EQ(first, second);
  GenerateOptions other = options;
  other.seed = 10;
  EXPECT_NE(generator.generate(f.tokenizer, prompt, other).tokens, first);
  int count = 0;
  EXPECT_EQ(generator.generate(f.tokenizer, prompt, options, [&](int32_t) { return ++count < 3; }).tokens.size(), 3u);
}

TEST(decoder, nothing_to_append_and_more_than_a_batch_are_refused) {
  Fixture f;
  const auto decoder = make_decoder(f.config, f.weights, false, Products::fp32);
  Sequence sequence(*decoder);
  int calls = 0;
  const auto append = [&](size_t n) {
    const std::vector<int32_t> ids(n, 1);
    return testing::error_of(
        [&] { sequence.extend(ids, Decoder::Rows::last, [&](int64_t, const Tensor&) { ++calls; }); });
  };
  EXPECT_NE(append(0).find("found 0 tokens to append, expected 1 to 16"), std::string::npos);
  EXPECT_NE(append(17).find("found 17 tokens to append, expected 1 to 16"), std::string::npos);
  EXPECT_EQ(append(16), "");
  EXPECT_NE(append(1).find("found 17 tokens, expected at most 16, the context"), std::string::npos);
  EXPECT_EQ(calls, 1);
}

TEST(generator, a_prompt_follows_the_start_token) {
  const std::vector<std::string_view> text = {"abc"};
  const ByteBpe bpe = train_bpe(text, 257);
  ASSERT_EQ(bpe.bos(), 0);
  const Fixture f(257);
  const std::vector<int32_t> prompt = {98, 99}, fed = {0, 98, 99};
  const auto decoder = make_decoder(f.config, f.weights, false, Products::fp32);
  const auto want = Session(*decoder).generate(fed, {.tokens = 8, .sampling = {.temperature = 0}}).tokens;
  Generator generator(f.config, f.weights, false);
  const GenerateOptions options{.tokens = 8, .sampling = {.temperature = 0}, .stop_at_document_end = false};
  EXPECT_EQ(generator.generate(bpe, prompt, options).tokens, want);
}

TEST(generator, an_empty_prompt_needs_a_start_token) {
  Fixture f;
  Generator generator(f.config, f.weights, false);
  EXPECT_THROW(generator.generate(f.tokenizer, {}, {}), Error);
}

TEST(generator, a_tokenizer_of_another_vocabulary_is_refused) {
  Fixture f;
  Generator generator(f.config, f.weights, false);
  const std::vector<int32_t> prompt = {1};
  EXPECT_EQ(testing::error_of([&] { generator.generate(CharTokenizer::from_text("abc"), prompt, {}); }),
            "invalid argument: generate: found a tokenizer of 3 tokens, expected the model's 10");
}

}  // namespace
}  // namespace ingot
