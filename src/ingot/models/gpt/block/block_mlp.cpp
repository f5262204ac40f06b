#include "ingot/models/gpt/block/block_mlp.h"

#include "ingot/models/gpt/block/block_stream.h"

namespace ingot::detail {

void MlpBranch::forward() const {
  const Tensor h = at.activated();
  at.show(MatrixInput::mlp_up, at.normed_mlp());
  linear({.x = at.normed_mlp(),
          .w = at.b.w.up,
          .y = h,
          .pre = at.pre(),
          .signs = at.signs(),
          .act = at.call.act,
          .products = at.call.products,
          .workspace = at.call.linear_workspace},
         at.call.stream);
  at.show(MatrixInput::mlp_down, h);
  // The large product adds to the small product's result, because its operations hide the additions.
  const bool adapted = adapter_forward(at.mlp_adapter(), at.normed_mlp(), at.mlp_out(), false);
  if (at.b.scaled != nullptr) return at.add_product(h, at.b.scaled->down, at.mid(), at.channels(at.b.out0));
  linear({.x = h,
          .w = at.b.w.down,
          .y = at.mlp_out(),
          .accumulate = adapted,
          .products = at.call.products,
          .workspace = at.call.linear_workspace},
         at.call.stream);
}
void MlpBranch::backward(const Tensor& x, const Tensor& dout) const {
  const Tensor dpre = at.hidden(at.b.scratch.hidden_grad), dm = at.normed_grad();
  if (!at.kept()) ResidualStream{at}.norm(x, at.b.w.mlp_norm, at.normed_mlp(), Tensor());
  linear_backward({.dy = dout,
                   .x = at.activated(),
                   .w = at.b.scaled != nullptr ? at.b.scaled->down : at.b.w.down,
                   .dx = dpre,
                   .dw = at.b.dw.down && at.b.scaled != nullptr ? at.b.scaled->down_grad : at.b.dw.down,
                   .pre = at.pre(),
                   .signs = at.signs(),
                   .act = at.call.act,
                   .products = at.call.products,
                   .form_x = at.b.dw.down && !at.b.saved.hidden,
                   .workspace = at.call.linear_workspace},
                  at.call.stream);
  const bool adapted = adapter_backward(at.mlp_adapter(), at.normed_mlp(), dout, dm, false);
  linear_backward({.dy = dpre,
                   .x = at.normed_mlp(),
                   .w = at.b.w.up,
                   .dx = dm,
                   .dw = at.b.dw.up,
                   .accumulate_dx = adapted,
                   .products = at.call.products,
                   .workspace = at.call.linear_workspace},
                  at.call.stream);
}

}  // namespace ingot::detail
