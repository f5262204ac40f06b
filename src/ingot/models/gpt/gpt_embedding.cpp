#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/embedding/embedding.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

using detail::view;

// The tokens' rows of the table, normed where the config says so, in `into`; `raw` receives the rows before the norm.
Tensor Gpt::Impl::look_up(const GptWeights& weights, const TokenBatch& batch, const Tensor& raw,
                          const Tensor& into) const {
  const Shape shape{batch.tokens.numel(), embed_width()};
  const Tensor x = view(into, shape), rows = config.embed_norm ? view(raw, shape) : x;
  embedding({.ids = batch.tokens, .table = roles.get(weights, roles.table), .y = rows}, options.stream);
  if (config.embed_norm) rmsnorm({.x = rows, .y = x, .eps = config.norm_eps}, options.stream);
  return x;
}

// Row, norm, projection, learned position.
void Gpt::Impl::embed_forward(const GptWeights& weights, const TokenBatch& batch, MatrixInputs* inputs) {
  const Tensor x0 = view(buffers.in0[0], {batch.tokens.numel(), config.dim});
  if (roles.embed_proj == nullptr) {
    look_up(weights, batch, buffers.embedded, x0);
  } else {
    const Tensor low = look_up(weights, batch, buffers.embedded, buffers.embed_low);
    if (inputs != nullptr) inputs->seen(MatrixInput::embed_proj, 0, low);
    linear({.x = low,
            .w = roles.get(weights, roles.embed_proj),
            .y = x0,
            .products = options.products,
            .workspace = buffers.linear_workspace},
           options.stream);
  }
  if (roles.positions != nullptr)
    embedding({.ids = batch.positions, .table = roles.get(weights, roles.positions), .y = x0, .accumulate = true},
              options.stream);
}

// g0 holds the gradient of the first layer call's input; x0_grad holds the gradient of x0 through the residual mixes.
void Gpt::Impl::embed_backward(const GptWeights& weights, const TokenBatch& batch, const Tensor& grads) {
  if (!grads) return;
  const int64_t T = batch.tokens.numel();
  const Shape shape{T, embed_width()};
  Tensor g = view(buffers.g0, {T, config.dim});
  if (config.resid_mix) axpby({.x = view(buffers.x0_grad, {T, config.dim}), .y = g}, options.stream);
  if (roles.positions != nullptr)
    embedding_backward({.ids = batch.positions, .dy = g, .dtable = roles.get(grads, roles.positions)}, options.stream);
  if (roles.embed_proj != nullptr) {
    const Tensor low = look_up(weights, batch, buffers.embedded_again, buffers.embed_low_again);
    const Tensor low_grad = view(buffers.embed_low_grad, shape);
    linear_backward({.dy = g,
                     .x = low,
                     .w = roles.get(weights, roles.embed_proj),
                     .dx = low_grad,
                     .dw = roles.get(grads, roles.embed_proj),
                     .products = options.products,
                     .workspace = buffers.linear_workspace},
                    options.stream);
    g = low_grad;
  }
  if (config.embed_norm) {
    const Tensor rows = view(buffers.embedded_again, shape);
    embedding({.ids = batch.tokens, .table = roles.get(weights, roles.table), .y = rows}, options.stream);
    rmsnorm_backward({.dy = g, .s = rows, .dx = g, .eps = config.norm_eps}, options.stream);
  }
  embedding_backward({.ids = batch.tokens, .dy = g, .dtable = roles.get(grads, roles.table)}, options.stream);
}

}  // namespace ingot
