#pragma once
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/granule_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/models/gpt_oss/decode/phases.h"

namespace ingot::gpt_oss_decode {

using granules::kThreads;
using granules::kWarps;
constexpr int kSms = 132;
constexpr int kBlocksPerSm = 2;
constexpr int kMostBlocks = kBlocksPerSm * kSms;
template <int kCols> constexpr int kBlocks8 = (kCols + 7) / 8;

// This warp's part of a matrix's band; nothing where there is no such band.
template <WeightFormat F>
__device__ __forceinline__ typename granules::Feed<F>::Band band_of(const Matrix& w, int64_t band) {
  return {band < w.bands ? w.data + band * w.band_bytes : nullptr, threadIdx.x / 32, w.granules};
}

// What a band's row is multiplied by in the end.
template <WeightFormat F>
__device__ __forceinline__ float row_scale(const Matrix& w, const uint8_t* band, uint32_t row) {
  constexpr float kDrop = granules::Form<F>::kDrop;
  if constexpr (F == WeightFormat::fp8)
    return kDrop * reinterpret_cast<const float*>(band + int64_t(w.granules) * granules::Form<F>::kBytes)[row];
  return kDrop;
}

template <int kCols> struct ProductMemory {
  granules::Sums<kCols> sums;
  float squares[kWarps][kCols], rstd[kCols];
};
// After a barrier, by threads that need it.
template <int kCols>
__device__ __forceinline__ float rstd_of(const float (&squares)[kWarps][kCols], uint32_t j, uint32_t C, float eps) {
  return 1 / sqrtf(granules::sum_of<kCols>(squares, j) / float(C) + eps);
}

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) norm_product(NormProduct p) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  auto& best = tile::shared<sampling::BestMemory>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  granules::Feed<F> feed;
  feed.ask(band_of<F>(p.w, blockIdx.x));  // weights, which nobody writes, while earlier kernels end
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  granules::stage_normed<F, kCols>(columns, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T, 0, p.w.granules,
                                   m.squares);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols;
  const bool ends = threadIdx.x < 16 * kCols && j < p.T;
  const float rstd = ends ? rstd_of<kCols>(m.squares, j, p.w.cols, p.eps) : 0;
  sampling::Best top;
  for (uint32_t band = blockIdx.x, unit = 0; band < p.w.bands; band += gridDim.x, ++unit) {
    const uint8_t* const data = p.w.data + band * p.w.band_bytes;
    const uint32_t n = 16 * band + row;
    const bool mine_to_end = ends && n < p.w.rows;
    const float scale = mine_to_end ? rstd * row_scale<F>(p.w, data, row) : 0;
    const float bias = mine_to_end && p.bias != nullptr ? p.bias[n] : 0;
    float sum[kBlocks8<kCols>][4] = {};
    feed.multiply_band(band_of<F>(p.w, band), band_of<F>(p.w, band + gridDim.x), mine, sum);
    granules::put_sums<kCols>(m.sums.part[unit & 1], sum);
    __syncthreads();
    if (!mine_to_end) continue;
    const float y = granules::total<kCols>(m.sums.part[unit & 1], row, j) * scale + bias;
    p.y[int64_t(j) * p.y_stride + n] = y;
    if (j == p.T - 1 && n < p.vocab) top.add(y, n);
  }
  if (p.best == nullptr) return;
  sampling::Drawn drawn;
  if (!sampling::best_of_grid(top, p.best, p.arrived, best, drawn) || threadIdx.x != 0) return;
  p.state->tokens[0] = drawn.token;
  p.state->flaw |= drawn.flaw;
  p.state->position += int32_t(p.advance);
}

template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) residual_product(ResidualProduct p) {
  auto& m = tile::shared<granules::Sums<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  granules::Feed<F> feed;
  feed.ask(band_of<F>(p.w, blockIdx.x));  // weights, which nobody writes, while earlier kernels end
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  granules::stage_columns(columns, stride, p.columns, p.w.cols, p.T);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols;
  for (uint32_t band = blockIdx.x, unit = 0; band < p.w.bands; band += gridDim.x, ++unit) {
    const uint8_t* const data = p.w.data + band * p.w.band_bytes;
    const uint32_t n = 16 * band + row;
    const bool ends = threadIdx.x < 16 * kCols && j < p.T && n < p.w.rows;
    float* const x = p.x + j * p.x_stride + n;
    const float scale = ends ? row_scale<F>(p.w, data, row) : 0;
    const float old = ends ? __ldcg(x) + (p.bias != nullptr ? p.bias[n] : 0) : 0;
    float sum[kBlocks8<kCols>][4] = {};
    feed.multiply_band(band_of<F>(p.w, band), band_of<F>(p.w, band + gridDim.x), mine, sum);
    granules::put_sums<kCols>(m.part[unit & 1], sum);
    __syncthreads();
    if (ends) *x = old + granules::total<kCols>(m.part[unit & 1], row, j) * scale;
  }
}

__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if (limit > 0) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate / (1 + __expf(-alpha * gate)) * (up + 1);
}

