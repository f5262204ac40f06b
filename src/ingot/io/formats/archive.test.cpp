#include "ingot/io/formats/archive.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "ingot/io/file.h"
#include "ingot/io/formats/iris.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string pattern(int64_t bytes, int seed) {
  std::string s(size_t(bytes), '\0');
  for (size_t i = 0; i < s.size(); ++i) s[i] = char(i * 7 + size_t(seed));
  return s;
}
const std::vector<std::pair<std::string, int64_t>> kBlobs = {{"a", 5000}, {"nothing", 0}, {"b", 4096}, {"c", 1}};

void write_archive(const std::string& path) {
  std::vector<ArchiveEntry> entries;
  for (const auto& [name, bytes] : kBlobs) entries.push_back({name, "bytes", "plain", {bytes}, bytes});
  ArchiveWriter writer(path, "test", R"({"answer": 42})", entries);
  std::string all;
  for (size_t i = 0; i < kBlobs.size(); ++i) all += pattern(kBlobs[i].second, int(i));
  for (size_t at = 0; at < all.size(); at += 1000)  // portions that ignore the boundaries of blobs
    writer.write(all.data() + at, int64_t(std::min<size_t>(1000, all.size() - at)));
  writer.commit();
  EXPECT_EQ(file_size(path), writer.file_bytes());
}

TEST(archive, written_blobs_are_page_aligned_and_match_their_sums) {
  const TemporaryDirectory dir;
  write_archive(dir / "x.ingot");
  const ArchiveFile file(dir / "x.ingot");
  EXPECT_EQ(file.kind(), "test");
  EXPECT_EQ(file.about(), R"({"answer":42})");
  ASSERT_EQ(file.entries().size(), kBlobs.size());
  for (size_t i = 0; i < kBlobs.size(); ++i) {
    const ArchiveEntry* e = file.find(kBlobs[i].first);
    ASSERT_NE(e, nullptr);
    EXPECT_EQ(e->offset % kArchiveAlign, 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.data(*e)) % uintptr_t(kArchiveAlign), 0u);
    EXPECT_EQ(std::string(file.data(*e), size_t(e->bytes)), pattern(kBlobs[i].second, int(i)));
  }
  EXPECT_EQ(file.find("d"), nullptr);
  file.prefetch({file.find("a"), file.find("c")});
  int64_t seen = 0;
  file.verify([&](int64_t n) { seen += n; });
  EXPECT_EQ(seen, 9097);
  EXPECT_TRUE(ArchiveFile::is_one(dir / "x.ingot"));
  EXPECT_FALSE(ArchiveFile::is_one(dir.path()));
  EXPECT_FALSE(IrisFile::is_one(dir / "x.ingot"));
}

TEST(archive, a_file_cut_anywhere_or_longer_is_refused) {
  const TemporaryDirectory dir;
  write_archive(dir / "x.ingot");
  const std::string whole = read_file(dir / "x.ingot");
  std::vector<size_t> ends = {
      0, 1, 7, 8, 39, 40, 41, 4095, 4096, whole.size() - 65, whole.size() - 64, whole.size() - 1};
  for (size_t at = 100; at < whole.size(); at += 997) ends.push_back(at);
  for (const size_t end : ends) {
    write_file(dir / "cut", whole.substr(0, end));
    EXPECT_TRUE(holds(error_of([&] { ArchiveFile(dir / "cut"); }), "bad data: ")) << end;
  }
  write_file(dir / "cut", whole + "x");
  EXPECT_TRUE(holds(error_of([&] { ArchiveFile(dir / "cut"); }), "cut short, or changed"));
}

TEST(archive, every_changed_byte_is_noticed) {
  const TemporaryDirectory dir;
  write_archive(dir / "x.ingot");
  const std::string whole = read_file(dir / "x.ingot");
  const ArchiveFile good(dir / "x.ingot");
  const auto in_a_blob = [&](size_t at) {
    for (const ArchiveEntry& e : good.entries())
      if (int64_t(at) >= e.offset && int64_t(at) < e.offset + e.bytes) return true;
    return false;
  };
  const size_t index = 4096 * 5;  // a: 2 pages, b and c: 1 each, after the head's
  for (size_t at = 0; at < whole.size(); at += (at < 40 || at >= index) ? 1 : 509) {
    if (at >= 40 && at < index && !in_a_blob(at)) continue;  // the padding of pages is not checked
    std::string changed = whole;
    changed[at] = char(changed[at] ^ 1);
    write_file(dir / "bad", changed);
    EXPECT_NE(error_of([&] { ArchiveFile(dir / "bad").verify(); }), "") << at;
  }
  std::string newer = whole;
  newer[8] = 2;
  write_file(dir / "bad", newer);
  EXPECT_TRUE(holds(error_of([&] { ArchiveFile(dir / "bad"); }), "unsupported: "));
  std::string damaged = whole;
  damaged[4096] ^= 1;
  write_file(dir / "bad", damaged);
  EXPECT_TRUE(holds(error_of([&] { ArchiveFile(dir / "bad").verify(); }), "blob \"a\": found the sum"));
}

