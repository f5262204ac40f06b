#pragma once
// The megakernel's screened head (screen.h has the bound, screen.cuh what it does to a weight tile): the codes say how
// large each row's logit can be, and what the largest is at least; rows that may be it are multiplied as the usual head
// multiplies all. Where several GPUs make the token each does so with its own rows and finds the likeliest of its ids,
// of which the usual exchange takes the likeliest of all: a lower end of another GPU's could leave fewer rows, but
// would be waited for.
#include "ingot/models/decode/megakernel/activation_vectors.cuh"
#include "ingot/models/decode/prefilter/screen.cuh"

namespace ingot::decode {

using ScreenMemory = screen::Memory<kTokenWarps, kRoundGroups>;
static_assert(sizeof(ScreenMemory) <= kBestBytes, "in the place of what the usual head keeps there");

namespace screened_head {

// Behind the column, where the usual head keeps the best of each thread.
template <TokenVariant V> __device__ __forceinline__ ScreenMemory& memory(const TokenContext<V>& block) {
  return *reinterpret_cast<ScreenMemory*>(block.head_memory());
}
// Whether this thread compares row n, of a round's first `kEpilogueThreads`.
template <TokenVariant V>
__device__ __forceinline__ bool is_screened_row(const TokenContext<V>& block, const WorkRange& s, uint32_t n) {
  const NormProduct& p = block.m.token.head;
  if constexpr (V.ranks)
    return threadIdx.x < kEpilogueThreads && n < min(16 * s.end_sums, p.w.rows) && p.first_id + n < p.vocab;
  else
    return threadIdx.x < kEpilogueThreads && n < min(16 * s.end_sums, min(p.w.rows, p.vocab));
}
template <TokenVariant V>
__device__ __forceinline__ screen::Column norm_vector(const TokenContext<V>& block, float drop) {
  ScreenMemory& m = memory(block);
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
  return screen::column_of(sum, drop);
}
// Of a round's bands, to the sums.
template <TokenVariant V>
__device__ __forceinline__ void multiply_codes(const TokenContext<V>& block, const WorkRange& s, uint32_t round,
                                               megakernel::WeightReader& weights) {
  constexpr uint32_t team = megakernel::kTeamWarps;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const char* const column = block.vectors() + lane % 4 * 16;
  weights.read(s.chunks_in_round(round, kRoundGroups),
               [&](const char* weight_tile, const megakernel::WeightNote& note) {
                 const Chunk p = noted_chunk(note);
                 float sum[4] = {};
#pragma unroll 2
                 for (uint32_t g = warp % team; g < p.count; g += team)
                   screen::multiply(weight_tile + g * kScreenWeightTile,
                                    column + (p.first + g) * weight_tiles::kColumnBytes, lane, sum);
                 float(&to)[16] = block.m.sums[p.row_tile - round][warp];
                 if (lane % 4 == 0) to[lane / 4] += sum[0], to[lane / 4 + 8] += sum[2];
               });
}
// Of what each block knows: a word of each, which says of which token it is.
template <TokenVariant V>
__device__ __forceinline__ uint32_t largest_of_grid(const TokenContext<V>& block, uint32_t lower) {
  ScreenMemory& m = memory(block);
  const uint32_t warp = threadIdx.x / 32, number = kGridBarriersPerLayer * block.m.token.count;
  lower = __reduce_max_sync(~0u, lower);
  if (threadIdx.x % 32 == 0) m.lower[warp] = lower;
  ComputeThreads::sync();
  if (threadIdx.x == 0 && !(block.m.token.grid.missing == number && blockIdx.x == gridDim.x - 1)) {
#pragma unroll
    for (uint32_t w = 1; w < kTokenWarps; ++w) lower = max(lower, m.lower[w]);
    ptx::store_relaxed(block.screened_head->lower_bounds + blockIdx.x, uint64_t(block.m.epoch) << 32 | lower);
  }
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t b = threadIdx.x; b < gridDim.x; b += kTokenThreads) {
    uint64_t word;
    const auto load = [&] { word = ptx::load_relaxed(block.screened_head->lower_bounds + b); };
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
// Lists the bands, from `first` on, that have rows which may be the largest.
template <TokenVariant V>
__device__ __forceinline__ void find_rows(const TokenContext<V>& block, const WorkRange& s, uint32_t first,
                                          uint32_t least) {
  if (threadIdx.x >= kEpilogueThreads) return;
  ScreenMemory& m = memory(block);
  float upper[screen::kRounds];
#pragma unroll
  for (uint32_t r = 0; r < screen::kRounds; ++r) {
    const uint32_t n = 16 * (first + r * kRoundGroups) + threadIdx.x;
    upper[r] = is_screened_row(block, s, n) ? block.m.token.head.y[n] : 0;
  }
#pragma unroll 1
  for (uint32_t r = 0; r < screen::kRounds; ++r) {
    const uint32_t row_tile = first + r * kRoundGroups + threadIdx.x / 16;
    float u = 0;  // of an array in registers
#pragma unroll
    for (uint32_t k = 0; k < screen::kRounds; ++k) u = k == r ? upper[k] : u;
    const bool found = is_screened_row(block, s, 16 * row_tile + threadIdx.x % 16) && screen::ordered(u) >= least;
    const uint32_t rows = __ballot_sync(~0u, found) >> threadIdx.x % 32 / 16 * 16 & 0xffffu;
    if (threadIdx.x % 16 == 0 && rows != 0) m.found[atomicAdd(&m.count, 1u)] = make_uint2(row_tile, rows);
  }
}
// Of at most kRoundGroups bands the rows that were found, each as the usual head has it: the same chunk_tiless by the
// same warps, in the same order. Other rows meet zeros.
template <TokenVariant V>
__device__ __forceinline__ void multiply_found(const TokenContext<V>& block, const WorkRange& s, const uint2* found,
                                               uint32_t count, uint32_t turn, float drop, sampling::Best& top) {
  constexpr uint32_t team = megakernel::kTeamWarps, teams = megakernel::kTeams, kHalves = 2, kTilesOfWarp = 2;
  static_assert(kTilesOfWarp * team >= kMostChunkTiles<V.dense>, "a warp's weight tiles of a chunk_tiles");
  const Matrix& w = block.screened_head->head;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = warp % team,
                 chunk_tiles = even_chunk_tiles(w.weight_tiles, kMostChunkTiles<V.dense>),
                 row_tile_chunks = (w.weight_tiles + chunk_tiles - 1) / chunk_tiles;
  const char* const mine[1] = {block.vectors() + lane % 4 * 16};
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) {
    const uint2 row_tile = found[i];
    const bool wanted = (row_tile.y >> lane / 4 & 0x101u) != 0;
    const uint8_t* const data = w.data + row_tile.x * w.band_bytes;
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
                                               weight_tile_of(h, u) * weight_tiles::kColumnBytes, sum);
    }
    float(&to)[16] = block.m.sums[i][warp];
    if (lane % 4 == 0) to[lane / 4] = 0.f + sum[0][0], to[lane / 4 + 8] = 0.f + sum[0][2];
  }
  ComputeThreads::sync();
  const uint32_t slot = threadIdx.x / 16, row = threadIdx.x % 16;
  if (slot < count && (found[slot].y >> row & 1) != 0) {
    const uint32_t n = 16 * found[slot].x + row;
    const float y = sum_of_warps(block.m.sums[slot], row) * drop;
    block.m.token.head.y[n] = y;
    top.add(y, (V.ranks ? block.m.token.head.first_id : 0) + n);
  }
  ComputeThreads::sync();
}

