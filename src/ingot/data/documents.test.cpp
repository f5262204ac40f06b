#include "ingot/data/documents.h"

#include <gtest/gtest.h>
#include <unistd.h>

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

TEST(documents, files_that_ingot_wrote_among_the_texts_are_left_out_and_named) {
  const TemporaryDirectory dir;
  const auto write = [&](const std::string& name, const std::string& text) {
    create_directories(parent_path(dir / name));
    write_file(dir / name, text);
  };
  write("a.txt", "a");
  for (const char* name : {"demo/run/config.json", "demo/run/log.jsonl", "demo/run/step-00000002/model.safetensors",
                           "demo/report.html", "demo/loss.svg", "adapters.safetensors", "boards/events.out.tfevents.1"})
    write(name, "x\xFF");
  write("kept/manifest.json", "{}");
  write("kept/model.safetensors", "x");
  write("tok", "{\n  \"version\": \"1.0\",\n  \"truncation\": null,");
  write("chars.json", "{\n  \"format\": \"ingot-char\",\n");
  write("m.ingot", "INGOTGPT\xFF");
  write("m.ingot.tokenizer", "x");
  write("shards/train_000000.bin", std::string("\x88\xD8\x34\x01", 4));
  write("page/picture.png", std::string("\x89PNG\r\n\x1A\n\0\0\0\rIHDR", 16));
  write("page/report.html", "no demo's");
  write("page/config.json", "{}");
  std::vector<std::string> left_out, names;
  for (const Document& d : read_documents(dir.path(), &left_out)) names.push_back(d.name);
  EXPECT_EQ(names, (std::vector<std::string>{dir / "a.txt", dir / "page/config.json", dir / "page/report.html"}));
  const std::vector<std::string> expected = {dir / "adapters.safetensors (weights)",
                                             dir / "boards/events.out.tfevents.1 (TensorBoard's)",
                                             dir / "chars.json (a tokenizer)",
                                             dir / "demo/loss.svg (of a demo)",
                                             dir / "demo/report.html (of a demo)",
                                             dir / "demo/run (a run)",
                                             dir / "kept (a checkpoint)",
                                             dir / "m.ingot (a model)",
                                             dir / "m.ingot.tokenizer (a model's tokenizer)",
                                             dir / "page/picture.png (a binary file)",
                                             dir / "shards/train_000000.bin (token shards)",
                                             dir / "tok (a tokenizer)"};
  EXPECT_EQ(left_out, expected);
  EXPECT_EQ(error_of([&] { read_documents(dir / "demo/run"); }),
            "bad data: " + (dir / "demo/run") + ": found a run, expected text");
}

TEST(documents, linked_directories_are_read_once_unless_they_hold_the_texts) {
  const TemporaryDirectory dir, elsewhere;
  create_directories(dir / "texts/sub");
  write_file(dir / "texts/sub/1", "one");
  write_file(dir / "beside", "not below the texts");
  write_file(elsewhere / "2", "two");
  const auto link = [&](const std::string& to, const std::string& name) {
    ASSERT_EQ(::symlink(to.c_str(), (dir / name).c_str()), 0);
  };
  link(elsewhere.path(), "texts/linked");
  link(elsewhere.path(), "texts/linked_twice");
  link(dir / "texts", "texts/sub/loop");
  link(dir / "texts/sub", "texts/again");
  link(dir.path(), "texts/up");
  std::vector<std::string> left_out, names;
  for (const Document& d : read_documents(dir / "texts", &left_out)) names.push_back(d.name);
  EXPECT_EQ(names, (std::vector<std::string>{dir / "texts/linked/2", dir / "texts/sub/1"}));
  EXPECT_EQ(left_out, (std::vector<std::string>{dir / "texts/up (a link to a directory above)"}));
}

TEST(documents, every_line_of_a_jsonl_file_is_a_document) {
  const TemporaryDirectory dir;
  const std::string file = dir / "a.jsonl";
  write_file(file, "{\"text\": \"one\\nline\", \"id\": 7}\n\n{\"text\": \"\"}\r\n{\"text\": \"\\u00e9\"}");
  const std::vector<Document> documents = read_documents(file);
  ASSERT_EQ(documents.size(), 2u);
  EXPECT_EQ(documents[0].text, "one\nline");
  EXPECT_EQ(documents[1].text, "\xC3\xA9");
  EXPECT_EQ(documents[1].name, file + ":4");
  for (const auto& [line, found] : {std::pair{"{\"content\": \"x\"}", "found object without a string \"text\""},
                                    {"{\"text\": 3}", "found object without a string \"text\""},
                                    {"[1]", "found array"}}) {
    write_file(file, std::string("{\"text\": \"x\"}\n") + line + "\n");
    const std::string error = error_of([&] { read_documents(file); });
    EXPECT_NE(error.find(file + ":2: " + found), std::string::npos) << error;
  }
  write_file(file, "{\"text\": \"x\"}\n{\"text\": \n");
  EXPECT_NE(error_of([&] { read_documents(file); }).find(file + ":2: byte "), std::string::npos);
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
  EXPECT_NE(error_of([&] { read_documents(dir / "none"); }).find("found no file of text in it"), std::string::npos);
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
