#pragma once
// The order in which the emulator runs the threads that may run. By default every such thread is as likely as every
// other, so all warps advance at about the same pace, and a missing barrier between warps is seldom seen. The orders
// below let one warp of each block, or one block of a cluster or of a cooperative launch, run as late or as early as
// the kernel's barriers, flags and mbarriers allow: a reader then finds data that a writer has already overwritten, and
// a writer overwrites data that a reader has not yet read.
#include <cstdint>
#include <optional>
#include <string_view>

namespace ingot::emulation {

struct Order {
  enum class Kind { drawn, late_warp, early_warp, late_block, early_block };
  Kind kind = Kind::drawn;
  // The number of the warp (modulo the warps of a block) or of the block (modulo the blocks that run together). Without
  // a value the number is drawn for each block, or for each set of blocks that run together.
  std::optional<uint32_t> which;
  bool operator==(const Order&) const = default;
};

// "late-warp", "early-warp", "late-block" or "early-block", and behind a colon the number: "late-warp:3". Throws
// Error(usage) for any other text.
Order order_named(std::string_view name);

// The order of this CPU thread's launches. Until the thread changes the order, this is the order that the environment
// variable INGOT_EMULATOR_ORDER names, or the default.
Order& order();

}  // namespace ingot::emulation
