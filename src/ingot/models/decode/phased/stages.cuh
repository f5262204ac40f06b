#pragma once
// The stages of a decode step. `blocks` blocks of kThreads threads compute a stage, and `block` is the number of this
// block. The phased path launches a kernel for each stage (phases.cuh); the megakernel calls some of these functions in
// turn (megakernel.cuh). A stage takes a Feed that has already requested the block's first weights: no kernel writes
// weights, so their loads may start before the stage's inputs are complete.
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/watch.h"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

using weight_tiles::kThreads;
using weight_tiles::kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kMostBlocks =
    kBlocksPerSm * 192;  // of any launch whose blocks share results; no GPU has more multiprocessors
template <int kCols> constexpr int kBlocks8 = (kCols + 7) / 8;

struct At {
  uint32_t block, blocks;
};

// --- embedding

__device__ __forceinline__ void embed(const Embedding& p, At at) {
  for (uint32_t i = at.block * kThreads + threadIdx.x; i < p.T * p.C; i += at.blocks * kThreads) {
    const uint32_t t = i / p.C, c = i % p.C;
    p.x[t * p.x_stride + c] = float(p.table[int64_t(__ldcg(&p.state->tokens[t])) * p.C + c]);
  }
}

// --- products

// This warp's part of a row tile; null where the matrix has no such row tile.
template <WeightFormat F>
__device__ __forceinline__ typename weight_tiles::Feed<F>::RowTile row_tile_part(const Matrix& w, int64_t row_tile) {
  return {row_tile < w.row_tiles ? w.data + row_tile * w.row_tile_bytes : nullptr, threadIdx.x / 32, w.weight_tiles};
}

// The factor of a row's sum.
template <WeightFormat F>
__device__ __forceinline__ float row_scale(const Matrix& w, const uint8_t* row_tile, uint32_t row) {
  constexpr float kOutputScale = weight_tiles::Form<F>::kOutputScale;
  if constexpr (F == WeightFormat::fp8)
    return kOutputScale *
           reinterpret_cast<const float*>(row_tile + int64_t(w.weight_tiles) * weight_tiles::Form<F>::kBytes)[row];
  return kOutputScale;
}

template <int kCols> struct ProductMemory {
  weight_tiles::Sums<kCols> sums;
  float squares[kWarps][kCols], rstd[kCols];
};
// Called after a barrier by the threads that need rstd.
template <int kCols>
__device__ __forceinline__ float rstd_of(const float (&squares)[kWarps][kCols], uint32_t j, uint32_t C, float eps) {
  return 1 / sqrtf(weight_tiles::sum_of<kCols>(squares, j) / float(C) + eps);
}

