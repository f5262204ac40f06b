#pragma once
#include "ingot/models/gpt/block/block_view.h"

namespace ingot::detail {

// The MLP branch of a block: normed rows -> mlp_out, or with folded scales mid -> out0.
struct MlpBranch {
  const BlockView& at;

  void forward() const;
  // Computes the gradient of the normed rows from the gradient of mlp_out (with folded scales of out0), in
  // scratch.normed_grad.
  void backward(const Tensor& x, const Tensor& dout) const;
};

}  // namespace ingot::detail
