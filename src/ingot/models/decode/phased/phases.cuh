#pragma once
// The launches of the phased path, one for each stage. A block requests its first weights while earlier kernels end.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/models/decode/phased/phases.h"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/small_batch/small_batch.cuh"

namespace ingot::decode {

__device__ __forceinline__ At whole_grid() { return {blockIdx.x, gridDim.x}; }

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) norm_product_kernel(NormProduct p) {
  ptx::let_next_kernel_start();
  weight_tiles::Feed<F> feed;
  feed.ask(row_tile_part<F>(p.w, blockIdx.x));
  ptx::wait_for_earlier_kernels();
  const sampling::Best top = norm_product<F, kCols>(p, whole_grid(), feed, tile::dynamic_shared<char>());
  uint64_t key;
  if (p.best != nullptr && likeliest_of_grid(p, top, key)) append(p, key);
}

template <WeightFormat F>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) residual_product_kernel(ResidualProduct p) {
  ptx::let_next_kernel_start();
  weight_tiles::Feed<F> feed;
  feed.ask(row_tile_part<F>(p.w, blockIdx.x));
  ptx::wait_for_earlier_kernels();
  residual_product<F>(p, whole_grid(), feed, tile::dynamic_shared<char>());
}

// `P`: GateUp or GeneralGateUp.
template <WeightFormat F, class P> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) gate_up_kernel(P p) {
  char* const vectors = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = __ldcg(p.lists.count) * p.w.row_tiles;
  const routing::Copy lists = routing::copy_lists<1>(vectors + weight_tiles::vector_stride(p.w.cols), p.lists, p.most);
  __syncthreads();
  weight_tiles::Feed<F> feed;
  feed.ask(unit_of<F>(p.w, lists, blockIdx.x, units));
  stage_gate_up<F>(p, vectors);
  __syncthreads();
  gate_up<F>(p, whole_grid(), lists, units, feed, vectors);
}
template <WeightFormat F> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) down_kernel(Down p) {
  char* const memory = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t count = __ldcg(p.lists.count);
  const routing::Copy lists =
      routing::copy_lists<1>(memory + p.k * weight_tiles::vector_stride(p.w.cols), p.lists, p.most);
  __syncthreads();
  weight_tiles::Feed<F> feed;
  feed.ask(expert_slot_part<F>(p.w, lists, count, blockIdx.x, 0, gridDim.x));
  down<F>(p, whole_grid(), lists, count, feed, memory);
}

// For several tokens (small_batch.cuh), with one block per SM.
template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(small_batch::kThreads, 1)
    small_batch_product_kernel(const __grid_constant__ SmallBatchProduct p, uint32_t slots) {
  ptx::let_next_kernel_start();
  small_batch::product<F, kCols>(p, slots, whole_grid(),
                                 tile::dynamic_shared<char>());  // product() waits for earlier kernels
}
template <WeightFormat F, int kCols, class P>
__global__ void __launch_bounds__(small_batch::kThreads, 1)
    small_batch_gate_up_kernel(const __grid_constant__ P p, const __grid_constant__ Normed x,
                               const __grid_constant__ Routed routed, uint32_t slots) {
  small_batch::gate_up<F, kCols>(p, x, routed, slots, whole_grid(),
                                 tile::dynamic_shared<char>());  // gate_up() waits for earlier kernels
}
template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(small_batch::kThreads, 1)
    small_batch_down_kernel(const __grid_constant__ Down p, const __grid_constant__ ChoiceSums to, uint32_t slots) {
  ptx::let_next_kernel_start();
  small_batch::down<F, kCols>(p, to, slots, whole_grid(),
                              tile::dynamic_shared<char>());  // down() waits for earlier kernels
}

// Two blocks per multiprocessor.
inline int64_t most_blocks() {
  return std::min<int64_t>(kMostBlocks, kBlocksPerSm * int64_t(gpu::current_limits().sms));
}
// Shared memory of a block that fills its multiprocessor, less the part that the kernel declares itself.
inline int64_t shared_of_block() { return gpu::current_limits().smem_per_block - 1024; }

template <class Kernel, class P>
void launch_one(const char* name, Kernel kernel, int64_t units, int64_t smem, Stream stream, const P& p) {
  gpu::launch(name, kernel,
              {.grid = std::min<int64_t>(units, most_blocks()),
               .block = kThreads,
               .smem = smem,
               .overlap = true,
               .device = std::max(0, gpu::current_device())},
              stream, p);
}
template <class Kernel, class... P>
void launch_columns(const char* name, Kernel&& kernel_of, uint32_t T, int64_t units, int64_t smem, Stream stream,
                    const P&... p) {
  const int64_t grid = std::min<int64_t>(units, most_blocks());
  const auto go = [&](auto kernel) {
    gpu::launch(name, kernel,
                {.grid = grid,
                 .block = kThreads,
                 .smem = smem,
                 .overlap = true,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device()},
                stream, p...);
  };
  if (T == 1) return go(kernel_of(std::integral_constant<int, 1>{}));
  if (T <= 8) return go(kernel_of(std::integral_constant<int, 8>{}));
  return go(kernel_of(std::integral_constant<int, 16>{}));
}

