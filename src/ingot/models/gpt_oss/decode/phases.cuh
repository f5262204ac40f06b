#pragma once
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/granule_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/models/gpt_oss/decode/phases.h"

namespace ingot::gpt_oss_decode {

using granules::kThreads;
using granules::kWarps;
constexpr int kBlocksPerSm = 2, kSms = 132;
template <int kCols> constexpr int kBlocks8 = (kCols + 7) / 8;

// While earlier kernels end, memory is asked for the first band: weights, which nobody writes.
__device__ __forceinline__ void ask_early(const Matrix& w, int64_t band) {
  if (threadIdx.x == 0 && band < w.bands)
    for (int64_t at = 0; at < w.band_bytes; at += 16384)
      ptx::prefetch_to_l2(w.data + band * w.band_bytes + at, uint32_t(min(w.band_bytes - at, int64_t(16384))));
}

// The band's sums, all warps together.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void multiply_band(const Matrix& w, const uint8_t* band,
                                              const char* const (&columns)[kBlocks8<kCols>],
                                              float (&sums)[kWarps][16][kCols]) {
  float sum[kBlocks8<kCols>][4] = {};
  granules::multiply_granules<F>(band, w.granules, threadIdx.x / 32, kWarps, columns, sum);
  granules::put_sums<kCols>(sums, sum);
  __syncthreads();
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
  ask_early(p.w, blockIdx.x);
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
    multiply_band<F, kCols>(p.w, data, mine, m.sums.part[unit & 1]);
    const uint32_t n = 16 * band + row;
    if (!ends || n >= p.w.rows) continue;
    float y = granules::total<kCols>(m.sums.part[unit & 1], row, j) * (rstd * row_scale<F>(p.w, data, row));
    if (p.bias != nullptr) y += p.bias[n];
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
  ask_early(p.w, blockIdx.x);
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  granules::stage_columns(columns, stride, p.columns, p.w.cols, p.T);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols;
  for (uint32_t band = blockIdx.x, unit = 0; band < p.w.bands; band += gridDim.x, ++unit) {
    const uint8_t* const data = p.w.data + band * p.w.band_bytes;
    multiply_band<F, kCols>(p.w, data, mine, m.part[unit & 1]);
    const uint32_t n = 16 * band + row;
    if (threadIdx.x >= 16 * kCols || j >= p.T || n >= p.w.rows) continue;
    float* const x = p.x + j * p.x_stride + n;
    const float y = granules::total<kCols>(m.part[unit & 1], row, j) * row_scale<F>(p.w, data, row);
    *x = __ldcg(x) + (p.bias != nullptr ? y + p.bias[n] : y);
  }
}

__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if (limit > 0) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate / (1 + __expf(-alpha * gate)) * (up + 1);
}

// A unit is a band of a chosen expert: gate and up of 8 channels.
template <WeightFormat F, int kCols> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) gate_up(GateUp p) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  granules::stage_normed<F, kCols>(columns, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T, 0, p.w.granules,
                                   m.squares);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  const uint32_t channel = threadIdx.x / kCols, j = threadIdx.x % kCols, width = p.w.rows / 2;
  const bool ends = threadIdx.x < 8 * kCols && j < p.T;
  const float rstd = ends ? rstd_of<kCols>(m.squares, j, p.w.cols, p.eps) : 0;
  const uint32_t units = __ldcg(p.lists.count) * p.w.bands;
  for (uint32_t at = blockIdx.x, unit = 0; at < units; at += gridDim.x, ++unit) {
    const uint32_t i = at / p.w.bands, band = at % p.w.bands, expert = uint32_t(__ldcg(p.lists.expert + i));
    const uint8_t* const data = p.w.data + expert * p.w.matrix_bytes + band * p.w.band_bytes;
    multiply_band<F, kCols>(p.w, data, mine, m.sums.part[unit & 1]);
    const uint32_t n = 8 * band + channel;
    if (!ends || n >= width) continue;
    const int32_t row = __ldcg(p.lists.row + i * routing::kTokens + j);
    if (row < 0) continue;
    const auto& sums = m.sums.part[unit & 1];
    const float* const bias = p.bias + (int64_t(expert) * width + n) * 2;
    const float gate = granules::total<kCols>(sums, 2 * channel, j) * (rstd * row_scale<F>(p.w, data, 2 * channel));
    const float up =
        granules::total<kCols>(sums, 2 * channel + 1, j) * (rstd * row_scale<F>(p.w, data, 2 * channel + 1));
    granules::put(p.hidden + row * granules::column_bytes(width), p.down, n,
                  gated(gate + bias[0], up + bias[1], p.limit, p.alpha));
  }
}

// The columns that an expert's tokens take: one token's k are in shared memory, more are read where they are. Whoever
// did not choose the expert reads another's; its weight is 0.
template <int kCols>
__device__ __forceinline__ void hidden_columns(const Down& p, const char* staged, uint32_t i,
                                               const char* (&mine)[kBlocks8<kCols>],
                                               float (&weight)[kBlocks8<kCols>][2]) {
  const uint32_t lane = threadIdx.x % 32, bytes = uint32_t(granules::column_bytes(p.w.cols));
#pragma unroll
  for (int k = 0; k < kBlocks8<kCols>; ++k) {
    const uint32_t j = kCols == 1 ? 0 : 8 * k + lane / 4;
    const int32_t row = __ldcg(p.lists.row + i * routing::kTokens + j);
    mine[k] =
        (kCols == 1 ? staged + row * granules::column_stride(p.w.cols) : p.hidden + int64_t(max(row, 0)) * bytes) +
        lane % 4 * 16;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      weight[k][c] = __ldcg(p.lists.weight + i * routing::kTokens + (kCols == 1 ? 0 : 8 * k + lane % 4 * 2 + c));
  }
}

