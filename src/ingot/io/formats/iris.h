#pragma once
// .iris files, the tensor archives of ROCm/iris: "IRISMDL1", u32 version 1, u32 count; then for each tensor a name of
// 128 bytes, u64 offset and u64 bytes, u32 type (bf16, f32, u8, i32), u32 rank and 8 u64 sizes; blobs from 4096 on, at
// multiples of 256.
#include <map>

#include "ingot/io/formats/safetensors.h"

namespace ingot {

class IrisFile {
 public:
  // Refuses names that occur twice, shapes that do not match the bytes, blobs that overlap or leave the file, and a
  // file that does not end with its last blob.
  explicit IrisFile(const std::string& path);
  static bool is_one(const std::string& path);  // a regular file that begins like an .iris file
  const std::string& path() const { return file_.path(); }
  const File& file() const { return file_; }
  // The tensors in the form of safetensors; begin and end count from the beginning of the file.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

 private:
  File file_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace ingot
