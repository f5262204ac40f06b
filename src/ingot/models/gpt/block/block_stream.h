#pragma once
// A block's inputs from the residual stream, and the norms before its branches.
#include "ingot/kernels/residual_norm/residual_norm.h"
#include "ingot/models/gpt/block/block_view.h"

namespace ingot::detail {

struct ResidualStream {
  const BlockView& at;

  void merge_skip() const;
  void mix_input() const;
  void read_input() const;
  // Turns g0 into the gradient of the block's input; the gradient of the attention branch's normed rows is in scratch.
  void read_backward(const BlockGradients& g) const;
  void norm(const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& rstd) const;
  // Backward through the norm of m: adds the gradient of m to g, and continues to the inputs of m in place.
  ResidualNormBackward norm_gradient(const Tensor& m, const Tensor& w, const Tensor& dw, const Tensor& rstd,
                                     const Tensor& g) const;
  // dx = dsum + the gradient through the norm of x; the gradient of the normed rows is in scratch.
  void norm_backward(const Tensor& x, const Tensor& w, const Tensor& dw, const Tensor& rstd, const Tensor& dsum,
                     const Tensor& dx) const;
};

}  // namespace ingot::detail