// Of one band, all chosen experts, their granules dealt out to the warps in turn.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void multiply_experts(const Down& p, const char* staged, uint32_t band, uint32_t count,
                                                 float (&sums)[kWarps][16][kCols]) {
  float all[kBlocks8<kCols>][4] = {};
  const uint32_t warp = threadIdx.x / 32;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t* const data =
        p.w.data + uint32_t(__ldcg(p.lists.expert + i)) * p.w.matrix_bytes + band * p.w.band_bytes;
    const char* mine[kBlocks8<kCols>];
    float weight[kBlocks8<kCols>][2], sum[kBlocks8<kCols>][4] = {}, scale[2] = {1, 1};
    hidden_columns<kCols>(p, staged, i, mine, weight);
    granules::multiply_granules<F>(data, p.w.granules, (warp + i * (kWarps - p.w.granules % kWarps)) % kWarps, kWarps,
                                   mine, sum);
    if constexpr (F == WeightFormat::fp8) granules::load_row_scales(data, p.w.granules, scale);
#pragma unroll
    for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (weight[k][c % 2] != 0) all[k][c] += sum[k][c] * (weight[k][c % 2] * scale[c / 2]);
  }
  granules::put_sums<kCols>(sums, all);
  __syncthreads();
}

template <WeightFormat F, int kCols> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) down(Down p) {
  auto& m = tile::shared<granules::Sums<kCols>>();
  char* staged = nullptr;
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if constexpr (kCols == 1) {
    staged = tile::dynamic_shared<char>();
    granules::stage_columns(staged, granules::column_stride(p.w.cols), p.hidden, p.w.cols, p.k);
    __syncthreads();
  }
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols, count = __ldcg(p.lists.count);
  for (uint32_t band = blockIdx.x, unit = 0; band < p.w.bands; band += gridDim.x, ++unit) {
    multiply_experts<F, kCols>(p, staged, band, count, m.part[unit & 1]);
    const uint32_t n = 16 * band + row;
    if (threadIdx.x >= 16 * kCols || j >= p.T || n >= p.w.rows) continue;
    float y = granules::total<kCols>(m.part[unit & 1], row, j) * granules::Form<F>::kDrop;
    for (uint32_t i = 0; i < count; ++i) {
      const float weight = __ldcg(p.lists.weight + i * routing::kTokens + j);
      if (weight != 0) y += weight * p.bias[int64_t(__ldcg(p.lists.expert + i)) * p.w.rows + n];
    }
    float* const x = p.x + j * p.x_stride + n;
    *x = __ldcg(x) + y;
  }
}

// --- launchers

template <class P, class Kernel>
void launch_columns(const char* name, Kernel&& kernel_of, const P& p, uint32_t T, int64_t units, int64_t column_bytes,
                    Stream stream) {
  const int64_t grid = std::min<int64_t>(units, kBlocksPerSm * kSms);
  const auto go = [&](auto kernel) {
    gpu::launch(name, kernel,
                {.grid = grid,
                 .block = kThreads,
                 .smem = column_bytes * int64_t(T),
                 .overlap = true,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device()},
                stream, p);
  };
  if (T == 1) return go(kernel_of(std::integral_constant<int, 1>{}));
  if (T <= 8) return go(kernel_of(std::integral_constant<int, 8>{}));
  return go(kernel_of(std::integral_constant<int, 16>{}));
}

template <WeightFormat F> void Phases<F>::norm_product(const NormProduct& p, Stream stream) {
  launch_columns(
      "decode norm and product", [](auto n) { return gpt_oss_decode::norm_product<F, n()>; }, p, p.T, p.w.bands,
      granules::column_stride(p.w.cols), stream);
}
template <WeightFormat F> void Phases<F>::residual_product(const ResidualProduct& p, Stream stream) {
  launch_columns(
      "decode product", [](auto n) { return gpt_oss_decode::residual_product<F, n()>; }, p, p.T, p.w.bands,
      granules::column_stride(p.w.cols), stream);
}
template <WeightFormat F> void Phases<F>::gate_up(const GateUp& p, Stream stream) {
  launch_columns(
      "decode gate and up", [](auto n) { return gpt_oss_decode::gate_up<F, n()>; }, p, p.T, int64_t(p.most) * p.w.bands,
      granules::column_stride(p.w.cols), stream);
}
template <WeightFormat F> void Phases<F>::down(const Down& p, Stream stream) {
  launch_columns(
      "decode down", [](auto n) { return gpt_oss_decode::down<F, n()>; }, p, p.T, p.w.bands,
      p.T == 1 ? int64_t(p.k) * granules::column_stride(p.w.cols) : 0, stream);
}

}  // namespace ingot::gpt_oss_decode
