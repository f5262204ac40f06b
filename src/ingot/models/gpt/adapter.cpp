#include "ingot/models/gpt/adapter.h"

#include "ingot/models/gpt/segments.h"

namespace ingot::detail {
namespace {

Tensor low_rows(const Tensor& scratch, int64_t tokens, int64_t rank) {
  INGOT_CHECK(scratch.numel() >= tokens * rank, "adapter: found rank ", rank,
              ", expected at most the max_adapter_rank of the options");
  return Tensor(scratch.data, scratch.dtype, {tokens, rank}, scratch.device);
}

}  // namespace

void adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y) {
  if (c.pair == nullptr || !c.pair->a) return;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    MatMul m{.products = c.products, .workspace = c.workspace};
    m.a = run.of(x), m.b = run.each_of(c.pair->a), m.c = run.of(low), m.transpose_b = true;
    matmul_each(m, c.stream);
    m.a = m.c, m.b = run.each_of(c.pair->b), m.c = run.of(y), m.beta = 1;
    matmul_each(m, c.stream);
  });
}

void adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  if (c.pair == nullptr || !c.pair->a) return;
  const bool learn = c.grad != nullptr && c.grad->a;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  const Tensor low_grad = low_rows(c.low_grad, x.rows(), c.pair->a.size(1));
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    const auto product = [&](const Tensor& a, bool ta, const Tensor& b, bool tb, const Tensor& into, double beta) {
      matmul_each({.a = a,
                   .b = b,
                   .c = into,
                   .transpose_a = ta,
                   .transpose_b = tb,
                   .beta = beta,
                   .products = c.products,
                   .workspace = c.workspace},
                  c.stream);
    };
    const Tensor xs = run.of(x), dys = run.of(dy), h = run.of(low), dh = run.of(low_grad);
    const Tensor a = run.each_of(c.pair->a), b = run.each_of(c.pair->b);
    product(dys, false, b, false, dh, 0);
    product(dh, false, a, false, run.of(dx), 1);
    if (!learn) return;
    product(xs, false, a, true, h, 0);
    product(dys, true, h, false, run.each_of(c.grad->b), 1);
    product(dh, true, xs, false, run.each_of(c.grad->a), 1);
  });
}

}  // namespace ingot::detail
