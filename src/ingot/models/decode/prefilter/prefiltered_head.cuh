#pragma once
// The token kernel's head with the int8 prefilter (int8_prefilter.h derives the bound, int8_prefilter.cuh has the
// product of a weight tile). The product with the codes gives bounds of each row's logit and a lower bound of the
// largest logit; the rows that may have the largest logit are then multiplied in bf16, with the same result as the
// whole head. Over several GPUs each GPU processes its own rows and finds its own largest logit; the ordinary exchange
// takes the largest of all. With the lower bounds of the other GPUs fewer rows would remain, but waiting for those
// bounds would cost more.
#include "ingot/models/decode/megakernel/activation_vectors.cuh"
#include "ingot/models/decode/prefilter/int8_prefilter.cuh"

namespace ingot::decode {

using PrefilterMemory = prefilter::Memory<kTokenWarps, kRoundGroups>;
static_assert(sizeof(PrefilterMemory) <= kEpilogueThreads * sizeof(sampling::Best),
              "the prefilter's memory takes the place of the whole head's");

namespace prefiltered_head {

// The memory behind the activation vector, where the whole head keeps the best row of each thread.
template <TokenVariant V> __device__ __forceinline__ PrefilterMemory& memory(const TokenContext<V>& block) {
  return *reinterpret_cast<PrefilterMemory*>(block.head_memory());
}
// Whether this thread compares row n, which is among the first kEpilogueThreads rows of a round.
template <TokenVariant V>
__device__ __forceinline__ bool is_prefiltered_row(const TokenContext<V>& block, const WorkRange& s, uint32_t n) {
  const NormProduct& p = block.m.token.head;
  if constexpr (V.ranks)
    return threadIdx.x < kEpilogueThreads && n < min(16 * s.end_sums, p.w.rows) && p.first_id + n < p.vocab;
  else
    return threadIdx.x < kEpilogueThreads && n < min(16 * s.end_sums, min(p.w.rows, p.vocab));
}
// Computes the noise of this block's rows, while the block waits for the results of the last layer. A thread computes
// four rows, whose noise comes from one block of random numbers.
template <TokenVariant V> __device__ __forceinline__ void write_noise(const TokenContext<V>& block) {
  const sampling::RowNoise& row = block.m.noise;
  const WorkRange& s = block.work(Stage::head);
  if (!(row.temperature > 0)) return;
  const sampling::Noise noise = row.noise();
#pragma unroll 1
  for (uint32_t n = 16 * s.first_sums + 4 * threadIdx.x; n < 16 * s.end_sums; n += 4 * kTokenThreads) {
    const uint32_t id = head_id(block, n);  // a multiple of 4, because GPUs share the head by row tiles
    const auto words = noise.words(id / 4);
#pragma unroll 1
    for (uint32_t k = 0; k < 4; ++k)
      block.prefiltered_head->noise[n + k] = noise.of(id + k, sampling::word_of(words, k));
  }
}
template <TokenVariant V> __device__ __forceinline__ float noise_of_row(const TokenContext<V>& block, uint32_t n) {
  return block.m.noise.temperature > 0 ? block.prefiltered_head->noise[n] : 0;
}
template <TokenVariant V>
__device__ __forceinline__ prefilter::Vector norm_vector(const TokenContext<V>& block, float output_scale) {
  PrefilterMemory& m = memory(block);
  const uint32_t words = 32 * block.m.token.head.w.weight_tiles;
  float squares = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < words; i += kTokenThreads) {
    float a, b;
    ptx::unpack(bf16{}, reinterpret_cast<const uint32_t*>(block.vectors())[i], a, b);
    squares += a * a + b * b;
  }
  squares = weight_tiles::lanes_sum(squares);
  if (threadIdx.x % 32 == 0) m.squares[threadIdx.x / 32] = squares;
  ComputeThreads::sync();
  float sum = 0;
#pragma unroll
  for (uint32_t w = 0; w < kTokenWarps; ++w) sum += m.squares[w];
  return prefilter::vector_of(sum, output_scale);
}
// Multiplies the codes of a round and adds to the sums.
template <TokenVariant V>
__device__ __forceinline__ void multiply_codes(const TokenContext<V>& block, const WorkRange& s, uint32_t round,
                                               megakernel::WeightReader& weights) {
  constexpr uint32_t team = megakernel::kTeamWarps;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const char* const vector = block.vectors() + lane % 4 * 16;
  weights.read(s.chunks_in_round(round, kRoundGroups),
               [&](const char* weight_tile, const megakernel::WeightNote& note) {
                 const Chunk p = noted_chunk(note);
                 float sum[4] = {};
#pragma unroll 2
                 for (uint32_t g = warp % team; g < p.count; g += team)
                   prefilter::multiply(weight_tile + g * kPrefilterTileBytes,
                                       vector + (p.first + g) * weight_tiles::kVectorTileBytes, lane, sum);
                 float(&to)[16] = block.m.sums[p.row_tile - round][warp];
                 if (lane % 4 == 0) to[lane / 4] += sum[0], to[lane / 4 + 8] += sum[2];
               });
}
// Finds the largest lower bound of all blocks. Each block publishes one word: its lower bound of the largest logit,
// tagged with the token's epoch.
template <TokenVariant V>
__device__ __forceinline__ uint32_t largest_of_grid(const TokenContext<V>& block, uint32_t lower) {
  PrefilterMemory& m = memory(block);
  const uint32_t warp = threadIdx.x / 32, number = kGridBarriersPerLayer * block.m.token.count;
  lower = __reduce_max_sync(~0u, lower);
  if (threadIdx.x % 32 == 0) m.lower[warp] = lower;
  ComputeThreads::sync();
  if (threadIdx.x == 0 && !(block.m.token.grid.missing == number && blockIdx.x == gridDim.x - 1)) {
#pragma unroll
    for (uint32_t w = 1; w < kTokenWarps; ++w) lower = max(lower, m.lower[w]);
    ptx::store_relaxed(block.prefiltered_head->lower_bounds + blockIdx.x, uint64_t(block.m.epoch) << 32 | lower);
  }
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t b = threadIdx.x; b < gridDim.x; b += kTokenThreads) {
    uint64_t word;
    const auto load = [&] { word = ptx::load_relaxed(block.prefiltered_head->lower_bounds + b); };
    load();
    block.wait_for(
        load, [&] { return uint32_t(word >> 32) == block.m.epoch; }, number);
    largest = max(largest, uint32_t(word));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) m.largest[warp] = largest;
  ComputeThreads::sync();
#pragma unroll
  for (uint32_t w = 0; w < kTokenWarps; ++w) largest = max(largest, m.largest[w]);
  return largest;
}
// Lists the row tiles, from `first` on, with a row that may have the largest logit.
template <TokenVariant V>
__device__ __forceinline__ void find_rows(const TokenContext<V>& block, const WorkRange& s, uint32_t first,
                                          uint32_t least) {
  if (threadIdx.x >= kEpilogueThreads) return;
  PrefilterMemory& m = memory(block);
  float upper[prefilter::kRounds];
#pragma unroll
  for (uint32_t r = 0; r < prefilter::kRounds; ++r) {
    const uint32_t n = 16 * (first + r * kRoundGroups) + threadIdx.x;
    upper[r] = is_prefiltered_row(block, s, n) ? block.m.token.head.y[n] : 0;
  }
#pragma unroll 1
  for (uint32_t r = 0; r < prefilter::kRounds; ++r) {
    const uint32_t row_tile = first + r * kRoundGroups + threadIdx.x / 16;
    float u = 0;  // selected from an array that stays in registers
#pragma unroll
    for (uint32_t k = 0; k < prefilter::kRounds; ++k) u = k == r ? upper[k] : u;
    const bool found = is_prefiltered_row(block, s, 16 * row_tile + threadIdx.x % 16) && prefilter::ordered(u) >= least;
    const uint32_t rows = __ballot_sync(~0u, found) >> threadIdx.x % 32 / 16 * 16 & 0xffffu;
    if (threadIdx.x % 16 == 0 && rows != 0) m.found[atomicAdd(&m.count, 1u)] = make_uint2(row_tile, rows);
  }
}
// Multiplies the listed rows of at most kRoundGroups row tiles in bf16, bit for bit as the whole head does: the same
// chunks by the same warps, in the same order. The other rows of a row tile are multiplied by zeros.
template <TokenVariant V>
__device__ __forceinline__ void multiply_found(const TokenContext<V>& block, const WorkRange& s, const uint2* found,
                                               uint32_t count, uint32_t turn, float output_scale, sampling::Best& top) {
  constexpr uint32_t team = megakernel::kTeamWarps, teams = megakernel::kTeams, kHalves = 2, kTilesOfWarp = 2;
  static_assert(kTilesOfWarp * team >= kMostChunkTiles<V.dense>, "a warp's weight tiles of a chunk_tiles");
  const Matrix& w = block.prefiltered_head->head;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = warp % team,
                 chunk_tiles = even_chunk_tiles(w.weight_tiles, kMostChunkTiles<V.dense>),
                 row_tile_chunks = (w.weight_tiles + chunk_tiles - 1) / chunk_tiles;
  const char* const mine[1] = {block.vectors() + lane % 4 * 16};
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) {
    const uint2 row_tile = found[i];
    const bool wanted = (row_tile.y >> lane / 4 & 0x101u) != 0;
    const uint8_t* const data = w.data + row_tile.x * w.row_tile_bytes;
    float sum[1][4] = {};
#pragma unroll 1
    for (uint32_t first = (turn + teams - (row_tile.x - s.first_sums) * row_tile_chunks % teams) % teams;
         first < row_tile_chunks; first += kHalves * teams) {
      weight_tiles::Stored<V.dense> weight_tile[kHalves][kTilesOfWarp];
      const auto weight_tile_of = [&](uint32_t h, uint32_t u) {
        return (first + h * teams) * chunk_tiles + begin + u * team;
      };
      const auto is_there = [&](uint32_t h, uint32_t u) {
        return begin + u * team < chunk_tiles && weight_tile_of(h, u) < w.weight_tiles;
      };
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
        for (uint32_t u = 0; u < kTilesOfWarp; ++u) {
          weight_tile[h][u] = {};
          if (wanted && is_there(h, u))
            weight_tiles::load(weight_tile[h][u], data + weight_tile_of(h, u) * weight_tiles::Form<V.dense>::kBytes,
                               lane);
        }
      __syncwarp();
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
        for (uint32_t u = 0; u < kTilesOfWarp; ++u)
          if (is_there(h, u))
            weight_tiles::multiply<V.dense, 1>(weight_tile[h][u], mine,
                                               weight_tile_of(h, u) * weight_tiles::kVectorTileBytes, sum);
    }
    float(&to)[16] = block.m.sums[i][warp];
    if (lane % 4 == 0) to[lane / 4] = 0.f + sum[0][0], to[lane / 4 + 8] = 0.f + sum[0][2];
  }
  ComputeThreads::sync();
  const uint32_t slot = threadIdx.x / 16, row = threadIdx.x % 16;
  if (slot < count && (found[slot].y >> row & 1) != 0) {
    const uint32_t n = 16 * found[slot].x + row;
    const float y = sum_of_warps(block.m.sums[slot], row) * output_scale;
    block.m.token.head.y[n] = y;
    top.add(block.m.noise.sum(noise_of_row(block, n), y), head_id(block, n));
  }
  ComputeThreads::sync();
}

