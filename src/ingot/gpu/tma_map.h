#pragma once
// Tensor maps describe tensors in global memory to the copy engine. Maps are made on the host and passed to kernels by
// value as `const __grid_constant__ CUtensorMap`. Included by .cu files; the driver's function is found at run time, so
// libcuda is not linked.
//     2-D: rows x cols, cols contiguous.    3-D: (outer, rows, cols).
//     A load brings box_rows x box_cols elements to shared memory as one panel (tile/swizzle.cuh); box_cols elements
//     are at most one swizzle row (none: up to 256 elements, rows of box_cols elements without swizzle).
#include <cuda.h>

#include "ingot/core/tensor.h"

namespace ingot::tile {
enum class Swizzle : uint8_t;
}

namespace ingot::gpu {

struct TmaBox {
  int rows = 0, cols = 0;  // elements
  tile::Swizzle swizzle{};
  int outer = 1;  // boxes of 3-D maps may span several outer indices
};

// `t` is f16, bf16, f32 or f64 (8 bytes of anything) on a GPU, rank 2 or 3, 16-byte aligned, its last stride 1 and all
// further strides multiples of 16 bytes. `name` is for the error. Elements out of bounds are read as zero and not
// written.
inline CUtensorMap tensor_map(const char* name, const Tensor& t, const TmaBox& box);

// Writes the map to the 128 bytes at `map`, at any alignment. In code from nvcc, g++ 13 aligns a returned map's slot to
// 16 bytes, while the called function may rely on the type's alignment of 64.
void write_tensor_map(void* map, const char* name, const Tensor& t, const TmaBox& box);

inline CUtensorMap tensor_map(const char* name, const Tensor& t, const TmaBox& box) {
  CUtensorMap map;
  write_tensor_map(&map, name, t, box);
  return map;
}

}  // namespace ingot::gpu
