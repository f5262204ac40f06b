#pragma once
// The norm before the experts, the router, the choice of experts and the places of the chosen rows as one kernel, for
// steps of sequences. A cluster of eight blocks processes 16 rows; a block normalises two rows, multiplies two of the
// sixteen parts of K by all rows and all experts, and chooses the experts of its two rows. The blocks exchange rows,
// sums and choices through their shared memories. In a step of at most 16 rows the cluster also finds the place of each
// choice and copies the rows there; otherwise place_and_gather_kernel() does.
//
// Every number is computed by the same operations in the same order as in norm_kernel() and route_kernel(), so the
// results have the same bits.
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/models/decode/prompt/expert_rows.cuh"
#include "ingot/models/decode/prompt/prompt_norm.cuh"
#include "ingot/models/decode/prompt/prompt_router.cuh"

namespace ingot::decode::prompts {

constexpr int kRouteCluster = 8;                                 // blocks
constexpr uint32_t kRowsOfBlock = kRouted / kRouteCluster;       // rows that a block normalises
constexpr int kRouteRowsThreads = kThreads * int(kRowsOfBlock);  // kThreads threads process each of these rows
constexpr uint32_t kPartsOfBlock = kRouteWarps / kRouteCluster;  // parts of K that a block multiplies
// A part is every sixteenth weight tile of a row tile of the router. A block holds this number of weight tiles of each
// of its parts in shared memory.
constexpr uint32_t kMostTilesOfPart = kRouterTiles;
constexpr uint32_t kMostRouteColumns = kMostTilesOfPart * kRouteWarps * 64, kMostRouteExperts = 128,
                   kMostRouteChoices = 16;
constexpr bool takes_route_rows(uint32_t C, uint32_t padded_columns, uint32_t E, uint32_t k) {
  return C % 4 == 0 && padded_columns <= kMostRouteColumns && E <= kMostRouteExperts && k <= kMostRouteChoices;
}

struct RouteRows {
  Norm norm;            // writes `y` unless `gathered` is set
  const float* halves;  // null, or (2 T, C): x += row t + row T + t
  Route route;          // neither `x` nor `logits` is used
  Places places;        // used where `gathered` is set, which needs a single cluster
  bf16* gathered;       // (S, stride), or null
};
struct RouteRowsMemory {
  alignas(16) bf16 row[kRowsOfBlock][kMostRouteColumns];  // this block's rows after the norm
  // The block's parts of all rows, and the sums of all parts of this block's rows; other blocks write both. 64 columns
  // are 32 words, and 4 more make the lanes of a warp read different banks.
  alignas(16) uint32_t x[kPartsOfBlock][kMostTilesOfPart][kRouted][36];
  union {
    float sums[kRouteWarps][kRowsOfBlock][kMostRouteExperts];
    alignas(16) float norm_weight[kMostRouteColumns];  // until the rows are shared
  };
  float logits[kRowsOfBlock][kMostRouteExperts];
  uint32_t mine[kRowsOfBlock][kMostRouteChoices];
  float weights[kRowsOfBlock][kMostRouteChoices];
  uint32_t chosen[kRouted * kMostRouteChoices];  // the choices of all rows; other blocks write them
  uint32_t place[kRowsOfBlock][kMostRouteChoices];
  float squares[kRowsOfBlock][kWarps];
};

constexpr int kRowVectors = int(kMostRouteColumns) / (4 * kThreads);  // vectors of four numbers of a row, of a thread

// Four normalised numbers at column c of the block's row r go to this block's copy of the row, and to the block that
// multiplies this part of K.
__device__ __forceinline__ void share_row(RouteRowsMemory& m, uint32_t r, uint32_t c, const float (&v)[4]) {
  alignas(8) bf16 four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = bf16(v[i]);
  const uint64_t word = *reinterpret_cast<const uint64_t*>(four);
  *reinterpret_cast<uint64_t*>(&m.row[r][c]) = word;
  const uint32_t tile = c / 64, part = tile % kRouteWarps, row = ptx::cluster_rank() * kRowsOfBlock + r;
  uint32_t* const to = &m.x[part % kPartsOfBlock][tile / kRouteWarps][row][c % 64 / 2];
  ptx::cluster_store_relaxed(reinterpret_cast<uint64_t*>(to), part / kPartsOfBlock, word);
}
// One row of the block by kThreads threads; a row that does not exist is zeros. `thread` counts within the row's
// threads.
__device__ __forceinline__ void norm_row(const RouteRows& p, int64_t t, uint32_t r, uint32_t thread,
                                         RouteRowsMemory& m) {
  const bool exists = t < p.route.T;
  const uint32_t C = p.norm.C, padded = 64 * p.route.weight_tiles;
  float* const x = p.norm.x + t * p.norm.stride;
  float4 from[kRowVectors] = {}, half[2][kRowVectors] = {};
#pragma unroll
  for (int h = 0; h < kRowVectors; ++h)
    if (const uint32_t c = 4 * (thread + h * kThreads); exists && c < C) {
      from[h] = __ldcg(reinterpret_cast<const float4*>(x + c));
      if (p.halves != nullptr) {
        half[0][h] = __ldcg(reinterpret_cast<const float4*>(p.halves + t * C + c));
        half[1][h] = __ldcg(reinterpret_cast<const float4*>(p.halves + (p.route.T + t) * C + c));
      }
    }
  float v[kRowVectors][4], squares = 0;
#pragma unroll
  for (int h = 0; h < kRowVectors; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[h][i] = reinterpret_cast<const float*>(&from[h])[i];
      if (p.halves != nullptr)
#pragma unroll
        for (int which = 0; which < 2; ++which) v[h][i] += reinterpret_cast<const float*>(&half[which][h])[i];
      squares += v[h][i] * v[h][i];
    }
    if (const uint32_t c = 4 * (thread + h * kThreads); exists && c < C && p.halves != nullptr)
      *reinterpret_cast<float4*>(x + c) = {v[h][0], v[h][1], v[h][2], v[h][3]};
  }
  squares = weight_tiles::lanes_sum(squares);
  if (thread % 32 == 0) m.squares[r][thread / 32] = squares;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += m.squares[r][w];
  const float rstd = 1 / sqrtf(sum / float(C) + p.norm.eps);
  ptx::cluster_wait();  // the other blocks have started
#pragma unroll
  for (int h = 0; h < kRowVectors; ++h)
    if (const uint32_t c = 4 * (thread + h * kThreads); c < padded) {
      float4 weight = {};
      if (c < C) weight = *reinterpret_cast<const float4*>(&m.norm_weight[c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[h][i] = v[h][i] * reinterpret_cast<const float*>(&weight)[i] * rstd;
      share_row(m, r, c, v[h]);
    }
}

// The products of a part of K of all rows with a row tile of the router; the sums go to the blocks of their rows.
__device__ __forceinline__ void route_part(const Route& p, uint32_t part, uint32_t row_tile, const RouterWords& words,
                                           RouteRowsMemory& m) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, column = lane % 4 * 2;
  float sums[2][4] = {};
#pragma unroll
  for (uint32_t i = 0; i < kMostTilesOfPart; ++i) {
    if (part + i * kRouteWarps >= p.weight_tiles) break;
    const auto& x = m.x[part % kPartsOfBlock][i];
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s)
#pragma unroll
      for (uint32_t block = 0; block < 2; ++block) {
        const uint32_t(&row)[36] = x[8 * block + g];
        const uint32_t b[2] = {row[8 * s + column / 2], row[8 * s + 4 + column / 2]};
        ptx::mma_m16n8k16(bf16{}, sums[block], words.a[i][s], b);
      }
  }
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = 8 * block + column + i % 2, e = row_tile * kRouted + g + i / 2 * 8;
      if (e < kMostRouteExperts)
        ptx::cluster_store(&m.sums[part][row % kRowsOfBlock][e], row / kRowsOfBlock, sums[block][i]);
    }
}

