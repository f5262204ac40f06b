#pragma once
// The loader: which weight tiles of each product this block multiplies, and the warp that copies weight tiles, and the
// keys and values of attention, into the ring (megakernel/weight_stream.cuh).
#include "ingot/gpu/ptx/prefetch.cuh"
#include "ingot/models/decode/megakernel/router.cuh"
#include "ingot/models/decode/prefilter/int8_prefilter.h"

namespace ingot::decode {

// The hand-over of a layer's arguments between the multiplying warps and the copying warp, in models with dense MLPs.
// The multiplying warps load the next layer's arguments during attention, into the place of the layer before, and the
// copying warp runs ahead of them. With experts the warps synchronise at the router once a layer. Without experts they
// synchronise here, in both directions: the copying warp waits for the arguments of the next layer, and the multiplying
// warps wait until the copying warp no longer reads the arguments that they are about to replace.
namespace layer_arguments {

constexpr uint32_t kBegunBarrier = 1;  // the copying warp has begun a layer; with experts the barrier of the router

// Runs in the multiplying warps, once a layer, after each thread's copies of arguments are complete.
template <TokenVariant V> __device__ __forceinline__ void announce(const TokenContext<V>& block) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&block.m.logits_ready);
}
// Runs in the copying warp at the beginning of layer i, except for the first layer, whose arguments are loaded before.
template <TokenVariant V> __device__ __forceinline__ void wait(const TokenContext<V>& block, uint32_t i) {
  megakernel::wait_for_slot(&block.m.logits_ready, (i - 1) % 2);
  ptx::barrier_arrive(kBegunBarrier, kTokenThreads + 32);
}
// Runs in the multiplying warps, in each layer except the first, before they load arguments.
__device__ __forceinline__ void wait_for_loader() { ptx::barrier_sync_unaligned(kBegunBarrier, kTokenThreads + 32); }

}  // namespace layer_arguments

