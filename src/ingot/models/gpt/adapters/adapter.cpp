#include "ingot/models/gpt/adapters/adapter.h"

#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/block/segments.h"

namespace ingot::detail {
namespace {

Tensor low_rows(const Tensor& scratch, int64_t tokens, int64_t rank) {
  INGOT_CHECK(scratch.numel() >= tokens * rank, "adapter: found rank ", rank,
              ", expected at most the max_adapter_rank of the options");
  if (scratch.row_stride() != scratch.cols()) return scratch.slice(0, 0, tokens).slice(1, 0, rank);
  return Tensor(scratch.data, scratch.dtype, {tokens, rank}, scratch.device);
}

// The weights of a group's documents, in the memory that holds the weights of all documents. `more_rows`: rows of a
// document's weights below those of w.
Tensor folded_rows(const Tensor& memory, const Tensor& w, const SegmentRun& run, int64_t more_rows) {
  const Shape all{run.first + run.count, w.rows() + more_rows, w.cols()};
  return run.each_of(Tensor(memory.data, memory.dtype, all, memory.device));
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
// Writes W + B A for each of the group's documents, and below these rows the A of a second adapter (`rider`), whose
// first product then takes no pass of its own.
Tensor fold(std::span<const AdapterCall> adapters, const Tensor& w, const SegmentRun& run, const AdapterPair* rider) {
  const int64_t rank = rider != nullptr ? rider->a.size(1) : 0;
  const Tensor own = folded_rows(adapters.front().folded, w, run, rank);
  each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
    multiply_segments(c, run.each_of(c.pair->b), false, run.each_of(c.pair->a), false, own.slice(1, row, end), 1,
                      w.slice(0, row, end));
  });
  if (rider != nullptr)
    copy({.from = run.each_of(rider->a), .to = own.slice(1, w.rows(), w.rows() + rank)}, adapters.front().stream);
  return own;
}

}  // namespace

void multiply_segments(const AdapterCall& call, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                       const Tensor& c, double beta, const Tensor& add) {
  matmul_each({.a = a,
               .b = b,
               .c = c,
               .transpose_a = transpose_a,
               .transpose_b = transpose_b,
               .beta = beta,
               .products = call.products,
               .add = add,
               .workspace = call.workspace},
              call.stream);
}

// Whether folding pays for w (N, K): a document's own weights are N K numbers to write and read, and save N + K numbers
// for each of the document's tokens.
bool adapters_fold(const AdapterCall& c, const Tensor& w, int64_t more_rows) {
  if (!c.folded || c.pair == nullptr || !c.pair->a) return false;
  int64_t segments = 0;
  bool pays = true;
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    segments = run.first + run.count;
    pays &= run.length * (w.rows() + w.cols()) >= w.numel();
  });
  return pays && segments * (w.rows() + more_rows) * w.cols() <= c.folded.numel();
}

void adapted_linear(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& y,
                    const AdapterPair* rider) {
  const AdapterCall& all = adapters.front();
  if (rider != nullptr || adapters_fold(all, w))
    return for_each_run(all.cu, all.cu, [&](const SegmentRun& run) {
      multiply_segments(all, run.of(x), false, fold(adapters, w, run, rider), true, run.of(y), 0);
    });
  linear({.x = x, .w = w, .y = y, .products = all.products, .workspace = all.workspace}, all.stream);
  each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
    adapter_forward(c, x, y.slice(1, row, end), true);
  });
}

void adapted_linear_backward(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& dw,
                             const Tensor& dy, const Tensor& dx, bool accumulate_dx, const AdapterCall* rider) {
  const AdapterCall& all = adapters.front();
  if (rider == nullptr && (dw || !adapters_fold(all, w))) {
    if (dx || dw)
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
    const int64_t more_rows = rider != nullptr ? rider->pair->a.size(1) : 0;
    if (dx) {
      const Tensor weights = all.kept ? folded_rows(all.kept, w, run, more_rows)
                                      : fold(adapters, w, run, rider != nullptr ? rider->pair : nullptr);
      multiply_segments(all, run.of(dy), false, weights, false, run.of(dx), accumulate_dx ? 1 : 0);
    }
    if (all.grad == nullptr || !all.grad->a) return;
    const Tensor g = folded_rows(all.folded, w, run, more_rows);
    multiply_segments(all, run.of(dy), true, run.of(x), false, g, 0);
    if (rider != nullptr)
      copy({.from = g.slice(1, w.rows(), g.size(1)), .to = run.each_of(rider->grad->a)}, all.stream);
    each_adapter(adapters, [&](const AdapterCall& c, int64_t row, int64_t end) {
      const Tensor own = g.slice(1, row, end);
      multiply_segments(c, own, false, run.each_of(c.pair->a), true, run.each_of(c.grad->b), c.write_grad ? 0 : 1);
      multiply_segments(c, run.each_of(c.pair->b), true, own, false, run.each_of(c.grad->a), c.write_grad ? 0 : 1);
    });
  });
}

bool adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y, bool add) {
  if (c.pair == nullptr || !c.pair->a) return false;
  const Tensor low = low_rows(c.low, x.rows(), c.pair->a.size(1));
  for_each_run(c.cu, c.cu, [&](const SegmentRun& run) {
    if (!c.rides) multiply_segments(c, run.of(x), false, run.each_of(c.pair->a), true, run.of(low), 0);
    multiply_segments(c, run.of(low), false, run.each_of(c.pair->b), true, run.of(y), add ? 1 : 0);
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
    multiply_segments(c, dys, false, b, false, dh, 0);
    if (!c.rides && dx) multiply_segments(c, dh, false, a, false, run.of(dx), add ? 1 : 0);
    if (!learn) return;
    if (!c.low_kept) multiply_segments(c, xs, false, a, true, h, 0);
    multiply_segments(c, dys, true, h, false, run.each_of(c.grad->b), c.write_grad ? 0 : 1);
    if (!c.rides) multiply_segments(c, dh, true, xs, false, run.each_of(c.grad->a), c.write_grad ? 0 : 1);
  });
  return true;
}

}  // namespace ingot::detail
