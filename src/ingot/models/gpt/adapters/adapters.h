#pragma once
// The storage of adapters: all adapters of a document are one row of numbers, and are named like "applications.3.q.a"
// in files.
#include <string>
#include <vector>

#include "ingot/io/formats/safetensors.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot {

class AdapterLayout {
 public:
  AdapterLayout(const GptConfig& config, const LayerProgram& program, int64_t rank);
  struct Piece {
    std::string name;
    int64_t offset, rows, cols;
  };
  // a (rank, in) and b (out, rank), in this order, for q, k, v, o and mlp of each layer call, and for the head.
  const std::vector<Piece>& pieces() const { return pieces_; }
  int64_t numbers() const { return numbers_; }  // numbers of a document, padding included
  int64_t rank() const { return rank_; }
  // The adapters as a model's argument: segment s reads row s of `flat` (documents, numbers).
  GptAdapters views(const Tensor& flat) const;
  // The adapters of one document, given its row of numbers.
  std::vector<NamedTensor> named(const Tensor& flat) const;

 private:
  size_t layer_calls_;
  int64_t rank_, numbers_ = 0;
  std::vector<Piece> pieces_;
};

// Reads a file written by save_safetensors() from named(). Errors name tensors of a different model or rank, and
// infinities or NaN.
int64_t adapter_rank(const SafetensorsFile& file);
void read_adapters(const SafetensorsFile& file, const AdapterLayout& layout, const Tensor& flat);  // (numbers) f32

}  // namespace ingot
