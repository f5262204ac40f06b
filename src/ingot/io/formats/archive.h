#pragma once
// .ingot archives: named blobs that each begin at a multiple of 4096 bytes, so that a mapped file can be used in place.
//   bytes 0 to 39   "INGOTARC", u32 version, u32 0, u64 bytes of the file, u64 offset and u64 bytes of the index
//   from 4096 on    the blobs, in the order of the index, with zeros between them
//   the index       JSON: kind, about (any text), and for every blob name, format, layout, shape, offset, bytes, sha256
//   last 64 bytes   SHA-256 of bytes 0 to 39 and the index, in hexadecimal digits
// Numbers are little-endian. Opening an archive checks everything but the sums of the blobs, for which verify() reads
// the whole file.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ingot/io/codecs/sha256.h"
#include "ingot/io/file.h"

namespace ingot {

constexpr int64_t kArchiveAlign = 4096;
constexpr int32_t kArchiveVersion = 1;

struct ArchiveEntry {
  std::string name;
  std::string format;  // "f32", "bf16", "fp8", "mxfp4", "bytes": the type of the numbers
  std::string layout;  // "plain" or "weight tiles": the order of the numbers
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  int64_t offset = 0;  // in the file
  std::string sha256;
};

class ArchiveFile {
 public:
  explicit ArchiveFile(const std::string& path);
  static bool is_one(const std::string& path);  // a regular file that begins like an archive

  const std::string& path() const { return path_; }
  const std::string& kind() const { return kind_; }
  const std::string& about() const { return about_; }  // JSON
  const std::vector<ArchiveEntry>& entries() const { return entries_; }
  const ArchiveEntry* find(const std::string& name) const;  // null when absent
  const char* data(const ArchiveEntry& e) const { return file_.bytes().data() + e.offset; }
  int64_t file_bytes() const { return int64_t(file_.bytes().size()); }

  // Reads these blobs into memory at the speed of the disk. Throws where the file has become shorter.
  void prefetch(const std::vector<const ArchiveEntry*>& wanted) const;
  // Compares every blob with its sum. `done` receives the number of bytes read.
  void verify(const std::function<void(int64_t)>& done = {}) const;
  // Compares one blob's sum with `found`, the sum that the caller has computed from the blob's bytes.
  void compare(const ArchiveEntry& e, const std::string& found) const;

 private:
  void read_index();
  std::string path_, kind_, about_;
  MappedFile file_;
  std::vector<ArchiveEntry> entries_;
  std::map<std::string, size_t> index_;
};

// Writes one blob after the other without keeping any in memory. The file appears when commit() returns, or not at all.
class ArchiveWriter {
 public:
  // `entries` name the blobs in order, with their sizes in bytes; `about` is JSON. The free space of the disk is
  // checked first.
  ArchiveWriter(const std::string& path, std::string kind, std::string about, std::vector<ArchiveEntry> entries);
  void write(const void* from, int64_t bytes);  // appends bytes to the present blob
  void commit();
  int64_t file_bytes() const { return file_bytes_; }

 private:
  std::string index_text() const;
  void pad_to(int64_t offset);
  void finish_entry();
  std::string path_, kind_, about_, head_;
  std::vector<ArchiveEntry> entries_;
  int64_t index_offset_ = 0, file_bytes_ = 0;
  size_t next_ = 0;          // the entry that is being written
  int64_t at_ = 0, in_ = 0;  // bytes written of the file, and of the present entry
  Sha256 sum_;
  AtomicFile file_;
};

}  // namespace ingot
