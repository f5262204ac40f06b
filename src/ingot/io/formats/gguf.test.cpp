#include "ingot/io/formats/gguf.h"

#include <gtest/gtest.h>

#include "ingot/io/formats/gguf_writer.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::GgufWriter;
using testing::TemporaryDirectory;

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

GgufWriter sample() {
  GgufWriter w;
  w.key("general.architecture", "gpt-oss").key("count", uint32_t(7)).key("epsilon", 1e-5f).key("yes", true);
  w.key("words", std::vector<std::string>{"a", "", "\u00e9"}).key("types", std::vector<int32_t>{1, -2});
  w.tensor("f", 0, {2, 3}, std::string(24, '\1')).tensor("q", 8, {4, 2, 64}, std::string(8 * 68, '\2'));
  w.tensor("m", 39, {1, 32}, std::string(17, '\3'));
  return w;
}
std::string refusal(const std::string& bytes) {
  static const TemporaryDirectory dir;
  File file = File::create(dir / "m.gguf");  // written without a sync, which tests do not need
  file.write(bytes);
  return error_of([&] { GgufFile(dir / "m.gguf"); });
}

TEST(gguf, a_file_is_read_as_it_was_written) {
  const TemporaryDirectory dir;
  write_file(dir / "m.gguf", sample().bytes());
  ASSERT_TRUE(GgufFile::is_one(dir / "m.gguf"));
  const GgufFile file(dir / "m.gguf");
  EXPECT_EQ(file.text("general.architecture"), "gpt-oss");
  EXPECT_EQ(file.integer("count"), 7);
  EXPECT_EQ(file.number("count"), 7.0);
  EXPECT_EQ(file.number("epsilon"), 1e-5);  // the decimal, not the exact value of the float
  EXPECT_EQ(file.integer("none"), std::nullopt);
  EXPECT_EQ(*file.texts("words"), (std::vector<std::string>{"a", "", "\u00e9"}));
  EXPECT_EQ(*file.integers("types"), (std::vector<int64_t>{1, -2}));
  EXPECT_TRUE(holds(error_of([&] { file.integer("epsilon"); }), "epsilon: found a value of another type"));
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.entries()[1].name, "q");
  EXPECT_EQ(file.entries()[1].dtype, "Q8_0");
  EXPECT_EQ(file.entries()[1].shape, (std::vector<int64_t>{4, 2, 64}));
  EXPECT_EQ(file.entries()[1].bytes(), 8 * 68);
  EXPECT_EQ(file.entries()[2].dtype, "MXFP4");
  for (const SafetensorsEntry& e : file.entries()) {
    std::string bytes(size_t(e.bytes()), 0);
    file.file().read_at(e.begin, bytes.data(), e.bytes());
    EXPECT_EQ(bytes, std::string(bytes.size(), e.name == "f" ? '\1' : e.name == "q" ? '\2' : '\3'));
  }
}

TEST(gguf, a_file_that_is_cut_anywhere_or_longer_is_refused) {
  const std::string whole = sample().bytes();
  const TemporaryDirectory dir;
  write_file(dir / "m.gguf", whole);
  const int64_t end = GgufFile(dir / "m.gguf").entries().back().end;
  for (size_t n = 0; n < whole.size(); ++n)
    // a file may be cut only in the padding after the last tensor
    EXPECT_EQ(refusal(whole.substr(0, n)).empty(), int64_t(n) >= end) << n;
  EXPECT_TRUE(holds(refusal(whole + '\0'), "cut short, or changed"));
}

