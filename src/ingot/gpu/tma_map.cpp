#ifdef INGOT_CUDA_BUILD
#include "ingot/gpu/tma_map.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <memory>

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
    case DType::f64: return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    default: fail(ErrorCode::unsupported, name, ": tensor map: found dtype ", t, ", expected f16, bf16, f32 or f64");
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

// The arguments of a map in the driver's form: innermost dimension first, strides in bytes, without the innermost
// stride.
struct Key {
  void* data = nullptr;
  cuuint64_t size[3] = {}, stride[2] = {};
  cuuint32_t extent[3] = {};
  int rank = 0;
  DType dtype = DType::f32;
  tile::Swizzle swizzle{};
  bool operator==(const Key&) const = default;
};

Key key_of(const Tensor& t, const TmaBox& box) {
  Key key{.data = t.data,
          .extent = {cuuint32_t(box.cols), cuuint32_t(box.rows), cuuint32_t(box.outer)},
          .rank = t.rank(),
          .dtype = t.dtype,
          .swizzle = box.swizzle};
  for (int i = 0, d = key.rank - 1; d >= 0; ++i, --d) {
    key.size[i] = cuuint64_t(t.shape.dim[d]);
    if (i > 0) key.stride[i - 1] = cuuint64_t(t.stride[d] * size_of(t.dtype));
  }
  return key;
}

// A thread's latest maps. Weights keep their addresses, and an allocator returns the same addresses in call after call.
// A map does not depend on the contents, so the same address and shape give the same map.
class Known {
 public:
  const CUtensorMap* find(const Key& key) {
    Entry* pair = pair_of(key);
    for (int i = 0; i < 2; ++i)
      if (pair[i].key == key) return &pair[i].map;
    return nullptr;
  }
  void add(const Key& key, const CUtensorMap& map) {
    Entry* pair = pair_of(key);
    pair[1] = pair[0];
    pair[0] = {key, map};
  }

 private:
  struct Entry {
    Key key;
    CUtensorMap map;
  };
  Entry* pair_of(const Key& key) {
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(key.data) ^ key.extent[1]) * 0x9e3779b97f4a7c15;
    return &entries_[(mixed >> 57) * 2];
  }
  std::array<Entry, 256> entries_ = {};
};

}  // namespace

void write_tensor_map(void* out, const char* name, const Tensor& t, const TmaBox& box) {
  thread_local const std::unique_ptr<Known> known = std::make_unique<Known>();
  const CUtensorMapDataType type = type_of(name, t.dtype);
  // Arguments without a key are not looked up.
  const bool keyed = (t.rank() == 2 || t.rank() == 3) && t.step(-1) == 1 && t.device.kind == Device::cuda;
  const Key key = keyed ? key_of(t, box) : Key();
  if (const CUtensorMap* map = keyed ? known->find(key) : nullptr) {
    std::memcpy(out, map, sizeof *map);
    return;
  }
  check_operand(name, t, box);
  static const Encode encode = find_encode();
  constexpr CUtensorMapSwizzle kSwizzle[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  const cuuint32_t step[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, type, cuuint32_t(key.rank), key.data, key.size, key.stride, key.extent, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle[int(key.swizzle)],
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorCode::unsupported, name, ": tensor map: found status ", int(status), " for shape ", t.shape, " of ",
         t.dtype, " in boxes of ", box.outer, " x ", box.rows, " x ", box.cols, ", expected 0");
  known->add(key, map);
  std::memcpy(out, &map, sizeof map);
}

}  // namespace ingot::gpu
#endif
