#pragma once
// The second moments of the inputs of a model's matrices on text: H = sum over tokens of x^T x for every matrix y = x
// W^T, summed over the layer calls of a looped layer. GPTQ (gptq.h) uses H.
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/data/token_source.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

// Sums the products on the model's device over a few batches, and in fp64 on the host over all batches.
class Hessians : public MatrixInputs {
 public:
  Hessians(const GptConfig& config, const GptTypes& types, Device device, Stream stream);
  void seen(MatrixInput which, int layer, const Tensor& x) override;
  // Called after each batch, and after the last batch: on a GPU the sums of 16 batches are brought to the host
  // together; this copy waits for the stream.
  void end_batch();
  void end();

  // The Hessian of the named parameter: [cols, cols], symmetric, on and below the diagonal; empty for a parameter
  // without products, such as an embedding without a tied head.
  std::span<const double> of(const std::string& parameter) const;

 private:
  struct Sum {
    Tensor batch;  // (K, K)
    std::vector<double> total;
  };
  Stream stream_;
  bool on_gpu_;
  int64_t batches_ = 0;  // batches in the device's sums
  Arena memory_;
  std::map<std::pair<MatrixInput, int>, Sum> sums_;
  std::map<std::string, std::pair<MatrixInput, int>> of_parameter_;
};

struct CalibrationOptions {
  int64_t batches = 64, batch_tokens = 4096;
  uint64_t seed = 1;  // of the order of the documents
  bool looping = false;
  Products products = Products::fp32;
  Stream stream;
};
// Runs batches of documents, packed as for training, through the model. Errors: bad_data for text with fewer tokens
// than asked for.
Hessians capture_hessians(const GptConfig& config, const GptWeights& weights, std::shared_ptr<const TokenSource> text,
                          const CalibrationOptions& options);

}  // namespace ingot
