// A function of libingot_bench.so: the bare rate of mma.sync, the ceiling of the portable kernels.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/testing/native.h"

namespace ingot::testing {
namespace {

// Four blocks of four warps keep each scheduler busy; a warp has eight sums that do not depend on each other.
constexpr int kThreads = 128, kBlocksOfSm = 4, kSums = 8;
constexpr int64_t kFlopsOfProduct = 2 * 16 * 8 * 16;

// bf16 numbers between 1 and 2 of either sign, because zeros would take less power than data.
__device__ uint32_t random_pair(uint32_t seed) {
  seed = (seed ^ (seed >> 16)) * 0x7feb352du;
  seed = (seed ^ (seed >> 15)) * 0x846ca68bu;
  return ((seed ^ (seed >> 16)) & 0x807f807fu) | 0x3f803f80u;
}

// The products read and write registers only. `sink` keeps the compiler from dropping the sums.
__global__ void __launch_bounds__(kThreads) mma_loop_kernel(int64_t rounds, float* sink) {
  uint32_t a[4], b[kSums][2];
  float d[kSums][4] = {};
  const uint32_t seed = (blockIdx.x * kThreads + threadIdx.x) * 32;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) a[i] = random_pair(seed + i);
#pragma unroll
  for (uint32_t i = 0; i < 2 * kSums; ++i) b[i / 2][i % 2] = random_pair(seed + 4 + i);
  for (int64_t round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < kSums; ++i) ptx::mma_m16n8k16(bf16{}, d[i], a, b[i]);
  float all = 0;
#pragma unroll
  for (int i = 0; i < 4 * kSums; ++i) all += d[i / 4][i % 4];
  if (all == 0.12345f) *sink = all;
}

}  // namespace

// Each warp of the launch executes 8 * `rounds` matrix instructions. Writes the number of operations of the whole
// launch to `flops`.
EXPORT int ingot_bench_mma_loop(int64_t rounds, float* sink, int64_t* flops, void* stream) {
  return guarded([&] {
    const int64_t blocks = int64_t(gpu::sm_count(0)) * kBlocksOfSm;
    *flops = blocks * (kThreads / 32) * rounds * kSums * kFlopsOfProduct;
    gpu::launch("mma_loop", mma_loop_kernel, {.grid = blocks, .block = kThreads}, {stream}, rounds, sink);
  });
}

}  // namespace ingot::testing
