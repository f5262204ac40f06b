#include "ingot/models/gpt/adapter.h"

namespace ingot::detail {
namespace {

// Calls use(segment, first token, end) for every segment that has tokens.
template <class Use> void for_each_segment(std::span<const int32_t> cu, Use&& use) {
  for (size_t s = 0; s + 1 < cu.size(); ++s)
    if (cu[s] < cu[s + 1]) use(int64_t(s), int64_t(cu[s]), int64_t(cu[s + 1]));
}

Tensor low_rows(const Tensor& scratch, int64_t tokens, int64_t rank) {
  INGOT_CHECK(scratch.numel() >= tokens * rank, "adapter: found rank ", rank,
              ", expected at most the max_adapter_rank of the options");
  return Tensor(scratch.data, scratch.dtype, {tokens, rank}, scratch.device);
}

}  // namespace

void adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y) {
  if (c.pair == nullptr || !c.pair->a) return;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  for_each_segment(c.cu, [&](int64_t s, int64_t begin, int64_t end) {
    const Tensor h = low.slice(0, begin, end);
    linear(
        {.x = x.slice(0, begin, end), .w = c.pair->a.row(s), .y = h, .products = c.products, .workspace = c.workspace},
        c.stream);
    linear({.x = h,
            .w = c.pair->b.row(s),
            .y = y.slice(0, begin, end),
            .accumulate = true,
            .products = c.products,
            .workspace = c.workspace},
           c.stream);
  });
}

void adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  if (c.pair == nullptr || !c.pair->a) return;
  const bool learn = c.grad != nullptr && c.grad->a;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  const Tensor low_grad = low_rows(c.low_grad, x.rows(), c.pair->a.size(1));
  for_each_segment(c.cu, [&](int64_t s, int64_t begin, int64_t end) {
    const Tensor xs = x.slice(0, begin, end), dys = dy.slice(0, begin, end);
    const Tensor h = low.slice(0, begin, end), dh = low_grad.slice(0, begin, end);
    linear({.x = xs, .w = c.pair->a.row(s), .y = h, .products = c.products, .workspace = c.workspace}, c.stream);
    linear_backward({.dy = dys,
                     .x = h,
                     .w = c.pair->b.row(s),
                     .dx = dh,
                     .dw = learn ? c.grad->b.row(s) : Tensor(),
                     .products = c.products,
                     .workspace = c.workspace},
                    c.stream);
    linear_backward({.dy = dh,
                     .x = xs,
                     .w = c.pair->a.row(s),
                     .dx = dx.slice(0, begin, end),
                     .dw = learn ? c.grad->a.row(s) : Tensor(),
                     .accumulate_dx = true,
                     .products = c.products,
                     .workspace = c.workspace},
                    c.stream);
  });
}

}  // namespace ingot::detail
