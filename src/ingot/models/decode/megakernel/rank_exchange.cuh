#pragma once
// A token over several GPUs: the ranks' parts of output and down are sent to all ranks and added to the residual stream
// there (megakernel/exchange.cuh). The greedy token is the token with the largest logit of all ranks.
#include "ingot/megakernel/exchange.cuh"
#include "ingot/models/decode/megakernel/router.cuh"

namespace ingot::decode {
namespace rank_exchange {

// Reads the number of the last exchange before this token. Call before a barrier.
template <TokenVariant V> __device__ __forceinline__ void begin(const TokenContext<V>& block, const Ranks& ranks) {
  copy_words(block.rank_memory().ranks, ranks);
  if (threadIdx.x == 0) block.rank_memory().epoch = ptx::load_relaxed(ranks.exchange.epoch);
}
// A layer has two exchanges: the output's sums, then down's.
template <TokenVariant V>
__device__ __forceinline__ uint32_t epoch_of(const TokenContext<V>& block, uint32_t i, Stage stage) {
  return block.rank_memory().epoch + 2 * i + (stage == Stage::output ? 1 : 2);
}
// In a traced kernel: records the time at which an exchange begins (0) or ends (1) for the block's first thread.
template <TokenVariant V>
__device__ __forceinline__ void record_time(const TokenContext<V>& block, uint32_t i, bool output, uint32_t end) {
  if constexpr (V.traced) {
    const megakernel::Trace& t = block.m.token.grid.trace;
    if (threadIdx.x == 0 && blockIdx.x < t.blocks)
      t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + kTracedBytes + kExchangeStamps * i +
              (output ? 0 : 2) + end] = ptx::global_timer();
  }
}
// Sends this block's part of a row's sum to all ranks. Where two blocks share a row, the block with the first weight
// tile of the row sends the first term.
template <TokenVariant V>
__device__ __forceinline__ void send_term(const TokenContext<V>& block, uint32_t i, Stage stage, const EpilogueRow& row,
                                          float value) {
  const megakernel::Exchange& x = block.rank_memory().ranks.exchange;
  const uint32_t epoch = epoch_of(block, i, stage), second = weight_tiles::padded(block.m.token.embedding.C) + row.row;
  megakernel::send(x, epoch, row.begins() ? row.row : second, value);
  if (row.terms() == 2) megakernel::send(x, epoch, second, 0);
}
// Each block adds the ranks' parts of some row tiles and publishes the sums as the blocks of a single GPU do. For the
// output, the block also adds the row tiles' part of the router's logits.
template <TokenVariant V>
__device__ __forceinline__ void add_ranks(const TokenContext<V>& block, uint32_t i, Stage stage, const LayerStages& l) {
  const Ranks& r = block.rank_memory().ranks;
  const bool routes = stage == Stage::output;
  const uint32_t C = block.m.token.embedding.C, each = exchanged_row_tiles(C, gridDim.x), group = threadIdx.x / 16,
                 row = threadIdx.x % 16, epoch = epoch_of(block, i, stage), senders = routes ? r.heads : r.channels,
                 wait = kGridBarriersPerLayer * i + uint32_t(stage), end = min((blockIdx.x + 1) * each, (C + 15) / 16);
  uint64_t* const sums = routes ? block.output_sums() : block.down_sums(i);
  record_time(block, i, routes, 0);
#pragma unroll 1
  for (uint32_t row_tile = blockIdx.x * each; row_tile < end; row_tile += kRoundGroups) {
    const uint32_t count = min(end - row_tile, kRoundGroups), n = 16 * (row_tile + group) + row;
    if (routes) router::prefetch_weights(block, l, row_tile, count);
    if (group < count) {
      float input = 0;
      if (n < C) {
        const float gain = routes ? l.router.weight[n] : 0;
        const float sum =
            megakernel::sum_of_ranks<2>(r.exchange, senders, epoch, n, weight_tiles::padded(C), r.watch, wait);
        RowSum::add(sums + n, sum, 2);
        input = gain * (block.x()[n] + sum);
      }
      router::put_input(block, group, row, input);
    }
    if (!routes) continue;
    ComputeThreads::sync();
    if (row_tile + count == end) record_time(block, i, routes, 1);
    router::add_logits(block, l, row_tile, count, row_tile + count == end ? 1 : 0);
    if (row_tile + count < end) ComputeThreads::sync();
  }
  if constexpr (V.traced) ComputeThreads::sync();
  if (!routes || blockIdx.x * each >= end) record_time(block, i, routes, 1);
}
// Returns the largest key of all ranks; `key` is this GPU's key. Called by one thread of the grid.
template <TokenVariant V> __device__ __forceinline__ uint64_t largest_key(const TokenContext<V>& block, uint64_t key) {
  const Ranks& r = block.rank_memory().ranks;
  return megakernel::largest_of_ranks(r.exchange, r.ids, block.rank_memory().epoch + 2 * block.m.token.count, key,
                                      r.watch, kGridBarriersPerLayer * block.m.token.count);
}
// `last` is true in one thread of the grid, after all blocks have read the epoch.
template <TokenVariant V> __device__ __forceinline__ void end(const TokenContext<V>& block, bool last) {
  const Ranks& r = block.rank_memory().ranks;
  if (last) ptx::store_relaxed(r.exchange.epoch, block.rank_memory().epoch + 2 * block.m.token.count);
  if (threadIdx.x == 0) megakernel::pass_on_stop(r.exchange, r.watch);
}

}  // namespace rank_exchange
}  // namespace ingot::decode