// Unit u of a bank is a band of a chosen expert.
struct BankUnit {
  uint32_t entry, band, expert;
  const uint8_t* data;
  __device__ BankUnit(const Matrix& w, const routing::Copy& lists, uint32_t u)
      : entry(u / w.bands), band(u % w.bands), expert(uint32_t(lists.expert[entry])) {
    data = w.data + expert * w.matrix_bytes + band * w.band_bytes;
  }
};
template <WeightFormat F>
__device__ __forceinline__ typename granules::Feed<F>::Band unit_of(const Matrix& w, const routing::Copy& lists,
                                                                    uint32_t u, uint32_t units) {
  return {u < units ? BankUnit(w, lists, u).data : nullptr, threadIdx.x / 32, w.granules};
}

// Gate and up of 8 channels a unit.
template <WeightFormat F, int kCols> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) gate_up(GateUp p) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  const uint32_t units = __ldcg(p.lists.count) * p.w.bands;
  const routing::Copy lists = routing::copy_lists<kCols>(columns + p.T * stride, p.lists, p.most);
  __syncthreads();
  granules::Feed<F> feed;
  feed.ask(unit_of<F>(p.w, lists, blockIdx.x, units));
  granules::stage_normed<F, kCols>(columns, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T, 0, p.w.granules,
                                   m.squares);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  const uint32_t channel = threadIdx.x / kCols, j = threadIdx.x % kCols, width = p.w.rows / 2;
  const bool in_rows = threadIdx.x < 8 * kCols && j < p.T;
  const float rstd = in_rows ? rstd_of<kCols>(m.squares, j, p.w.cols, p.eps) : 0;
  for (uint32_t at = blockIdx.x, unit = 0; at < units; at += gridDim.x, ++unit) {
    const BankUnit u(p.w, lists, at);
    const uint32_t n = 8 * u.band + channel;
    const int32_t row = in_rows && n < width ? lists.row[u.entry * kCols + j] : -1;
    float bias[2] = {}, scale[2] = {};
    if (row >= 0)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        bias[i] = p.bias[(int64_t(u.expert) * width + n) * 2 + i];
        scale[i] = rstd * row_scale<F>(p.w, u.data, 2 * channel + i);
      }
    auto& sums = m.sums.part[unit & 1];
    float sum[kBlocks8<kCols>][4] = {};
    feed.multiply_band(unit_of<F>(p.w, lists, at, units), unit_of<F>(p.w, lists, at + gridDim.x, units), mine, sum);
    granules::put_sums<kCols>(sums, sum);
    __syncthreads();
    if (row < 0) continue;
    const float gate = granules::total<kCols>(sums, 2 * channel, j) * scale[0] + bias[0];
    const float up = granules::total<kCols>(sums, 2 * channel + 1, j) * scale[1] + bias[1];
    granules::put(p.hidden + row * granules::column_bytes(width), p.down, n, gated(gate, up, p.limit, p.alpha));
  }
}

// The columns that an expert's tokens take: one token's k are in shared memory, more are read where they are. Whoever
// did not choose the expert reads another's; its weight is 0.
template <int kCols>
__device__ __forceinline__ void hidden_columns(const Down& p, const char* staged, const routing::Copy& lists,
                                               uint32_t i, const char* (&mine)[kBlocks8<kCols>],
                                               float (&weight)[kBlocks8<kCols>][2]) {
  const uint32_t lane = threadIdx.x % 32, bytes = uint32_t(granules::column_bytes(p.w.cols));
#pragma unroll
  for (int k = 0; k < kBlocks8<kCols>; ++k) {
    const int32_t row = lists.row[i * kCols + (kCols == 1 ? 0 : 8 * k + lane / 4)];
    mine[k] =
        (kCols == 1 ? staged + row * granules::column_stride(p.w.cols) : p.hidden + int64_t(max(row, 0)) * bytes) +
        lane % 4 * 16;
#pragma unroll
    for (int c = 0; c < 2; ++c) weight[k][c] = lists.weight[i * kCols + (kCols == 1 ? 0 : 8 * k + lane % 4 * 2 + c)];
  }
}

// Entry i of a band; past the last entry the block's next band begins. Warps begin where those of the entry before
// ended.
template <WeightFormat F>
__device__ __forceinline__ typename granules::Feed<F>::Band entry_of(const Matrix& w, const routing::Copy& lists,
                                                                     uint32_t count, uint32_t band, uint32_t i) {
  if (i == count) band += gridDim.x, i = 0;
  if (band >= w.bands || count == 0) return {};
  const uint32_t first = (threadIdx.x / 32 + i * (kWarps - w.granules % kWarps)) % kWarps;
  return {w.data + uint32_t(lists.expert[i]) * w.matrix_bytes + band * w.band_bytes, first, w.granules};
}

