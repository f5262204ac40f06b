#include "ingot/models/gpt/gpt.h"

#include <utility>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/gpt/gpt_impl.h"

namespace ingot {

Gpt::Impl::Impl(const GptConfig& c, const GptTypes& t, const GptOptions& o)
    : config(c),
      types(t),
      options(o),
      program(layer_program(c, o.looping)),
      layout(c),
      roles(c, layout),
      act(activation_named(c.activation)) {
  INGOT_CHECK(o.capacity >= 1, "gpt: found a capacity of ", o.capacity, " tokens, expected at least 1");
  check_types();
  if (options.max_positions == 0) options.max_positions = config.context;
  buffers = detail::plan_buffers(config, program, types, options);
  make_rope_table();
}

void Gpt::Impl::make_rope_table() {
  if (config.rotary_dim == 0) return;
  // Computed on the host, and copied to the model's device.
  const Shape shape{options.max_positions, config.rotary_dim / 2};
  const auto take_both = [&](Allocator& from) {
    Arena arena(2 * Arena::aligned(types.sums(), shape), from);
    cos = arena.take(types.sums(), shape), sin = arena.take(types.sums(), shape);
    return arena;
  };
  table_memory = take_both(system_memory());
  rope_table(rope_frequencies(config.rotary_dim, config.rope_base, config.rope_scaling), cos, sin);
  if (options.device.kind == Device::cpu) return;
  const Tensor host_cos = cos, host_sin = sin;
  Arena on_device = take_both(gpu::memory_of(options.device));
  copy({.from = host_cos, .to = cos}, options.stream);
  copy({.from = host_sin, .to = sin}, options.stream);
  gpu::synchronize(options.device, options.stream);  // the copies end before the host's memory is freed
  table_memory = std::move(on_device);
}

// --- the public class

GptTypes gpt_types(Device device) {
  return device.kind == Device::cpu ? GptTypes(DType::f32) : GptTypes(DType::f32, DType::bf16, DType::bf16);
}

int64_t Gpt::planned_bytes(const GptConfig& config, const GptTypes& types, const GptOptions& options) {
  return detail::planned_bytes(config, layer_program(config, options.looping), types, options);
}
Gpt::Gpt(const GptConfig& config, const GptTypes& types, const GptOptions& options)
    : impl_(std::make_unique<Impl>(config, types, options)) {}
Gpt::~Gpt() = default;
Gpt::Gpt(Gpt&&) noexcept = default;
const GptConfig& Gpt::config() const { return impl_->config; }
const LayerProgram& Gpt::program() const { return impl_->program; }
const GptOptions& Gpt::options() const { return impl_->options; }
int64_t Gpt::arena_bytes() const { return impl_->buffers.arena.capacity(); }

void Gpt::losses(const GptWeights& weights, const TokenBatch& batch, const Tensor& loss, const GptAdapters* adapters,
                 MatrixInputs* inputs, const CachedSegments* cached) {
  Impl& m = *impl_;
  m.check_call(weights, batch, true);
  m.check_adapters(batch, adapters);
  if (cached != nullptr) m.check_cached(batch, *cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, nullptr);
  call.inputs = inputs;
  if (inputs == nullptr && cached == nullptr) m.cut_last_call(call, batch);
  m.continue_sequences(call, cached);
  m.embed_forward(weights, batch, inputs);
  m.blocks_forward(call, weights);
  m.head_losses(call, weights, batch, {}, loss, {}, false);
  m.advance_caches(call);
}

void Gpt::losses_and_gradients(const GptWeights& weights, const TokenBatch& batch, const Tensor& dloss,
                               const Tensor& loss, const Tensor& grads, const GptAdapters* adapters,
                               GptAdapters* adapter_grads, const CachedSegments* cached) {
  Impl& m = *impl_;
  INGOT_CHECK(m.options.training, "gpt: gradients were asked for, expected training = true in the options");
  m.check_call(weights, batch, true);
  m.check_adapters(batch, adapters);
  if (grads) INGOT_CHECK_EQ(grads.numel(), m.layout.padded_count(), "gpt: length of the flat gradients");
  if (cached != nullptr) m.check_cached(batch, *cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, adapter_grads);
  if (!grads && cached == nullptr) m.cut_last_call(call, batch);
  call.folds_scales = !m.buffers.scaled_of.empty() && !call.cut;
  m.continue_sequences(call, cached);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.head_losses(call, weights, batch, dloss, loss, grads, true);
  m.blocks_backward(call, weights, grads);
  m.embed_backward(weights, batch, grads);
  m.advance_caches(call);
}

void Gpt::logits(const GptWeights& weights, const TokenBatch& batch, const Tensor& rows, const Tensor& logits,
                 const GptAdapters* adapters) {
  Impl& m = *impl_;
  m.check_call(weights, batch, false);
  m.check_adapters(batch, adapters);
  if (rows.numel() == 0) return;
  const detail::CallContext call = m.context(batch, adapters, nullptr);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.head_logits(call, weights, rows, logits);
}

void Gpt::extend(const GptWeights& weights, const TokenBatch& batch, const std::vector<int64_t>& sequences,
                 GptCache& cache, const Tensor& rows, const Tensor& logits, const GptAdapters* adapters) {
  Impl& m = *impl_;
  m.check_call(weights, batch, false);
  m.check_adapters(batch, adapters);
  const CachedSegments cached{cache, sequences};
  m.check_cached(batch, cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, nullptr);
  m.continue_sequences(call, &cached);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.advance_caches(call);
  if (rows.numel() > 0) m.head_logits(call, weights, rows, logits);
}

void Gpt::next(const GptWeights& weights, const TokenBatch& batch, int64_t sequence, GptCache& cache,
               const Tensor& cached_cu, const Tensor& logits, const GptAdapters* adapters) {
  Impl& m = *impl_;
  const std::vector<int64_t> sequences{sequence};
  detail::CallContext call = m.context(batch, adapters, nullptr);
  const CachedSegments cached{cache, sequences};
  call.cached = &cached;
  call.cached_cu = cached_cu;
  call.cache_at = batch.positions;
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  int32_t row = 0;
  m.head_logits(call, weights, Tensor(&row, {1}), logits);
}

}  // namespace ingot
