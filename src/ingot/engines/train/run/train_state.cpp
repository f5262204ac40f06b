#include "ingot/engines/train/run/train_state.h"

#include <algorithm>

#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"

namespace ingot {
namespace {

std::unique_ptr<gpu::OwnedStream> stream_on(Device device) {
  if (device.kind == Device::cpu) return nullptr;
  const gpu::DeviceGuard guard(device.index);
  return std::make_unique<gpu::OwnedStream>();
}

}  // namespace

TrainState::TrainState(const RunConfig& c, Device where, const RunRanks& ranks)
    : config(c),
      passes(ranks.passes_of(c.train)),
      layout(c.model),
      device(where),
      own_stream(stream_on(where)),
      stream(own_stream ? Stream(*own_stream) : Stream()),
      types(gpt_types(where)),
      memory(2 * (layout.padded_count() + c.train.batch_tokens) * 4 + total_bytes() + passes * 8 + compute_bytes() +
                 8 * Arena::kAlign,
             gpu::memory_of(device)),
      weights(memory.take(DType::f32, {layout.padded_count()})),
      grads(memory.take(DType::f32, {layout.padded_count()})),
      compute(compute_bytes() > 0 ? memory.take(types.compute, {layout.padded_count()}) : Tensor()),
      loss(memory.take(DType::f32, {c.train.batch_tokens})),
      dloss(memory.take(DType::f32, {c.train.batch_tokens})),
      loss_sum(memory.take(DType::f64, {1})),
      pass_losses(memory.take(DType::f64, {passes})),
      total(total_bytes() > 0 ? memory.take(DType::f32, {layout.padded_count()}) : Tensor()),
      optimizer(layout, DType::f32, c.train.optimizer, c.train.schedule.ema_horizon > 0,
                {.device = device, .stream = stream, .ranks = ranks.communicator(), .graphs = c.train.cuda_graphs}) {}

int64_t TrainState::compute_bytes() const {
  return types.compute == types.master ? 0 : layout.padded_count() * size_of(types.compute);
}

void TrainState::initialise_weights() const {
  const HostCopy here(weights, stream);
  initialise(config.model, layout, here.tensor(), config.train.seed);
  here.write_back();
}

void TrainState::take_weights(const TrainedModel& other, const std::string& path) const {
  const auto refuse = [&](const auto&... what) { fail(ErrorCode::usage, "train.init_from: ", path, ": ", what...); };
  const ParameterLayout theirs(other.config);
  if (theirs.all().size() != layout.all().size())
    refuse("found a model of ", theirs.all().size(), " tensors, expected ", layout.all().size(),
           " as this configuration has");
  const HostCopy here(weights, stream);
  for (size_t i = 0; i < layout.all().size(); ++i) {
    const Parameter &a = theirs.all()[i], &b = layout.all()[i];
    const Tensor from = theirs.view(other.weights, a), to = layout.view(here.tensor(), b);
    if (a.name != b.name || from.shape != to.shape)
      refuse("found the tensor ", a.name, " of ", from.shape, ", expected ", b.name, " of ", to.shape,
             " as this configuration has");
    std::copy_n(static_cast<const float*>(from.data), from.numel(), static_cast<float*>(to.data));
  }
  here.write_back();
}

void TrainState::renew_compute() const {
  if (compute) copy({.from = weights, .to = compute}, stream);
}

void TrainState::share(const RunRanks& ranks) const {
  Communicator& all = *ranks.communicator();
  all.broadcast(weights, 0, stream);
  for (const NamedState& s : optimizer.state()) all.broadcast(s.tensor, 0, stream);
  all.wait(stream);
}

std::string TrainState::broken_tensor(const RunRanks& ranks) const {
  const HostCopy here(step_grads(), stream);
  const auto& all = layout.all();
  const auto broken = std::find_if(all.begin(), all.end(),
                                   [&](const Parameter& p) { return !all_finite(layout.view(here.tensor(), p)); });
  const std::vector<int64_t> firsts = ranks.gather(int64_t(broken - all.begin()));
  const int64_t first = *std::min_element(firsts.begin(), firsts.end());
  return first < int64_t(all.size()) ? all[size_t(first)].name : "a sum of finite numbers";
}

HostState::HostState(const TrainState& s) : weights(s.weights, s.stream), result(s.result_weights(), s.stream) {
  for (const NamedState& n : s.optimizer.state())
    if (n.name != "ema.weights") state.emplace_back(n.name, HostCopy(n.tensor, s.stream));
}
void HostState::write_back() const {
  weights.write_back(), result.write_back();
  for (const auto& [name, copy] : state) copy.write_back();
}

}  // namespace ingot
