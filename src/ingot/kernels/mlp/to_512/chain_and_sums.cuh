#pragma once
// The chain and the sums as one launch, for where values or slopes are formed by a launch before: the same blocks do
// both, one after the other, and wait for each other in between. The sums' buffers lie where the chain's tiles and ring
// were; barriers have places of their own.
#include "ingot/kernels/mlp/to_512/chain.cuh"
#include "ingot/kernels/mlp/to_512/sums.cuh"

namespace ingot::cuda::to_512_backward {

template <class Cut, bool kNorms> struct BothMemory {
  using Chain = ChainMemory<Cut, kNorms>;
  using Sums = SumBuffers<SumsOfBoth<Cut>>;
  static_assert(sizeof(Sums) <= kGroups * Chain::kTileBytes + Chain::kSlots * kSlotBytes,
                "the sums must fit where tiles and slots were");

  Chain chain;
  SumBarriers barriers;
};

template <class T, Slope kSlope, class Cut, bool kNorms>
__global__ void __launch_bounds__(kChainThreads, 1)
    both_kernel(const __grid_constant__ BothMaps maps, const __grid_constant__ Both a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using Memory = BothMemory<Cut, kNorms>;
  using ChainBlock = ChainBlock<T, kSlope, Cut, kNorms, true>;
  using SumBlock = SumBlock<T, SumsOfBoth<Cut>>;
  static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "both must fit the shared memory");
  static_assert(SumBlock::kGroupWarps == kGroupWarps, "who multiplies in the chain multiplies in the sums");
  Memory& s = *reinterpret_cast<Memory*>(memory);
  ChainBlock chain{s.chain, maps.chain, a.chain};
  const auto sums = [&] {  // called by whole warps
    return SumBlock{*reinterpret_cast<typename Memory::Sums*>(memory), s.barriers, maps.sums, a.sums};
  };
  if (threadIdx.x == 0) {
    chain.prepare();
    SumBlock::prepare(s.barriers);
  }
  __syncwarp();
  ptx::wait_for_earlier_kernels();
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.sums.counter = 0;
  tile::sync_cluster();  // the neighbour's barriers are ready
  if constexpr (kNorms) chain.find_scales();
  if (chain.warp < kGroupWarps) {
    ptx::increase_registers<ChainBlock::kMultiplyRegisters>();
    if (int(chain.group) < chain.groups()) chain.run();
    ptx::barrier_sync_unaligned(0, kChainThreads);
    auto block = sums();
    block.sum();
    block.template finish_together<true, kChainThreads>();
  } else {
    ptx::decrease_registers<ChainBlock::kServeRegisters>();
    const uint32_t server = chain.warp - kGroupWarps, mover = server - 1;
    if (server == 0 && chain.lane == 0) chain.fill_ring();
    if (mover < uint32_t(chain.groups()) && chain.lane == 0) {
      chain.move_tile(mover);
      ptx::fence_proxy_async();  // other blocks are told of what these copies wrote
    }
    if (server == 1 + kGroups && chain.lane == 0) mark_counter(a.met);
    __syncwarp();
    ptx::barrier_sync_unaligned(0, kChainThreads);  // what the chain has made is there, and its memory free
    auto block = sums();
    if (server == 0 && chain.lane == 0) {
      meet_at_counter(a.met, gridDim.x);
      ptx::fence_proxy_async();
      block.load();
    }
    __syncwarp();
    block.template finish_together<false, kChainThreads>();
  }
}

template <class T, int kHalf>
void launch_both(const BothMaps& maps, const Both& a, const ChainLaunch& at, Stream stream) {
  const auto with = [&](auto kernel, int64_t memory) {
    gpu::launch("mlp_backward", kernel, in_pairs(at, memory, true), stream, maps, a);
  };
  with_slope_kind(at.slope, [&](auto slope) {
    using Cut = Cut<kHalf>;
    a.chain.has_gain ? with(both_kernel<T, slope(), Cut, true>, sizeof(BothMemory<Cut, true>))
                     : with(both_kernel<T, slope(), Cut, false>, sizeof(BothMemory<Cut, false>));
  });
}

}  // namespace ingot::cuda::to_512_backward