// After the last layer's grid barrier: to `top` the likeliest of this block's rows that were multiplied.
template <TokenVariant V>
__device__ __forceinline__ void run(const TokenContext<V>& block, sampling::Best& top,
                                    megakernel::WeightReader& weights) {
  const NormProduct& p = block.m.token.head;
  const WorkRange& s = block.work(Stage::head);
  ScreenMemory& m = memory(block);
  const uint32_t turn = weights.turn();  // of the usual head's chunk_tiless, where it came now
  write_normed_vector<V.dense>(block, p.weight, p.w,
                               block.m.token.count > 0 ? block.down_sums(block.m.token.count - 1) : nullptr);
  if (threadIdx.x == 0) m.count = 0;
  ComputeThreads::sync();
  const screen::Column x = norm_vector(block, residual_rstd(block, p.eps) * weight_tiles::Form<V.dense>::kDrop);
  uint32_t lower = 0;
#pragma unroll 1
  for (uint32_t round = s.first_sums; round < s.end_sums; round += kRoundGroups) {
    const uint32_t n = 16 * round + threadIdx.x;
    const bool mine = is_screened_row(block, s, n);
    const ScreenRow row = mine ? block.screened_head->rows[n] : ScreenRow{};
    multiply_codes(block, s, round, weights);
    ComputeThreads::sync();
    if (threadIdx.x < kEpilogueThreads) {
      float(&sums)[kTokenWarps][16] = block.m.sums[threadIdx.x / 16];
      const screen::Range range = screen::range_of(sum_of_warps(sums, threadIdx.x % 16), row, x);
#pragma unroll
      for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][threadIdx.x % 16] = 0;
      if (mine) p.y[n] = range.upper, lower = max(lower, range.lower);  // y[n] is this thread's alone
    }
    ComputeThreads::sync();
  }
  const uint32_t least = largest_of_grid(block, lower);
  // Nobody has to wait for other blocks any more.
#pragma unroll 1
  for (uint32_t first = s.first_sums; first < s.end_sums; first += screen::kRounds * kRoundGroups) {
    find_rows(block, s, first, least);
    ComputeThreads::sync();
    const uint32_t count = m.count;
#pragma unroll 1
    for (uint32_t at = 0; at < count; at += kRoundGroups)
      multiply_found(block, s, m.found + at, min(count - at, kRoundGroups), turn, x.drop, top);
    ComputeThreads::sync();
    if (threadIdx.x == 0) m.count = 0;
    ComputeThreads::sync();
  }
}

}  // namespace screened_head
}  // namespace ingot::decode
