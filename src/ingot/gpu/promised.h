#pragma once
#include <string>

namespace ingot::gpu {

// The peak of dense bf16 products with fp32 sums in operations per second, according to the GPU's data sheet, by the
// GPU's name. 0 for GPUs outside the table.
double promised_bf16_flops(const std::string& name);

}  // namespace ingot::gpu