// Returns the largest of the logits of row T - 1 that this thread has computed.
template <WeightFormat F, int kCols>
__device__ __forceinline__ sampling::Best norm_product(const NormProduct& p, At at, weight_tiles::Feed<F>& feed,
                                                       char* vectors) {
  auto& m = tile::shared<ProductMemory<kCols>>();
  const uint32_t stride = weight_tiles::vector_stride(p.w.cols);
  weight_tiles::stage_normed<F, kCols>(vectors, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T, 0, p.w.weight_tiles,
                                       m.squares);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  weight_tiles::lane_vectors(vectors, stride, p.T, mine);
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols;
  const bool ends = threadIdx.x < 16 * kCols && j < p.T;
  const float rstd = ends ? rstd_of<kCols>(m.squares, j, p.w.cols, p.eps) : 0;
  sampling::Best top;
  for (uint32_t row_tile = at.block, unit = 0; row_tile < p.w.row_tiles; row_tile += at.blocks, ++unit) {
    const uint8_t* const data = p.w.data + row_tile * p.w.row_tile_bytes;
    const uint32_t n = 16 * row_tile + row;
    const bool mine_to_end = ends && n < p.w.rows;
    const float scale = mine_to_end ? rstd * row_scale<F>(p.w, data, row) : 0;
    const float bias = mine_to_end && p.bias != nullptr ? p.bias[n] : 0;
    float sum[kBlocks8<kCols>][4] = {};
    feed.multiply_row_tile(row_tile_part<F>(p.w, row_tile), row_tile_part<F>(p.w, row_tile + at.blocks), mine, sum);
    weight_tiles::put_sums<kCols>(m.sums.part[unit & 1], sum);
    __syncthreads();
    if (!mine_to_end) continue;
    const float y = weight_tiles::total<kCols>(m.sums.part[unit & 1], row, j) * scale + bias;
    p.y[int64_t(j) * p.y_stride + n] = y;
    if (j == p.T - 1 && p.first_id + n < p.vocab) top.add(y, p.first_id + n);
  }
  return top;
}
// True in one thread of the grid; `key` is then the largest logit of this GPU, with its id.
__device__ __forceinline__ bool likeliest_of_grid(const NormProduct& p, const sampling::Best& top, uint64_t& key) {
  auto& m = tile::shared<sampling::BestMemory>();
  return sampling::best_key_of_grid(top, p.best, p.arrived, m, key) && threadIdx.x == 0;
}
// After a wait has given up, the kernels that were already queued compute from wrong inputs. These kernels must change
// nothing.
__device__ __forceinline__ bool is_stopped(const uint32_t* stop) {
  return stop != nullptr && ptx::load_relaxed(stop) != gpu::kRunning;
}
__device__ __forceinline__ void append(const NormProduct& p, uint64_t key) {
  if (p.key != nullptr) return void(*p.key = key);
  if (is_stopped(p.stop)) return;
  const sampling::SampledId sampled = sampling::sampled_id(key);
  p.state->tokens[0] = sampled.token;
  p.state->flaw |= sampled.flaw;
  p.state->position += int32_t(p.advance);
  if (p.noise != nullptr) p.noise->step += 1;
}

// For one token, like gate_up() and down(); small_batch.cuh has the same stages for several tokens.
template <WeightFormat F>
__device__ __forceinline__ void residual_product(const ResidualProduct& p, At at, weight_tiles::Feed<F>& feed,
                                                 char* vector) {
  auto& m = tile::shared<weight_tiles::Sums<1>>();
  weight_tiles::stage_vectors(vector, weight_tiles::vector_stride(p.w.cols), p.vectors, p.w.cols, 1);
  __syncthreads();
  const char* const mine[1] = {vector + threadIdx.x % 4 * 16};
  const uint32_t row = threadIdx.x;
  for (uint32_t row_tile = at.block, unit = 0; row_tile < p.w.row_tiles; row_tile += at.blocks, ++unit) {
    const uint8_t* const data = p.w.data + row_tile * p.w.row_tile_bytes;
    const uint32_t n = 16 * row_tile + row;
    const bool ends = row < 16 && n < p.w.rows;
    float* const x = p.x + n;
    const float scale = ends ? row_scale<F>(p.w, data, row) : 0;
    const float old = ends ? (p.first_part ? 0 : __ldcg(x)) + (p.bias != nullptr ? p.bias[n] : 0) : 0;
    float sum[1][4] = {};
    feed.multiply_row_tile(row_tile_part<F>(p.w, row_tile), row_tile_part<F>(p.w, row_tile + at.blocks), mine, sum);
    weight_tiles::put_sums<1>(m.part[unit & 1], sum);
    __syncthreads();
    if (ends) *x = old + weight_tiles::total<1>(m.part[unit & 1], row, 0) * scale;
  }
}

__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if (limit > 0) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate / (1 + __expf(-alpha * gate)) * (up + 1);
}
__device__ __forceinline__ float gated(float gate, float up, const GateUp& p) {
  return gated(gate, up, p.limit, p.alpha);
}
__device__ __forceinline__ float gated(float gate, float up, const Gate& p) {
  if (p.limit > 0) {
    gate = fminf(gate, p.limit);
    up = fminf(fmaxf(up, -p.limit), p.limit);
  }
  return gate / (1 + __expf(-gate * (p.alpha + p.cubic * gate * gate))) * (up + p.up_offset);
}
__device__ __forceinline__ float gated(float gate, float up, const GeneralGateUp& p) { return gated(gate, up, p.gate); }