namespace loader {

// This block's part of a product, the same in all layers.
template <TokenVariant V>
__device__ __forceinline__ WorkRange work_range(const TokenContext<V>& block, Stage stage, const LayerOf<V>& l) {
  // A weight tile of the prefilter's codes has the size of an fp8 weight tile.
  constexpr WeightFormat kHead = V.prefiltered ? WeightFormat::fp8 : V.dense;
  static_assert(kPrefilterTileBytes == weight_tiles::Form<WeightFormat::fp8>::kBytes,
                "a weight tile of codes has the bytes of one of fp8");
  const bool experts = block.uses_experts(stage), is_head = stage == Stage::head;
  const Matrix& w = block.matrix(stage, l);
  const uint32_t slots = experts ? block.m.token.k : 1;
  WorkRange s{.weight_tile_bytes = experts   ? weight_tiles::Form<V.experts>::kBytes
                                   : is_head ? weight_tiles::Form<kHead>::kBytes
                                             : weight_tiles::Form<V.dense>::kBytes,
              .row_tile_bytes = w.row_tile_bytes,
              .matrix_bytes = w.matrix_bytes,
              .expert = experts ? block.chosen() : nullptr,
              .weight_tiles = w.weight_tiles,
              .row_tiles = max(w.row_tiles, 1u),  // 0 row tiles where another GPU computes the stage
              .slots = slots,
              .by_row_tile = experts && adds_to_residual(stage),
              .chunk_tiles = even_chunk_tiles(w.weight_tiles, experts   ? kMostChunkTiles<V.experts>
                                                              : is_head ? kMostChunkTiles<kHead>
                                                                        : kMostChunkTiles<V.dense>),
              .vector_stride = uint32_t(weight_tiles::vector_bytes(w.cols)),
              .range = range_of_block(w.weight_tiles * w.row_tiles * slots, block.m.token.work.weight_tiles[int(stage)],
                                      blockIdx.x)};
  s.begin();
  return s;
}

// Brings the first weights of the next layer's qkv, or of the head, into the L2 cache. Called in a mixture of a family
// before the copying warp waits for the router, while the memory has nothing else to read. If all requests were made at
// once, they would delay the words of attention and output. Therefore a pause of about the duration of a request
// follows each request; all pauses together are shorter than the wait for the router.
template <TokenVariant V>
__device__ __forceinline__ void prefetch_next_layer(const TokenContext<V>& block, uint32_t i) {
  constexpr uint32_t kRequests = 7, kRequestBytes = 12288, kPauseNs = 300;
  const auto& t = block.m.token;
  const bool last = i + 1 == t.count;
  const WorkRange& s = block.work(last ? Stage::head : Stage::qkv);
  const uint8_t* const data = last ? t.head.w.data : layers_of(t)[i + 1].qkv.w.data;
  const auto offset_of = [&](uint32_t weight_tile) {
    return weight_tile / s.weight_tiles * s.row_tile_bytes + weight_tile % s.weight_tiles * s.weight_tile_bytes;
  };
  const int64_t end = offset_of(s.range.end);
  int64_t at = offset_of(s.range.begin);
#pragma unroll 1
  for (uint32_t n = 0; n < kRequests && at < end; ++n, at += kRequestBytes) {
    if (threadIdx.x % 32 == 0)
      ptx::prefetch_to_l2_keeping(data + at, uint32_t(end - at < kRequestBytes ? end - at : kRequestBytes));
    ptx::sleep(kPauseNs);
  }
  __syncwarp();
}

template <TokenVariant V>
__device__ __forceinline__ void copy_weights(const TokenContext<V>& block, megakernel::WeightWriter& ring, Stage stage,
                                             uint32_t i) {
  const LayerOf<V>& l = block.layer(i);
  const WorkRange& s = block.work(stage);
  const uint8_t* const data = block.matrix(stage, l).data;
  const uint32_t end = s.end_chunk;
  bool chooses = !V.dense_mlp && stage == Stage::gate_up;
#pragma unroll 1
  for (uint32_t first = s.first_chunk; first < end || chooses; first += 32) {
    // Each lane computes the address of one chunk, because a single lane would take too long for all. The addresses are
    // computed before the experts are known.
    Chunk p = s.chunk(min(first + threadIdx.x % 32, end - 1), data);
    if constexpr (V.family && !V.dense_mlp)
      if (chooses) prefetch_next_layer(block, i);
    if constexpr (!V.dense_mlp)
      if (chooses) router::choose(block, l.router, i % 2);
    chooses = false;
    if (first >= end) return;
    s.move_to_expert(p);
    const uint32_t bytes = p.count * uint32_t(s.weight_tile_bytes), count = min(end - first, 32u);
#pragma unroll 1
    for (uint32_t lane = 0; lane < count; ++lane) ring.put(lane, p.data, bytes, note_of(p));
  }
}

// chunks in flight in a long context, where no grid barrier is near enough to be delayed
constexpr uint32_t kKeyChunksAhead = 6;

// Copies the keys and values of earlier tokens for the block's units of attention.
template <TokenVariant V>
__device__ __forceinline__ void copy_keys(const TokenContext<V>& block, megakernel::WeightWriter& ring,
                                          const decode_attention::Params& p, const split_kv_attention::Keys& keys) {
  using Attention = typename TokenContext<V>::Attention;
  constexpr uint32_t kRow = TokenContext<V>::kHeadDim * 2, kKeys = TokenContext<V>::kChunkKeys;
  static_assert(2 * kKeys * kRow <= megakernel::kSlotBytes, "a slot has room for a chunk's keys and values");
  static_assert(split_kv_attention::kChunkWarps == megakernel::kTeamWarps, "a team reads a chunk");
  const megakernel::WeightRing& r = block.m.token.stream;
  // Parts with more keys belong to a long context. With 8 keys to a warp the limit is a chunk for each team.
  constexpr uint32_t kFew = TokenContext<V>::kWarpKeys == 8 ? megakernel::kTeams * kKeys : TokenContext<V>::kRoundKeys;
  const uint32_t units = Attention::units(p, keys),
                 ahead = keys.each > kFew ? min(kKeyChunksAhead, r.slots - megakernel::kTeams) : r.ahead;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const split_kv_attention::Unit u = Attention::unit_of(p, keys, unit);
    const uint32_t chunks = Attention::chunks_of(u);
#pragma unroll 1
    for (uint32_t first = 0; first < chunks; first += 32) {
      const uint32_t chunk = min(first + threadIdx.x % 32, chunks - 1), count = min(chunks - first, 32u);
      const split_kv_attention::KeyRows r = Attention::rows_of(p, u, chunk);
#pragma unroll 1
      for (uint32_t lane = 0; lane < count; ++lane)
        ring.put_pieces(lane, 2 * (r.rows + r.others) * kRow, {chunk}, ahead, r,
                        [&](char* slot, const split_kv_attention::KeyRows& r, auto&& load) {
#pragma unroll 1
                          for (uint32_t i = 0; i < 2; ++i, slot += kKeys * kRow) {
                            const bf16* const from = i == 0 ? p.keys : p.values;
                            load(slot, from + r.first, r.rows * kRow);
                            if (r.others > 0) load(slot + r.rows * kRow, from + r.begin, r.others * kRow);
                          }
                        });
    }
  }
}

// The loop of the copying warp: requests everything that the block reads for a token, stage by stage, as soon as slots
// become free.
template <TokenVariant V> __device__ __forceinline__ void copy_token(const TokenContext<V>& block) {
  const Token& t = block.m.token;
  megakernel::WeightWriter ring(t.stream, block.m.stream, block.memory + t.ring);
  uint32_t i = 0;
#pragma unroll 1
  for (Stage stage = Stage::qkv; stage != Stage::head || t.head_rows > 0; stage = Stage(int(stage) + 1)) {
    if constexpr (V.dense_mlp)
      if (stage == Stage::qkv && i > 0) layer_arguments::wait(block, i);
    if (stage == Stage::attention)
      copy_keys(block, ring, block.layer(i).attention, block.m.keys[i % 2]);
    else
      copy_weights(block, ring, stage, i);
    if (stage == Stage::head) return;
    if (ends_layer(stage) && ++i < t.count) stage = Stage(int(Stage::qkv) - 1);
  }
}
// The loop of a block's last warp in the form where the multiplying warps copy their own weights: this warp copies
// nothing and only chooses the experts.
template <TokenVariant V> __device__ __forceinline__ void choose_experts(const TokenContext<V>& block) {
#pragma unroll 1
  for (uint32_t i = 0; i < block.m.token.count; ++i) router::choose(block, block.layer(i).router, i % 2);
}

}  // namespace loader
}  // namespace ingot::decode
