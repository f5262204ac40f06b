#pragma once
// How much memory this process may still take.
#include <cstdint>
#include <string>

#include "ingot/core/memory/allocator.h"

namespace ingot {

// What the system could give without swapping: MemAvailable, or less where a control group allows less. -1: unknown.
int64_t available_memory();
int64_t resident_memory();  // what this process takes of it; -1: unknown
// Throws Error{unsupported} when `bytes` are more than the allocator says it has, naming both: "what needs 12.1 GB of
// memory, found 7.9 GB available", of a GPU "... of memory on cuda:0, ...". Call it before the memory is taken.
void require_memory(int64_t bytes, const std::string& what, const Allocator& from = system_memory());

}  // namespace ingot
