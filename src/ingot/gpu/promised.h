#pragma once
#include <string>

namespace ingot::gpu {

// What its data sheet promises of dense bf16 products with fp32 sums, in operations a second, of a GPU by its name; 0
// where it is not known here.
double promised_bf16_flops(const std::string& name);

}  // namespace ingot::gpu
