#pragma once
// The router of a layer. Each block multiplies its rows of the residual stream by the router's weights and adds the
// products to the logits of all blocks. Then the copying warp of each block chooses the experts, so that it can begin
// to copy their weights at once.
#include "ingot/models/decode/megakernel/activation_vectors.cuh"
#include "ingot/models/decode/phased/choose.cuh"

namespace ingot::decode {

// The warps meet twice in each layer: the multiplying warps state that the logits are in shared memory, by
// kLogitsBarrier where there are no mbarriers and else by TokenMemory::logits_ready; then the copying warp states by
// kChosenBarrier that it has chosen the experts.
constexpr uint32_t kChosenBarrier = 1, kLogitsBarrier = 2;
using LogitSum = megakernel::FixedSum<20>;  // a logit's sum over all blocks

namespace router {

// The 16 rows of a row tile of the residual stream are the columns of one step through the router's weight tiles.
constexpr uint32_t kStepBytes = 512;
__device__ __forceinline__ const uint8_t* weight_step(const Matrix& w, uint32_t router_row_tile, uint32_t row_tile) {
  return w.data + router_row_tile * w.row_tile_bytes + row_tile / 4 * weight_tiles::Form<WeightFormat::bf16>::kBytes +
         row_tile % 4 * kStepBytes + threadIdx.x % 32 * 16;
}
// The memory of this lane's prefetched steps for `count` row tiles, behind the output's activation vector. Null where
// there is no room for them.
template <TokenVariant V>
__device__ __forceinline__ char* prefetched_steps(const TokenContext<V>& block, const LayerStages& l, uint32_t count) {
  const Token& t = block.m.token;
  const uint32_t vector = (weight_tiles::vector_stride(l.output.w.cols) + 127) / 128 * 128;
  if (t.stage + vector + count * l.router.w.row_tiles * kStepBytes > t.ring) return nullptr;
  return block.vectors() + vector + threadIdx.x % 32 * 16;
}

// Stores a row of the residual stream times the norm's weight as two bf16: the first eight significant bits, and the
// next eight.
template <TokenVariant V>
__device__ __forceinline__ void put_input(const TokenContext<V>& block, uint32_t group, uint32_t row, float value) {
  const bf16 high(value), low(value - float(high));
  block.m.router_input[0][group][row] = high.bits, block.m.router_input[1][group][row] = low.bits;
}
// Prefetches the router's weights of `count` row tiles of the residual stream for add_logits().
template <TokenVariant V>
__device__ __forceinline__ void prefetch_weights(const TokenContext<V>& block, const LayerStages& l, uint32_t row_tile,
                                                 uint32_t count) {
  char* const to = prefetched_steps(block, l, count);
  if (to == nullptr) return;
  const Matrix& w = l.router.w;
#pragma unroll 1
  for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.row_tiles; r += kTokenWarps)
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i)
      ptx::cp_async<16>(ptx::shared_address(to + (i * w.row_tiles + r) * kStepBytes), weight_step(w, r, row_tile + i));
  ptx::cp_async_commit_group();
}
// Adds the products of `count` row tiles of the router's input to the logits of all blocks. Each lane reads the weights
// that the lane itself has prefetched. `parts` is 1 for the block's last row tiles, else 0.
template <TokenVariant V>
__device__ __forceinline__ void add_logits(const TokenContext<V>& block, const LayerStages& l, uint32_t row_tile,
                                           uint32_t count, uint32_t parts) {
  const Matrix& w = l.router.w;
  const char* const prefetched = prefetched_steps(block, l, count);
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  ptx::cp_async_wait_group<0>();
#pragma unroll 1
  for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.row_tiles; r += kTokenWarps) {
    float sum[4] = {};
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const uint4 step = prefetched != nullptr
                             ? *reinterpret_cast<const uint4*>(prefetched + (i * w.row_tiles + r) * kStepBytes)
                             : *reinterpret_cast<const uint4*>(weight_step(w, r, row_tile + i));
      const uint32_t a[4] = {step.x, step.y, step.z, step.w};
      uint32_t b[2] = {};  // two of the eight columns: the two halves of the router's input
      if (g < 2) {
        b[0] = *reinterpret_cast<const uint32_t*>(&block.m.router_input[g][i][2 * t]);
        b[1] = *reinterpret_cast<const uint32_t*>(&block.m.router_input[g][i][2 * t + 8]);
      }
      ptx::mma_m16n8k16(bf16{}, sum, a, b);
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t e = 16 * r + g + 8 * h;
      if (t == 0 && e < w.rows) LogitSum::add(block.logit_sums() + e, sum[2 * h] + sum[2 * h + 1], parts);
    }
  }
}
// Runs in the multiplying warps after the output's grid barrier: turns the output's sums into the activation vector of
// gate and up, and copies the logits to shared memory for the copying warp. The last warps read the logits, because
// their parts of the vector are the smallest.
template <TokenVariant V> __device__ __forceinline__ void route(const TokenContext<V>& block, const LayerStages& l) {
  const Router& p = l.router;
  const ChoiceMemory m = block.choice();
  uint64_t word = 0;
  uint32_t e = kTokenThreads - 1 - threadIdx.x;
  const auto load = [&] {
    if (e < p.w.rows) word = ptx::load_relaxed(block.logit_sums() + e);
  };
  load();
  write_normed_vector<V.experts>(block, l.gate_up.weight, l.gate_up.w, block.output_sums());
#pragma unroll 1
  while (e < p.w.rows) {
    block.read_again(load, [&] { return LogitSum::count(word) == block.m.token.work.router_blocks; });
    m.logits[e] = LogitSum::value(word);
    e += kTokenThreads;
    load();
  }
  // All warps arrive: the copying warp reads data that each warp has written, including the next layer's stages.
  if constexpr (V.warp_rings) {
    ptx::barrier_arrive(kLogitsBarrier, kTokenThreads + 32);
  } else {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&block.m.logits_ready);
  }
  ptx::barrier_sync_unaligned(kChosenBarrier, kTokenThreads + 32);
  // the weights are needed by `down`
  if (threadIdx.x / 32 == kTokenWarps - 1) weigh(m.logits, p.k, m.chosen, m.weights);
}
// Runs in the copying warp: waits for the logits and chooses the experts.
template <TokenVariant V>
__device__ __forceinline__ void choose(const TokenContext<V>& block, const Router& p, uint32_t parity) {
  const ChoiceMemory m = block.choice();
  float* const logits = m.logits;
  const uint32_t lane = threadIdx.x % 32, rows = p.w.rows, k = p.k;
  float bias[kLogitsOfLane], logit[kLogitsOfLane] = {};
#pragma unroll
  for (uint32_t u = 0; u < kLogitsOfLane; ++u)
    bias[u] = lane + 32 * u < rows ? p.bias[lane + 32 * u] : 0;  // prefetched
  if constexpr (V.warp_rings)
    ptx::barrier_sync_unaligned(kLogitsBarrier, kTokenThreads + 32);
  else
    megakernel::wait_for_slot(&block.m.logits_ready, parity);
#pragma unroll
  for (uint32_t u = 0; u < kLogitsOfLane; ++u)
    if (lane + 32 * u < rows) logit[u] = logits[lane + 32 * u];
  const float scale = residual_rstd(block, p.eps);
#pragma unroll
  for (uint32_t u = 0; u < kLogitsOfLane; ++u) {
    logit[u] = logit[u] * scale + bias[u];
    if (lane + 32 * u < rows) logits[lane + 32 * u] = logit[u];
  }
#pragma unroll 1
  for (uint32_t e = lane + 32 * kLogitsOfLane; e < rows; e += 32) logits[e] = logits[e] * scale + p.bias[e];
  __syncwarp();
  choose_held(logits, logit, rows, k, m.chosen);
  ptx::barrier_arrive(kChosenBarrier, kTokenThreads + 32);
}

}  // namespace router
}  // namespace ingot::decode
