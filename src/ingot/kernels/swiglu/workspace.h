#pragma once
// The workspace of gated layers: two tensors (T, H), one behind the other, and behind them memory for cuBLASLt, which
// has fewer algorithms without it.
#include "ingot/kernels/linear/linear.h"

namespace ingot::detail {

// The bytes of each of the two tensors.
inline int64_t half_bytes(int64_t rows, int64_t hidden, DType dtype) {
  return (rows * hidden * size_of(dtype) + 63) / 64 * 64;
}
inline Tensor half_of(const Tensor& workspace, int which, int64_t rows, int64_t hidden, DType dtype) {
  return Tensor(static_cast<char*>(workspace.data) + which * half_bytes(rows, hidden, dtype), dtype, {rows, hidden},
                workspace.device);
}

// cuBLASLt's part, behind the first `before` bytes; no tensor on a device whose products need no workspace.
inline Tensor product_room(const Tensor& workspace, int64_t before) {
  const int64_t begin = (before + 255) / 256 * 256, bytes = linear_workspace_bytes(workspace.device);
  if (bytes == 0) return {};
  return Tensor(static_cast<char*>(workspace.data) + begin, DType::u8, {bytes}, workspace.device);
}
inline int64_t with_product_room(int64_t before, Device device) {
  const int64_t bytes = linear_workspace_bytes(device);
  return bytes == 0 ? before : (before + 255) / 256 * 256 + bytes;
}

}  // namespace ingot::detail
