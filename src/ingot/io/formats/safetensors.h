#pragma once
// safetensors: 8 bytes with the little-endian header length, a JSON header, then the tensors' bytes. A file is accepted
// only if its tensors fill the buffer exactly: no gaps, no overlaps, nothing after the last tensor.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/tensor.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/io/file.h"

namespace ingot {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous, on the CPU
};

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // the type's name in the file: "F32", "BF16", "U8", "F8_E4M3", ...
  std::vector<int64_t> shape;  // up to 8 dimensions
  int64_t begin = 0, end = 0;  // in the buffer after the header
  int64_t bytes() const { return end - begin; }
  // For Ingot's own tensor types, with up to kMaxRank dimensions; otherwise Error{unsupported}.
  DType core_dtype() const;
  Shape core_shape() const;
};

std::string shape_text(const std::vector<int64_t>& shape);  // "(2, 3)"

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // in the file
};

constexpr int64_t kSafetensorsMaxHeader = 100'000'000;

// Parses and checks the JSON header of a file with `buffer_bytes` bytes after it.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t buffer_bytes, const std::string& where);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const SafetensorsHeader& header() const { return header_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const SafetensorsEntry* find(const std::string& name) const;  // null when absent
  void read(const SafetensorsEntry& entry, void* into) const;
  // Reads a part of the file, for tensors that are read in pieces; `offset` counts from the beginning of the file.
  void read_bytes(int64_t offset, void* into, int64_t bytes) const { file_.read_at(offset, into, bytes); }
  // Reads a tensor into a contiguous CPU tensor. The name must exist, with this dtype and shape.
  void read(const std::string& name, const Tensor& into) const;
  // Reads every tensor, and refuses a file with further tensors.
  void read_all(const std::vector<NamedTensor>& into) const;
  const std::string& path() const { return file_.path(); }
  const File& file() const { return file_; }

 private:
  File file_;
  SafetensorsHeader header_;
  std::map<std::string, size_t> index_;
};

// Writes to an open file, in the given order except that wider types come first, so that every tensor is aligned to its
// type. Returns the SHA-256 of the written bytes.
std::string write_safetensors(File& file, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});
// Writes a file durably and atomically.
void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace ingot
