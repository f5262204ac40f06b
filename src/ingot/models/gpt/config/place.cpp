#include "ingot/models/gpt/config/place.h"

#include "ingot/core/check.h"
#include "ingot/core/dispatch.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"

namespace ingot {
namespace {

constexpr int64_t kWidestHead = 256;  // of attention on a GPU

// Empty if a GPU can run the model; else a sentence with the value found and the value expected.
std::string unsupported_reason(const GptConfig& c) {
  const auto text = [](const auto&... parts) { return ingot::detail::concat(parts...); };
  if constexpr (!(INGOT_HAS_CUDA(ATTENTION) && INGOT_HAS_CUDA(LINEAR) && INGOT_HAS_CUDA(MUON)))
    return "found a build without CUDA, expected one made with INGOT_CUDA=ON";
  if (gpu::device_count() == 0) return "found no GPU, expected one and its driver";
  if (const gpu::Limits& limits = gpu::limits(0); limits.capability < 80)
    return text("found ", gpu::device_info().name, " of compute capability ", limits.capability / 10, ".",
                limits.capability % 10, ", expected 8.0 or later");
  if (c.head_dim % 8 != 0 || c.head_dim > kWidestHead)
    return text("found heads of ", c.head_dim, ", expected a multiple of 8 up to ", kWidestHead);
  return {};
}

}  // namespace

GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice) {
  if (choice == DeviceChoice::cpu) return {};
  const std::string found = unsupported_reason(config);
  if (found.empty()) return {.device = {Device::cuda, 0}, .note = {}};
  if (choice == DeviceChoice::cuda) fail(ErrorCode::unsupported, "device cuda: ", found);
  return {.device = {}, .note = gpu::device_count() > 0 ? "on the CPU: " + found : std::string()};
}

}  // namespace ingot
