#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/scaled_add/scaled_rows.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

using detail::view;

detail::BlockTensors Gpt::Impl::block(int i, const GptWeights& weights, const Tensor& grads, bool backward) const {
  const LayerCall& a = program.layer_calls[size_t(i)];
  const size_t n = size_t(i);
  return {.index = i,
          .layer_call = &a,
          .w = roles.layer(weights, a.layer),
          .dw = roles.layer(grads, a.layer),
          .skip_w = roles.skip(weights, a.skip_slot),
          .skip_dw = roles.skip(grads, a.skip_slot),
          .skip = a.skip_from >= 0 ? buffers.in0[size_t(a.skip_from) + 1] : Tensor(),
          .in0 = buffers.in0[n],
          .in1 = buffers.in1[n],
          .x0 = buffers.in0[0],
          .out0 = buffers.in0[n + 1],
          .out1 = buffers.in1[n + 1],
          .saved = buffers.saved[n],
          .scratch = backward ? buffers.backward[n] : buffers.forward[n]};
}

// Folds the scales of the branches into the matrices before them.
void Gpt::Impl::scale_matrices(const GptWeights& weights) {
  for (size_t i = 0; i < buffers.scaled_of.size(); ++i) {
    const detail::ScaledMatrices& s = buffers.scaled_of[i];
    if (!s.o) continue;
    const detail::LayerViews w = roles.layer(weights.master, int(i));
    scaled_rows({.x = w.o, .scale = w.attn_scale, .y = s.o}, options.stream);
    scaled_rows({.x = w.down, .scale = w.mlp_scale, .y = s.down}, options.stream);
  }
}
void Gpt::Impl::scale_matrices_backward(const GptWeights& weights, const Tensor& grads) {
  for (size_t i = 0; i < buffers.scaled_of.size(); ++i) {
    const detail::ScaledMatrices& s = buffers.scaled_of[i];
    if (!s.o) continue;
    const detail::LayerViews w = roles.layer(weights.master, int(i)), dw = roles.layer(grads, int(i));
    scaled_rows_backward({.x = w.o, .scale = w.attn_scale, .dy = s.o_grad, .dx = dw.o, .dscale = dw.attn_scale},
                         options.stream);
    scaled_rows_backward({.x = w.down, .scale = w.mlp_scale, .dy = s.down_grad, .dx = dw.down, .dscale = dw.mlp_scale},
                         options.stream);
  }
}

void Gpt::Impl::blocks_forward(const detail::CallContext& call, const GptWeights& weights) {
  if (call.folds_scales) scale_matrices(weights);
  for (int i = 0; i < int(program.layer_calls.size()); ++i) {
    detail::BlockTensors b = block(i, weights, {}, false);
    if (call.folds_scales && !b.layer_call->lanes) b.scaled = &buffers.scaled_of[size_t(b.layer_call->layer)];
    if (call.cut && i + 1 == int(program.layer_calls.size())) b.scored = &buffers.scored_rows;
    detail::block_forward(call, b);
  }
}

// Whether the backward pass of a layer call adds the gradient of a skip from its input to the gradient of its input.
bool Gpt::Impl::adds_skip(int i) const {
  if (i >= int(program.layer_calls.size())) return false;
  const LayerCall& next = program.layer_calls[size_t(i)];
  return buffers.skip_grad[size_t(i)] && next.skip_slot < 0 && !next.lanes;
}

void Gpt::Impl::blocks_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads) {
  INGOT_CHECK(!grads || !weights.qkv, "gpt: found weights with a copy of q, k and v, expected none that get gradients");
  const Shape shape{call.tokens, config.dim};
  const bool of_x0 = config.resid_mix && grads;  // with frozen weights this gradient is not needed
  if (of_x0) fill({.to = view(buffers.x0_grad, shape)}, options.stream);
  if (call.folds_scales && grads) fill({.to = buffers.scaled_grads}, options.stream);
  for (int i = int(program.layer_calls.size()) - 1; i >= 0; --i) {
    const LayerCall& a = program.layer_calls[size_t(i)];
    detail::BlockGradients g{
        .g0 = buffers.g0, .g1 = buffers.g1, .x0_grad = of_x0 ? buffers.x0_grad : Tensor(), .of_input = i > 0 || grads};
    if (a.skip_from >= 0) g.skip_grad = buffers.skip_grad[size_t(a.skip_from) + 1];
    // A skip from this layer call's output, where the next layer call has not added its gradient.
    if (const Tensor& from_skip = buffers.skip_grad[size_t(i) + 1]; from_skip && !adds_skip(i + 1))
      axpby({.x = view(from_skip, shape), .y = view(buffers.g0, shape)}, options.stream);
    if (i > 0 && adds_skip(i)) g.more = buffers.skip_grad[size_t(i)];
    detail::BlockTensors b = block(i, weights, grads, true);
    if (call.cut && i + 1 == int(program.layer_calls.size())) b.scored = &buffers.scored_rows;
    if (call.folds_scales && !b.layer_call->lanes) b.scaled = &buffers.scaled_of[size_t(b.layer_call->layer)];
    detail::block_backward(call, b, g);
  }
  if (call.folds_scales && grads) scale_matrices_backward(weights, grads);
}

}  // namespace ingot
