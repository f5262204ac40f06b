#pragma once
// A token over several GPUs: what output and down add to the residual stream is the sum of the ranks' parts, which go
// to all ranks (megakernel/exchange.cuh); the likeliest id is the largest of theirs.
#include "ingot/megakernel/exchange.cuh"
#include "ingot/models/decode/megakernel/token_router.cuh"

namespace ingot::decode {

template <bool kTraced> class TokenRanks : public TokenBlock {
 public:
  // What this token's exchanges are numbered from, before a barrier.
  __device__ __forceinline__ void begin(const Ranks& ranks) const {
    copy_words(rank_memory().ranks, ranks);
    if (threadIdx.x == 0) rank_memory().epoch = ptx::load_relaxed(ranks.exchange.epoch);
  }
  // This block's part of a sum, to all ranks: of two, a begin is the first.
  __device__ __forceinline__ void send_part(uint32_t i, Stage stage, const RowPlace& row, float value) const {
    const megakernel::Exchange& x = rank_memory().ranks.exchange;
    const uint32_t epoch = epoch_of(i, stage), second = weight_tiles::padded(m_.token.embedding.C) + row.n;
    megakernel::send(x, epoch, row.begins() ? row.n : second, value);
    if (row.terms() == 2) megakernel::send(x, epoch, second, 0);
  }
  // Each block adds the ranks' parts of some bands and publishes them as one GPU's blocks do; the output's with what
  // the router makes of them.
  __device__ __forceinline__ void add(uint32_t i, Stage stage, const LayerStages& l) const {
    const Ranks& r = rank_memory().ranks;
    const bool routes = stage == Stage::output;
    const uint32_t C = m_.token.embedding.C, each = bands_of_block(C, gridDim.x), slot = threadIdx.x / 16,
                   row = threadIdx.x % 16, epoch = epoch_of(i, stage), from = routes ? r.heads : r.channels,
                   what = kGridBarriersPerLayer * i + uint32_t(stage),
                   end = min((blockIdx.x + 1) * each, (C + 15) / 16);
    uint64_t* const sums = routes ? m_.token.sums.output() : down_sums(i);
    keep_exchange(i, routes, 0);
#pragma unroll 1
    for (uint32_t band = blockIdx.x * each; band < end; band += kHeldBands) {
      const uint32_t held = min(end - band, kHeldBands), n = 16 * (band + slot) + row;
      if (routes) router_.ask_router(l, band, held);
      if (slot < held) {
        float part = 0;
        if (n < C) {
          const float gain = routes ? l.router.weight[n] : 0;
          const float sum =
              megakernel::sum_of_ranks<2>(r.exchange, from, epoch, n, weight_tiles::padded(C), r.watch, what);
          RowSum::add(sums + n, sum, 2);
          part = gain * (x()[n] + sum);
        }
        router_.put_normed(slot, row, part);
      }
      if (!routes) continue;
      TokenTeam::sync();
      if (band + held == end) keep_exchange(i, routes, 1);
      router_.add_logits(l, band, held, band + held == end ? 1 : 0);
      if (band + held < end) TokenTeam::sync();
    }
    if constexpr (kTraced) TokenTeam::sync();
    if (!routes || blockIdx.x * each >= end) keep_exchange(i, routes, 1);
  }
  // By one thread of the grid, which knows the best of this GPU's ids.
  __device__ __forceinline__ uint64_t likeliest(uint64_t key) const {
    const Ranks& r = rank_memory().ranks;
    return megakernel::largest_of_ranks(r.exchange, r.ids, rank_memory().epoch + 2 * m_.token.count, key, r.watch,
                                        kGridBarriersPerLayer * m_.token.count);
  }
  // `last`: in one thread of the grid, when all have begun.
  __device__ __forceinline__ void leave(bool last) const {
    const Ranks& r = rank_memory().ranks;
    if (last) ptx::store_relaxed(r.exchange.epoch, rank_memory().epoch + 2 * m_.token.count);
    if (threadIdx.x == 0) megakernel::pass_on_stop(r.exchange, r.watch);
  }

 private:
  // Of layer i: the output's sums, then down's.
  __device__ __forceinline__ uint32_t epoch_of(uint32_t i, Stage stage) const {
    return rank_memory().epoch + 2 * i + (stage == Stage::output ? 1 : 2);
  }
  // The time of an exchange's begin or end, as the first thread sees it.
  __device__ __forceinline__ void keep_exchange(uint32_t i, bool output, uint32_t which) const {
    if constexpr (kTraced) {
      const megakernel::Trace& t = m_.token.grid.trace;
      if (threadIdx.x == 0 && blockIdx.x < t.blocks)
        t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + kTracedBytes + kExchangeStamps * i +
                (output ? 0 : 2) + which] = ptx::global_timer();
    }
  }

  const TokenRouter router_;
};

}  // namespace ingot::decode
