#include "ingot/models/gpt/config/place.h"

#include "ingot/core/check.h"
#include "ingot/core/dispatch.h"
#include "ingot/gpu/cublaslt.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"

namespace ingot {
namespace {

constexpr int64_t kWidestHead = 256;  // of attention on a GPU

// Empty if a GPU can run the model; else a sentence with the value found and the value expected.
std::string unsupported_reason(const GptConfig& c, [[maybe_unused]] GptUse use) {
  const auto text = [](const auto&... parts) { return ingot::detail::concat(parts...); };
  if constexpr (!(INGOT_HAS_CUDA(ATTENTION) && INGOT_HAS_CUDA(LINEAR) && INGOT_HAS_CUDA(MUON)))
    return "found a build without CUDA, expected one made with INGOT_CUDA=ON";
  if (gpu::device_count() == 0) return "found no GPU, expected one and its driver";
  if (const gpu::Limits& limits = gpu::limits(0); !limits.hopper) {
    const bool trains = use == GptUse::training;
    if (!trains || limits.capability < 80)
      return text("found ", gpu::device_info().name, " of compute capability ", limits.capability / 10, ".",
                  limits.capability % 10, ", expected ", trains ? "8.0 or later" : "9.0");
    if (!gpu::lt_available())
      return text("found ", gpu::device_info().name, " without cuBLASLt (", gpu::lt_version(),
                  "), expected the library, which computes products there");
  }
  if (c.head_dim % 8 != 0 || c.head_dim > kWidestHead)
    return text("found heads of ", c.head_dim, ", expected a multiple of 8 up to ", kWidestHead);
  return {};
}

}  // namespace

GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice, GptUse use) {
  if (choice == DeviceChoice::cpu) return {};
  const std::string found = unsupported_reason(config, use);
  if (found.empty()) return {.device = {Device::cuda, 0}, .note = {}};
  if (choice == DeviceChoice::cuda) fail(ErrorCode::unsupported, "device cuda: ", found);
  return {.device = {}, .note = gpu::device_count() > 0 ? "on the CPU: " + found : std::string()};
}

}  // namespace ingot
