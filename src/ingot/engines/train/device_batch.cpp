#include "ingot/engines/train/device_batch.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"

namespace ingot {

DeviceBatch::DeviceBatch(Device device, Stream stream, int64_t most_tokens) : stream_(stream) {
  if (device.kind == Device::cpu) return;
  const Shape tokens{most_tokens}, cuts{most_tokens + 1};
  const int64_t bytes = 3 * Arena::aligned(DType::i32, tokens) + Arena::aligned(DType::i32, cuts);
  memory_ = Arena(bytes, gpu::memory_of(device));
  for (Tensor* t : {&tokens_, &targets_, &positions_}) *t = memory_.take(DType::i32, tokens);
  cu_seqlens_ = memory_.take(DType::i32, cuts);
  staged_ = Staged(bytes);
}

TokenBatch DeviceBatch::put(Batch& b) {
  const auto here = [](std::vector<int32_t>& v) { return Tensor(v.data(), {int64_t(v.size())}); };
  TokenBatch host{here(b.tokens), here(b.targets), here(b.positions), here(b.cu_seqlens)};
  host.last = b.last;
  if (!tokens_) return host;
  cuts_ = b.cu_seqlens, last_ = b.last;
  cuts_.resize(size_t(segment_bucket(int64_t(cuts_.size()) - 1, b.size()) + 1), cuts_.back());
  host.cu_seqlens = here(cuts_);
  if (!last_.empty()) last_.resize(cuts_.size() - 1, 0);
  INGOT_CHECK_LE(b.size(), tokens_.numel(), "batch: tokens");
  staged_.begin();
  const auto there = [&](const Tensor& from, const Tensor& all) {
    const Tensor by = staged_.take(DType::i32, from.shape), to = all.slice(0, 0, from.numel());
    std::copy_n(from.ptr<int32_t>(), from.numel(), by.ptr<int32_t>());
    copy({.from = by, .to = to}, stream_);
    return to;
  };
  const TokenBatch batch{.tokens = there(host.tokens, tokens_),
                         .targets = there(host.targets, targets_),
                         .positions = there(host.positions, positions_),
                         .cu_seqlens = there(host.cu_seqlens, cu_seqlens_),
                         .host_positions = host.positions,
                         .host_cu_seqlens = host.cu_seqlens,
                         .last = last_};
  staged_.end(stream_);
  return batch;
}

}  // namespace ingot
