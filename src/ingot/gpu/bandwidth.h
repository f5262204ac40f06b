#pragma once
// What this GPU's memory gives: a copy and a read of `bytes` (a multiple of 16, 16-byte aligned). Benchmarks measure
// both in the same run as the kernels they judge.
#include "ingot/core/tensor.h"

namespace ingot::gpu {

void copy_kernel(void* to, const void* from, int64_t bytes, Stream stream);
// Reads everything; `sink` (4 bytes) is there so that the loads cannot be dropped, and is not written for any data but
// a planted one.
void read_kernel(const void* from, int64_t bytes, void* sink, Stream stream);

}  // namespace ingot::gpu
