#pragma once
// Measures this GPU's memory: a copy and a read of `bytes` (a multiple of 16, 16-byte aligned). Benchmarks measure both
// in the same run as their kernels.
#include "ingot/core/tensor.h"

namespace ingot::gpu {

void copy_kernel(void* to, const void* from, int64_t bytes, Stream stream);
// Reads all bytes. `sink` (4 bytes) prevents the compiler from dropping the loads; the kernel writes `sink` only for
// one planted value.
void read_kernel(const void* from, int64_t bytes, void* sink, Stream stream);

}  // namespace ingot::gpu
