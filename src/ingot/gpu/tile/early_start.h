#pragma once
#include <cstdint>

namespace ingot::tile {

// Whether blocks that move so many bytes each should let the next kernel start at once (ptx::let_next_kernel_start),
// which gains half a microsecond. Blocks that say so start at 0.8 per ns at most (docs/measured-facts.md), short of
// what the memory takes of small ones; where none says it the next kernel starts when the last block has ended.
constexpr bool starts_next_early(int64_t bytes_of_block) { return bytes_of_block >= 6 * 1024; }

}  // namespace ingot::tile