constexpr int64_t vectors_for(uint32_t T, bool alone) { return alone ? 1 : T <= 8 ? 8 : 16; }

template <WeightFormat F> void Phases<F>::norm_product(const NormProduct& p, uint32_t columns, Stream stream) {
  launch_columns(
      "decode norm and product", [](auto n) { return norm_product_kernel<F, n()>; }, columns, p.w.row_tiles,
      int64_t(p.T) * weight_tiles::vector_stride(p.w.cols), stream, p);
}
template <WeightFormat F> void Phases<F>::residual_product(const ResidualProduct& p, Stream stream) {
  launch_one("decode product", residual_product_kernel<F>, p.w.row_tiles, weight_tiles::vector_stride(p.w.cols), stream,
             p);
}
// Launches one block per SM, with as many slots of the ring as the SM's memory holds besides `smem` bytes. With
// `together` the blocks may wait for each other, and then start when the earlier kernels have ended, not as soon as an
// SM has space.
template <WeightFormat F, class Kernel, class... P>
void launch_small_batch(const char* name, Kernel&& kernel_of, uint32_t T, int64_t units, int64_t smem, bool together,
                        Stream stream, const P&... p) {
  const auto go = [&](auto kernel, int64_t sums) {
    const int64_t slot = small_batch::kWarps * small_batch::Ring<F>::kSlotBytes;
    const int64_t slots = std::clamp<int64_t>((shared_of_block() - sums - smem) / slot, 1, small_batch::kMostSlots);
    gpu::launch(name, kernel,
                {.grid = std::min<int64_t>(units, gpu::current_limits().sms),
                 .block = small_batch::kThreads,
                 .smem = slots * slot + sums + smem,
                 .overlap = true,
                 .device = std::max(0, gpu::current_device()),
                 .cooperative = together},
                stream, p..., uint32_t(slots));
  };
  if (T <= 8) return go(kernel_of(std::integral_constant<int, 8>{}), small_batch::kSumsBytes<8>);
  go(kernel_of(std::integral_constant<int, 16>{}), small_batch::kSumsBytes<16>);
}

template <WeightFormat F> void Phases<F>::small_batch(const SmallBatchProduct& p, Stream stream) {
  launch_small_batch<F>(
      "decode product of several", [](auto n) { return small_batch_product_kernel<F, n()>; }, p.T, p.w.row_tiles,
      int64_t(p.T) * weight_tiles::vector_stride(p.w.cols), false, stream, p);
}
template <WeightFormat F, class P>
void launch_gate_up(const P& p, const Normed& normed, const Routed& routed, Stream stream) {
  const int64_t vectors = int64_t(p.T) * weight_tiles::vector_stride(p.w.cols),
                lists = routing::copy_bytes(p.most, vectors_for(p.T, normed.vectors == nullptr));
  if (normed.vectors == nullptr)
    return launch_one("decode gate and up", gate_up_kernel<F, P>, int64_t(p.most) * p.w.row_tiles, vectors + lists,
                      stream, p);
  launch_small_batch<F>(
      "decode gate and up of several", [](auto n) { return small_batch_gate_up_kernel<F, n(), P>; }, p.T,
      int64_t(p.most) * p.w.row_tiles, vectors + lists, routed.counter != nullptr, stream, p, normed, routed);
}
template <WeightFormat F>
void Phases<F>::gate_up(const GateUp& p, const Normed& normed, const Routed& routed, Stream stream) {
  launch_gate_up<F>(p, normed, routed, stream);
}
template <WeightFormat F>
void Phases<F>::gate_up(const GeneralGateUp& p, const Normed& normed, const Routed& routed, Stream stream) {
  launch_gate_up<F>(p, normed, routed, stream);
}
template <WeightFormat F> void Phases<F>::down(const Down& p, const ChoiceSums& sums, Stream stream) {
  const bool alone = sums.sums == nullptr;
  const int64_t stride = weight_tiles::vector_stride(p.w.cols),
                lists = routing::copy_bytes(p.most, vectors_for(p.T, alone));
  if (alone) return launch_one("decode down", down_kernel<F>, p.w.row_tiles, p.k * stride + lists, stream, p);
  launch_small_batch<F>(
      "decode down of several", [](auto n) { return small_batch_down_kernel<F, n()>; }, p.T,
      int64_t(p.most) * p.w.row_tiles,
      sums.room * stride + lists + small_batch::staged_bytes(sums.room, p.most, vectors_for(p.T, false)), false, stream,
      p, sums);
}

}  // namespace ingot::decode
