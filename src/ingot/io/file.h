#pragma once
// Files. Every failure is an Error (not_found, io or busy) with the path and the system's reason. Reads and writes that
// the system cuts short or interrupts are continued.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/check.h"

namespace ingot {

// A write beyond RLIMIT_FSIZE raises the signal SIGXFSZ, which ends the process. Programs that use this header should
// ignore the signal; the write then fails with EFBIG, which becomes an Error.

// An open file. close() reports the errors that the kernel reports only at the end, such as of delayed writes; the
// destructor closes without a report.
class File {
 public:
  static File open(const std::string& path);    // to read
  static File create(const std::string& path);  // for writing; an existing file is emptied
  static File append(const std::string& path);  // to write at the end
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  int64_t size() const;
  // Reads exactly `bytes` bytes from `offset` on. Error{bad_data} where the file is shorter.
  void read_at(int64_t offset, void* into, int64_t bytes) const;
  void write(const void* from, int64_t bytes);
  void write(std::string_view bytes) { write(bytes.data(), int64_t(bytes.size())); }
  void shorten(int64_t bytes);  // keeps only the first `bytes` bytes
  void sync();
  void close();

 private:
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  friend class AtomicFile;
  std::string path_;
  int descriptor_ = -1;
  int64_t written_ = 0;
};

// A new file that appears under its name complete and durable, or not at all. The bytes go to "<path>.partial";
// commit() syncs this file, renames it, syncs the directory, and looks the file up again. A second writer of the same
// path gets Error{busy}; the partial file that a killed writer left is used again. Where the path is a link, the file
// behind the link is replaced; a device, a pipe or a directory is refused.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // without commit(), removes the partial file
  void write(const void* from, int64_t bytes) { file_.write(from, bytes); }
  void write(std::string_view bytes) { file_.write(bytes); }
  void commit();

 private:
  std::string path_;
  File file_;
  int slot_ = -1;  // place in the list of unfinished files
};

// Removes the partial files of this process's AtomicFiles. For a signal handler that is about to end the process: the
// function makes only calls that handlers may make. The AtomicFiles must not be used afterwards.
void remove_unfinished_files();

// Holds a directory for this process until destroyed (flock on "<directory>/.lock"; the kernel drops the lock if the
// process dies). A second holder gets Error{busy} naming the directory and the holding process.
class Lock {
 public:
  Lock() = default;
  explicit Lock(const std::string& directory);

 private:
  File file_;
};

// A read-only view of a file's bytes. If another process shortens the file, reading the lost part raises SIGBUS, so a
// mapping is for files that no process changes while they are mapped. File::read_at is for all other files.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::string_view bytes() const { return {static_cast<const char*>(memory_), size_t(size_)}; }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

std::string read_file(const std::string& path, int64_t max_bytes = int64_t(1) << 40);
std::string read_standard_input(int64_t max_bytes);                // the whole input
void write_file(const std::string& path, std::string_view bytes);  // durable and atomic
int64_t file_size(const std::string& path);
bool exists(const std::string& path);
bool is_directory(const std::string& path);
bool begins_with(const std::string& path, std::string_view bytes);  // false also for a missing file
void create_directories(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);  // a missing file is no error
void remove_tree(const std::string& path);  // a missing directory is no error; links are removed, not followed
void sync_directory(const std::string& path);
// Names in a directory, sorted by byte value, without "." and "..".
std::vector<std::string> list_directory(const std::string& path);
// Paths of all regular files below a directory, sorted by byte value. Names that begin with "." are left out. Links to
// files are followed, links to directories are not, so that the walk ends.
std::vector<std::string> list_files(const std::string& path);
std::string join_path(const std::string& directory, const std::string& name);
std::string parent_path(const std::string& path);  // "." for a bare name
std::string base_name(const std::string& path);

}  // namespace ingot