// A unit of work is a row tile of the matrix in an expert slot.
struct BankUnit {
  uint32_t expert_slot, row_tile, expert;
  const uint8_t* data;
  __device__ BankUnit(const Matrix& w, const routing::Copy& lists, uint32_t u)
      : expert_slot(u / w.row_tiles), row_tile(u % w.row_tiles), expert(uint32_t(lists.expert[expert_slot])) {
    data = w.data + expert * w.matrix_bytes + row_tile * w.row_tile_bytes;
  }
};
template <WeightFormat F>
__device__ __forceinline__ typename weight_tiles::Feed<F>::RowTile unit_of(const Matrix& w, const routing::Copy& lists,
                                                                           uint32_t u, uint32_t units) {
  return {u < units ? BankUnit(w, lists, u).data : nullptr, threadIdx.x / 32, w.weight_tiles};
}

// Writes the activation vector of gate_up(), before a barrier.
template <WeightFormat F> __device__ __forceinline__ void stage_gate_up(const GateUp& p, char* vector) {
  weight_tiles::stage_normed<F, 1>(vector, weight_tiles::vector_stride(p.w.cols), p.x, p.x_stride, p.weight, p.w.cols,
                                   1, 0, p.w.weight_tiles, tile::shared<ProductMemory<1>>().squares);
}
// Gate and up of the 8 channels of a unit. `P`: GateUp or GeneralGateUp.
template <WeightFormat F, class P>
__device__ __forceinline__ void gate_up(const P& p, At at, const routing::Copy& lists, uint32_t units,
                                        weight_tiles::Feed<F>& feed, const char* vector) {
  auto& m = tile::shared<ProductMemory<1>>();
  const char* const mine[1] = {vector + threadIdx.x % 4 * 16};
  const uint32_t channel = threadIdx.x, width = p.w.rows / 2;
  const bool in_rows = channel < 8;
  const float rstd = in_rows ? rstd_of<1>(m.squares, 0, p.w.cols, p.eps) : 0;
  for (uint32_t i = at.block, unit = 0; i < units; i += at.blocks, ++unit) {
    const BankUnit u(p.w, lists, i);
    const uint32_t n = 8 * u.row_tile + channel;
    const int32_t row = in_rows && n < width ? lists.row[u.expert_slot] : -1;
    float bias[2] = {}, scale[2] = {};
    if (row >= 0)
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        bias[k] = p.bias[(int64_t(u.expert) * width + n) * 2 + k];
        scale[k] = rstd * row_scale<F>(p.w, u.data, 2 * channel + k);
      }
    auto& sums = m.sums.part[unit & 1];
    float sum[1][4] = {};
    feed.multiply_row_tile(unit_of<F>(p.w, lists, i, units), unit_of<F>(p.w, lists, i + at.blocks, units), mine, sum);
    weight_tiles::put_sums<1>(sums, sum);
    __syncthreads();
    if (row < 0) continue;
    const float gate = weight_tiles::total<1>(sums, 2 * channel, 0) * scale[0] + bias[0];
    const float up = weight_tiles::total<1>(sums, 2 * channel + 1, 0) * scale[1] + bias[1];
    weight_tiles::put(p.hidden + row * weight_tiles::vector_bytes(width), p.down, n, gated(gate, up, p));
  }
}

// This warp's part of row tile `row_tile` in expert slot i. After the last slot comes the first slot of the block's
// next row tile. The weight tiles of each slot are dealt to the warps beginning after the warp that got the last weight
// tile of the preceding slot, so that all warps have equal work.
template <WeightFormat F>
__device__ __forceinline__ typename weight_tiles::Feed<F>::RowTile expert_slot_part(const Matrix& w,
                                                                                    const routing::Copy& lists,
                                                                                    uint32_t count, uint32_t row_tile,
                                                                                    uint32_t i, uint32_t blocks) {
  if (i == count) row_tile += blocks, i = 0;
  if (row_tile >= w.row_tiles || count == 0) return {};
  const uint32_t first = (threadIdx.x / 32 + i * (kWarps - w.weight_tiles % kWarps)) % kWarps;
  return {w.data + uint32_t(lists.expert[i]) * w.matrix_bytes + row_tile * w.row_tile_bytes, first, w.weight_tiles};
}