// The experts of row t by its kThreads threads: the choice goes to global memory, and to all blocks where `share`.
__device__ __forceinline__ void choose_row(const Route& p, int64_t t, uint32_t r, uint32_t thread, float bias,
                                           bool share, RouteRowsMemory& m) {
  if (thread < p.E) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kRouteWarps; ++part) sum += m.sums[part][r][thread];
    m.logits[r][thread] = sum + bias;
  }
  __syncthreads();
  if (thread >= 32 || t >= p.T) return;
  const uint32_t k = p.choose.k, row = ptx::cluster_rank() * kRowsOfBlock + r;
  routing::choose(m.logits[r], p.E, k, m.mine[r], m.weights[r]);
  if (share)
    for (uint32_t i = thread; i < k * kRouteCluster; i += 32)
      ptx::cluster_store(reinterpret_cast<float*>(&m.chosen[row * k + i / kRouteCluster]), i % kRouteCluster,
                         __uint_as_float(m.mine[r][i / kRouteCluster]));
  for (uint32_t i = thread; i < k; i += 32)
    p.choose.chosen[t * k + i] = m.mine[r][i], p.choose.weights[t * k + i] = m.weights[r][i];
  __syncwarp();
}

// Among the choices before choice `end`, counts those of an expert below e, and those of expert e before choice s.
// Called by a warp.
__device__ __forceinline__ uint32_t chosen_before(const RouteRowsMemory& m, uint32_t end, uint32_t e, uint32_t s) {
  uint32_t before = 0;
  for (uint32_t i = threadIdx.x % 32; i < end; i += 32) {
    const uint32_t c = m.chosen[i];
    before += c < e || (c == e && i < s) ? 1 : 0;
  }
  return __reduce_add_sync(~0u, before);
}
// Does the work of place_and_gather_kernel() in one cluster. The first S choices belong to sequences.
__device__ __forceinline__ void place_and_gather(const RouteRows& p, uint32_t S, RouteRowsMemory& m) {
  constexpr uint32_t kBlockWarps = kRouteRowsThreads / 32;
  const uint32_t rank = ptx::cluster_rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = p.places.k;
  for (uint32_t i = warp; i < kRowsOfBlock * k; i += kBlockWarps) {
    const uint32_t s = rank * kRowsOfBlock * k + i, at = s < S ? chosen_before(m, S, m.chosen[s], s) : s;
    if (lane != 0 || s >= p.places.S) continue;
    m.place[i / k][i % k] = at;
    p.places.place[s] = int32_t(at);
  }
  for (uint32_t e = rank * kBlockWarps + warp; e <= p.places.E; e += kRouteCluster * kBlockWarps) {
    const uint32_t first = e < p.places.E ? chosen_before(m, S, e, 0) : S;
    if (lane == 0) p.places.offsets[e] = int32_t(first);
  }
  __syncthreads();
  const uint32_t r = threadIdx.x / kThreads, vectors = uint32_t(p.norm.stride) / 8;
  if (rank * kRowsOfBlock + r >= p.route.T) return;
  const uint4* const from = reinterpret_cast<const uint4*>(m.row[r]);
  for (uint32_t i = threadIdx.x % kThreads; i < vectors; i += kThreads) {
    const uint4 v = from[i];
    for (uint32_t j = 0; j < k; ++j)
      reinterpret_cast<uint4*>(p.gathered + int64_t(m.place[r][j]) * p.norm.stride)[i] = v;
  }
}

