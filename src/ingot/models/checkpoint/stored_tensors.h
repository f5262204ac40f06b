#pragma once
// The tensors of a checkpoint's files, and the way from the files to a model's weights in memory. Every kind of decoder
// reads its checkpoints through these functions; the expected tensors are listed in its own layout (layout.h).
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ingot/io/formats/gguf.h"
#include "ingot/io/formats/iris.h"
#include "ingot/io/formats/safetensors_set.h"

namespace ingot {

// The path of the weights: `path` itself, or the only GGUF file of a directory without safetensors. The cache of
// Hugging Face's tools is followed to its snapshot.
std::string checkpoint_source(const std::string& path);

}  // namespace ingot

namespace ingot::detail {

// A tensor of a file.
struct StoredTensor {
  const File* file = nullptr;
  std::string name, dtype;  // dtype in safetensors' spelling, or ggml's
  std::vector<int64_t> shape;
  int64_t begin = 0, bytes = 0;  // in the file
};

enum class Naming { hugging_face, openai, iris, gguf };

// The safetensors files of a directory, a .iris file, or a GGUF file with its further parts. Only headers are read.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path);             // of checkpoint_source()
  const StoredTensor* find(const std::string& name) const;  // null when absent
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  const std::string& path() const { return path_; }
  Naming naming() const;

 private:
  std::string path_;
  std::unique_ptr<SafetensorsSet> set_;
  std::unique_ptr<IrisFile> iris_;
  std::unique_ptr<GgufSet> gguf_;
  std::map<std::string, StoredTensor> tensors_;
};

// none: copied; widen: to f32; turn: (E, K, N) to (E, N, K); scales: copied bytes of MXFP4 scales, of which too large
// ones are refused; decode: rows of ggml's blocks.
enum class Change { none, widen, turn, scales, decode };
// The target format of rows of blocks; mxfp4 in two reads.
enum class Into { f32, bf16, mx_blocks, mx_scales };
struct Read {
  const StoredTensor* from;
  char* to;
  Change change;
  // For `decode`. Rows may lie apart, so that the rows of two tensors alternate.
  Into into = Into::f32;
  int64_t rows = 0, cols = 0, stride = 0;  // stride in bytes
  // For `decode`: the rows per head if the file has them in llama.cpp's order, with the pair (j, j + head_dim / 2) at
  // (2j, 2j + 1); else 0.
  int64_t paired_head = 0;
};

// Fills the part of the arena at [begin, begin + bytes), and refuses NaN and infinity. A vector or a transposed expert
// must lie completely inside or outside of the range, because each is read in a single piece.
void read_range(const std::vector<Read>& reads, const void* begin, int64_t bytes);

}  // namespace ingot::detail