// All experts of one row tile.
template <WeightFormat F>
__device__ __forceinline__ void multiply_experts(const Down& p, const char* staged, const routing::Copy& lists,
                                                 uint32_t row_tile, uint32_t count, uint32_t blocks,
                                                 weight_tiles::Feed<F>& feed, float (&sums)[kWarps][16][1]) {
  float all[1][4] = {};
  for (uint32_t i = 0; i < count; ++i) {
    const auto here = expert_slot_part<F>(p.w, lists, count, row_tile, i, blocks);
    const char* const mine[1] = {staged + lists.row[i] * int32_t(weight_tiles::vector_stride(p.w.cols)) +
                                 threadIdx.x % 4 * 16};
    const float weight = lists.weight[i];
    float sum[1][4] = {}, scale[2] = {1, 1};
    if constexpr (F == WeightFormat::fp8) weight_tiles::load_row_scales(here.data, p.w.weight_tiles, scale);
    feed.multiply_row_tile(here, expert_slot_part<F>(p.w, lists, count, row_tile, i + 1, blocks), mine, sum);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (weight != 0) all[0][c] += sum[0][c] * (weight * scale[c / 2]);
  }
  weight_tiles::put_sums<1>(sums, all);
  __syncthreads();
}

// For one token. `staged` is memory for its k activation vectors.
template <WeightFormat F>
__device__ __forceinline__ void down(const Down& p, At at, const routing::Copy& lists, uint32_t count,
                                     weight_tiles::Feed<F>& feed, char* staged) {
  auto& m = tile::shared<weight_tiles::Sums<1>>();
  weight_tiles::stage_vectors(staged, weight_tiles::vector_stride(p.w.cols), p.hidden, p.w.cols, p.k);
  __syncthreads();
  for (uint32_t row_tile = at.block, round = 0; row_tile < p.w.row_tiles; row_tile += at.blocks, ++round) {
    const uint32_t n = 16 * row_tile + threadIdx.x;
    const bool ends = threadIdx.x < 16 && n < p.w.rows;
    float* const x = p.x + n;
    const float old = ends && !p.first_part ? __ldcg(x) : 0;
    float y = 0;
    constexpr uint32_t kHeld = 4;  // biases requested together
    for (uint32_t e = 0; ends && p.bias != nullptr && e < count; e += kHeld) {
      float bias[kHeld];
#pragma unroll
      for (uint32_t k = 0; k < kHeld; ++k)
        bias[k] = e + k < count ? p.bias[int64_t(lists.expert[e + k]) * p.w.rows + n] : 0;
#pragma unroll
      for (uint32_t k = 0; k < kHeld; ++k) {
        const float weight = e + k < count ? lists.weight[e + k] : 0;
        if (weight != 0) y += weight * bias[k];
      }
    }
    multiply_experts<F>(p, staged, lists, row_tile, count, at.blocks, feed, m.part[round & 1]);
    if (ends)
      *x = old + y + weight_tiles::total<1>(m.part[round & 1], threadIdx.x, 0) * weight_tiles::Form<F>::kOutputScale;
  }
}

// --- router: a unit of work is some weight tiles of a row tile. The last block, or every block after a barrier, adds
// the parts and chooses the experts.

template <int kCols> struct RouterMemory {
  weight_tiles::Sums<kCols> sums;
  float squares[kWarps][kCols];
};
// Arrays in dynamic shared memory, one after the other: logits (T, E), chosen (T, k), weights (T, k), first (E + 1).
struct ChoiceMemory {
  float* logits;
  uint32_t* chosen;
  float* weights;
  uint32_t* first;
  INGOT_HD static int64_t bytes(uint32_t T, uint32_t E, uint32_t k) { return 4 * (int64_t(T) * (E + 2 * k) + E + 1); }
  __device__ ChoiceMemory(char* memory, uint32_t T, uint32_t E, uint32_t k) {
    logits = reinterpret_cast<float*>(memory);
    chosen = reinterpret_cast<uint32_t*>(logits + T * E);
    weights = reinterpret_cast<float*>(chosen + T * k);
    first = reinterpret_cast<uint32_t*>(weights + T * k);
  }
};

