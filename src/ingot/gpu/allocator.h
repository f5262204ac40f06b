#pragma once
// Allocators of a GPU's memory and of host memory that a GPU reads without a detour. Sources of ordinary Arenas.
#include "ingot/core/memory/allocator.h"

namespace ingot::gpu {

Allocator& device_memory(int index);  // of cuda:index; without CUDA in the build taking any fails by name
Allocator& memory_of(Device device);  // system_memory() or device_memory(index)

// Host memory that never leaves its pages, so that copies from and to a GPU run beside the host. The system's memory
// where no GPU is.
Allocator& pinned_memory();

}  // namespace ingot::gpu
