#pragma once
// The backward pass of a whole MLP whose values were kept, in one kernel: gradients of activations never leave the SMs,
// dW stays in registers.
//
//     dz_L = dy (. f'(z_L))    dz_{l-1} = (dz_l W_l) . f'(z_{l-1})    dx = dz_1 W_1    dW_l += dz_l^T h_{l-1}
//
// The layers are spread over the blocks of a cluster, one each, from the top down, for the whole launch. The unit of
// work is 64 rows; a cluster takes every so many. A block is given dz_l of a unit by the block above, in shared memory,
// and h_{l-1} by the copy engine. Both serve both products of the layer:
//   - Two warpgroups run the chain, one for each 64 inputs of the layer. Its product is transposed, inputs by rows: W^T
//     stays in their registers all the time and dz is read where it lies. The product of a unit runs while the slopes
//     of the one before are formed.
//   - One warpgroup holds dW in its registers.
//   - In the fourth warpgroup, a thread each loads h, loads dy or tells the block above that there is room, and sends
//     what each of the chain's warpgroups has formed to the block below, or to dx.
// Then the clusters' parts of dW are added, in fixed order: by a second kernel.
#include "ingot/kernels/mlp/to_128/layer_pipeline_chain.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_filling.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_gradient.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_sums.cuh"

namespace ingot::cuda::layer_pipeline {

template <class T, int kPanels>
__global__ void __launch_bounds__(kThreads, 1)
    layer_pipeline_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t base = ptx::shared_address(memory);
  ptx::settle(base);  // else the compiler forms the address of the block's window anew at every access
  const BlockView<T, kPanels> view{*static_cast<SharedMemory<kPanels>*>(__cvta_shared_to_generic(base)), maps, a};
  Filling<T, kPanels> filling{view};
  WeightGradient<T, kPanels> gradient{view};
  GradientChain<T, kPanels> chain{view};
  if (threadIdx.x == 0) filling.initialise();
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) filling.start_filling();
  __syncwarp();
  const auto& plan = view.plan();
  ptx::cluster_wait();                                                // the barriers are ready, also the neighbours'
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler then knows it for uniform
  if (warpgroup == 3) {
    ptx::increase_registers<kDwRegisters>();
    if (!plan.entry) gradient.hold_dw();
  } else if (warpgroup != 0) {
    ptx::increase_registers<kChainRegisters>();
    if (plan.sends) chain.run_chain(warpgroup - 1);
  } else {
    ptx::decrease_registers<kHelperRegisters>();
    if (threadIdx.x == 0) filling.fill_h();
    if (threadIdx.x == 32) filling.fill_dz();
    if (threadIdx.x % 32 == 0 && threadIdx.x >= 64 && plan.sends) chain.send(threadIdx.x / 32 - 2);
    __syncwarp();
  }
  // Blocks end one by one, so that those of the next kernel find room early. Nobody writes to this one's shared memory
  // or reads it any more: all copies and all arrivals, also of `room`, have been waited for.
}

}  // namespace ingot::cuda::layer_pipeline
