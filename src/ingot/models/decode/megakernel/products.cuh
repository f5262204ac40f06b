#pragma once
// A block's part of a product: multiplies chunks of weights from the ring by the activation vector in shared memory.
// Each warp adds to its own sums (TokenMemory::sums).
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode {

// A warp's weight tiles of one prefetched chunk, in registers. While the warps wait for an activation vector, each team
// takes a chunk out of the ring, so that the ring has room for as many further chunks.
template <TokenVariant V> struct PrefetchedChunk {
  static constexpr uint32_t kTiles =
      (kMostChunkTiles<WeightFormat::bf16> + megakernel::kTeamWarps - 1) / megakernel::kTeamWarps;
  weight_tiles::Stored<WeightFormat::bf16> weight_tile[kTiles];
  // Packed: the number of weight tiles of the chunk (0 means no chunk), its row tile in the round (from bit 4), and its
  // first weight tile (from bit 8).
  uint32_t bits = 0;

  __device__ __forceinline__ uint32_t count() const { return bits % 16; }
  __device__ __forceinline__ uint32_t row_tile() const { return bits / 16 % 16; }
  __device__ __forceinline__ uint32_t first() const { return bits / 256; }
};
// The variants that prefetch a chunk. In the other variants the dense weights fit into the ring anyway, or no registers
// are left.
template <TokenVariant V>
constexpr bool kPrefetchesChunk =
    V.dense == WeightFormat::bf16 && !V.warp_rings && (V.family || (V.experts == WeightFormat::mxfp4 && !V.ranks));

// Loads a warp's part of a weight tile from the ring.
template <WeightFormat F>
__device__ __forceinline__ void load_from_ring(weight_tiles::Stored<F>& s, const char* weight_tile, uint32_t lane) {
#pragma unroll
  for (int i = 0; i < int(sizeof(s.word) / 16); ++i) {
    const uint4 w = *reinterpret_cast<const uint4*>(weight_tile + i * 512 + lane * 16);
    s.word[i][0] = w.x, s.word[i][1] = w.y, s.word[i][2] = w.z, s.word[i][3] = w.w;
  }
  if constexpr (F == WeightFormat::mxfp4)
    s.scales = *reinterpret_cast<const uint32_t*>(weight_tile + 512 + lane / 4 * 4);
}

// Takes the team's first chunk of a round of `chunks` chunks out of the ring. For dense products only.
template <TokenVariant V>
__device__ __forceinline__ void prefetch_chunk(uint32_t round, uint32_t chunks,
                                               typename TokenContext<V>::WeightReader& weights,
                                               PrefetchedChunk<V>& prefetched) {
  if constexpr (kPrefetchesChunk<V>) {
    constexpr uint32_t team = megakernel::kTeamWarps;
    const uint32_t lane = threadIdx.x % 32, begin = threadIdx.x / 32 % team;
    weights.read_one(chunks, [&](const char* weight_tile, const megakernel::WeightNote& note) {
      const Chunk p = noted_chunk(note);
      prefetched.bits = p.count + 16 * (p.row_tile - round) + 256 * p.first;
#pragma unroll
      for (uint32_t u = 0; u < PrefetchedChunk<V>::kTiles; ++u)
        if (begin + u * team < p.count)
          load_from_ring(prefetched.weight_tile[u],
                         weight_tile + (begin + u * team) * weight_tiles::Form<V.dense>::kBytes, lane);
    });
  }
}
// Multiplies a round of `chunks` chunks, whose first group of sums is `round`. With kSlots the matrices are those of
// the chosen experts, which begin at `data`.
template <WeightFormat F, bool kSlots, TokenVariant V>
__device__ __forceinline__ void multiply_chunks(const TokenContext<V>& block, const WorkRange& s, const uint8_t* data,
                                                uint32_t chunks, uint32_t round, PrefetchedChunk<V>& prefetched,
                                                typename TokenContext<V>::WeightReader& weights) {
  constexpr uint32_t team = megakernel::kTeamWarps;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Copied into registers: the compiler assumes that any store to shared memory may change them.
  const bool by_row_tile = kSlots && s.by_row_tile;
  const uint32_t stride = by_row_tile ? s.vector_stride : 0, slot_sums = kSlots && !by_row_tile ? s.row_tiles : 0;
  const float* const slot_weights = block.choice().weights;
  const char* const vector = block.vectors() + lane % 4 * 16;
  float sum[1][4] = {};
  uint32_t slot = 0, row_tile = ~0u;  // the expert slot and row tile that `sum` belongs to; ~0: `sum` is empty
  const auto store_sum = [&] {
    float scale[2] = {1, 1};
    if (by_row_tile) scale[0] = scale[1] = slot_weights[slot];
    if constexpr (kSlots && F == WeightFormat::fp8) {
      float row_scale[2];
      weight_tiles::load_row_scales(data + s.expert[slot] * s.matrix_bytes + row_tile * s.row_tile_bytes,
                                    s.weight_tiles, row_scale);
      scale[0] *= row_scale[0], scale[1] *= row_scale[1];
    }
    // The four lanes that share g all hold the sums of rows g and g + 8.
    float(&to)[16] = block.m.sums[row_tile + slot * slot_sums - round][warp];
    if (lane % 4 == 0) to[lane / 4] += scale[0] * sum[0][0], to[lane / 4 + 8] += scale[1] * sum[0][2];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[0][c] = 0;
  };
  const uint32_t first = warp % team;
  if constexpr (kPrefetchesChunk<V> && !kSlots) {
    if (prefetched.bits != 0) {
      row_tile = round + prefetched.row_tile();
      const char* const mine[1] = {vector + prefetched.first() * weight_tiles::kVectorTileBytes};
#pragma unroll
      for (uint32_t u = 0; u < PrefetchedChunk<V>::kTiles; ++u)
        if (first + u * team < prefetched.count())
          weight_tiles::multiply<F, 1>(prefetched.weight_tile[u], mine,
                                       (first + u * team) * weight_tiles::kVectorTileBytes, sum);
    }
  }
  weights.read(chunks, [&](const char* weight_tile, const megakernel::WeightNote& note) {
    const Chunk p = noted_chunk(note);
    if (row_tile != ~0u && (p.row_tile != row_tile || p.slot != slot)) store_sum();
    slot = p.slot, row_tile = p.row_tile;
    const char* const mine[1] = {vector + p.slot * stride + p.first * weight_tiles::kVectorTileBytes};
#pragma unroll 1
    for (uint32_t g = first; g < p.count; g += team) {
      weight_tiles::Stored<F> w;
      load_from_ring(w, weight_tile + g * weight_tiles::Form<F>::kBytes, lane);
      weight_tiles::multiply<F, 1>(w, mine, g * weight_tiles::kVectorTileBytes, sum);
    }
  });
  if (row_tile != ~0u) store_sum();
}

}  // namespace ingot::decode
