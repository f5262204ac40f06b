#include "ingot/data/token_source.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ingot/core/rng.h"
#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/byte_tokenizer.test.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

std::vector<int32_t> all_of(const TokenSource& source) {
  std::vector<int32_t> tokens(size_t(source.size()));
  source.read(0, tokens);
  return tokens;
}

// 1000 tokens; a document begins at 0, 300, 301 and 950.
std::shared_ptr<const TokenSource> sample(int64_t vocab = 1000) {
  std::vector<int32_t> tokens;
  const Rng rng(5, Purpose::test);
  for (uint64_t i = 0; i < 1000; ++i) tokens.push_back(int32_t(2 + rng.below(i, uint64_t(vocab - 2))));
  for (const size_t at : {0, 300, 301, 950}) tokens[at] = 1;
  return tokens_in_memory(std::move(tokens), {0, 300, 301, 950}, 1, vocab);
}

TEST(token_source, documents_begin_with_bos) {
  const testing::ByteTokenizer tokenizer;
  const auto source = tokenize_documents(tokenizer, {{"a", "xy"}, {"b", "z"}});
  EXPECT_EQ(all_of(*source), (std::vector<int32_t>{256, 'x', 'y', 256, 'z'}));
  EXPECT_EQ(source->document_begins(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(source->part_bounds(), (std::vector<int64_t>{0, 5}));
  EXPECT_NE(source->fingerprint(), tokenize_documents(tokenizer, {{"a", "xy"}, {"b", "y"}})->fingerprint());
}

TEST(shards, tokens_survive_in_both_widths_and_across_files) {
  for (const int64_t vocab : {int64_t(1000), int64_t(65536), int64_t(65537), int64_t(200000)}) {
    const TemporaryDirectory dir;
    const auto source = sample(vocab);
    const std::vector<std::string> paths = write_shards(dir / "data_train", *source, 42, 333);
    ASSERT_EQ(paths.size(), 4u);
    EXPECT_EQ(paths[3], dir / "data_train_000003.bin");
    EXPECT_EQ(read_shard_header(paths[0]).version, vocab > 65536 ? 2 : 1);
    EXPECT_EQ(read_shard_header(paths[0]).tokenizer_hash, 42u);
    EXPECT_EQ(file_size(paths[3]), 1024 + 1 * (vocab > 65536 ? 4 : 2));
    const auto back = open_shards(paths, 1, vocab, 42);
    EXPECT_EQ(all_of(*back), all_of(*source));
    EXPECT_EQ(back->document_begins(), source->document_begins());
    EXPECT_EQ(back->part_bounds(), (std::vector<int64_t>{0, 333, 666, 999, 1000}));
    std::vector<int32_t> piece(400);
    back->read(300, piece);
    const std::vector<int32_t> all = all_of(*source);
    EXPECT_EQ(piece, std::vector<int32_t>(all.begin() + 300, all.begin() + 700));
  }
}

TEST(shards, are_found_by_name_and_by_content) {
  const TemporaryDirectory dir;
  EXPECT_FALSE(holds_shards(dir.path()));
  write_shards(dir / "x_train", *sample(), 0);
  write_shards(dir / "x_val", *sample(), 0);
  File::create(dir / "text").write("hello");
  EXPECT_TRUE(holds_shards(dir.path()));
  EXPECT_FALSE(holds_shards(dir / "text"));
  rename_path(dir / "x_train_000000.bin", dir / "renamed");
  EXPECT_TRUE(holds_shards(dir / "renamed"));
  const ShardPaths paths = find_shards(dir.path());
  EXPECT_EQ(paths.train.size(), 0u);
  EXPECT_EQ(paths.held_out, std::vector<std::string>{dir / "x_val_000000.bin"});
  EXPECT_EQ(find_shards(paths.held_out[0]).held_out, paths.held_out);  // a single shard keeps its role
  EXPECT_EQ(find_shards(dir / "renamed").train, std::vector<std::string>{dir / "renamed"});
}

// A shard with its header words and its length changed at will.
std::string shard_refusal(std::vector<int32_t> words, int64_t bytes) {
  const TemporaryDirectory dir;
  std::string content(size_t(bytes), '\0');
  std::memcpy(content.data(), words.data(), std::min(content.size(), words.size() * 4));
  File::create(dir / "f.bin").write(content);
  return error_of([&] { open_shards({dir / "f.bin"}, 1, 100, 7); });
}

TEST(shards, damaged_shards_are_refused_with_the_fault) {
  EXPECT_EQ(shard_refusal({20240520, 1, 10, 7}, 1044), "");
  EXPECT_EQ(shard_refusal({20240520, 1, 10, 0}, 1044), "");  // another program's shard: tokenizer unknown
  EXPECT_NE(shard_refusal({20240520, 1, 10, 7}, 1043)
                .find("found 1043 bytes, expected 1044 for 10 tokens of 2 bytes: the file is cut short"),
            std::string::npos);
  EXPECT_NE(shard_refusal({20240520, 1, 10, 7}, 1046), "");
  EXPECT_NE(shard_refusal({20240520, 2, 10, 7}, 1044).find("expected 1064"), std::string::npos);
  EXPECT_NE(shard_refusal({20240520, 3, 10, 7}, 1044).find("found shard version 3, expected 1 (uint16 tokens) or 2"),
            std::string::npos);
  EXPECT_NE(shard_refusal({20240521, 1, 10, 7}, 1044).find("found magic number 20240521, expected 20240520"),
            std::string::npos);
  EXPECT_NE(shard_refusal({20240520, 1, -1, 7}, 1044).find("found -1 tokens"), std::string::npos);
  EXPECT_NE(shard_refusal({20240520, 1, 10, 8}, 1044).find("tokenizer with hash 8, expected 7"), std::string::npos);
  EXPECT_NE(shard_refusal({20240520, 1, 0, 7}, 1024).find("found no tokens"), std::string::npos);
  for (int64_t n = 0; n < 1044; n += 1 + n / 64) EXPECT_NE(shard_refusal({20240520, 1, 10, 7}, n), "") << n;
}

TEST(shards, an_id_outside_the_vocabulary_is_an_error_when_the_id_is_read) {
  const TemporaryDirectory dir;
  const auto paths = write_shards(dir / "s", *tokens_in_memory({1, 5, 99, 6}, {0}, 1, 100), 0, 2);
  const auto source = open_shards(paths, 1, 99);
  EXPECT_EQ(error_of([&] { all_of(*source); }),
            "bad data: " + paths[1] + ": token 0: found id 99, expected less than the vocabulary's 99");
  EXPECT_THROW(tokens_in_memory({1, 100}, {0}, 1, 100), Error);
  EXPECT_THROW(tokens_in_memory({}, {}, 1, 100), Error);
  EXPECT_THROW(open_shards({}, 1, 99), Error);
}

TEST(shards, a_shard_that_shrinks_while_in_use_is_an_error_and_no_crash) {
  const TemporaryDirectory dir;
  const auto paths = write_shards(dir / "s", *sample(), 0);
  const auto source = open_shards(paths, 1, 1000);
  File::create(paths[0]);
  EXPECT_NE(error_of([&] { all_of(*source); }).find("found 0 bytes, expected at least 3024"), std::string::npos);
}

}  // namespace
}  // namespace ingot
