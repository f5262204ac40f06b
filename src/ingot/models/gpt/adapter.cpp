#include "ingot/models/gpt/adapter.h"

#include "ingot/models/gpt/segments.h"

namespace ingot::detail {
namespace {

Tensor low_rows(const Tensor& scratch, int64_t tokens, int64_t rank) {
  INGOT_CHECK(scratch.numel() >= tokens * rank, "adapter: found rank ", rank,
              ", expected at most the max_adapter_rank of the options");
  return Tensor(scratch.data, scratch.dtype, {tokens, rank}, scratch.device);
}

// A folded document writes and reads N K numbers more, and N + K fewer a token.
bool folds(const AdapterCall& c, const Tensor& w) {
  if (!c.folded || c.pair == nullptr || !c.pair->a) return false;
  int64_t segments = 0;
  bool pays = true;
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    segments += run.count;
    pays &= run.length * (w.rows() + w.cols()) >= w.numel();
  });
  return pays && segments * w.numel() <= c.folded.numel();
}
Tensor folded_rows(const AdapterCall& c, const Tensor& w, int64_t count) {
  return Tensor(c.folded.data, c.folded.dtype, {count, w.rows(), w.cols()}, c.folded.device);
}
void product(const AdapterCall& c, const Tensor& a, bool ta, const Tensor& b, bool tb, const Tensor& into, double beta,
             const Tensor& add = {}) {
  matmul_each({.a = a,
               .b = b,
               .c = into,
               .transpose_a = ta,
               .transpose_b = tb,
               .beta = beta,
               .products = c.products,
               .add = add,
               .workspace = c.workspace},
              c.stream);
}
// Calls use(adapter, its first row, the row after its last).
template <class Use> void each_adapter(std::span<const AdapterCall> adapters, Use&& use) {
  int64_t row = 0;
  for (const AdapterCall& c : adapters) {
    if (c.pair == nullptr || !c.pair->a) return;
    const int64_t end = row + c.pair->b.size(1);
    use(c, row, end);
    row = end;
  }
}
// W + B A of a run's documents.
Tensor fold(std::span<const AdapterCall> adapters, const Tensor& w, const SegmentRun& run) {
  const Tensor own = folded_rows(adapters.front(), w, run.count);
  each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
    product(c, run.each_of(c.pair->b), false, run.each_of(c.pair->a), false, own.slice(1, row, end), 1,
            w.slice(0, row, end));
  });
  return own;
}

}  // namespace

void adapted_linear(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& y) {
  const AdapterCall& all = adapters.front();
  if (folds(all, w))
    return for_each_run(all.cu, all.cu, [&](const SegmentRun& run) {
      product(all, run.of(x), false, fold(adapters, w, run), true, run.of(y), 0);
    });
  linear({.x = x, .w = w, .y = y, .products = all.products, .workspace = all.workspace}, all.stream);
  each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
    adapter_forward(c, x, y.slice(1, row, end), true);
  });
}

void adapted_linear_backward(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& dw,
                             const Tensor& dy, const Tensor& dx, bool accumulate_dx) {
  const AdapterCall& all = adapters.front();
  if (dw || !folds(all, w)) {
    linear_backward({.dy = dy,
                     .x = x,
                     .w = w,
                     .dx = dx,
                     .dw = dw,
                     .accumulate_dx = accumulate_dx,
                     .products = all.products,
                     .workspace = all.workspace},
                    all.stream);
    return each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
      adapter_backward(c, x, dy.slice(1, row, end), dx, true);
    });
  }
  for_each_run(all.cu, all.cu, [&](const SegmentRun& run) {
    product(all, run.of(dy), false, fold(adapters, w, run), false, run.of(dx), accumulate_dx ? 1 : 0);
    if (all.grad == nullptr || !all.grad->a) return;
    const Tensor g = folded_rows(all, w, run.count);
    product(all, run.of(dy), true, run.of(x), false, g, 0);
    each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
      const Tensor own = g.slice(1, row, end);
      product(c, own, false, run.each_of(c.pair->a), true, run.each_of(c.grad->b), c.write_grad ? 0 : 1);
      product(c, run.each_of(c.pair->b), true, own, false, run.each_of(c.grad->a), c.write_grad ? 0 : 1);
    });
  });
}

bool adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y, bool add) {
  if (c.pair == nullptr || !c.pair->a) return false;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    product(c, run.of(x), false, run.each_of(c.pair->a), true, run.of(low), 0);
    product(c, run.of(low), false, run.each_of(c.pair->b), true, run.of(y), add ? 1 : 0);
  });
  return true;
}

bool adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx, bool add) {
  if (c.pair == nullptr || !c.pair->a) return false;
  const bool learn = c.grad != nullptr && c.grad->a;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  const Tensor low_grad = low_rows(c.low_grad, x.rows(), c.pair->a.size(1));
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    const Tensor xs = run.of(x), dys = run.of(dy), h = run.of(low), dh = run.of(low_grad);
    const Tensor a = run.each_of(c.pair->a), b = run.each_of(c.pair->b);
    product(c, dys, false, b, false, dh, 0);
    product(c, dh, false, a, false, run.of(dx), add ? 1 : 0);
    if (!learn) return;
    if (!c.low_kept) product(c, xs, false, a, true, h, 0);
    product(c, dys, true, h, false, run.each_of(c.grad->b), c.write_grad ? 0 : 1);
    product(c, dh, true, xs, false, run.each_of(c.grad->a), c.write_grad ? 0 : 1);
  });
  return true;
}

}  // namespace ingot::detail
