#pragma once
// The backward pass of a whole MLP whose values were kept, in one kernel: gradients of activations never leave the SMs,
// dW stays in registers.
//
//     dz_L = dy (. f'(z_L))    dz_{l-1} = (dz_l W_l) . f'(z_{l-1})    dx = dz_1 W_1    dW_l += dz_l^T h_{l-1}
//
// The layers are distributed over the blocks of a cluster, a layer each, from the top down, for the whole launch. The
// unit of work is 64 rows, and the clusters take the units in turn. A block receives dz_l of a unit from the block
// above, through shared memory, and h_{l-1} from the copy engine. Both serve both products of the layer:
//   - Two warpgroups run the chain, one for each 64 inputs of the layer; where no layer is wider than 64, the two
//     take the units in turn. Its product is transposed, inputs by rows: W^T stays in their registers all the time, and
//     dz is read in place. The product of a unit runs while the slopes of the unit before are computed.
//   - One warpgroup holds dW in its registers.
//   - In the remaining warpgroup, the first of the block, single threads load h, load dy or report free space to the
//     block above, and send the results of each of the chain's warpgroups to the block below, or to dx.
// Then a second kernel adds the clusters' parts of dW, in a fixed order.
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
  ptx::settle(base);  // otherwise the compiler computes the address of the block's window anew at every access
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
  ptx::cluster_wait();  // the barriers of this block and of its neighbours are ready
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler: the value is uniform
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
  // Blocks end one by one, so that blocks of the next kernel find room early. No block accesses this block's shared
  // memory any more: all copies and all arrivals, including those on `room`, have been waited for.
}

}  // namespace ingot::cuda::layer_pipeline
