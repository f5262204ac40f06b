#include "ingot/data/documents.h"

#include <gtest/gtest.h>

#include <set>

#include "ingot/core/check.h"
#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

std::vector<Document> numbered(int n) {
  std::vector<Document> documents;
  for (int i = 0; i < n; ++i) documents.push_back({detail::concat("d", i), detail::concat("text ", i)});
  return documents;
}

TEST(documents, a_directory_gives_one_document_per_file_in_sorted_order) {
  const TemporaryDirectory dir;
  create_directories(dir / "b");
  for (const char* name : {"b/2", "b/10", "a", ".hidden"}) File::create(dir / name).write(name);
  File::create(dir / "empty");
  const std::vector<Document> documents = read_documents(dir.path());
  ASSERT_EQ(documents.size(), 3u);
  EXPECT_EQ(documents[0].text, "a");
  EXPECT_EQ(documents[1].text, "b/10");
  EXPECT_EQ(documents[2].text, "b/2");
  EXPECT_EQ(documents[2].name, dir / "b/2");
  EXPECT_EQ(read_documents(dir / "a").size(), 1u);
  EXPECT_EQ(total_bytes(documents), 1 + 4 + 3);
}

TEST(documents, missing_empty_and_ill_coded_text_is_refused_by_name) {
  const TemporaryDirectory dir;
  create_directories(dir / "none");
  File::create(dir / "empty");
  File::create(dir / "latin").write("caf\xE9 noir");
  EXPECT_NE(error_of([&] { read_documents(dir / "absent"); }).find("not found: " + (dir / "absent")),
            std::string::npos);
  EXPECT_NE(error_of([&] { read_documents(dir / "empty"); }).find("found an empty file, expected text"),
            std::string::npos);
  EXPECT_NE(error_of([&] { read_documents(dir / "none"); }).find("found no file in it"), std::string::npos);
  EXPECT_EQ(error_of([&] { read_documents(dir.path()); }),
            "bad data: " + (dir / "latin") + ": byte 3: found 0xe9, expected UTF-8 text");
}

TEST(split, every_kth_document_of_a_shuffle_is_held_out_and_none_is_lost) {
  for (const int n : {2, 3, 19, 20, 21, 400}) {
    const DocumentSplit split = split_documents(numbered(n), {.every = 20, .seed = 3});
    EXPECT_EQ(int(split.held_out.size()), (n + 19) / 20) << n;
    std::set<std::string> names;
    for (const auto* part : {&split.train, &split.held_out})
      for (const Document& d : *part) names.insert(d.name);
    EXPECT_EQ(int(names.size()), n);
    EXPECT_EQ(int(split.train.size() + split.held_out.size()), n);
  }
}

TEST(split, the_seed_alone_decides) {
  const auto held = [](uint64_t seed) {
    std::string all;
    for (const Document& d : split_documents(numbered(400), {.seed = seed}).held_out) all += d.name + " ";
    return all;
  };
  EXPECT_EQ(held(1), held(1));
  EXPECT_NE(held(1), held(2));
}

TEST(split, a_single_document_gives_its_last_tenth_cut_between_characters) {
  const DocumentSplit split = split_documents({{"f", std::string(1115394, 'x')}});
  EXPECT_EQ(split.train[0].text.size(), 1003854u);  // int(n * 0.9), as nanoGPT cuts
  EXPECT_EQ(split.held_out[0].text.size(), 1115394u - 1003854u);
  std::string euros;
  for (int i = 0; i < 11; ++i) euros += "\u20ac";
  const DocumentSplit cut = split_documents({{"f", euros}}, {.tail = 0.5});
  EXPECT_EQ(cut.train[0].text.size(), 15u);  // 16.5 bytes, back to a character's beginning
  EXPECT_EQ(cut.train[0].text + cut.held_out[0].text, euros);
  EXPECT_THROW(split_documents({{"f", "x"}}), Error);
}

}  // namespace
}  // namespace ingot
