#pragma once
// The places of a checkpoint's tensors in memory. Each kind of decoder derives its layout from LayoutBuilder and asks
// for every tensor of the model once.
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/decoder_weights.h"

namespace ingot::detail {

// The model's weights in an arena's memory, and the reads that fill this memory. Without an arena the layout only
// checks and counts. Throws where the checkpoint is no such model.
struct CheckpointLayout {
  DecoderWeights weights;
  std::vector<Read> reads;
  int64_t bytes = 0;  // of the arena
};

class LayoutBuilder : public CheckpointLayout {
 protected:
  using Names = std::vector<std::string>;
  // Types of vectors, and of matrices in rows.
  static constexpr std::initializer_list<const char*> kNumbers = {"F32", "F16", "BF16"};
  static constexpr std::initializer_list<const char*> kBlocks = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                                                 "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"};
  LayoutBuilder(const Checkpoint& set, Arena* arena) : set_(set), arena_(arena) {}

  // Returns the tensor of this name, shape and one of these types. Returns null for a missing tensor, which
  // report_missing() later reports.
  const StoredTensor* find(const std::string& name, const std::vector<int64_t>& shape,
                           std::initializer_list<const char*> dtypes);
  Tensor take(DType dtype, Shape shape);
  void add(const StoredTensor* from, const Tensor& to, int64_t offset, Change change);
  void decode(const StoredTensor* from, const Tensor& to, int64_t offset, Into into, int64_t rows, int64_t cols,
              int64_t stride, int64_t paired_head = 0);
  static DType type_of(const StoredTensor* place) {
    return place != nullptr && place->dtype == "F32" ? DType::f32 : DType::bf16;
  }
  // The common type in memory: f32 if any of the tensors is stored as f32, otherwise bf16.
  static DType type_of(const std::vector<const StoredTensor*>& places);
  static Into into(DType dtype) { return dtype == DType::f32 ? Into::f32 : Into::bf16; }

  // Stacks several matrices with the same columns into one. `paired_heads`, where given: the Read::paired_head of each.
  WeightMatrix decoded_rows(const Names& names, const std::vector<int64_t>& rows, int64_t cols,
                            const std::vector<int64_t>& paired_heads = {});
  // Joins several vectors into one.
  Tensor decoded_vector(const Names& names, const std::vector<int64_t>& widths,
                        const std::vector<int64_t>& paired_heads = {});
  // A matrix, or a bank with a matrix for each list of names: the rows of a list's tensors (rows, cols) alternate.
  WeightMatrix alternating_rows(const std::vector<Names>& lists, int64_t rows, int64_t cols, bool bank);
  // (E, N, K) of one tensor, or (E, 2N, K) of two with alternating rows.
  WeightMatrix decoded_bank(const Names& names, int64_t experts, int64_t n, int64_t k);

  void report_missing() const;
  // Refuses unused tensors, except for the tensors of the skipped layers from `layers` to `all_layers`.
  void refuse_others(const std::string& layer_prefix, int64_t layers, int64_t all_layers) const;

  const Checkpoint& set_;
  Arena* arena_;
  std::set<std::string> used_;
  std::vector<std::string> missing_;
};

}  // namespace ingot::detail