// For one token.
__device__ inline void choose_experts(const Router& p, const ChoiceMemory& m) {
  const uint32_t E = p.w.rows;
  constexpr uint32_t kItems = 4, kHeld = 4;  // experts of a thread, and parts requested together for each
  for (uint32_t begin = threadIdx.x; begin < E; begin += kItems * kThreads) {
    float sum[kItems] = {}, squares = 0, bias[kItems];
#pragma unroll
    for (uint32_t u = 0; u < kItems; ++u) {
      const uint32_t i = begin + u * kThreads;
      bias[u] = i < E ? p.bias[i] : 0;
    }
    for (uint32_t first = 0; first < p.splits; first += kHeld) {
      float part[kItems][kHeld], square[kHeld];
#pragma unroll
      for (uint32_t s = 0; s < kHeld; ++s) {
        const uint32_t at = (first + s) * kMostTokens;
        square[s] = first + s < p.splits ? __ldcg(p.squares + at) : 0;
#pragma unroll
        for (uint32_t u = 0; u < kItems; ++u) {
          const uint32_t i = begin + u * kThreads;
          part[u][s] = i < E && first + s < p.splits ? __ldcg(p.part + at * E + i) : 0;
        }
      }
#pragma unroll
      for (uint32_t s = 0; s < kHeld; ++s) {
        squares += square[s];
#pragma unroll
        for (uint32_t u = 0; u < kItems; ++u) sum[u] += part[u][s];
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kItems; ++u)
      if (const uint32_t i = begin + u * kThreads; i < E)
        m.logits[i] = sum[u] / sqrtf(squares / float(p.w.cols) + p.eps) + bias[u];
  }
  __syncthreads();
  if (threadIdx.x < 32) routing::choose(m.logits, E, p.k, m.chosen, m.weights);
  __syncthreads();
}

using RouterFeed = weight_tiles::Feed<WeightFormat::bf16>;
// This warp's weight tile of a unit; null where there is no such unit.
__device__ __forceinline__ RouterFeed::RowTile split_of(const Router& p, uint32_t unit) {
  const uint32_t first = unit % p.splits * kSplitWeightTiles, row_tile = unit / p.splits;
  if (row_tile >= p.w.row_tiles) return {};
  return {p.w.data + row_tile * p.w.row_tile_bytes, first + threadIdx.x / 32,
          min(first + kSplitWeightTiles, p.w.weight_tiles)};
}
template <int kCols> __device__ __forceinline__ void route(const Router& p, At at, RouterFeed& feed, char* vectors) {
  auto& m = tile::shared<RouterMemory<kCols>>();
  const uint32_t stride = weight_tiles::vector_stride(p.w.cols), E = p.w.rows;
  for (uint32_t unit = at.block; unit < p.w.row_tiles * p.splits; unit += at.blocks) {
    const uint32_t row_tile = unit / p.splits, split = unit % p.splits;
    const uint32_t first = split * kSplitWeightTiles, end = min(first + kSplitWeightTiles, p.w.weight_tiles);
    weight_tiles::stage_normed<WeightFormat::bf16, kCols>(vectors, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T,
                                                          first, end, m.squares);
    __syncthreads();
    const char* mine[kBlocks8<kCols>];
    weight_tiles::lane_vectors(vectors, stride, p.T, mine);
    float sum[kBlocks8<kCols>][4] = {};
    feed.multiply_row_tile(split_of(p, unit), split_of(p, unit + at.blocks), mine, sum);
    weight_tiles::put_sums<kCols>(m.sums.part[0], sum);
    __syncthreads();
    const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols, e = 16 * row_tile + row;
    if (threadIdx.x < 16 * kCols && j < p.T && e < E)
      p.part[(split * kMostTokens + j) * E + e] = weight_tiles::total<kCols>(m.sums.part[0], row, j);
    if (row_tile == 0 && threadIdx.x < p.T)
      p.squares[split * kMostTokens + threadIdx.x] = weight_tiles::sum_of<kCols>(m.squares, threadIdx.x);
    __syncthreads();
  }
}

}  // namespace ingot::decode