// Runs after the last layer's grid barrier: computes the logits of the rows that may have the largest logit; `top`
// receives the largest of this block.
template <TokenVariant V>
__device__ __forceinline__ void run(const TokenContext<V>& block, sampling::Best& top,
                                    megakernel::WeightReader& weights) {
  const NormProduct& p = block.m.token.head;
  const WorkRange& s = block.work(Stage::head);
  PrefilterMemory& m = memory(block);
  const uint32_t turn = weights.turn();  // the turn that the team would have here among the chunks of the whole head
  write_normed_vector<V.dense>(block, p.weight, p.w,
                               block.m.token.count > 0 ? block.down_sums(block.m.token.count - 1) : nullptr);
  if (threadIdx.x == 0) m.count = 0;
  ComputeThreads::sync();
  const prefilter::Vector x =
      norm_vector(block, residual_rstd(block, p.eps) * weight_tiles::Form<V.dense>::kOutputScale);
  uint32_t lower = 0;
#pragma unroll 1
  for (uint32_t round = s.first_sums; round < s.end_sums; round += kRoundGroups) {
    const uint32_t n = 16 * round + threadIdx.x;
    const bool mine = is_prefiltered_row(block, s, n);
    const PrefilterRow row = mine ? block.prefiltered_head->rows[n] : PrefilterRow{};
    const float noise = mine ? noise_of_row(block, n) : 0;
    multiply_codes(block, s, round, weights);
    ComputeThreads::sync();
    if (threadIdx.x < kEpilogueThreads) {
      float(&sums)[kTokenWarps][16] = block.m.sums[threadIdx.x / 16];
      const prefilter::Range range =
          prefilter::range_of(sum_of_warps(sums, threadIdx.x % 16), row, x, block.m.noise, noise);
#pragma unroll
      for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][threadIdx.x % 16] = 0;
      if (mine) {  // only this thread writes y[n]
        p.y[n] = range.upper, lower = max(lower, range.lower);
      }
    }
    ComputeThreads::sync();
  }
  const uint32_t least = largest_of_grid(block, lower);
  // From here on no block waits for another block.
#pragma unroll 1
  for (uint32_t first = s.first_sums; first < s.end_sums; first += prefilter::kRounds * kRoundGroups) {
    find_rows(block, s, first, least);
    ComputeThreads::sync();
    const uint32_t count = m.count;
#pragma unroll 1
    for (uint32_t at = 0; at < count; at += kRoundGroups)
      multiply_found(block, s, m.found + at, min(count - at, kRoundGroups), turn, x.output_scale, top);
    ComputeThreads::sync();
    if (threadIdx.x == 0) m.count = 0;
    ComputeThreads::sync();
  }
}

}  // namespace prefiltered_head
}  // namespace ingot::decode
