#include "ingot/io/formats/safetensors_set.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ingot/core/memory/memory.h"
#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

// Two shards: a (2 numbers) and b (3 numbers) in one, c (4 numbers) in the other.
struct Sharded {
  TemporaryDirectory dir;
  float numbers[4] = {1, 2, 3, 4};
  Sharded() {
    save_safetensors(dir / "one.safetensors", {{"a", Tensor(numbers, {2})}, {"b", Tensor(numbers, {3})}});
    save_safetensors(dir / "two.safetensors", {{"c", Tensor(numbers, {4})}});
    index(R"("a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors")", "36");
  }
  void index(const std::string& map, const std::string& total) {
    write_file(dir / "model.safetensors.index.json",
               R"({"metadata": {"total_size": )" + total + R"(}, "weight_map": {)" + map + "}}");
  }
  std::string refusal() {
    return error_of([&] { SafetensorsSet set(dir.path()); });
  }
};
bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(safetensors_set, an_index_leads_to_every_tensor) {
  Sharded s;
  const SafetensorsSet set(s.dir.path());
  EXPECT_EQ(set.files(), 2u);
  EXPECT_EQ(set.tensors().size(), 3u);
  EXPECT_EQ(set.bytes(), 36);
  float back[4];
  const auto place = set.find("c");
  place.file->read(*place.entry, back);
  EXPECT_EQ(back[3], 4);
  EXPECT_FALSE(set.find("d"));
}

TEST(safetensors_set, without_an_index_one_file_or_all_of_them_are_read) {
  Sharded s;
  remove_file(s.dir / "model.safetensors.index.json");
  EXPECT_EQ(SafetensorsSet(s.dir.path()).tensors().size(), 3u);
  save_safetensors(s.dir / "model.safetensors", {{"z", Tensor(s.numbers, {1})}});
  EXPECT_EQ(SafetensorsSet(s.dir.path()).tensors().size(), 1u);
}

TEST(safetensors_set, links_to_regular_files_are_followed) {
  Sharded s;
  create_directories(s.dir / "blobs");
  rename_path(s.dir / "two.safetensors", s.dir / "blobs/9f86d081");
  ASSERT_EQ(::symlink("blobs/9f86d081", (s.dir / "two.safetensors").c_str()), 0);
  EXPECT_EQ(SafetensorsSet(s.dir.path()).tensors().size(), 3u);
}

TEST(safetensors_set, an_index_that_leaves_the_directory_or_is_wrong_is_refused) {
  const std::vector<std::array<std::string, 3>> cases = {
      {R"("a": "../one.safetensors")", "36", "found string \"../one.safetensors\", expected the plain name"},
      {R"("a": "/etc/passwd")", "36", "expected the plain name of a .safetensors file"},
      {R"("a": "x/../one.safetensors")", "36", "expected the plain name"},
      {R"("a": ".one.safetensors")", "36", "expected the plain name"},
      {R"("a": "")", "36", "expected the plain name"},
      {R"("a": 3)", "36", "found number 3, expected the plain name"},
      {R"("a": "one\u0000.safetensors")", "36", "expected the plain name"},
      {R"("a": "one.bin")", "36", "expected the plain name"},
      {R"("a": "gone.safetensors")", "36", "names the shard gone.safetensors, which is missing"},
      {R"("a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors")", "36",
       "tensor \"c\" is not in one.safetensors, where the index puts it"},
      {R"("a": "one.safetensors", "c": "two.safetensors")", "36", "found tensor \"b\", which"},
  };
  for (const auto& [map, total, message] : cases) {
    Sharded s;
    s.index(map, total);
    EXPECT_TRUE(holds(s.refusal(), message)) << map << ": " << s.refusal();
  }
}

TEST(safetensors_set, a_sum_of_sizes_that_is_wrong_changes_nothing) {
  for (const char* total : {"35", "null", "36.0", "35.5", "\"36\"", "-1", "[]"}) {
    Sharded s;
    s.index(R"("a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors")", total);
    EXPECT_EQ(SafetensorsSet(s.dir.path()).tensors().size(), 3u) << total;
  }
}

TEST(safetensors_set, two_files_with_one_tensor_two_beginnings_and_no_file_are_refused) {
  Sharded s;
  save_safetensors(s.dir / "two.safetensors", {{"a", Tensor(s.numbers, {4})}});
  s.index(R"("a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors")", "36");
  EXPECT_TRUE(holds(s.refusal(), "found tensor \"a\", which is also in")) << s.refusal();
  Sharded both;
  save_safetensors(both.dir / "model.safetensors", {{"z", Tensor(both.numbers, {1})}});
  EXPECT_TRUE(holds(both.refusal(), "found both model.safetensors and")) << both.refusal();
  const TemporaryDirectory empty;
  EXPECT_TRUE(holds(error_of([&] { SafetensorsSet set(empty.path()); }), "found no .safetensors file"));
  EXPECT_TRUE(holds(error_of([&] { SafetensorsSet set(empty / "absent"); }), "is not a directory"));
  write_file(empty / "pytorch_model.bin", "PK");
  EXPECT_TRUE(holds(error_of([&] { SafetensorsSet set(empty.path()); }),
                    "weights of PyTorch (.bin or .pth), which are not read"));
}

TEST(safetensors_set, a_pipe_in_place_of_a_shard_does_not_block) {
  Sharded s;
  remove_file(s.dir / "two.safetensors");
  ASSERT_EQ(::mkfifo((s.dir / "two.safetensors").c_str(), 0600), 0);
  EXPECT_TRUE(holds(s.refusal(), "found a special file, expected a regular file")) << s.refusal();
}

TEST(memory, a_request_beyond_what_the_machine_has_names_both_amounts) {
  EXPECT_EQ(error_of([] { require_memory(1, "a byte"); }), "");
  const std::string found = error_of([] { require_memory(int64_t(1) << 50, "a model"); });
  EXPECT_TRUE(holds(found, "unsupported: a model needs 1125899.91 GB") && holds(found, " of memory, found ")) << found;
}

}  // namespace
}  // namespace ingot
