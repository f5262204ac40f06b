#include "ingot/io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "ingot/io/removed_on_signal.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

// Runs `body` in a child process and returns its exit status.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = body();
    } catch (...) {}
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(atomic_file, an_incompletely_written_file_never_replaces_the_old_file) {
  const TemporaryDirectory dir;
  const std::string path = dir / "a.json";
  write_file(path, "old");
  const std::string message = error_of([&] {
    AtomicFile file(path);
    file.write("twelve bytes");
    ASSERT_EQ(::truncate((path + ".partial").c_str(), 11), 0);
    file.commit();
  });
  EXPECT_NE(message.find("found 11 bytes, expected the 12"), std::string::npos) << message;
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"a.json"});
}

TEST(atomic_file, a_process_that_a_signal_ends_leaves_nothing_unfinished_and_everything_else) {
  const TemporaryDirectory dir;
  const int status = in_child([&] {
    write_file(dir / "done", "whole");
    AtomicFile gone(dir / "a"), first(dir / "b"), taken(dir / "c");
    const RemovedOnSignal temporary(dir / "d"), nowhere(dir / "e");
    write_file(temporary.path(), "whole");
    write_file(RemovedOnSignal(dir / "kept").path(), "whole");
    first.write("half");
    first.commit();
    // A second process's file under our file's name.
    if (::unlink((dir / "c.partial").c_str()) != 0) return 1;
    write_file(dir / "c.partial", "theirs");
    remove_unfinished_files();
    ::_exit(0);  // as after a signal: no destructor runs
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"b", "c.partial", "done", "kept"}));
}

TEST(atomic_file, a_link_stays_and_a_device_or_pipe_is_never_replaced) {
  const TemporaryDirectory dir;
  create_directories(dir / "there");
  write_file(dir / "there/f", "old");
  ASSERT_EQ(::symlink("there/f", (dir / "link").c_str()), 0);
  write_file(dir / "link", "new");
  EXPECT_EQ(read_file(dir / "there/f"), "new");
  struct stat s;
  EXPECT_TRUE(::lstat((dir / "link").c_str(), &s) == 0 && S_ISLNK(s.st_mode));

  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { write_file(dir / "fifo", "x"); }).find("found a special file"), std::string::npos);
  EXPECT_TRUE(::lstat((dir / "fifo").c_str(), &s) == 0 && S_ISFIFO(s.st_mode));
  EXPECT_NE(error_of([&] { write_file(dir / "there", "x"); }).find("found a directory"), std::string::npos);
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"fifo", "link", "there"}));

  EXPECT_EQ(
      error_of([&] { write_file(dir / "missing/f", "x"); }),
      "not found: " + dir / "missing/f" + ": found no directory " + dir / "missing" + ", expected one to write to");

  ASSERT_EQ(::symlink("there/f", (dir / "g.partial").c_str()), 0);
  EXPECT_NE(error_of([&] { write_file(dir / "g", "x"); }).find("g.partial: cannot create"), std::string::npos);
  EXPECT_EQ(read_file(dir / "there/f"), "new");
}

TEST(file, written_data_are_read_back) {
  const TemporaryDirectory dir;
  const std::string bytes = std::string("a\0b", 3) + std::string(100000, 'x');
  write_file(dir / "f", bytes);
  EXPECT_EQ(read_file(dir / "f"), bytes);
  EXPECT_EQ(MappedFile(dir / "f").bytes(), bytes);
  EXPECT_EQ(file_size(dir / "f"), int64_t(bytes.size()));
  write_file(dir / "f", "short");
  EXPECT_EQ(read_file(dir / "f"), "short");
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"f"});
  write_file(dir / "empty", "");
  EXPECT_EQ(MappedFile(dir / "empty").bytes(), "");
}

TEST(file, failures_name_the_path_and_the_reason) {
  const TemporaryDirectory dir;
  EXPECT_EQ(error_of([&] { read_file(dir / "none"); }),
            "not found: " + (dir / "none") + ": cannot open: No such file or directory");
  EXPECT_NE(error_of([&] { read_file(dir.path()); }).find("found a directory, expected a regular file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { write_file(dir / "no/such/f", "x"); }).find("not found: "), std::string::npos);
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { read_file(dir / "fifo"); }).find("special file"), std::string::npos);  // and does not wait
  write_file(dir / "f", "12345");
  EXPECT_NE(error_of([&] { read_file(dir / "f", 4); }).find("found 5 bytes, expected at most 4"), std::string::npos);
  char buffer[8];
  EXPECT_NE(error_of([&] { File::open(dir / "f").read_at(2, buffer, 8); }).find("found 5 bytes, expected at least 10"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { File::append("/dev/full").write("x"); }),
            "input/output: /dev/full: cannot write at byte 0: No space left on device");
}

