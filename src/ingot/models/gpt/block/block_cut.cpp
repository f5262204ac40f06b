#include "ingot/models/gpt/block/block_cut.h"

#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"

namespace ingot::detail {

Tensor ScoredTokens::packed(const Tensor& t, int64_t cols) const { return view(t, {at.call.scored(), cols}); }
void ScoredTokens::gather(const Tensor& from, const Tensor& to) const {
  each_run([&](const SegmentRun& run) {
    copy({.from = run.last_of(from), .to = run.packed_of(packed(to, from.cols()))}, at.call.stream);
  });
}
void ScoredTokens::scatter(const Tensor& from, const Tensor& to) const {
  each_run([&](const SegmentRun& run) {
    copy({.from = run.packed_of(packed(from, to.cols())), .to = run.last_of(to)}, at.call.stream);
  });
}
void ScoredTokens::add_scattered(const Tensor& from, const Tensor& to) const {
  const Tensor sum = packed(at.b.scored->spare, to.cols());
  gather(to, sum);
  axpby({.x = packed(from, to.cols()), .y = sum}, at.call.stream);
  scatter(sum, to);
}
void ScoredTokens::spread(const Tensor& g) const {
  const Tensor rows = packed(at.b.scored->spare, at.config.dim), all = at.channels(g);
  copy({.from = packed(g, at.config.dim), .to = rows}, at.call.stream);
  fill({.to = all}, at.call.stream);
  scatter(rows, all);
}

}  // namespace ingot::detail
