#pragma once
// Attention as a stage of the token kernel (split_kv_attention.cuh). No block waits at the grid barrier before
// attention: a block waits for the words of its own heads, and signals its completion before its result is visible,
// because each result word carries an epoch.
#include "ingot/megakernel/ptx/ring_copies.cuh"
#include "ingot/models/decode/megakernel/head_norms.cuh"
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode {

// Sets to zero, during attention, the words that all blocks have read. The blocks without a unit of attention do this
// where such blocks exist; then only these blocks need a fence at the next grid barrier.
template <TokenVariant V>
__device__ __forceinline__ void clear_used_words(const TokenContext<V>& block, uint32_t layer) {
  const uint32_t units = block.units(layer), first = units < gridDim.x ? units : 0;
  if (threadIdx.x == 0) block.m.clears = blockIdx.x >= first;
  if (blockIdx.x < first) return;
  const TokenSums& sums = block.m.token.sums;
  uint64_t* const begin = sums.used(block.m.epoch + layer);
  const uint64_t* const end = begin + sums.used_words();
#pragma unroll 1
  for (uint64_t* p = begin + (blockIdx.x - first) * kTokenThreads + threadIdx.x; p < end;
       p += (gridDim.x - first) * kTokenThreads)
    ptx::store_relaxed(p, uint64_t(0));
}

// Without the copy engine: where the cache holds the keys and values that this warp multiplies in chunk `index` of a
// unit.
template <TokenVariant V>
__device__ __forceinline__ split_kv_attention::CachedKeys<TokenContext<V>::kHeadDim> cached_keys(
    const decode_attention::Params& p, const split_kv_attention::Unit& u, uint32_t index) {
  constexpr uint32_t kDim = TokenContext<V>::kHeadDim;
  const uint32_t warp = threadIdx.x / 32 % megakernel::kTeamWarps,
                 key = u.begin + index * TokenContext<V>::kChunkKeys + TokenContext<V>::kWarpKeys * warp;
  const size_t head = size_t(u.head) * p.rows * kDim;
  return {&p.keys[head].bits, &p.values[head].bits, key % p.rows, p.rows};
}
// Brings the keys and values of a chunk into the L2 cache: each lane prefetches one key or one value.
template <TokenVariant V>
__device__ __forceinline__ void prefetch_cached_keys(const decode_attention::Params& p,
                                                     const split_kv_attention::Unit& u, uint32_t index) {
  const uint32_t of = threadIdx.x % 16, warp = threadIdx.x / 32 % megakernel::kTeamWarps,
                 key = u.begin + index * TokenContext<V>::kChunkKeys + TokenContext<V>::kWarpKeys * warp;
  if (of >= TokenContext<V>::kWarpKeys || key + of >= u.end) return;
  const auto c = cached_keys<V>(p, u, index);
  ptx::prefetch_line((threadIdx.x % 32 < 16 ? c.keys : c.values) + c.offset(of));
}
// Without the copy engine: calls use(keys, index) for this team's chunks of a unit, whose keys are read from the cache.
template <TokenVariant V, class Use>
__device__ __forceinline__ void read_cached_keys(const TokenContext<V>& block, uint32_t layer, uint32_t unit,
                                                 uint32_t count, Use&& use) {
  const auto& p = block.layer(layer).attention;
  const split_kv_attention::Unit u = TokenContext<V>::Attention::unit_of(p, block.m.keys[layer % 2], unit);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32 / megakernel::kTeamWarps; i < count; i += megakernel::kTeams) {
    prefetch_cached_keys<V>(p, u, i + megakernel::kTeams);
    use(cached_keys<V>(p, u, i), i);
  }
}
template <TokenVariant V>
__device__ __forceinline__ void attend(const TokenContext<V>& block, uint32_t layer,
                                       typename TokenContext<V>::WeightReader& weights) {
  const auto& token = block.m.token;
  const typename TokenContext<V>::Attention attention(
      block.layer(layer).attention, block.m.keys[layer % 2], token.attention, block.m.epoch + layer,
      *reinterpret_cast<typename TokenContext<V>::AttentionMemory*>(block.vectors()));
  const uint64_t* const sums = block.qkv_sums(layer);
  // Returns numbers i and j of the token's queries, keys and values.
  const auto projected = [&](uint32_t i, uint32_t j, float& a, float& b) {
    uint64_t word[2];
    const auto load = [&] { word[0] = ptx::load_relaxed(sums + i), word[1] = ptx::load_relaxed(sums + j); };
    load();
    block.wait_for(
        load, [&] { return (RowSum::count(word[0]) == 2) & (RowSum::count(word[1]) == 2); },
        kGridBarriersPerLayer * layer + uint32_t(Stage::qkv));
    a = RowSum::value(word[0]), b = RowSum::value(word[1]);
  };
  const uint32_t number = kGridBarriersPerLayer * layer + uint32_t(Stage::attention), units = block.units(layer);
  const auto put = [&](uint32_t n, uint32_t a, uint32_t b) {
    tile::EpochWords{{a, b, 0}, block.m.epoch + layer}.store(token.attention.mixed + n / 4);
  };
#pragma unroll 1
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    if (unit != blockIdx.x) ComputeThreads::sync();
    const auto chunks = [&](uint32_t count, auto&& use) {
      if constexpr (V.warp_rings)
        read_cached_keys(block, layer, unit, count, use);
      else
        weights.read(count, [&](const char* chunk, const megakernel::WeightNote& note) { use(chunk, note.word[0]); });
    };
    const auto soon = [&] {
      if (units - unit <= gridDim.x) block.grid_barriers.announce(block.m.clears != 0);
    };
    if constexpr (V.family)
      attention.attend(
          unit, block.m.keys[layer % 2].fresh,
          [&](const split_kv_attention::Unit& u) {
            head_norms::stage_heads(block, layer, sums, u, kGridBarriersPerLayer * layer + uint32_t(Stage::qkv));
          },
          chunks, put, soon);
    else
      attention.attend(unit, block.m.cos, block.m.sin, chunks, projected, put, soon);
  }
  if (!attention.has_parts()) return;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x)
    attention.add_parts(
        unit, [&](auto&& load, auto&& complete) { block.wait_for(load, complete, number); }, put);
}

}  // namespace ingot::decode
