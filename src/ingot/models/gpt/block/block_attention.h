#pragma once
// The attention branch of a block: normed rows -> attn_out, or with folded scales mixed -> mid. Backward, the gradient
// of the normed rows is written to scratch.normed_grad, and adapters read the gradient of attn_out in
// scratch.branch_grad.
#include "ingot/models/gpt/block/block_view.h"

namespace ingot::detail {

struct AttentionBranch {
  const BlockView& at;

  // Computes rotated q and k from the raw projections. Where no operation changes q and k, the raw projections are
  // used.
  void rotate() const;
  void rotate_queries() const;
  void rotate_keys() const;
  void project_all() const;
  void project_queries() const;
  void project_keys() const;
  void attend() const;
  // Adapters get all tokens at once, and then the normed rows of the projection are still in memory.
  void attention_output() const;
  // Computes the same bits again: 2 T C H D operations cost less than keeping T rows in memory from the forward pass to
  // here.
  void attention_output_again() const;
  // dout: the gradient of attn_out, with folded scales of mid. The input of attention_output is still in scratch.z.
  void attention_output_backward(const Tensor& dout) const;
  void attend_backward() const;
  // Computes the gradient of the normed rows from the gradients of q, k and v, in scratch.normed_grad.
  void projections_backward(bool of_input) const;
  // Adds to the gradient of the normed rows; o's adapter reads these rows too.
  void queries_backward() const;
  void keys_backward(bool accumulate) const;
  void rotate_queries_backward() const;
  void rotate_keys_backward() const;

 private:
  void project_backward(const Tensor& dy, const Tensor& w, const Tensor& dw, AdapterPair LayerCallAdapters::*slot,
                        bool accumulate) const;
  void output_adapter_backward() const;
  void rotate_backward() const;
  void rotate_backward(const Tensor& x, const Tensor& d, const Tensor& gain, const Tensor& dgain) const;
  void rotate(const Tensor& x, const Tensor& y, const Tensor& gain) const;
  void project(const Tensor& w, const Tensor& y, AdapterPair LayerCallAdapters::*slot) const;
  void attend_cached() const;
  void attend_cached_backward() const;
  template <class Use> void each_cached(Use&& use) const;
};

}  // namespace ingot::detail
