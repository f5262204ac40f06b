#pragma once
// GGUF files of llama.cpp: "GGUF", u32 version 3, u64 number of tensors, u64 number of keys; then the keys, each a
// name, a type and a value or a list of values; then for each tensor its name, u32 rank, u64 sizes (the innermost
// first), u32 type and u64 offset; and from the next multiple of general.alignment (32 by default) on the tensors, each
// at such a multiple. A text is a u64 length and bytes. Numbers are little-endian.
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>

#include "ingot/io/formats/safetensors.h"

namespace ingot {

// A value of the metadata: every integer as int64, every float as double.
using GgufValue = std::variant<bool, int64_t, double, std::string, std::vector<bool>, std::vector<int64_t>,
                               std::vector<double>, std::vector<std::string>>;

class GgufFile {
 public:
  // Refuses names and keys that occur twice; counts, sizes and offsets beyond the file; unknown types; tensors that do
  // not follow one another; and a file that does not end with its last tensor. Only the part before the tensors is
  // read.
  explicit GgufFile(const std::string& path);
  static bool is_one(const std::string& path);  // a regular file that begins like a GGUF file
  // The text of general.architecture, which is among the first keys; the rest of the file is not read. Empty where the
  // key is missing, or where damaged data comes before it.
  static std::string architecture_of(const std::string& path);
  const std::string& path() const { return file_.path(); }
  const File& file() const { return file_; }
  // The tensors in the form of safetensors: the outermost size first; begin and end count from the beginning of the
  // file. dtype is the name of a ggml type, such as "F32", "MXFP4", "Q4_K".
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, GgufValue>& metadata() const { return metadata_; }

  // The value of a key; empty where the key is missing. Throws where the value has a different kind; number() also
  // accepts an integer.
  std::optional<int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  const std::vector<std::string>* texts(const std::string& key) const;
  const std::vector<int64_t>* integers(const std::string& key) const;

 private:
  template <class T> const T* value(const std::string& key, const char* kind) const;
  File file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, GgufValue> metadata_;
};

// The count of numbers in a block of a type, and the block's bytes.
struct GgufBlock {
  int64_t numbers, bytes;
};
GgufBlock gguf_block(const std::string& dtype);

// The GGUF model in a directory: the only .gguf file, or the first part of the only split file. Empty where the path is
// no directory, or the directory has no such file. Several models are an error that names them.
std::string gguf_in(const std::string& directory);

// All files of a model: a single file, or the parts of a split file, which is opened by its first part,
// name-00001-of-00003.gguf.
class GgufSet {
 public:
  explicit GgufSet(const std::string& path);
  const GgufFile& first() const { return *files_[0]; }  // has the metadata
  const std::vector<std::unique_ptr<GgufFile>>& files() const { return files_; }

 private:
  void open_rest(const std::string& path, int64_t count);
  std::vector<std::unique_ptr<GgufFile>> files_;
};

}  // namespace ingot
