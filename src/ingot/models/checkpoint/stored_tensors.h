#pragma once
// The tensors of a checkpoint's files, and the way from the files to a model's weights in memory. Every kind of decoder
// reads its checkpoints through this; which tensors it expects stands in its own layout (layout.h).
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ingot/io/formats/gguf.h"
#include "ingot/io/formats/iris.h"
#include "ingot/io/formats/safetensors_set.h"

namespace ingot {

// The path that holds the weights: itself, or the one GGUF file of a directory without safetensors. The cache of
// Hugging Face's tools is followed to its snapshot.
std::string checkpoint_source(const std::string& path);

}  // namespace ingot

namespace ingot::detail {

// One tensor of a file.
struct StoredTensor {
  const File* file = nullptr;
  std::string name, dtype;  // dtype as safetensors spells it, or ggml
  std::vector<int64_t> shape;
  int64_t begin = 0, bytes = 0;  // in the file
};

enum class Naming { hugging_face, openai, iris, gguf };

// The safetensors files of a directory, one .iris file, or a GGUF file with its further parts. Only headers are read.
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

// widen: to f32; turn: (E, K, N) to (E, N, K); scales: none, but of bytes that are scales; decode: rows of ggml's
// blocks.
enum class Change { none, widen, turn, scales, decode };
// What rows of blocks become; mxfp4 in two reads.
enum class Into { f32, bf16, mx_blocks, mx_scales };
struct Read {
  const StoredTensor* from;
  char* to;
  Change change;
  // Of decode. Rows may lie apart, so that those of two tensors take turns.
  Into into = Into::f32;
  int64_t rows = 0, cols = 0, stride = 0;  // stride in bytes
  // Of decode: not 0 where the file pairs the rows of each head of so many as llama.cpp does, (2j, 2j + 1), for rows
  // that belong at (j, j + head_dim / 2).
  int64_t paired_head = 0;
};

// Fills the part of the arena at [begin, begin + bytes), and refuses NaN and infinity. What is read in one piece must
// lie inside or outside: a vector, an expert that has to be turned.
void read_range(const std::vector<Read>& reads, const void* begin, int64_t bytes);

}  // namespace ingot::detail
