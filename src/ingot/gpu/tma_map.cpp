#ifdef INGOT_CUDA_BUILD
#include "ingot/gpu/tma_map.h"

#include <cuda_runtime_api.h>

#include "ingot/gpu/device.h"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::gpu {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
             "looking for cuTensorMapEncodeTiled");
  if (found == nullptr || status != cudaDriverEntryPointSuccess)
    fail(ErrorCode::unsupported,
         "tensor map: found no cuTensorMapEncodeTiled in the driver, expected CUDA 12 or newer");
  return reinterpret_cast<Encode>(found);
}

CUtensorMapDataType type_of(const char* name, DType t) {
  switch (t) {
    case DType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default: fail(ErrorCode::unsupported, name, ": tensor map: found dtype ", t, ", expected f16, bf16 or f32");
  }
}

void check_operand(const char* name, const Tensor& t, const TmaBox& box) {
  INGOT_CHECK(t.device.kind == Device::cuda, name, ": tensor map: found a tensor on ", t.device, ", expected cuda");
  INGOT_CHECK(t.rank() == 2 || t.rank() == 3, name, ": tensor map: found shape ", t.shape, ", expected rank 2 or 3");
  INGOT_CHECK(t.numel() > 0, name, ": tensor map: found shape ", t.shape, ", expected at least one element");
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, name, ": tensor map: found address ", t.data,
              ", expected a multiple of 16");
  INGOT_CHECK_EQ(t.step(-1), 1, name, ": tensor map: stride of the last dimension");
  const int64_t size = size_of(t.dtype);
  for (int d = 0; d + 1 < t.rank(); ++d)
    INGOT_CHECK(t.stride[d] > 0 && t.stride[d] * size % 16 == 0 && t.stride[d] * size < int64_t(1) << 40, name,
                ": tensor map: found a stride of ", t.stride[d], " elements of ", size, " bytes in dimension ", d,
                ", expected a multiple of 16 bytes below 2^40");
  for (int d = 0; d < t.rank(); ++d)
    INGOT_CHECK(t.size(d) <= int64_t(1) << 32, name, ": tensor map: found size ", t.size(d), ", expected at most 2^32");
  INGOT_CHECK(box.rows >= 1 && box.rows <= 256 && box.cols >= 1 && box.cols <= 256 && box.outer >= 1 &&
                  box.outer <= 256 && (t.rank() == 3 || box.outer == 1),
              name, ": tensor map: found a box of ", box.outer, " x ", box.rows, " x ", box.cols,
              ", expected 1 to 256 each, and 1 outer for rank 2");
  const int64_t row = box.cols * size;
  INGOT_CHECK(row % 16 == 0, name, ": tensor map: found box rows of ", row, " bytes, expected a multiple of 16");
  INGOT_CHECK(box.swizzle == tile::Swizzle::none || row <= tile::row_bytes(box.swizzle), name,
              ": tensor map: found box rows of ", row, " bytes, expected at most the swizzle's ",
              tile::row_bytes(box.swizzle));
}

}  // namespace

CUtensorMap tensor_map(const char* name, const Tensor& t, const TmaBox& box) {
  const CUtensorMapDataType type = type_of(name, t.dtype);
  check_operand(name, t, box);
  static const Encode encode = find_encode();
  const int rank = t.rank();
  const int boxes[3] = {box.cols, box.rows, box.outer};
  cuuint64_t size[3] = {}, stride[2] = {};  // innermost first; strides in bytes, the innermost's is implied
  cuuint32_t extent[3] = {}, step[3] = {1, 1, 1};
  for (int i = 0; i < rank; ++i) {
    size[i] = cuuint64_t(t.size(rank - 1 - i));
    extent[i] = cuuint32_t(boxes[i]);
    if (i > 0) stride[i - 1] = cuuint64_t(t.stride[rank - 1 - i] * size_of(t.dtype));
  }
  constexpr CUtensorMapSwizzle kSwizzle[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, cuuint32_t(rank), t.data, size, stride, extent, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             kSwizzle[int(box.swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorCode::unsupported, name, ": tensor map: found status ", int(status), " for shape ", t.shape, " of ",
         t.dtype, " in boxes of ", box.outer, " x ", box.rows, " x ", box.cols, ", expected 0");
  return map;
}

}  // namespace ingot::gpu
#endif
