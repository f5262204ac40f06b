#pragma once
// The launches of the phased path: a stage each, whose blocks ask for their first weights while earlier kernels end.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/models/gpt_oss/decode/phases.h"
#include "ingot/models/gpt_oss/decode/stages.cuh"

namespace ingot::gpt_oss_decode {

__device__ __forceinline__ At whole_grid() { return {blockIdx.x, gridDim.x}; }

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) norm_product_kernel(NormProduct p) {
  ptx::let_next_kernel_start();
  granules::Feed<F> feed;
  feed.ask(band_of<F>(p.w, blockIdx.x));
  ptx::wait_for_earlier_kernels();
  const sampling::Best top = norm_product<F, kCols>(p, whole_grid(), feed, tile::dynamic_shared<char>());
  uint64_t key;
  if (p.best != nullptr && likeliest_of_grid(p, top, key)) append(p, key);
}

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) residual_product_kernel(ResidualProduct p) {
  ptx::let_next_kernel_start();
  granules::Feed<F> feed;
  feed.ask(band_of<F>(p.w, blockIdx.x));
  ptx::wait_for_earlier_kernels();
  residual_product<F, kCols>(p, whole_grid(), feed, tile::dynamic_shared<char>());
}

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) gate_up_kernel(GateUp p) {
  char* const columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = __ldcg(p.lists.count) * p.w.bands;
  const routing::Copy lists =
      routing::copy_lists<kCols>(columns + p.T * granules::column_stride(p.w.cols), p.lists, p.most);
  __syncthreads();
  granules::Feed<F> feed;
  feed.ask(unit_of<F>(p.w, lists, blockIdx.x, units));
  stage_gate_up<F, kCols>(p, columns);
  __syncthreads();
  gate_up<F, kCols>(p, whole_grid(), lists, units, feed, columns);
}

// 16 columns' weighted sums need more registers than two blocks leave.
template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kCols == 16 ? 1 : kBlocksPerSm) down_kernel(Down p, DownParts q) {
  char* const memory = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t count = __ldcg(p.lists.count);
  const routing::Copy lists = routing::copy_lists<kCols>(
      memory + (kCols == 1 ? p.k : q.staged) * granules::column_stride(p.w.cols), p.lists, p.most);
  __syncthreads();
  const uint32_t parts = kCols == 1 ? 1 : max(1u, min(q.most, count));
  granules::Feed<F> feed;
  feed.ask(entry_of<F>(p.w, lists, count, parts, blockIdx.x, DownUnit(blockIdx.x, count, parts).first, gridDim.x));
  down<F, kCols>(p, q, whole_grid(), lists, count, parts, feed, memory);
}

template <class Kernel, class... P>
void launch_columns(const char* name, Kernel&& kernel_of, uint32_t T, int64_t units, int64_t smem, Stream stream,
                    const P&... p) {
  const int64_t grid = std::min<int64_t>(units, kMostBlocks);
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

constexpr int64_t columns_for(uint32_t T) { return T == 1 ? 1 : T <= 8 ? 8 : 16; }

template <WeightFormat F> void Phases<F>::norm_product(const NormProduct& p, Stream stream) {
  launch_columns(
      "decode norm and product", [](auto n) { return norm_product_kernel<F, n()>; }, p.T, p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols), stream, p);
}
template <WeightFormat F> void Phases<F>::residual_product(const ResidualProduct& p, Stream stream) {
  launch_columns(
      "decode product", [](auto n) { return residual_product_kernel<F, n()>; }, p.T, p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols), stream, p);
}
template <WeightFormat F> void Phases<F>::gate_up(const GateUp& p, Stream stream) {
  launch_columns(
      "decode gate and up", [](auto n) { return gate_up_kernel<F, n()>; }, p.T, int64_t(p.most) * p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols) + routing::copy_bytes(p.most, columns_for(p.T)), stream, p);
}
template <WeightFormat F> void Phases<F>::down(const Down& p, const DownParts& parts, Stream stream) {
  launch_columns(
      "decode down", [](auto n) { return down_kernel<F, n()>; }, p.T, int64_t(p.w.bands) * (p.T == 1 ? 1 : parts.most),
      (p.T == 1 ? p.k : int64_t(parts.staged)) * granules::column_stride(p.w.cols) +
          routing::copy_bytes(p.most, columns_for(p.T)),
      stream, p, parts);
}

}  // namespace ingot::gpt_oss_decode