// Writes an archive with a changed index and the right sum over it.
void sign_again(const std::string& from, const std::string& to, const std::string& find, const std::string& replace) {
  std::string all = read_file(from);
  uint64_t offset, bytes;
  std::memcpy(&offset, all.data() + 24, 8);
  std::memcpy(&bytes, all.data() + 32, 8);
  std::string index = all.substr(size_t(offset), size_t(bytes));
  ASSERT_NE(index.find(find), std::string::npos) << find;
  index.replace(index.find(find), find.size(), replace);
  bytes = index.size();
  const uint64_t size = offset + bytes + 64;
  std::string head = all.substr(0, 40);
  std::memcpy(head.data() + 16, &size, 8);
  std::memcpy(head.data() + 32, &bytes, 8);
  Sha256 sum;
  sum.update(head);
  sum.update(index);
  write_file(to, head + all.substr(40, size_t(offset) - 40) + index + sum.hex());
}

TEST(archive, an_index_that_contradicts_itself_is_refused_although_its_sum_is_right) {
  const TemporaryDirectory dir;
  write_archive(dir / "x.ingot");
  const std::vector<std::array<std::string, 3>> cases = {
      {R"("offset":4096)", R"("offset":8192)", "found 5000 bytes at 8192, expected them at 4096"},
      {R"("bytes":5000)", R"("bytes":50000)", "found 50000 bytes at 4096"},
      {R"("bytes":5000)", R"("bytes":-1)", "found -1 bytes at 4096"},
      {R"("bytes":5000)", R"("bytes":9223372036854775807)", "found 9223372036854775807 bytes at 4096"},
      {R"("bytes":5000)", R"("bytes":3)", "expected them at 8192"},
      {R"("name":"b")", R"("name":"a")", "found the name \"a\", which is there twice"},
      {R"("name":"b")", R"("name":"")", "which is empty"},
      {R"("shape":[4096])", R"("shape":[-1])", "none below 0"},
      {R"("shape":[4096])", R"("shape":4096)", "shape"},
      {R"("format":"bytes")", R"("format":7)", "format"},
      {R"("blobs":[)", R"("blobs":7,"x":[)", "blobs"},
      {R"("kind":"test")", R"("kind":"test","more":1)", "more"},
  };
  for (const auto& [find, replace, message] : cases) {
    sign_again(dir / "x.ingot", dir / "bad", find, replace);
    const std::string found = error_of([&] { ArchiveFile(dir / "bad"); });
    EXPECT_TRUE(holds(found, message)) << replace << ": " << found;
    EXPECT_TRUE(holds(found, "bad data: ")) << found;
  }
  // The reserved word, with a sum that is right.
  std::string all = read_file(dir / "x.ingot");
  all[12] = 1;
  write_file(dir / "odd.ingot", all);
  sign_again(dir / "odd.ingot", dir / "bad", "\"kind\"", "\"kind\"");
  EXPECT_TRUE(holds(error_of([&] { ArchiveFile(dir / "bad"); }), "byte 12: found 1, expected 0"));
}

TEST(archive, an_unfinished_archive_leaves_no_file) {
  const TemporaryDirectory dir;
  {
    ArchiveWriter writer(dir / "x.ingot", "test", "{}", {{"a", "bytes", "plain", {10}, 10}});
    writer.write("12345", 5);
    EXPECT_TRUE(holds(error_of([&] { writer.commit(); }), "found blob \"a\" incomplete with 5 bytes, expected 10"));
  }
  EXPECT_TRUE(list_directory(dir.path()).empty());
  EXPECT_TRUE(holds(error_of([&] {
                      ArchiveWriter(dir / "x.ingot", "test", "{}", {{"a", "bytes", "plain", {}, int64_t(1) << 60}});
                    }),
                    "of disk space, found "));
  EXPECT_TRUE(list_directory(dir.path()).empty());
}

