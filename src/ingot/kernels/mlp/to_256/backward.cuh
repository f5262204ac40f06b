#pragma once
// The kernels of the backward pass where layers are up to 256 wide: the chain of gradients, which writes every layer's
// dz to memory, and the sums of dW and db over all rows, in two launches.
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/kernels/mlp/to_256/chain.cuh"
#include "ingot/kernels/mlp/to_256/sums.cuh"

namespace ingot::cuda::to_256_backward {

constexpr int kSumThreads = kGroups * 128 + 32;
constexpr int kMultiplyRegisters = 224, kServeRegisters = 56;

// The neighbour may still write to this block's memory, or report the end of its reads.
__device__ __forceinline__ void end_together() {
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

template <class T, Slope kSlope>
__global__ void __launch_bounds__(kThreads, 1)
    chain_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  ChainBlock<T, kSlope> chain{s, maps, a};
  if (threadIdx.x == 0) {
    chain.prepare();
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::wait_for_earlier_kernels();
  tile::sync_cluster();
  if (chain.warp < kGroupWarps) {
    ptx::increase_registers<kMultiplyRegisters>();
    chain.run();
  } else {
    ptx::decrease_registers<kServeRegisters>();
    chain.serve();
  }
  end_together();
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, 1)
    sum_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const SumBlock<T> block{*reinterpret_cast<Memory*>(memory), maps, a};
  if (!block.has_work) return;  // both blocks of the pair
  if (threadIdx.x == 0) {
    block.prepare(block.s);
    ptx::fence_mbarrier_init();
    block.prefetch_maps();
  }
  __syncwarp();
  tile::sync_cluster();
  if (block.warp < kGroupWarps)
    block.run();
  else
    block.serve();
  end_together();
}

template <class T> void launch(const Maps& maps, const Arguments& a, const LaunchAt& at, Stream stream) {
  gpu::Launch how{.grid = int64_t(at.clusters) * kPair,
                  .block = kThreads,
                  .smem = sizeof(Memory),
                  .cluster = kPair,
                  .overlap = true,
                  .device = at.device};
  with_slope_kind(at.slope,
                  [&](auto slope) { gpu::launch("mlp_backward", chain_kernel<T, slope()>, how, stream, maps, a); });
  if (!at.has_sums) return;
  how.grid = int64_t(a.layers) * a.splits * kPair, how.block = kSumThreads;
  how.overlap = false, how.cooperative = true;  // blocks waiting for each other must run at the same time
  gpu::launch("mlp_backward: sums", sum_kernel<T>, how, stream, maps, a);
}

}  // namespace ingot::cuda::to_256_backward