// Of one band, all chosen experts.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void multiply_experts(const Down& p, const char* staged, const routing::Copy& lists,
                                                 uint32_t band, uint32_t count, granules::Feed<F>& feed,
                                                 float (&sums)[kWarps][16][kCols]) {
  float all[kBlocks8<kCols>][4] = {};
  for (uint32_t i = 0; i < count; ++i) {
    const auto here = entry_of<F>(p.w, lists, count, band, i);
    const char* mine[kBlocks8<kCols>];
    float weight[kBlocks8<kCols>][2], sum[kBlocks8<kCols>][4] = {}, scale[2] = {1, 1};
    hidden_columns<kCols>(p, staged, lists, i, mine, weight);
    if constexpr (F == WeightFormat::fp8) granules::load_row_scales(here.data, p.w.granules, scale);
    feed.multiply_band(here, entry_of<F>(p.w, lists, count, band, i + 1), mine, sum);
#pragma unroll
    for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (weight[k][c % 2] != 0) all[k][c] += sum[k][c] * (weight[k][c % 2] * scale[c / 2]);
  }
  granules::put_sums<kCols>(sums, all);
  __syncthreads();
}

// 16 columns' weighted sums need more registers than two blocks leave.
template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kCols == 16 ? 1 : kBlocksPerSm) down(Down p) {
  auto& m = tile::shared<granules::Sums<kCols>>();
  char* const memory = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols), count = __ldcg(p.lists.count);
  const char* const staged = memory;
  const routing::Copy lists = routing::copy_lists<kCols>(memory + (kCols == 1 ? p.k * stride : 0), p.lists, p.most);
  __syncthreads();
  granules::Feed<F> feed;
  feed.ask(entry_of<F>(p.w, lists, count, blockIdx.x, 0));
  if constexpr (kCols == 1) {
    granules::stage_columns(memory, stride, p.hidden, p.w.cols, p.k);
    __syncthreads();
  }
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols;
  for (uint32_t band = blockIdx.x, unit = 0; band < p.w.bands; band += gridDim.x, ++unit) {
    const uint32_t n = 16 * band + row;
    const bool ends = threadIdx.x < 16 * kCols && j < p.T && n < p.w.rows;
    float* const x = p.x + j * p.x_stride + n;
    float y = ends ? __ldcg(x) : 0;
    constexpr uint32_t kHeld = 4;  // biases on their way at once
    for (uint32_t i = 0; ends && i < count; i += kHeld) {
      float bias[kHeld];
#pragma unroll
      for (uint32_t k = 0; k < kHeld; ++k)
        bias[k] = i + k < count ? p.bias[int64_t(lists.expert[i + k]) * p.w.rows + n] : 0;
#pragma unroll
      for (uint32_t k = 0; k < kHeld; ++k) {
        const float weight = i + k < count ? lists.weight[(i + k) * kCols + j] : 0;
        if (weight != 0) y += weight * bias[k];
      }
    }
    multiply_experts<F, kCols>(p, staged, lists, band, count, feed, m.part[unit & 1]);
    if (ends) *x = y + granules::total<kCols>(m.part[unit & 1], row, j) * granules::Form<F>::kDrop;
  }
}

// --- launchers

template <class P, class Kernel>
void launch_columns(const char* name, Kernel&& kernel_of, const P& p, uint32_t T, int64_t units, int64_t smem,
                    Stream stream) {
  const int64_t grid = std::min<int64_t>(units, kMostBlocks);
  const auto go = [&](auto kernel) {
    gpu::launch(name, kernel,
                {.grid = grid,
                 .block = kThreads,
                 .smem = smem,
                 .overlap = true,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device()},
                stream, p);
  };
  if (T == 1) return go(kernel_of(std::integral_constant<int, 1>{}));
  if (T <= 8) return go(kernel_of(std::integral_constant<int, 8>{}));
  return go(kernel_of(std::integral_constant<int, 16>{}));
}

constexpr int64_t columns_for(uint32_t T) { return T == 1 ? 1 : T <= 8 ? 8 : 16; }

template <WeightFormat F> void Phases<F>::norm_product(const NormProduct& p, Stream stream) {
  launch_columns(
      "decode norm and product", [](auto n) { return gpt_oss_decode::norm_product<F, n()>; }, p, p.T, p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols), stream);
}
template <WeightFormat F> void Phases<F>::residual_product(const ResidualProduct& p, Stream stream) {
  launch_columns(
      "decode product", [](auto n) { return gpt_oss_decode::residual_product<F, n()>; }, p, p.T, p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols), stream);
}
template <WeightFormat F> void Phases<F>::gate_up(const GateUp& p, Stream stream) {
  launch_columns(
      "decode gate and up", [](auto n) { return gpt_oss_decode::gate_up<F, n()>; }, p, p.T, int64_t(p.most) * p.w.bands,
      int64_t(p.T) * granules::column_stride(p.w.cols) + routing::copy_bytes(p.most, columns_for(p.T)), stream);
}
template <WeightFormat F> void Phases<F>::down(const Down& p, Stream stream) {
  launch_columns(
      "decode down", [](auto n) { return gpt_oss_decode::down<F, n()>; }, p, p.T, p.w.bands,
      (p.T == 1 ? int64_t(p.k) * granules::column_stride(p.w.cols) : 0) + routing::copy_bytes(p.most, columns_for(p.T)),
      stream);
}

}  // namespace ingot::gpt_oss_decode
