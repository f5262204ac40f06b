#pragma once
// The end of a workspace that is left to cuBLASLt, which has fewer algorithms without memory of its own.
#include "ingot/kernels/linear/linear.h"

namespace ingot::detail {

// The part behind the first `before` bytes; no tensor on a device whose products need no workspace.
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
