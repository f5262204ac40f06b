#include "ingot/models/gpt/block/block_stream.h"

#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "ingot/kernels/skip_merge/skip_merge.h"

namespace ingot::detail {

void ResidualStream::merge_skip() const {
  if (at.layer_call.skip_slot < 0) return;
  skip_merge({.x = at.lane0(),
              .skip = at.channels(at.b.skip),
              .w = at.b.skip_w.weight,
              .gate = at.b.skip_w.gate,
              .y = at.merged()},
             at.call.stream);
}
void ResidualStream::mix_input() const {
  if (!at.config.resid_mix) return;
  mix({.x = at.merged(), .x0 = at.channels(at.b.x0), .a = at.b.w.mix_a, .b = at.b.w.mix_b, .y = at.mixed()},
      at.call.stream);
}
void ResidualStream::read_input() const {
  if (!at.config.resid_mix) return norm(at.merged(), at.b.w.attn_norm, at.normed(), at.rstd_attn());
  residual_norm({.x = at.merged(),
                 .x0 = at.channels(at.b.x0),
                 .a = at.b.w.mix_a,
                 .b = at.b.w.mix_b,
                 .mixed = at.mixed(),
                 .w = at.b.w.attn_norm,
                 .y = at.normed(),
                 .rstd = at.rstd_attn(),
                 .eps = at.config.norm_eps,
                 .norm_scale = at.layer_scale()},
                at.call.stream);
}
void ResidualStream::read_backward(const BlockGradients& g) const {
  const Tensor g0 = at.channels(g.g0);
  ResidualNormBackward r = norm_gradient(at.mixed(), at.b.w.attn_norm, at.b.dw.attn_norm, at.rstd_attn(), g0);
  r.more = at.channels(g.more);
  if (at.layer_call.lanes) {  // lane0's gradient does not pass through the mix
    r.dsum = Tensor(), r.more = g0;
    r.spare = view(at.b.scratch.in_grad, {at.end - at.begin, at.config.dim});
  }
  if (at.config.resid_mix) {
    r.a = at.b.w.mix_a;
    if (g.x0_grad) {
      r.x = at.merged(), r.x0 = at.channels(at.b.x0), r.b = at.b.w.mix_b;
      r.dx0 = at.channels(g.x0_grad), r.da = at.b.dw.mix_a, r.db = at.b.dw.mix_b;
    }
  }
  residual_norm_backward(r, at.call.stream);
  if (at.layer_call.skip_slot >= 0)
    skip_merge_backward({.x = at.lane0(),
                         .skip = at.channels(at.b.skip),
                         .w = at.b.skip_w.weight,
                         .gate = at.b.skip_w.gate,
                         .dy = g0,
                         .dx = g0,
                         .dskip = at.channels(g.skip_grad),
                         .dw = at.b.skip_dw.weight,
                         .dgate = at.b.skip_dw.gate,
                         .workspace = at.b.scratch.residual_workspace,
                         .write_dskip = true},
                        at.call.stream);
  if (at.layer_call.enters_lanes)
    axpby({.x = at.channels(g.g1), .y = g0}, at.call.stream);  // both lanes started as the same x
}
void ResidualStream::norm(const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& rstd) const {
  residual_norm({.x = x, .w = w, .y = y, .rstd = rstd, .eps = at.config.norm_eps, .norm_scale = at.layer_scale()},
                at.call.stream);
}
ResidualNormBackward ResidualStream::norm_gradient(const Tensor& m, const Tensor& w, const Tensor& dw,
                                                   const Tensor& rstd, const Tensor& g) const {
  return {.dy = at.normed_grad(),
          .m = m,
          .rstd = rstd,
          .dsum = g,
          .w = w,
          .dw = dw,
          .dx = g,
          .workspace = at.b.scratch.residual_workspace,
          .norm_workspace = at.b.scratch.norm_workspace,
          .eps = at.config.norm_eps,
          .norm_scale = at.layer_scale()};
}
void ResidualStream::norm_backward(const Tensor& x, const Tensor& w, const Tensor& dw, const Tensor& rstd,
                                   const Tensor& dsum, const Tensor& dx) const {
  rmsnorm_backward({.dy = at.normed_grad(),
                    .s = x,
                    .w = w,
                    .rstd = rstd,
                    .dsum = dsum,
                    .dx = dx,
                    .dw = dw,
                    .workspace = at.b.scratch.norm_workspace,
                    .eps = at.config.norm_eps,
                    .scale = at.layer_scale()},
                   at.call.stream);
}

}  // namespace ingot::detail
