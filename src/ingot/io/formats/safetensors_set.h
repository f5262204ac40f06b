#pragma once
// The tensors of a directory, from all of its files: model.safetensors.index.json and the shards that the index names,
// or model.safetensors, or, without either, every *.safetensors file. Opening reads only headers.
#include <memory>

#include "ingot/io/formats/safetensors.h"

namespace ingot {

class SafetensorsSet {
 public:
  // Errors: no such file; an index that names a file outside the directory, a missing shard, tensors on which index and
  // shards disagree, a tensor in two files, an index beside a model.safetensors that the index does not name. A
  // total_size that differs from the sum gives a line in the log.
  explicit SafetensorsSet(const std::string& directory);

  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
    explicit operator bool() const { return entry != nullptr; }
  };
  Place find(const std::string& name) const;  // empty when absent
  const std::map<std::string, Place>& tensors() const { return tensors_; }
  int64_t bytes() const;  // sum over all tensors
  size_t files() const { return files_.size(); }
  const std::string& directory() const { return directory_; }

 private:
  void open(const std::string& name);
  void open_index(const std::string& path);
  std::string directory_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;  // by file name in the directory
  std::map<std::string, Place> tensors_;
};

}  // namespace ingot
