#pragma once
// What a block reads of the residual stream, and the norms before its branches.
#include "ingot/kernels/residual_norm/residual_norm.h"
#include "ingot/models/gpt/block/block_view.h"

namespace ingot::detail {

struct ResidualStream {
  const BlockView& at;

  void merge_skip() const;
  void mix_input() const;
  void read_input() const;
  // g0 becomes the gradient of what the block read; the gradient of the attention branch's normed rows is in scratch.
  void read_backward(const BlockGradients& g) const;
  void mix_input_backward(const Tensor& d, const BlockGradients& g) const;
  void norm(const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& rstd) const;
  // Through the norm of m to what it was made of, added to g, which becomes that.
  ResidualNormBackward norm_gradient(const Tensor& m, const Tensor& w, const Tensor& dw, const Tensor& rstd,
                                     const Tensor& g) const;
  // dx = dsum + the gradient through the norm of x; the gradient of the normed rows is in scratch.
  void norm_backward(const Tensor& x, const Tensor& w, const Tensor& dw, const Tensor& rstd, const Tensor& dsum,
                     const Tensor& dx) const;
};

}  // namespace ingot::detail
