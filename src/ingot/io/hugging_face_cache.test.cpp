#include "ingot/io/hugging_face_cache.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

struct Cache {
  TemporaryDirectory dir;
  std::string root = dir / "models--a--b";
  Cache() { std::filesystem::create_directories(root + "/refs"); }
  void snapshot(const std::string& commit) { std::filesystem::create_directories(root + "/snapshots/" + commit); }
  void main(const std::string& commit) { write_file(root + "/refs/main", commit); }
};

TEST(hugging_face_cache, a_repository_s_folder_leads_to_the_snapshot_of_its_main_revision) {
  Cache c;
  c.snapshot("abc");
  c.snapshot("def");
  c.main("def\n");
  EXPECT_EQ(snapshot_of(c.root), c.root + "/snapshots/def");
  EXPECT_EQ(snapshot_of(c.root + "/snapshots/abc"), c.root + "/snapshots/abc");
}

TEST(hugging_face_cache, without_a_main_revision_the_only_snapshot_is_meant) {
  Cache c;
  c.snapshot("abc");
  EXPECT_EQ(snapshot_of(c.root), c.root + "/snapshots/abc");
  c.snapshot("def");
  EXPECT_NE(error_of([&] { snapshot_of(c.root); }).find("found 2 snapshots and no refs/main"), std::string::npos);
}

TEST(hugging_face_cache, a_revision_without_a_snapshot_is_refused) {
  for (const char* commit : {"gone", "../refs", "", "abc/.."}) {
    Cache c;
    c.snapshot("abc");
    c.main(commit);
    EXPECT_NE(error_of([&] { snapshot_of(c.root); }).find("which is missing"), std::string::npos) << commit;
  }
}

TEST(hugging_face_cache, any_other_path_stays_unchanged) {
  const TemporaryDirectory dir;
  EXPECT_EQ(snapshot_of(dir.path()), dir.path());
  EXPECT_EQ(snapshot_of(dir / "nothing"), dir / "nothing");
  std::filesystem::create_directories(dir / "snapshots/x");
  write_file(dir / "config.json", "{}");
  EXPECT_EQ(snapshot_of(dir.path()), dir.path());
}

}  // namespace
}  // namespace ingot
