#pragma once
// How much memory this process may still take.
#include <cstdint>
#include <string>

namespace ingot {

// What the system could give without swapping: MemAvailable, or less where a control group allows less. -1: unknown.
int64_t available_memory();
// Throws Error{unsupported} when `bytes` are more than available_memory(), naming both: "what needs 12.1 GB of memory,
// found 7.9 GB available". Call it before the memory is taken.
void require_memory(int64_t bytes, const std::string& what);

}  // namespace ingot
