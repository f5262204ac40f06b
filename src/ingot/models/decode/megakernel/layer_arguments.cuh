#pragma once
// The hand-over of a layer's arguments between the multiplying warps and the copying warp, in models with dense MLPs.
// The multiplying warps load the next layer's arguments during attention, into the place of the layer before, and the
// copying warp runs ahead of them. With experts the warps synchronise at the router once a layer. Without experts they
// synchronise here, in both directions: the copying warp waits for the arguments of the next layer, and the multiplying
// warps wait until the copying warp no longer reads the arguments that they are about to replace.
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode::layer_arguments {

constexpr uint32_t kBegunBarrier = 1;  // the copying warp has begun a layer; with experts the barrier of the router

// Runs in the multiplying warps, once a layer, after each thread's copies of arguments are complete.
template <TokenVariant V> __device__ __forceinline__ void announce(const TokenContext<V>& block) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) TokenContext<V>::Copies::arrive(&block.m.logits_ready);
}
// Runs in the copying warp at the beginning of layer i, except the first layer, whose arguments are there.
template <TokenVariant V> __device__ __forceinline__ void wait(const TokenContext<V>& block, uint32_t i) {
  TokenContext<V>::Copies::wait(&block.m.logits_ready, (i - 1) % 2);
  ptx::barrier_arrive(kBegunBarrier, kTokenThreads + 32);
}
// Runs in the multiplying warps, in each layer except the first, before they load arguments.
__device__ __forceinline__ void wait_for_loader() { ptx::barrier_sync_unaligned(kBegunBarrier, kTokenThreads + 32); }

}  // namespace ingot::decode::layer_arguments
