#include <span>

#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/block/segments.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

detail::CallContext Gpt::Impl::context(const TokenBatch& batch, const GptAdapters* adapters, GptAdapters* grads) {
  scored_cu.assign(1, 0);
  for (const int32_t n : batch.last) scored_cu.push_back(scored_cu.back() + n);
  return {.config = config,
          .tokens = batch.tokens.numel(),
          .block_rows = detail::most_block_rows(options.capacity, options),
          .device = options.device,
          .stream = options.stream,
          .positions = batch.positions,
          .cu_seqlens = batch.cu_seqlens,
          .cu = batch.cu(),
          .scored_cu = batch.last.empty() ? batch.cu() : std::span<const int32_t>(scored_cu),
          .cos = cos,
          .sin = sin,
          .act = act,
          .products = options.products,
          .any_order = options.any_order_segments > 0,
          .linear_workspace = buffers.linear_workspace,
          .adapters = adapters,
          .adapter_grads = grads};
}
// The last layer call need not compute the outputs of tokens without a score.
void Gpt::Impl::cut_last_call(detail::CallContext& call, const TokenBatch& batch) {
  const int64_t N = call.scored();
  if (!buffers.scored_rows.merged || N == 0 || N == call.tokens) return;
  scored_at.clear();
  const int32_t* const at = batch.positions_on_host().ptr<int32_t>();
  for (size_t s = 0; s + 1 < call.cu.size(); ++s) {
    const int32_t end = call.cu[s + 1];
    scored_at.insert(scored_at.end(), at + end - (call.scored_cu[s + 1] - call.scored_cu[s]), at + end);
  }
  scored_at.insert(scored_at.end(), call.scored_cu.begin(), call.scored_cu.end());
  const int64_t all = int64_t(scored_at.size());
  Tensor there(scored_at.data(), {all});
  if (options.device.kind == Device::cuda) {
    const Tensor host = there;
    if (scored_at_memory.capacity() < host.bytes())
      scored_at_memory = Arena(2 * host.bytes(), gpu::memory_of(options.device));
    there = scored_at_memory.at(0, DType::i32, {all});
    copy({.from = host, .to = there}, options.stream);
  }
  call.cut = true;
  call.scored_positions = there.slice(0, 0, N), call.scored_cu_seqlens = there.slice(0, N, all);
}

// Sets the fields that a call after cached sequences needs.
void Gpt::Impl::continue_sequences(detail::CallContext& call, const CachedSegments* cached) {
  if (cached == nullptr) return;
  call.cached = cached;
  call.cached_cu = cached_offsets(call.cu, *cached);
}
// Adds the call's tokens to the lengths of its sequences. Called after the pass.
void Gpt::Impl::advance_caches(const detail::CallContext& call) {
  if (call.cached == nullptr) return;
  for (size_t s = 0; s < call.cached->sequences.size(); ++s)
    call.cached->cache.advance(call.cached->sequences[s], call.cu[s + 1] - call.cu[s]);
}

// The offsets of each segment's keys, including cached keys, on the device for attention.
Tensor Gpt::Impl::cached_offsets(std::span<const int32_t> cu, const CachedSegments& cached) {
  cached_cu.clear();
  for (size_t s = 0; s < cached.sequences.size(); ++s) {
    const int32_t added = cu[s + 1] - cu[s];
    for (int32_t n : {0, added, 0, int32_t(detail::cached_keys(cached, s, added))}) cached_cu.push_back(n);
  }
  const Shape shape{int64_t(cached.sequences.size()), 2, 2};
  const Tensor host(cached_cu.data(), shape);
  if (options.device.kind == Device::cpu) return host;
  if (cached_cu_memory.capacity() < host.bytes())
    cached_cu_memory = Arena(2 * host.bytes(), gpu::memory_of(options.device));
  const Tensor there = cached_cu_memory.at(0, DType::i32, shape);
  // The host's memory is not pinned, so the call returns only when the memory may be used again.
  copy({.from = host, .to = there}, options.stream);
  return there;
}

}  // namespace ingot
