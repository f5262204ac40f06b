#pragma once
// The model's parameters: names as in spec/gpt.py, shapes, and their places in a flat tensor. Matrices of equal shape
// stand next to each other (a bank), so an optimizer sees a bank as a (B, R, C) tensor.
#include <string>
#include <vector>

#include "ingot/core/tensor.h"
#include "ingot/models/gpt/config/config.h"

namespace ingot {

enum class ParameterKind { matrix, embedding, head, scalar };  // scalar: per-channel vectors, gains, gates, lambdas
struct Parameter {
  std::string name;  // "blocks.3.attn.q.weight"
  Shape shape;
  ParameterKind kind;
  int64_t offset;  // in elements, in the flat tensor
};
struct MatrixBank {
  int64_t offset, count, rows, cols;
};
struct ParameterRange {
  int64_t offset, count;
};  // in elements, padding included

class ParameterLayout {
 public:
  explicit ParameterLayout(const GptConfig& config);
  const std::vector<Parameter>& all() const { return parameters_; }
  const std::vector<MatrixBank>& banks() const { return banks_; }  // every `matrix` parameter is in a bank
  int64_t count() const { return count_; }                         // numbers of the model
  int64_t padded_count() const { return padded_; }                 // length of the flat tensor
  const Parameter& find(const std::string& name) const;            // throws when unknown
  Tensor view(const Tensor& flat, const Parameter& p) const;
  ParameterRange range(ParameterKind kind) const;  // parameters of the same kind stand together
  Tensor view(const Tensor& flat, const std::string& name) const { return view(flat, find(name)); }

 private:
  std::vector<Parameter> parameters_;
  std::vector<MatrixBank> banks_;
  int64_t count_ = 0, padded_ = 0;
};

// Fills `flat` (f32 or f64) by the config's rule; Philox keyed by (seed, init, parameter number, element).
void initialise(const GptConfig& config, const ParameterLayout& layout, const Tensor& flat, uint64_t seed);

}  // namespace ingot
