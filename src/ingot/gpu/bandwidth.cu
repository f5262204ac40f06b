#include "ingot/gpu/bandwidth.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::gpu {
namespace {
constexpr int kThreads = 256, kVecs = 4;  // 64 bytes in flight per thread

__global__ void __launch_bounds__(kThreads) copy_bytes(uint4* to, const uint4* from, int64_t n) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * kVecs + threadIdx.x;
  uint32_t v[kVecs][4];
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    if (first + k * kThreads < n) ptx::load_streaming(from + first + k * kThreads, v[k]);
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    if (first + k * kThreads < n) ptx::store_evict_first(to + first + k * kThreads, v[k]);
}

__global__ void __launch_bounds__(kThreads) read_bytes(const uint4* from, int64_t n, uint32_t* sink) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  uint32_t all = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step * kVecs) {
    uint32_t v[kVecs][4] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      if (i + k * step < n) ptx::load_streaming(from + i + k * step, v[k]);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) all ^= v[k][0] ^ v[k][1] ^ v[k][2] ^ v[k][3];
  }
  if (all == 0x9e3779b9u) *sink = all;
}
}  // namespace

void copy_kernel(void* to, const void* from, int64_t bytes, Stream stream) {
  INGOT_CHECK_EQ(bytes % 16, 0, "copy_kernel: bytes beyond a multiple of 16");
  if (bytes == 0) return;
  const int64_t n = bytes / 16, per_block = kThreads * kVecs;
  launch("copy_kernel", copy_bytes, {.grid = (n + per_block - 1) / per_block, .block = kThreads}, stream,
         static_cast<uint4*>(to), static_cast<const uint4*>(from), n);
}

void read_kernel(const void* from, int64_t bytes, void* sink, Stream stream) {
  INGOT_CHECK_EQ(bytes % 16, 0, "read_kernel: bytes beyond a multiple of 16");
  if (bytes == 0) return;
  const Limits& limits = current_limits();
  const int64_t resident = int64_t(limits.sms) * (limits.threads_per_sm / kThreads);
  launch("read_kernel", read_bytes, {.grid = resident, .block = kThreads}, stream, static_cast<const uint4*>(from),
         bytes / 16, static_cast<uint32_t*>(sink));
}

}  // namespace ingot::gpu
