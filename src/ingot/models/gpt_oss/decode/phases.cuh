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
template <int kCols> constexpr int kBlocksPerSm = kCols == 1 ? 3 : 2;  // more columns, more memory and registers
constexpr int kMostBlocks = kBlocksPerSm<1> * kSms;
template <int kCols> constexpr int kBlocks8 = (kCols + 7) / 8;

// Memory is asked for a block's next two units while it still waits for others: for weights, which nobody writes, even
// while earlier kernels end.
constexpr uint32_t kAskAhead = 2;
__device__ __forceinline__ void ask(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 16384)
    ptx::prefetch_to_l2(from + at, uint32_t(min(bytes - at, int64_t(16384))));
}
__device__ __forceinline__ void ask_band(const Matrix& w, int64_t band) {
  if (threadIdx.x == 32 && band < w.bands) ask(w.data + band * w.band_bytes, w.band_bytes);
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
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kCols>) norm_product(NormProduct p) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  auto& best = tile::shared<sampling::BestMemory>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  for (uint32_t i = 0; i < kAskAhead; ++i) ask_band(p.w, blockIdx.x + int64_t(i) * gridDim.x);
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
    ask_band(p.w, band + int64_t(kAskAhead) * gridDim.x);
    const float scale = mine_to_end ? rstd * row_scale<F>(p.w, data, row) : 0;
    const float bias = mine_to_end && p.bias != nullptr ? p.bias[n] : 0;
    multiply_band<F, kCols>(p.w, data, mine, m.sums.part[unit & 1]);
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
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kCols>) residual_product(ResidualProduct p) {
  auto& m = tile::shared<granules::Sums<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  for (uint32_t i = 0; i < kAskAhead; ++i) ask_band(p.w, blockIdx.x + int64_t(i) * gridDim.x);
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
    ask_band(p.w, band + int64_t(kAskAhead) * gridDim.x);
    const float scale = ends ? row_scale<F>(p.w, data, row) : 0;
    const float old = ends ? __ldcg(x) + (p.bias != nullptr ? p.bias[n] : 0) : 0;
    multiply_band<F, kCols>(p.w, data, mine, m.part[unit & 1]);
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
__device__ __forceinline__ void ask_unit(const Matrix& w, const routing::Copy& lists, int64_t u, uint32_t units) {
  if (threadIdx.x == 32 && u < units) ask(BankUnit(w, lists, uint32_t(u)).data, w.band_bytes);
}

// Gate and up of 8 channels a unit.
template <WeightFormat F, int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kCols>) gate_up(GateUp p) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  const uint32_t units = __ldcg(p.lists.count) * p.w.bands;
  const routing::Copy lists = routing::copy_lists<kCols>(columns + p.T * stride, p.lists, p.most);
  __syncthreads();
  for (uint32_t i = 0; i < kAskAhead; ++i) ask_unit(p.w, lists, blockIdx.x + int64_t(i) * gridDim.x, units);
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
    ask_unit(p.w, lists, at + int64_t(kAskAhead) * gridDim.x, units);
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
    multiply_band<F, kCols>(p.w, u.data, mine, sums);
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

// Of one band, all chosen experts, their granules dealt out to the warps in turn.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void multiply_experts(const Down& p, const char* staged, const routing::Copy& lists,
                                                 uint32_t band, uint32_t count, float (&sums)[kWarps][16][kCols]) {
  float all[kBlocks8<kCols>][4] = {};
  const uint32_t warp = threadIdx.x / 32;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t* const data = p.w.data + uint32_t(lists.expert[i]) * p.w.matrix_bytes + band * p.w.band_bytes;
    const char* mine[kBlocks8<kCols>];
    float weight[kBlocks8<kCols>][2], sum[kBlocks8<kCols>][4] = {}, scale[2] = {1, 1};
    hidden_columns<kCols>(p, staged, lists, i, mine, weight);
    if constexpr (F == WeightFormat::fp8) granules::load_row_scales(data, p.w.granules, scale);
    granules::multiply_granules<F>(data, p.w.granules, (warp + i * (kWarps - p.w.granules % kWarps)) % kWarps, kWarps,
                                   mine, sum);
#pragma unroll
    for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (weight[k][c % 2] != 0) all[k][c] += sum[k][c] * (weight[k][c % 2] * scale[c / 2]);
  }
  granules::put_sums<kCols>(sums, all);
  __syncthreads();
}

template <WeightFormat F, int kCols> __global__ void __launch_bounds__(kThreads, kBlocksPerSm<kCols>) down(Down p) {
  auto& m = tile::shared<granules::Sums<kCols>>();
  char* const memory = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols), count = __ldcg(p.lists.count);
  const char* const staged = memory;
  const routing::Copy lists = routing::copy_lists<kCols>(memory + (kCols == 1 ? p.k * stride : 0), p.lists, p.most);
  __syncthreads();
  // Of the first band all experts' weights at once.
  if (threadIdx.x % 32 == 0 && blockIdx.x < p.w.bands)
    for (uint32_t i = threadIdx.x / 32; i < count; i += kWarps)
      ask(p.w.data + uint32_t(lists.expert[i]) * p.w.matrix_bytes + blockIdx.x * p.w.band_bytes, p.w.band_bytes);
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
    multiply_experts<F, kCols>(p, staged, lists, band, count, m.part[unit & 1]);
    if (ends) *x = y + granules::total<kCols>(m.part[unit & 1], row, j) * granules::Form<F>::kDrop;
  }
}

// --- launchers

template <class P, class Kernel>
void launch_columns(const char* name, Kernel&& kernel_of, const P& p, uint32_t T, int64_t units, int64_t smem,
                    Stream stream) {
  const int64_t grid = std::min<int64_t>(units, kSms * (T == 1 ? kBlocksPerSm<1> : kBlocksPerSm<8>));
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
