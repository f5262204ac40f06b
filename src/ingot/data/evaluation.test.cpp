#include "ingot/data/evaluation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ingot/testing/temporary_directory.h"
#include "ingot/text/byte_tokenizer.test.h"
#include "ingot/text/char_tokenizer.h"

namespace ingot {
namespace {

// Every token is unique, so a target determines its position. `bos` is a token that does not occur.
std::shared_ptr<const TokenSource> unique_tokens(const std::vector<int64_t>& lengths, int32_t bos = 1 << 20) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> begins;
  for (const int64_t n : lengths) {
    begins.push_back(int64_t(tokens.size()));
    for (int64_t i = 0; i < n; ++i) tokens.push_back(int32_t(tokens.size()));
  }
  const int64_t vocab = int64_t(tokens.size());
  return tokens_in_memory(std::move(tokens), std::move(begins), bos, vocab);
}

const std::vector<int64_t> kLengths = {5, 1, 40, 100, 16, 17, 2, 33};

// For each target: the number of context tokens at its scoring, in any batch. Also checks that each target is scored
// once.
std::vector<int64_t> contexts(const std::shared_ptr<const TokenSource>& source, const EvaluationOptions& options) {
  const EvaluationBatches batches(source, options);
  std::vector<int64_t> context(size_t(source->size()), 0);
  const std::vector<int64_t> begins = source->document_begins();
  Batch b;
  for (int64_t i = 0; i < batches.count(); ++i) {
    batches.fill(i, b);
    EXPECT_LE(b.size(), options.tokens);
    EXPECT_GT(b.size(), 0);
    for (int64_t s = 0; s < b.segments(); ++s)
      for (int32_t t = b.cu_seqlens[size_t(s)]; t < b.cu_seqlens[size_t(s) + 1]; ++t) {
        EXPECT_EQ(b.positions[size_t(t)], t - b.cu_seqlens[size_t(s)]);
        const int64_t at = b.tokens[size_t(t)];
        const size_t document = size_t(std::upper_bound(begins.begin(), begins.end(), at) - begins.begin()) - 1;
        EXPECT_EQ(b.documents[size_t(s)], int32_t(document)) << "a segment crosses documents";
        if (b.targets[size_t(t)] < 0) continue;
        EXPECT_EQ(b.targets[size_t(t)], b.tokens[size_t(t)] + 1);
        EXPECT_EQ(context[size_t(b.targets[size_t(t)])], 0) << "scored twice";
        context[size_t(b.targets[size_t(t)])] = b.positions[size_t(t)] + 1;
      }
  }
  EXPECT_EQ(batches.targets(), source->size() - (source->bos() >= 0 ? 1 : int64_t(begins.size())));
  return context;
}

TEST(evaluation, every_target_is_scored_exactly_once) {
  const auto source = unique_tokens(kLengths);
  for (const int64_t tokens : {1, 7, 16, 50, 1000})
    for (const int64_t context : {1, 4, 16, 64})
      for (const int64_t stride : {0, 1, 3})
        for (const bool flat : {false, true}) {
          if (stride > context || (flat && stride > 0)) continue;
          const std::vector<int64_t> got =
              contexts(source, {.tokens = tokens, .context = context, .stride = stride, .flat = flat});
          EXPECT_EQ(got[0], 0);
          for (size_t t = 1; t < got.size(); ++t)
            EXPECT_GT(got[t], 0) << tokens << " " << context << " " << stride << " " << t;
        }
}

TEST(evaluation, without_bos_a_documents_first_token_is_no_target) {
  const auto source = unique_tokens(kLengths, -1);
  const std::vector<int64_t> begins = source->document_begins();
  for (const int64_t tokens : {1, 7, 16, 50, 1000})
    for (const int64_t stride : {0, 3})
      for (const bool flat : {false, true}) {
        if (flat && stride > 0) continue;
        const auto got =
            contexts(source, {.tokens = tokens, .context = 16, .stride = std::min(stride, tokens), .flat = flat});
        for (size_t t = 0; t < got.size(); ++t)
          EXPECT_EQ(got[t] > 0, !std::binary_search(begins.begin(), begins.end(), int64_t(t))) << tokens << " " << t;
      }
  EXPECT_THROW(EvaluationBatches(unique_tokens({1, 1, 1}, -1), {.tokens = 8}), Error);
  EXPECT_THROW(EvaluationBatches(unique_tokens({1, 1, 1}, -1), {.tokens = 8, .flat = true}), Error);
}

TEST(evaluation, a_batch_holds_the_tokens_of_the_document_before_each_segment) {
  const auto source = unique_tokens({2, 9});
  const EvaluationBatches batches(source, {.tokens = 4, .context = 4});
  std::vector<std::vector<int32_t>> before;
  Batch b;
  for (int64_t i = 0; i < batches.count(); ++i) {
    batches.fill(i, b);
    before.insert(before.end(), b.before.begin(), b.before.end());
  }
  EXPECT_EQ(before, (std::vector<std::vector<int32_t>>{{}, {}, {3, 4, 5}}));
}

TEST(evaluation, sliding_windows_give_each_target_the_promised_context) {
  const auto source = unique_tokens(kLengths);
  const std::vector<int64_t> begins = source->document_begins();
  const int64_t context = 32, stride = 4;
  const std::vector<int64_t> got = contexts(source, {.tokens = 128, .context = context, .stride = stride});
  for (size_t d = 0; d < kLengths.size(); ++d)
    for (int64_t i = 1; i <= kLengths[d]; ++i) {
      const int64_t target = begins[d] + i;  // i = length: the next document's first token
      if (target == source->size()) continue;
      EXPECT_GE(got[size_t(target)], std::min(i, context - stride + 1)) << target;
    }
}

TEST(evaluation, whole_segments_do_not_depend_on_the_batch_and_flat_ones_do) {
  const auto source = unique_tokens(kLengths);
  const auto with = [&](int64_t tokens, bool flat) {
    return contexts(source, {.tokens = tokens, .context = 16, .flat = flat});
  };
  EXPECT_EQ(with(16, false), with(1000, false));
  EXPECT_EQ(with(50, false), with(1000, false));
  EXPECT_EQ(with(1000, true), with(1000, false));
  EXPECT_NE(with(50, true), with(1000, true));
}

TEST(evaluation, bytes_are_those_of_the_scored_targets) {
  const testing::ByteTokenizer tokenizer;
  const auto source = tokenize_documents(tokenizer, {{"a", "hello"}, {"b", "wide world"}});
  for (const int64_t stride : {0, 2}) {
    const EvaluationBatches batches(source, {.tokens = 8, .context = 4, .stride = stride});
    int64_t bytes = 0;
    Batch b;
    for (int64_t i = 0; i < batches.count(); ++i) {
      batches.fill(i, b);
      bytes += target_bytes(tokenizer, b);
    }
    EXPECT_EQ(bytes, 15);  // all of the text; the second document's bos counts none
  }
  EXPECT_DOUBLE_EQ(bits_per_byte(std::log(2.0) * 30, 15), 2);
}

TEST(evaluation, without_bos_the_first_token_of_each_document_is_missing_from_the_expected_bytes) {
  const CharTokenizer chars = CharTokenizer::from_text("\xC3\xA9tude");
  const std::vector<Document> documents = {{"a", "\xC3\xA9t\xC3\xA9"}, {"b", "t"}};
  const auto source = tokenize_documents(chars, documents);
  EXPECT_EQ(expected_bytes(total_bytes(documents), chars, *source), 3);
  const EvaluationBatches batches(source, {.tokens = 8});
  Batch b;
  batches.fill(0, b);
  EXPECT_EQ(target_bytes(chars, b), 3);
  const testing::ByteTokenizer bytes;
  EXPECT_EQ(expected_bytes(6, bytes, *tokenize_documents(bytes, documents)), 6);
}

TEST(evaluation, impossible_options_are_refused) {
  const auto source = unique_tokens({5});
  EXPECT_THROW(EvaluationBatches(source, {.tokens = 0}), Error);
  EXPECT_THROW(EvaluationBatches(source, {.tokens = 8, .context = 4, .stride = 5}), Error);
  EXPECT_THROW(EvaluationBatches(source, {.tokens = 8, .context = 4, .stride = 1, .flat = true}), Error);
  EXPECT_THROW(EvaluationBatches(unique_tokens({1}), {.tokens = 8}), Error);
  EXPECT_THROW(EvaluationBatches(source, {.tokens = 8}).fill(1, *std::make_unique<Batch>()), Error);
}

}  // namespace
}  // namespace ingot
