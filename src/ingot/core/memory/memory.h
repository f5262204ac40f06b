#pragma once
// How much more memory this process may allocate.
#include <cstdint>
#include <string>

#include "ingot/core/memory/allocator.h"

namespace ingot {

// The memory available without swapping, in bytes: MemAvailable, or what the process's control group leaves (its limit
// less the anonymous memory in use) where this is lower. -1 where unknown.
int64_t available_memory();
int64_t resident_memory();  // the resident memory of this process; -1 where unknown
// Throws Error{unsupported} when `bytes` exceed the free memory according to the allocator. The message names both
// sizes: "<purpose> needs 12.10 GB of memory, found 7.90 GB available", or "... of memory on cuda:0, ..." for a GPU.
// Call require_memory() before the allocation.
void require_memory(int64_t bytes, const std::string& what, const Allocator& from = system_memory());

}  // namespace ingot
