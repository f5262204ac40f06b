#pragma once
// Where adapters lie: one document's in one row of numbers, under names as "applications.3.q.a", and in files of them.
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
  // a (rank, in) and b (out, rank), one after the other: of q, k, v, o and mlp of each application, and of the head.
  const std::vector<Piece>& pieces() const { return pieces_; }
  int64_t numbers() const { return numbers_; }  // of one document, padding included
  int64_t rank() const { return rank_; }
  // As a model takes them: segment s reads row s of `flat` (documents, numbers).
  GptAdapters views(const Tensor& flat) const;
  // One document's (numbers).
  std::vector<NamedTensor> named(const Tensor& flat) const;

 private:
  size_t applications_;
  int64_t rank_, numbers_ = 0;
  std::vector<Piece> pieces_;
};

// A file that save_safetensors() made of named(). Errors: tensors of another model or rank by name, numbers that are
// not finite.
int64_t adapter_rank(const SafetensorsFile& file);
void read_adapters(const SafetensorsFile& file, const AdapterLayout& layout, const Tensor& flat);  // (numbers) f32

}  // namespace ingot
