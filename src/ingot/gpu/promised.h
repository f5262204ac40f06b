#pragma once
#include <string>

namespace ingot::gpu {

// The peak of dense bf16 products with fp32 sums in operations per second, as the GPU's data sheet states it, by the
// GPU's name. 0 for GPUs that are not in the table.
double promised_bf16_flops(const std::string& name);

}  // namespace ingot::gpu
