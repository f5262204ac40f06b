#include "ingot/engines/train/step_passes.h"

#include <algorithm>
#include <string>

#include "ingot/core/check.h"
#include "ingot/core/progress.h"
#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/sum/sum.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {

StepPasses::StepPasses(TrainState& state)
    : s_(state),
      on_device_(state.device, state.stream, state.config.train.batch_tokens),
      graphs_(state.stream, state.device.kind == Device::cuda && state.config.train.cuda_graphs) {}

GptOptions StepPasses::options_of(bool loop, int64_t tokens) const {
  return {.capacity = tokens,
          .looping = loop,
          .training = true,
          .keep_rows = keep_rows_,
          .products = products_named(s_.config.train.products),
          .device = s_.device,
          .stream = s_.stream};
}

int64_t StepPasses::planned_bytes(int64_t tokens) const {
  const GptConfig& model = s_.config.model;
  int64_t most = Gpt::planned_bytes(model, s_.types, options_of(false, tokens));
  if (model.has_loop()) most = std::max(most, Gpt::planned_bytes(model, s_.types, options_of(true, tokens)));
  return most;
}

void StepPasses::plan() {
  // Some memory stays free for libraries, graphs, and further processes on the GPU.
  constexpr int64_t kFree = int64_t(2) << 30;
  if (s_.device.kind != Device::cpu && s_.config.train.keep_activations) {
    const int64_t available = gpu::memory_of(s_.device).available();
    keep_rows_ = true;
    keep_rows_ = planned_bytes(s_.config.train.batch_tokens) + kFree <= available;
  }
  require_room();
}

void StepPasses::require_room() const {
  const TrainOptions& o = s_.config.train;
  const auto bytes = [&](int64_t tokens) { return planned_bytes(tokens); };
  const int64_t tokens = o.batch_tokens, needed = bytes(tokens);
  const int64_t available = gpu::memory_of(s_.device).available();
  if (available < 0 || needed <= available) return;
  const int64_t unit = o.order == "windows" ? s_.config.model.context : 64;
  const int64_t fit = tokens_that_fit(tokens, unit, available, bytes);
  const std::string where = s_.device.kind == Device::cpu ? "" : detail::concat(" on ", s_.device);
  fail(ErrorCode::unsupported, "training on ", tokens, " tokens at once needs ", format_bytes(double(needed)),
       " of memory", where, ", found ", format_bytes(double(available)), " available, expected ",
       fit > 0 ? detail::concat("train.batch_tokens of at most ", fit) : "a smaller model");
}

void StepPasses::forget_model() {
  graphs_.clear();  // the graphs read the model's memory
  model_.reset();
}

Gpt& StepPasses::bound_model(bool loop) {
  if (!model_ || model_->options().looping != loop) {
    forget_model();  // the old model's memory is freed before the new model is made
    flops_ = forward_flops(s_.config.model, loop);
    model_ = std::make_unique<Gpt>(s_.config.model, s_.types, options_of(loop, s_.config.train.batch_tokens));
  }
  return *model_;
}

void StepPasses::run(Prefetch& batches, bool loop, int64_t targets) {
  Gpt& gpt = bound_model(loop);
  if (targets != targets_) fill({.to = s_.dloss, .value = targets > 0 ? 1.0 / double(targets) : 0.0}, s_.stream);
  targets_ = targets;
  step_flops_ = 0;
  Batch batch;
  for (int64_t pass = 0; pass < s_.passes; ++pass) {
    fill({.to = s_.grads}, s_.stream);
    fill({.to = s_.loss_sum}, s_.stream);
    batches.next(batch);
    step_flops_ += 3 * (flops_.per_token * double(batch.size()) +
                        flops_.per_pair * attended_pairs(batch.cu_seqlens, s_.config.model.window));
    const auto part = [&](const Tensor& t) { return t.slice(0, 0, batch.size()); };
    const TokenBatch there = on_device_.put(batch);
    graphs_.run({batch.size(), there.cu_seqlens.numel() - 1}, [&] {
      gpt.losses_and_gradients(s_.all_weights(), there, part(s_.dloss), part(s_.loss), s_.grads);
      sum({.x = part(s_.loss), .total = s_.loss_sum}, s_.stream);
    });
    copy({.from = s_.loss_sum, .to = s_.pass_losses.slice(0, pass, pass + 1)}, s_.stream);
    if (s_.total && pass == 0) copy({.from = s_.grads, .to = s_.total}, s_.stream);
    if (s_.total && pass > 0) axpby({.x = s_.grads, .y = s_.total}, s_.stream);
  }
}

}  // namespace ingot
