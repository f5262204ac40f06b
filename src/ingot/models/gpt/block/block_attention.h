#pragma once
// The attention branch of a block: normed rows -> attn_out. Backward, the gradient of attn_out is in
// scratch.branch_grad, and that of the normed rows comes to scratch.normed_grad.
#include "ingot/models/gpt/block/block_view.h"

namespace ingot::detail {

struct AttentionBranch {
  const BlockView& at;

  // Rotated q and k from the raw projections; the raw ones themselves where nothing changes them.
  void rotate() const;
  void rotate_queries() const;
  void rotate_keys() const;
  void project_all() const;
  void project_queries() const;
  void project_keys() const;
  void attend() const;
  // With adapters, which are given all tokens at once, the normed rows are still those that were projected.
  void attention_output() const;
  // The same bits once more: 2 T C H D operations cost less than T rows in memory from the forward pass to here.
  void attention_output_again() const;
  // The gradient of attn_out is in scratch.branch_grad, what attention_output multiplied still in scratch.z.
  void attention_output_backward() const;
  void attend_backward() const;
  // The gradients of q, k and v -> the gradient of the normed rows, in scratch.normed_grad.
  void projections_backward(bool of_input) const;
  // To the gradient of the normed rows; o's adapter reads these too.
  void queries_backward() const;
  void keys_backward(bool accumulate) const;
  void rotate_queries_backward() const;
  void rotate_keys_backward() const;

 private:
  void project_backward(const Tensor& dy, const Tensor& w, const Tensor& dw, AdapterPair ApplicationAdapters::*slot,
                        bool accumulate) const;
  void output_adapter_backward() const;
  void rotate_backward() const;
  void rotate_backward(const Tensor& x, const Tensor& d, const Tensor& gain, const Tensor& dgain) const;
  void rotate(const Tensor& x, const Tensor& y, const Tensor& gain) const;
  void project(const Tensor& w, const Tensor& y, AdapterPair ApplicationAdapters::*slot) const;
  void attend_cached() const;
  void attend_cached_backward() const;
  template <class Use> void each_cached(Use&& use) const;
};

}  // namespace ingot::detail
