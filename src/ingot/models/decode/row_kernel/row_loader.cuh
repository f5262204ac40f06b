#pragma once
// The warp that copies a block's weights, and the keys and values of attention, into the ring, in the order in which
// the teams take the chunks: five units at a time, chunk after chunk.
#include "ingot/models/decode/row_kernel/row_attention.cuh"

namespace ingot::decode::rows::loader {

// Copies the units `first` to `end - 1` of a product, whose weight tiles have `tile_bytes` bytes each.
__device__ __forceinline__ void copy_units(const Context& block, megakernel::WeightWriter& ring, const Matrix& w,
                                           const RowSplit& s, bool experts, uint32_t tile_bytes, uint32_t first,
                                           uint32_t end) {
  const uint32_t total = (end - first + kTeams - 1) / kTeams * s.chunks * kTeams, lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t begin = 0; begin < total; begin += 32) {
    // Each lane computes the address of one chunk. Where a team has no unit, its chunk is void.
    const uint32_t index = min(begin + lane, total - 1), round = index / kTeams / s.chunks,
                   chunk = index / kTeams - round * s.chunks, number = first + round * kTeams + index % kTeams;
    const uint8_t* from = nullptr;
    uint32_t count = 0, at = 0;
    if (number < end) {
      const Unit u = block.unit(w, s, number);
      const uint32_t behind = min((u.part + 1) * s.tiles, w.weight_tiles);
      at = u.part * s.tiles + chunk * s.chunk_tiles;
      count = at < behind ? min(s.chunk_tiles, behind - at) : 0;
      from = w.data + (experts ? int64_t(block.m.slots.expert[u.slot]) * w.matrix_bytes : 0) +
             u.row_tile * w.row_tile_bytes + int64_t(at) * tile_bytes;
    }
    if (count == 0) at = 0;
    const uint32_t all = min(total - begin, 32u), bytes = count * tile_bytes;
#pragma unroll 1
    for (uint32_t turn = 0; turn < all; ++turn) {
      const bool is_void = __shfl_sync(~0u, bytes, turn) == 0;
      ring.put(turn, bytes, {count, at, 0, 0}, block.m.step.stream.ahead, [&](char* slot, uint64_t* full) {
        if (!is_void) ptx::bulk_load(slot, from, bytes, full, ring.policy());
      });
    }
  }
}

__device__ __forceinline__ void copy_keys(const Context& block, megakernel::WeightWriter& ring, uint32_t layer) {
  constexpr uint32_t kRow = kDim * 2, kKeys = split_kv_attention::kChunkKeys<kDim>;
  const decode_attention::Params& p = block.layer(layer).attention;
  const Keys* const keys = block.m.keys[layer % 2];
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t number = blockIdx.x;; number += gridDim.x) {
    const RowUnit at = row_unit(block, p, keys, number);
    if (at.row == block.m.step.T) return;
    const split_kv_attention::Unit u = Attention::unit_of(p, keys[at.row], at.unit);
    const uint32_t chunks = Attention::chunks_of(u), padded = padded_chunks(chunks);
    const int64_t offset = block.m.offset[at.row];
#pragma unroll 1
    for (uint32_t first = 0; first < padded; first += 32) {
      const uint32_t all = min(padded - first, 32u), chunk = first + lane;
      split_kv_attention::KeyRows r{};
      if (chunk < chunks) r = Attention::rows_of(p, u, chunk);
#pragma unroll 1
      for (uint32_t turn = 0; turn < all; ++turn)
        ring.put(turn, 2 * (r.rows + r.others) * kRow, {chunk < chunks ? chunk : ~0u}, block.m.step.stream.ahead,
                 [&](char* slot, uint64_t* full) {
                   if (chunk >= chunks) return;
#pragma unroll 1
                   for (uint32_t i = 0; i < 2; ++i, slot += kKeys * kRow) {
                     const auto* const from =
                         reinterpret_cast<const bf16*>(uintptr_t(i == 0 ? p.keys : p.values) + offset);
                     ptx::bulk_load(slot, from + r.first, r.rows * kRow, full);
                     if (r.others > 0) ptx::bulk_load(slot + r.rows * kRow, from + r.begin, r.others * kRow, full);
                   }
                 });
    }
  }
}

template <WeightFormat kDense> __device__ __forceinline__ void copy_step(const Context& block) {
  const RowStep& t = block.m.step;
  megakernel::WeightWriter ring(t.stream, block.m.stream, block.memory + t.ring);
  uint32_t i = 0;
#pragma unroll 1
  for (Stage stage = t.count > 0 ? Stage::qkv : Stage::head; stage != Stage::head || t.head_rows > 0;
       stage = Stage(int(stage) + 1)) {
    if (stage == Stage::attention) {
      copy_keys(block, ring, i);
      continue;
    }
    if (stage == Stage::gate_up) ptx::barrier_sync_unaligned(kListedBarrier, kTokenThreads + 32);
    const bool experts = uses_experts(stage);
    const Matrix& w = block.matrix(stage, i);
    const RowSplit& s = block.split(stage);
    const WeightTileRange range = block.units((experts ? block.m.slots.count : 1) * w.row_tiles * s.parts);
#pragma unroll 1
    for (uint32_t first = range.begin; first < range.end;) {
      const uint32_t end = stage == Stage::down ? block.end_of_group(w, s, first, range.end) : range.end;
      copy_units(block, ring, w, s, experts,
                 experts ? weight_tiles::Form<kExperts>::kBytes : weight_tiles::Form<kDense>::kBytes, first, end);
      first = end;
    }
    if (stage == Stage::head) return;
    if (ends_layer(stage) && ++i < t.count) stage = Stage(int(Stage::qkv) - 1);
  }
}

}  // namespace ingot::decode::rows::loader