__global__ void __launch_bounds__(kRouteRowsThreads, 1) route_rows_kernel(const __grid_constant__ RouteRows p) {
  auto& m = tile::shared<RouteRowsMemory>();
  ptx::cluster_arrive_relaxed();
  ptx::let_next_kernel_start();
  const uint32_t rank = ptx::cluster_rank(), warp = threadIdx.x / 32;
  const uint32_t r = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const int64_t t = int64_t(blockIdx.x) * kRowsOfBlock + r;
  // Warps take the pairs of a part and a row tile.
  const uint32_t pairs = kPartsOfBlock * ((p.route.E + kRouted - 1) / kRouted);
  const uint32_t first_part = rank * kPartsOfBlock;
  // No kernel writes the weights, so they are requested before the preceding kernel ends.
  RouterWords words = {};
  if (warp < pairs) load_router(p.route, first_part + warp % kPartsOfBlock, warp / kPartsOfBlock, words);
  for (uint32_t c = threadIdx.x; c < p.norm.C; c += kRouteRowsThreads) m.norm_weight[c] = __ldg(p.norm.weight + c);
  const float bias = thread < p.route.E ? __ldg(p.route.bias + thread) : 0;
  ptx::wait_for_earlier_kernels();
  const uint32_t count = p.places.count != nullptr ? __ldcg(p.places.count) : p.route.T;

  norm_row(p, t, r, thread, m);
  tile::sync_cluster();
  for (uint32_t pair = warp; pair < pairs; pair += kRouteRowsThreads / 32) {
    if (pair != warp) load_router(p.route, first_part + pair % kPartsOfBlock, pair / kPartsOfBlock, words);
    route_part(p.route, first_part + pair % kPartsOfBlock, pair / kPartsOfBlock, words, m);
  }
  tile::sync_cluster();
  choose_row(p.route, t, r, thread, bias, p.gathered != nullptr, m);
  if (p.gathered != nullptr) {
    tile::sync_cluster();
    return place_and_gather(p, min(p.places.S, count * p.places.k), m);
  }
  if (t >= p.route.T) return;
  for (uint32_t i = thread; i < p.norm.stride / 8; i += kThreads)
    reinterpret_cast<uint4*>(p.norm.y + t * p.norm.stride)[i] = reinterpret_cast<const uint4*>(m.row[r])[i];
}

}  // namespace ingot::decode::prompts
