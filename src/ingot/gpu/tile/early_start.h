#pragma once
#include <cstdint>

namespace ingot::tile {

// Whether blocks that read this many bytes each should let the next kernel start at once (ptx::let_next_kernel_start),
// which gains half a microsecond. The GPU starts such blocks at a rate of at most 0.8 per ns (docs/measured-facts.md),
// too slow for small blocks to keep the memory busy. Where no block calls the function, the next kernel starts when the
// last block has ended.
constexpr bool starts_next_early(int64_t bytes_of_block) { return bytes_of_block >= 6 * 1024; }

}  // namespace ingot::tile
