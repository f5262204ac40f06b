#include "ingot/engines/train/run/step_meter.h"

#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/promised.h"

namespace ingot {
namespace {

// Operations of bf16 products per second according to the data sheet, without sparsity. 0 where the rate is not known,
// as for every CPU.
double promised_flops(Device device) {
  if (device.kind == Device::cpu) return 0;
  return gpu::promised_bf16_flops(gpu::device_info(device.index).name);
}

double smooth(double old, double now) { return old == 0 ? now : 0.9 * old + 0.1 * now; }

}  // namespace

StepMeter::StepMeter(Device device)
    : device_(device),
      promised_flops_(promised_flops(device)),
      gpu_memory_(device.kind == Device::cpu ? 0 : gpu::device_info(device.index).memory_bytes) {}

void StepMeter::measure(TrainStatus& s, double tokens, double flops, bool ask_for_memory) {
  s.tokens_per_second = tokens_rate_ = smooth(tokens_rate_, tokens / s.step_seconds);
  s.flops_per_second = flops_rate_ = smooth(flops_rate_, flops / s.step_seconds);
  if (promised_flops_ > 0) s.utilisation = flops_rate_ / promised_flops_;
  if (ask_for_memory || used_memory_ == 0)
    used_memory_ = device_.kind == Device::cpu ? resident_memory() : gpu_memory_ - gpu::memory_of(device_).available();
  s.memory_bytes = used_memory_;
}

}  // namespace ingot
