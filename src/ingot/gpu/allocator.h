#pragma once
// Allocators of a GPU's memory, and of host memory that GPUs read directly. Both can be the source of an Arena.
#include "ingot/core/memory/allocator.h"

namespace ingot::gpu {

Allocator& device_memory(
    int index);  // memory of cuda:index; without CUDA in the build every allocation fails with an error
Allocator& memory_of(Device device);  // system_memory() or device_memory(index)

// Host memory whose pages are locked, so that copies from and to a GPU run at the same time as the host's work. Without
// a GPU this is the system's memory.
Allocator& pinned_memory();

}  // namespace ingot::gpu
