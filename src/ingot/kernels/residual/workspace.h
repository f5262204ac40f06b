#pragma once
// The workspace of the backward passes of residual operations on a GPU: sums over tokens are first computed per block
// of rows.
#include <algorithm>

#include "ingot/core/tensor.h"

namespace ingot {

namespace residual {
constexpr int kMostSums = 6;              // sums over tokens of an op
constexpr int64_t kMostRowBlocks = 1024;  // about eight per SM of an H200; the same on every GPU
}  // namespace residual

// u8, for (rows, cols); 0 on a CPU, whose threads bring their own.
inline int64_t residual_workspace_bytes(int64_t rows, int64_t cols, Device device) {
  if (device.kind == Device::cpu) return 0;
  const int64_t blocks = std::min(std::max<int64_t>(1, rows), residual::kMostRowBlocks);
  return residual::kMostSums * cols * (blocks * 4 + 8);  // partial sums in fp32, totals in fp64
}

}  // namespace ingot