TEST(file, a_write_that_fails_leaves_the_old_file_and_no_partial_one) {
  const TemporaryDirectory dir;
  write_file(dir / "f", "old");
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&] { write_file(dir / "f", std::string(5000, 'n')); });
    return error.find("cannot write at byte 1000: File too large") != std::string::npos ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(dir / "f"), "old");
  EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"f"});
}

TEST(file, leftovers_of_a_killed_writer_are_reused) {
  const TemporaryDirectory dir;
  const int status = in_child([&] {
    AtomicFile file(dir / "f");
    file.write(std::string(100, 'x'));
    return ::kill(::getpid(), SIGKILL);
  });
  EXPECT_EQ(status, 1000 + SIGKILL);
  EXPECT_TRUE(exists(dir / "f.partial"));
  EXPECT_FALSE(exists(dir / "f"));
  write_file(dir / "f", "new");
  EXPECT_EQ(read_file(dir / "f"), "new");
  EXPECT_FALSE(exists(dir / "f.partial"));
}

TEST(file, two_writers_of_one_path_do_not_mix) {
  const TemporaryDirectory dir;
  AtomicFile first(dir / "f");
  first.write("first");
  EXPECT_EQ(in_child([&] { return error_of([&] { AtomicFile second(dir / "f"); }).substr(0, 4) == "busy" ? 0 : 1; }),
            0);
  first.commit();
  EXPECT_EQ(read_file(dir / "f"), "first");
}

TEST(lock, a_second_process_gets_an_error_that_names_the_holder) {
  const TemporaryDirectory dir;
  const std::string expected = "busy: " + dir.path() + ": in use by process " + std::to_string(::getpid());
  const auto try_lock = [&] { return error_of([&] { Lock lock(dir.path()); }); };
  {
    const Lock lock(dir.path());
    EXPECT_EQ(in_child([&] { return try_lock().substr(0, expected.size()) == expected ? 0 : 1; }), 0);
  }
  EXPECT_EQ(in_child([&] { return try_lock().empty() ? 0 : 1; }), 0);
}

TEST(lock, a_killed_holder_releases_it) {
  const TemporaryDirectory dir;
  in_child([&] {
    Lock lock(dir.path());
    return ::kill(::getpid(), SIGKILL);
  });
  EXPECT_EQ(error_of([&] { Lock lock(dir.path()); }), "");
}

TEST(files, are_listed_sorted_without_hidden_ones_and_without_following_directory_links) {
  const TemporaryDirectory dir;
  create_directories(dir / "b/c");
  for (const char* name : {"b/c/2", "b/1", "a", "z", ".hidden", "b0"}) write_file(dir / name, name);
  ASSERT_EQ(::symlink(dir.path().c_str(), (dir / "b/loop").c_str()), 0);
  ASSERT_EQ(::symlink((dir / "a").c_str(), (dir / "b/link").c_str()), 0);
  EXPECT_EQ(list_files(dir.path()),
            (std::vector<std::string>{dir / "a", dir / "b/1", dir / "b/c/2", dir / "b/link", dir / "b0", dir / "z"}));
  remove_tree(dir / "b");  // removes the link, not its target
  EXPECT_TRUE(exists(dir / "a"));
  EXPECT_FALSE(exists(dir / "b"));
}

TEST(paths, are_split_and_joined) {
  struct Case {
    const char *path, *parent, *base;
  };
  for (const Case& c : {Case{"a", ".", "a"},
                        {"a/b", "a", "b"},
                        {"/a", "/", "a"},
                        {"a/b/", "a", "b"},
                        {"/", "/", "/"},
                        {"a//b", "a", "b"}}) {
    EXPECT_EQ(parent_path(c.path), c.parent) << c.path;
    EXPECT_EQ(base_name(c.path), c.base) << c.path;
  }
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
}

}  // namespace
}  // namespace ingot