TEST(archive, a_file_that_became_shorter_is_an_error_and_no_signal) {
  const TemporaryDirectory dir;
  write_archive(dir / "x.ingot");
  const ArchiveFile file(dir / "x.ingot");
  ASSERT_EQ(::truncate((dir / "x.ingot").c_str(), 4096), 0);
  EXPECT_TRUE(holds(error_of([&] { file.prefetch({file.find("a")}); }), "the file has become shorter"));
  // Blobs that are requested in a different order are read all the same: an error can be found only by reading the
  // pages.
  EXPECT_TRUE(holds(error_of([&] { file.prefetch({file.find("b"), file.find("a")}); }), "the file has become shorter"));
}

// --- .iris ---------------------------------------------------------------------------------------------------------
struct IrisTensor {
  std::string name;
  uint32_t type;
  std::vector<uint64_t> shape;
  uint64_t offset, bytes;
};
std::string iris(const std::vector<IrisTensor>& tensors, int64_t size) {
  const auto put = [](std::string& s, const auto& n) { s.append(reinterpret_cast<const char*>(&n), sizeof n); };
  std::string s = "IRISMDL1";
  put(s, uint32_t(1));
  put(s, uint32_t(tensors.size()));
  for (const IrisTensor& t : tensors) {
    s += t.name + std::string(128 - t.name.size(), '\0');
    put(s, t.offset);
    put(s, t.bytes);
    put(s, t.type);
    put(s, uint32_t(t.shape.size()));
    for (size_t i = 0; i < 8; ++i) put(s, i < t.shape.size() ? t.shape[i] : uint64_t(0));
  }
  s.resize(size_t(size), '\0');
  return s;
}

TEST(iris, tensors_are_found_and_damage_is_refused) {
  const TemporaryDirectory dir;
  const std::vector<IrisTensor> good = {{"embed", 0, {3, 4}, 4096, 24}, {"L0.sinks", 1, {2}, 4352, 8}};
  const auto refused = [&](const std::vector<IrisTensor>& t, int64_t size) {
    write_file(dir / "x.iris", iris(t, size));
    return error_of([&] { IrisFile(dir / "x.iris"); });
  };
  EXPECT_EQ(refused(good, 4360), "");
  const IrisFile file(dir / "x.iris");
  ASSERT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.entries()[0].dtype, "BF16");
  EXPECT_EQ(file.entries()[1].begin, 4352);
  EXPECT_TRUE(IrisFile::is_one(dir / "x.iris"));
  const auto with = [&](auto&& change) {
    auto t = good;
    change(t);
    return refused(t, 4360);
  };
  EXPECT_TRUE(holds(refused(good, 4359), "expected them within 4359"));
  EXPECT_TRUE(holds(refused(good, 4361), "the tensors end at byte 4360"));
  EXPECT_TRUE(holds(refused(good, 100), "cut short, or damaged"));
  EXPECT_TRUE(holds(refused({}, 8), "not an .iris archive"));
  EXPECT_TRUE(holds(with([](auto& t) { t[1].name = "embed"; }), "\"embed\" twice"));
  EXPECT_TRUE(holds(with([](auto& t) { t[1].name = ""; }), "a name that is empty"));
  EXPECT_TRUE(holds(with([](auto& t) { t[1].name = "a\nb"; }), "not plain text"));
  EXPECT_TRUE(holds(with([](auto& t) { t[0].type = 4; }), "found type 4"));
  EXPECT_TRUE(holds(with([](auto& t) { t[0].shape[0] = 4; }), "expected what type and shape make"));
  EXPECT_TRUE(holds(with([](auto& t) { t[0].shape = {uint64_t(1) << 40, uint64_t(1) << 40}; }), "type and shape"));
  EXPECT_TRUE(holds(with([](auto& t) { t[0].offset = 4097; }), "multiple of 256"));
  EXPECT_TRUE(holds(with([](auto& t) { t[1].offset = 0; }), "(an overlap)"));
  EXPECT_TRUE(holds(with([](auto& t) { t[0].offset = uint64_t(-256); }), "expected them within"));
}

}  // namespace
}  // namespace ingot
