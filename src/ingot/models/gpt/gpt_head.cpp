#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/softcap/softcap.h"
#include "ingot/models/gpt/adapters/adapter.h"
#include "ingot/models/gpt/block/segments.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

using detail::view;

// The output of the last block: x, or the combination of the lanes.
Tensor Gpt::Impl::block_output(int64_t tokens) {
  const Shape shape{tokens, config.dim};
  const Tensor lane0 = view(buffers.in0.back(), shape);
  if (!program.layer_calls.back().lanes || config.lane_output == "attn") return lane0;
  const Tensor lane1 = view(buffers.in1.back(), shape);
  if (config.lane_output == "mlp") return lane1;
  const Tensor x = view(buffers.final, shape);
  copy({.from = lane0, .to = x}, options.stream);
  axpby({.x = lane1, .y = x, .alpha = 0.5, .beta = 0.5}, options.stream);
  return x;
}

// The scored rows of the output.
Tensor Gpt::Impl::scored_rows(const detail::CallContext& call) {
  const Tensor x = block_output(call.rows_out());
  if (call.scored() == call.rows_out()) return x;
  const Tensor rows = view(buffers.scored, {call.scored(), config.dim});
  detail::for_each_run(call.cu, call.scored_cu, [&](const detail::SegmentRun& run) {
    if (run.scored > 0) copy({.from = run.last_of(x), .to = run.packed_of(rows)}, options.stream);
  });
  return rows;
}

void Gpt::Impl::head_losses(const detail::CallContext& call, const GptWeights& weights, const TokenBatch& batch,
                            const Tensor& dloss, const Tensor& loss, const Tensor& grads, bool backward) {
  const int64_t T = call.scored();
  const Tensor x = scored_rows(call), f = view(buffers.head_normed, {T, config.dim});
  rmsnorm({.x = x,
           .w = roles.get(weights, roles.final_norm),
           .y = f,
           .rstd = view(buffers.final_rstd, {T}),
           .eps = config.norm_eps},
          options.stream);
  LinearCrossEntropy ce{.x = f,
                        .w = roles.get(weights, roles.output()),
                        .targets = batch.targets,
                        .loss = loss,
                        .workspace = buffers.head_workspace,
                        .softcap = config.softcap,
                        .z_loss = config.z_loss,
                        .products = options.products};
  if (roles.head_proj != nullptr) {
    if (call.inputs != nullptr) call.inputs->seen(MatrixInput::head_proj, 0, f);
    ce.x = view(buffers.head_in, {T, config.embed_dim});
    linear({.x = f,
            .w = roles.get(weights, roles.head_proj),
            .y = ce.x,
            .products = options.products,
            .workspace = buffers.linear_workspace},
           options.stream);
  }
  if (call.inputs != nullptr) call.inputs->seen(MatrixInput::head, 0, ce.x);
  if (backward) {
    ce.dloss = dloss;
    ce.dx = roles.head_proj != nullptr ? view(buffers.head_in_grad, {T, config.embed_dim})
                                       : view(buffers.head_normed_grad, {T, config.dim});
    ce.dw = roles.get(grads, roles.output());
  }
  const bool adapted = call.adapters != nullptr && call.adapters->head.a;
  if (adapted)
    losses_per_segment(ce, call);
  else
    linear_cross_entropy(ce, options.stream);
  if (backward) head_backward(call, weights, grads, x);
}

// With head adapters the logits depend on the document: x W^T + (f A_s^T) B_s^T.
void Gpt::Impl::losses_per_segment(LinearCrossEntropy ce, const detail::CallContext& call) {
  const AdapterPair& pair = call.adapters->head;
  const AdapterPair* grad =
      call.adapter_grads != nullptr && call.adapter_grads->head.a ? &call.adapter_grads->head : nullptr;
  const int64_t rank = pair.a.size(1), T = call.scored();
  const Tensor f = view(buffers.head_normed, {T, config.dim}), df = view(buffers.head_normed_grad, {T, config.dim});
  const Tensor low = view(buffers.head_low, {T, rank}), low_grad = view(buffers.head_low_grad, {T, rank});
  std::span<const int32_t> cu = call.scored_cu;
  while (cu.size() > 2 && cu[cu.size() - 2] == cu.back())
    cu = cu.first(cu.size() - 1);  // the last segment has no adapters
  const detail::AdapterCall by{
      .products = options.products, .workspace = buffers.linear_workspace, .stream = options.stream};
  const auto product = [&by](const auto&... arguments) { detail::multiply_segments(by, arguments...); };
  detail::for_each_run(cu, cu, [&](const detail::SegmentRun& run) {
    product(run.of(f), false, run.each_of(pair.a), true, run.of(low), 0);
  });
  const auto of_each = [&](const Tensor& t) { return t.slice(0, 0, int64_t(cu.size()) - 1); };
  ce.x2 = low, ce.w2 = of_each(pair.b), ce.cu2 = cu;
  if (ce.dloss) ce.dx2 = low_grad;
  const bool written = grad != nullptr && call.adapter_grads->written;
  if (ce.dloss && grad != nullptr) ce.dw2 = of_each(grad->b);
  if (ce.dw2 && written) fill({.to = ce.dw2}, options.stream);
  linear_cross_entropy(ce, options.stream);
  if (!ce.dloss) return;
  if (roles.head_proj != nullptr) fill({.to = df}, options.stream);  // head_backward adds the projection's part
  detail::for_each_run(cu, cu, [&](const detail::SegmentRun& run) {
    product(run.of(low_grad), false, run.each_of(pair.a), false, run.of(df), 1);
    if (grad != nullptr) product(run.of(low_grad), true, run.of(f), false, run.each_of(grad->a), written ? 0 : 1);
  });
}

