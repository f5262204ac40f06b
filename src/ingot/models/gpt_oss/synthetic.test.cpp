#include "ingot/models/gpt_oss/synthetic.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/registry.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"
#include "ingot/text/chat/harmony.h"

namespace ingot {
namespace {

using testing::error_of;

TEST(synthetic, a_name_states_the_size_and_the_format_and_paths_are_no_such_names) {
  EXPECT_FALSE(synthetic_model("synthetic").has_value());
  EXPECT_FALSE(synthetic_model("runs/synthetic:20b").has_value());
  EXPECT_EQ(synthetic_model("synthetic:20b")->size, "20b");
  EXPECT_EQ(synthetic_model("synthetic:20b")->dense, WeightFormat::bf16);
  EXPECT_EQ(synthetic_model("synthetic:120b:fp8")->dense, WeightFormat::fp8);
  EXPECT_EQ(error_of([] { synthetic_model("synthetic:7b"); }),
            "usage: synthetic:7b: found the size '7b', expected 20b, 120b or small");
  EXPECT_EQ(error_of([] { synthetic_model("synthetic:20b:int8"); }),
            "usage: synthetic:20b:int8: found the format 'int8', expected bf16, fp8 or mxfp4");
}

TEST(synthetic, the_tokenizer_has_the_model_s_vocabulary_and_harmony_s_special_tokens_at_their_ids) {
  for (const char* size : {"20b", "small"}) {
    const GptOssConfig config = synthetic_gpt_oss(size);
    const ByteBpe bpe = synthetic_tokenizer(config);
    EXPECT_EQ(bpe.vocab_size(), config.vocab);
    const HarmonyTokens tokens(bpe, size);
    if (config.end_tokens.empty()) continue;
    EXPECT_EQ(tokens.answer_end, 200002);
    EXPECT_EQ(tokens.start, 200006);
    EXPECT_EQ(tokens.end, 200007);
    EXPECT_EQ(tokens.message, 200008);
    EXPECT_EQ(tokens.call, 200012);
  }
}

TEST(synthetic, text_is_encoded_byte_by_byte_and_every_ordinary_id_has_a_text_of_its_own) {
  const ByteBpe bpe = synthetic_tokenizer(synthetic_gpt_oss("small"));
  EXPECT_EQ(bpe.encode("a b"), (std::vector<int32_t>{'a', ' ', 'b'}));
  const std::string every_byte = [] {
    std::string text;
    for (int c = 0; c < 256; ++c) text += char(c);
    return text;
  }();
  EXPECT_EQ(bpe.decode(bpe.encode("\xc3\xa4 \n\t")), "\xc3\xa4 \n\t");
  std::set<std::string> texts;
  for (int32_t id = 0; id < 984; ++id) texts.insert(bpe.decode({&id, 1}));
  EXPECT_EQ(texts.size(), 984u);
  for (const char c : every_byte) EXPECT_EQ(texts.count(std::string(1, c)), 1u) << int(c);
}

TEST(synthetic, a_small_model_answers_on_the_cpu_and_leaves_no_file) {
  const testing::TemporaryDirectory dir;
  setenv("TMPDIR", dir.path().c_str(), 1);
  const OpenedModel a = open_model("synthetic:small", {.context = 32, .device = DeviceChoice::cpu});
  const OpenedModel b = open_model("synthetic:small", {.context = 32, .layers = 1, .device = DeviceChoice::cpu});
  unsetenv("TMPDIR");
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_EQ(a.note, "random weights: every answer is random text");
  EXPECT_GT(a.weight_bytes, b.weight_bytes);
  std::vector<std::vector<int32_t>> answers;
  for (const OpenedModel* m : {&a, &a, &b}) {
    Sequence sequence(*m->decoder);
    sequence.extend(std::vector<int32_t>{1, 2, 3});
    answers.push_back(sequence.sample({.sampling = {.temperature = 1}, .seed = 5}, 8).tokens);
    EXPECT_EQ(answers.back().size(), 8u);
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_NE(answers[0], answers[2]);
}

TEST(synthetic, large_models_need_a_gpu_and_the_error_names_a_model_for_a_cpu) {
  EXPECT_EQ(
      error_of([] { open_model("synthetic:20b", {.context = 32, .device = DeviceChoice::cpu}); }),
      "unsupported: synthetic:20b: found no GPU for these weights (the CPU was asked for), expected one, or a model of "
      "`ingot convert --synthetic 20b`, which also runs on a CPU");
  EXPECT_EQ(error_of([] { open_model("synthetic:small", {.context = 32, .layers = 5}); }),
            "usage: --layers: found 5, expected at most 4, the model's");
}

TEST(synthetic, a_model_that_the_memory_does_not_hold_is_refused_by_its_name) {
  const std::string error = error_of(
      [] { open_model("synthetic:small", {.context = 1 << 17, .slots = 1 << 24, .device = DeviceChoice::cpu}); });
  EXPECT_EQ(error.find("unsupported: synthetic:small needs "), 0u) << error;
}

TEST(synthetic, the_vocabulary_chats_and_another_vocabulary_is_refused) {
  const Vocabulary v = load_vocabulary("synthetic:small");
  ASSERT_NE(v.chat, nullptr);
  EXPECT_STREQ(v.chat->name(), "harmony");
  EXPECT_EQ(model_kind_of("synthetic:120b").context("synthetic:120b"), 131072);
  const testing::TemporaryDirectory dir;
  synthetic_tokenizer(synthetic_gpt_oss("small")).save(dir / "tokenizer.json");
  EXPECT_EQ(load_vocabulary("synthetic:small", {.tokenizer = dir / "tokenizer.json"}).bpe->vocab_size(), 1000);
  EXPECT_NE(error_of([&] {
              load_vocabulary("synthetic:20b", {.tokenizer = dir / "tokenizer.json"});
            }).find("a tokenizer of another vocabulary"),
            std::string::npos);
}

}  // namespace
}  // namespace ingot
