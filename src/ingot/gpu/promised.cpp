#include "ingot/gpu/promised.h"

#include <utility>

namespace ingot::gpu {

double promised_bf16_flops(const std::string& name) {
  // More specific names come first: "NVIDIA H100 80GB HBM3" is the SXM variant.
  constexpr std::pair<const char*, double> kSheets[] = {
      {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 836e12}, {"H100", 989.4e12},
      {"H200", 989.4e12},    {"H800", 989.4e12},   {"GH200", 989.4e12},  {"H20", 148e12}};
  for (const auto& [part, flops] : kSheets)
    if (name.find(part) != std::string::npos) return flops;
  return 0;
}

}  // namespace ingot::gpu