void Gpt::Impl::head_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads,
                              const Tensor& x) {
  const int64_t T = call.scored();
  const Shape shape{T, config.dim}, all{call.rows_out(), config.dim};
  const Tensor df = view(buffers.head_normed_grad, shape), g0 = view(buffers.g0, all);
  const Tensor dx = T == call.rows_out() ? g0 : view(buffers.scored_grad, shape);
  if (roles.head_proj != nullptr) {
    const bool adapted = call.adapters != nullptr && call.adapters->head.a;
    linear_backward({.dy = view(buffers.head_in_grad, {T, config.embed_dim}),
                     .x = view(buffers.head_normed, shape),
                     .w = roles.get(weights, roles.head_proj),
                     .dx = df,
                     .dw = roles.get(grads, roles.head_proj),
                     .accumulate_dx = adapted,
                     .products = options.products,
                     .workspace = buffers.linear_workspace},
                    options.stream);
  }
  rmsnorm_backward({.dy = df,
                    .s = x,
                    .w = roles.get(weights, roles.final_norm),
                    .rstd = view(buffers.final_rstd, {T}),
                    .dx = dx,
                    .dw = roles.get(grads, roles.final_norm),
                    .workspace = buffers.embed_workspace,
                    .eps = config.norm_eps},
                   options.stream);
  if (T < call.rows_out()) {
    fill({.to = g0}, options.stream);
    detail::for_each_run(call.cu, call.scored_cu, [&](const detail::SegmentRun& run) {
      if (run.scored > 0) copy({.from = run.packed_of(dx), .to = run.last_of(g0)}, options.stream);
    });
  }
  if (!program.layer_calls.back().lanes) return;
  const Tensor g1 = view(buffers.g1, all);
  if (config.lane_output == "attn") {
    fill({.to = g1}, options.stream);
  } else if (config.lane_output == "mlp") {
    copy({.from = g0, .to = g1}, options.stream);
    fill({.to = g0}, options.stream);
  } else {
    axpby({.x = g0, .y = g0, .alpha = 0.5, .beta = 0}, options.stream);
    copy({.from = g0, .to = g1}, options.stream);
  }
}

void Gpt::Impl::head_logits(const detail::CallContext& call, const GptWeights& weights, const Tensor& rows,
                            const Tensor& logits) {
  const int64_t N = rows.numel();
  INGOT_CHECK(logits.rows() == N && logits.cols() == config.vocab, "gpt: found logits of shape ", logits.shape,
              ", expected (", N, ", ", config.vocab, ")");
  INGOT_CHECK(rows.device.kind == Device::cpu, "gpt: found rows on ", rows.device, ", expected them in host memory");
  const Tensor x = block_output(call.tokens);
  const Tensor f = view(buffers.head_normed, {call.tokens, config.dim});
  const int32_t* row = rows.ptr<int32_t>();
  rmsnorm({.x = x, .w = roles.get(weights, roles.final_norm), .y = f, .eps = config.norm_eps}, options.stream);
  const Tensor w = roles.get(weights, roles.output());
  const auto product = [&](const Tensor& in, const Tensor& matrix, const Tensor& out, bool add) {
    const Tensor& workspace = buffers.linear_workspace;
    if (out.dtype == in.dtype)
      linear({.x = in, .w = matrix, .y = out, .accumulate = add, .products = options.products, .workspace = workspace},
             options.stream);
    else
      matmul({.a = in, .b = matrix, .c = out, .transpose_b = true, .beta = add ? 1.0 : 0.0, .workspace = workspace},
             options.stream);
  };
  for (int64_t i = 0; i < N; ++i) {
    INGOT_CHECK(row[i] >= 0 && row[i] < call.tokens, "gpt: found row ", row[i], ", expected 0 to ", call.tokens - 1);
    const Tensor fi = f.slice(0, row[i], row[i] + 1), li = logits.slice(0, i, i + 1);
    Tensor in = fi;
    if (roles.head_proj != nullptr) {
      in = view(buffers.head_in, {1, config.embed_dim});
      product(fi, roles.get(weights, roles.head_proj), in, false);
    }
    product(in, w, li, false);
    if (call.adapters != nullptr && call.adapters->head.a) {
      int64_t s = 0;
      while (call.cu[size_t(s) + 1] <= row[i]) ++s;
      const Tensor low = view(buffers.head_low, {1, call.adapters->head.a.size(1)});
      product(fi, call.adapters->head.a.row(s), low, false);
      product(low, call.adapters->head.b.row(s), li, true);
    }
  }
  if (config.softcap > 0) softcap({.x = logits, .y = logits, .cap = config.softcap}, options.stream);
}

}  // namespace ingot
