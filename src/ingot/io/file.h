#pragma once
// Files. Every failure is an Error (not_found, io or busy) with the path and the system's reason; reads and writes go
// on after short counts and interruptions.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/check.h"

namespace ingot {

// Process-wide hazard: a write beyond RLIMIT_FSIZE raises SIGXFSZ, which ends the process. Programs ignore this signal,
// and then see EFBIG.

// An open file. close() reports errors the kernel kept for last; the destructor closes silently.
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
  // Exactly `bytes` from `offset`; a shorter file is bad_data.
  void read_at(int64_t offset, void* into, int64_t bytes) const;
  void write(const void* from, int64_t bytes);
  void write(std::string_view bytes) { write(bytes.data(), int64_t(bytes.size())); }
  void shorten(int64_t bytes);  // to its first so many
  void sync();
  void close();

 private:
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  friend class AtomicFile;
  std::string path_;
  int descriptor_ = -1;
  int64_t written_ = 0;
};

// A file appears under its name complete and durable, or not at all: written as "<path>.partial", synced, renamed, the
// directory synced, and looked up again. A second writer of the same path gets Error{busy}; the remains of a killed
// writer are reused. Where the path is a link, the file behind the link is replaced; a device, a pipe or a directory is
// refused.
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
  int slot_ = -1;  // in the list for remove_unfinished_files
};

// Removes this process's uncommitted AtomicFiles, for a signal handler about to end the process: the function makes
// only calls allowed in handlers. The AtomicFiles must not be used afterwards.
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

// A read-only view of a file's bytes. If another process shortens the file, touching the lost part raises SIGBUS: use a
// mapping for data without writers, File::read_at for the rest.
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
bool begins_with(const std::string& path, std::string_view bytes);  // false too for a missing file
void create_directories(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);  // absent is fine
void remove_tree(const std::string& path);  // absent is fine; does not follow links
void sync_directory(const std::string& path);
// Names in a directory, sorted by byte value, without "." and "..".
std::vector<std::string> list_directory(const std::string& path);
// Paths of all regular files below, sorted by byte value. Names starting with "." are left out; links are followed for
// files only, so the walk ends.
std::vector<std::string> list_files(const std::string& path);
std::string join_path(const std::string& directory, const std::string& name);
std::string parent_path(const std::string& path);  // "." for a bare name
std::string base_name(const std::string& path);

}  // namespace ingot