TEST(gguf, files_that_violate_the_format_are_refused_before_memory_is_taken) {
  const auto with = [](auto&& change) {
    GgufWriter w = sample();
    change(w);
    return refusal(w.bytes());
  };
  const uint64_t huge = uint64_t(1) << 62;
  using W = GgufWriter;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {refusal("GGML0000"), "found no GGUF at the beginning"},
      {with([](W& w) { w.version = 2; }), "found version 2, expected version 3"},
      {with([](W& w) { w.version = 3 << 24; }), "found numbers with the high byte first"},
      {with([](W& w) { w.more_tensors = int64_t(1) << 40; }), "tensors and 6 keys, expected at most"},
      {with([](W& w) { w.more_keys = 1; }), "expected at most"},
      {with([](W& w) { w.key("count", uint32_t(8)); }), "found key \"count\" twice"},
      {with([](W& w) { w.key("", uint32_t(8)); }), "key 6: found a name that is empty"},
      {with([](W& w) { w.add("x", 13, ""); }), "key \"x\": found type 13, expected 0 to 12"},
      {with([](W& w) { w.add("x", 7, "\2"); }), "key \"x\": found 2, expected 0 or 1"},
      {with([&](W& w) { w.add("x", 8, W::number(huge)); }), "found a text of 4611686018427387904 bytes"},
      {with([&](W& w) { w.add("x", 9, W::number(uint32_t(8)) + W::number(huge)); }),
       "found a list of 4611686018427387904"},
      {with([&](W& w) { w.add("x", 9, W::number(uint32_t(9)) + W::number(huge)); }), "found a list of lists"},
      {with([&](W& w) { w.add("x", 10, W::number(~uint64_t(0))); }), "found 18446744073709551615, expected at most"},
      {with([](W& w) { w.key("general.alignment", uint32_t(48)); }),
       "general.alignment: found 48, expected a power of two"},
      {with([](W& w) { w.key("general.alignment", uint32_t(0)); }), "general.alignment: found 0"},
      {with([](W& w) { w.key("general.alignment", uint32_t(64)); }), "begins at byte"},
      {with([](W& w) { w.key("general.alignment", "32"); }), "general.alignment: found a value of another type"},
      {with([](W& w) { w.tensor("f", 0, {1}, "1234"); }), "found tensor \"f\" twice"},
      {with([](W& w) { w.tensor("a b", 0, {1}, "1234"); }), "tensor 3: found a name that is empty or not plain text"},
      {with([](W& w) { w.tensor("t", 0, {}, "1234"); }), "found 0 dimensions, expected 1 to 4"},
      {with([](W& w) {
         w.tensor("t", 0, {1, 1, 1, 1, 1}, "1234");
       }),
       "found 5 dimensions"},
      {with([](W& w) { w.tensor("t", 0, {0}, ""); }), "found shape (0) of F32"},
      {with([](W& w) { w.tensor("t", 4, {1}, "1234"); }), "found type 4 of ggml, which is not known here"},
      {with([](W& w) {
         w.tensor("t", 8, {2, 33}, std::string(68, 0));
       }),
       "found rows of 33 numbers, expected a multiple of 32"},
      {with([](W& w) {
         w.tensor("t", 0, {int64_t(1) << 40, int64_t(1) << 40}, "");
       }),
       "expected it within the file"},
      {with([](W& w) { w.tensor("t", 0, {1 << 20}, ""); }), "expected it within the file: cut short, or damaged"},
      {with([](W& w) { w.tensor("t", 0, {1}, "1234", -32); }), "where the one before it ends"},
      {with([](W& w) { w.tensor("t", 0, {1}, "1234", 32); }), "expected"},
      {with([](W& w) { w.tensor("t", 0, {1}, "1234", -1); }), "expected"},
  };
  for (const auto& [found, expected] : cases) {
    EXPECT_TRUE(holds(found, expected)) << expected << "\n" << found;
    EXPECT_EQ(found.find('\n'), std::string::npos);
  }
}

TEST(gguf, parts_of_a_model_belong_together) {
  const TemporaryDirectory dir;
  const auto part = [&](uint32_t i, uint32_t count, const std::string& tensor) {
    GgufWriter w;
    w.key("split.no", i).key("split.count", count).key("split.tensors.count", uint32_t(2));
    if (!tensor.empty()) w.tensor(tensor, 0, {1}, "1234");
    return w.bytes();
  };
  const std::string first = dir / "m-00001-of-00003.gguf", second = dir / "m-00002-of-00003.gguf",
                    third = dir / "m-00003-of-00003.gguf";
  const auto found = [&] { return error_of([&] { GgufSet{first}; }); };
  write_file(first, part(0, 3, ""));
  EXPECT_TRUE(holds(found(), "found no part 2 of 3, expected "));
  write_file(second, part(1, 3, "a"));
  write_file(third, part(2, 3, "b"));
  EXPECT_EQ(GgufSet(first).files().size(), 3u);
  EXPECT_TRUE(holds(error_of([&] { GgufSet{second}; }), "found part 2 of 3, expected the first"));
  write_file(third, part(2, 3, "a"));
  EXPECT_TRUE(holds(found(), "found tensor \"a\", which is also in another part"));
  write_file(third, part(1, 3, "b"));
  EXPECT_TRUE(holds(found(), "found part 2 of 3, expected 3 of 3"));
  write_file(third, part(2, 3, ""));
  EXPECT_TRUE(holds(found(), "split.tensors.count: found 2, expected 1"));
  write_file(dir / "other.gguf", part(0, 3, ""));
  EXPECT_TRUE(
      holds(error_of([&] { GgufSet{dir / "other.gguf"}; }), "expected a name that ends in -00001-of-00003.gguf"));
}

TEST(gguf, a_directory_with_one_model_stands_for_it) {
  const TemporaryDirectory dir;
  EXPECT_EQ(gguf_in(dir.path()), "");
  EXPECT_EQ(gguf_in(dir / "nothing"), "");
  write_file(dir / "m-00002-of-00002.gguf", "");
  EXPECT_EQ(gguf_in(dir.path()),
            dir / "m-00002-of-00002.gguf");  // opening the file reports that the first part is missing
  write_file(dir / "m-00001-of-00002.gguf", "");
  write_file(dir / "notes.txt", "");
  EXPECT_EQ(gguf_in(dir.path()), dir / "m-00001-of-00002.gguf");
  EXPECT_EQ(gguf_in(dir / "notes.txt"), "");
  write_file(dir / "x-Q8_0.gguf", "");
  EXPECT_EQ(error_of([&] { gguf_in(dir.path()); }), "usage: " + dir.path() +
                                                        ": found 2 GGUF models, expected one of them by its name, "
                                                        "such as " +
                                                        (dir / "m-00001-of-00002.gguf"));
}

}  // namespace
}  // namespace ingot
