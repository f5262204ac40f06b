#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/megakernel/exchange.cuh"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/phased/ranks.h"

namespace ingot::decode {
namespace {

constexpr uint32_t kRankThreads = 256;
constexpr int64_t kRankBlocks = 64;  // all must run at once, because they wait for blocks on other GPUs

struct RankSums {
  Ranks ranks;
  float* x;
  int64_t x_stride;
  uint32_t T, C, from, what;
};
__global__ void __launch_bounds__(kRankThreads, 1) add_ranks_kernel(const __grid_constant__ RankSums p) {
  const megakernel::Exchange& x = p.ranks.exchange;
  const uint32_t epoch = ptx::load_relaxed(x.epoch) + 1, first = blockIdx.x * kRankThreads + threadIdx.x,
                 step = gridDim.x * kRankThreads, all = p.T * p.C;
  if (p.ranks.of(p.from))
#pragma unroll 1
    for (uint32_t i = first; i < all; i += step)
      megakernel::send(x, epoch, i, __ldcg(p.ranks.added + i / p.C * p.x_stride + i % p.C));
#pragma unroll 1
  for (uint32_t i = first; i < all; i += step)
    p.x[i / p.C * p.x_stride + i % p.C] += megakernel::sum_of_ranks<1>(x, p.from, epoch, i, 0, p.ranks.watch, p.what);
  __syncthreads();
  if (threadIdx.x != 0) return;
  // The last block to arrive counts the exchange, because only then all blocks have read the number before.
  if (ptx::fetch_add_acq_rel(p.ranks.arrived, 1) == gridDim.x - 1) {
    ptx::store_relaxed(p.ranks.arrived, 0);
    ptx::store_relaxed(x.epoch, epoch);
  }
  megakernel::pass_on_stop(x, p.ranks.watch);
}

__global__ void sample_over_ranks_kernel(const __grid_constant__ Ranks ranks, State* state, uint32_t advance,
                                         uint32_t what) {
  if (threadIdx.x != 0) return;
  const megakernel::Exchange& x = ranks.exchange;
  const uint64_t mine = ranks.of(ranks.ids) ? *ranks.key : 0;
  const uint64_t key = megakernel::largest_of_ranks(x, ranks.ids, ptx::load_relaxed(x.epoch), mine, ranks.watch, what);
  megakernel::pass_on_stop(x, ranks.watch);
  if (tile::stopped(ranks.watch)) return;
  const sampling::SampledId sampled = sampling::sampled_id(key);
  state->tokens[0] = sampled.token;
  state->flaw |= sampled.flaw;
  state->position += int32_t(advance);
}

int device() { return std::max(0, gpu::current_device()); }

}  // namespace

void add_ranks(const Buffers& b, const RankStep& step, Stream stream) {
  const RankSums p{.ranks = b.ranks,
                   .x = b.x,
                   .x_stride = b.x_stride,
                   .T = step.T,
                   .C = step.width,
                   .from = step.down ? b.ranks.channels : b.ranks.heads,
                   .what = grid_barrier_of(step.layer, step.down)};
  const int64_t units = (int64_t(p.T) * p.C + kRankThreads - 1) / kRankThreads;
  gpu::launch("decode exchange", add_ranks_kernel,
              {.grid = std::min(units, kRankBlocks), .block = kRankThreads, .device = device(), .cooperative = true},
              stream, p);
}

void sample_over_ranks(const Buffers& b, const RankStep& step, Stream stream) {
  gpu::launch("decode sampling over GPUs", sample_over_ranks_kernel, {.grid = 1, .block = 32, .device = device()},
              stream, b.ranks, b.state, step.T, kGridBarriersPerLayer * step.layer);
}

uint32_t inbox_words(const DecoderSpec& c) { return kMostTokens * uint32_t(weight_tile_padded_cols(c.hidden)); }
int64_t inbox_bytes(const DecoderSpec& c, uint32_t ranks) {
  return 8 * megakernel::Exchange::inbox_words(ranks, inbox_words(c));
}

}  // namespace ingot::decode
