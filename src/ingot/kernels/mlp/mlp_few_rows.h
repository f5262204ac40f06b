#pragma once
// What the few-rows forms, forward and backward, agree on.
#include <cstdint>

namespace ingot::cuda::few_rows {

constexpr int kPanel = 64;  // columns: one 128-byte swizzle row of 16-bit elements
constexpr int64_t kMaxSharedBytes = 227 * 1024;

constexpr int64_t kFewest = 2048;  // up to here a block of the forward form takes 16 rows: there is an SM for each

}  // namespace ingot::cuda::few_rows
