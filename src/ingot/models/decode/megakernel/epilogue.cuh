#pragma once
// The epilogue of a token's products. Decides which thread finishes which row, prefetches the constants of the row
// while the activation vector is being loaded, and sends the finished number to the sums of all blocks, to the other
// ranks, to the activation vectors of `down`, or to the logits.
#include "ingot/models/decode/megakernel/rank_exchange.cuh"

namespace ingot::decode {
namespace epilogue {

// The index of this thread in the set of epilogue threads that finishes the rows of `stage`. A thread outside the set
// gets kEpilogueThreadsOf<V> or more.
template <TokenVariant V> __device__ __forceinline__ uint32_t thread(Stage stage) {
  return threadIdx.x - (adds_to_residual(stage) ? kFirstResidualThread : kTokenThreads - kEpilogueThreadsOf<V>);
}
template <TokenVariant V> __device__ __forceinline__ bool includes_thread(Stage stage) {
  return thread<V>(stage) < kEpilogueThreadsOf<V>;
}
template <TokenVariant V> __device__ __forceinline__ EpilogueRow& row(const TokenContext<V>& block, Stage stage) {
  return block.m.rows[adds_to_residual(stage)][thread<V>(stage)];
}

template <TokenVariant V>
__device__ __forceinline__ float load_bias(const TokenContext<V>& block, Stage stage, const LayerOf<V>& l,
                                           uint32_t rows, uint32_t slot, uint32_t n) {
  const float* const bias = stage == Stage::qkv       ? l.qkv.bias
                            : stage == Stage::output  ? l.output.bias
                            : stage == Stage::gate_up ? l.gate_up.bias
                            : stage == Stage::down    ? l.down.bias
                                                      : nullptr;
  if (bias == nullptr) return 0;
  if (!block.uses_experts(stage)) return bias[n];
  const int32_t* const chosen = block.chosen();
  if (!adds_to_residual(stage)) return bias[int64_t(chosen[slot]) * rows + n];
  float sum = 0;
#pragma unroll 4
  for (uint32_t j = 0; j < block.m.token.k; ++j) sum += block.choice().weights[j] * bias[int64_t(chosen[j]) * rows + n];
  return sum;
}
__device__ __forceinline__ void prefetch(float& to, const float* from) {
  ptx::cp_async<4>(ptx::shared_address(&to), from);
}
// Finds the row that this thread will finish in the round that begins with the sums `round`, and prefetches its
// constants.
template <TokenVariant V>
__device__ __forceinline__ RowConstants begin_row(const TokenContext<V>& block, Stage stage, const LayerOf<V>& l,
                                                  const WorkRange& s, uint32_t round) {
  RowConstants constants{.scale = 1};
  const uint32_t v = round + thread<V>(stage) / 16, first_tile = v * s.tiles_per_sums();
  if (!includes_thread<V>(stage)) return constants;
  EpilogueRow& place = row(block, stage);
  place.bits = 0;
  if (v >= s.end_sums) return constants;
  const bool begins = s.range.begin <= first_tile, ends = s.range.end >= first_tile + s.tiles_per_sums();
  const uint32_t slot = stage == Stage::gate_up ? v / s.row_tiles : 0, row_tile = v - slot * s.row_tiles,
                 n = 16 * row_tile + threadIdx.x % 16;
  const Matrix& w = block.matrix(stage, l);
  place = {n, 32 * slot + EpilogueRow::kExists + (begins ? EpilogueRow::kBegins + EpilogueRow::kTerm : 0) +
                  (ends ? EpilogueRow::kTerm : 0) + (n < w.rows ? EpilogueRow::kInside : 0)};
  const float* const scale =
      V.dense == WeightFormat::fp8 && !block.uses_experts(stage)
          ? reinterpret_cast<const float*>(w.data + row_tile * w.row_tile_bytes +
                                           w.weight_tiles * weight_tiles::Form<V.dense>::kBytes) +
                threadIdx.x % 16
          : nullptr;
  if (stage == Stage::output) {
    // The constants of these rows are copied to shared memory during attention, and so take no registers.
    RowConstants& to = block.m.output_rows[thread<V>(stage)];
    to = {};
    if (scale != nullptr)
      prefetch(to.scale, scale);
    else
      to.scale = 1;
    if constexpr (!V.dense_mlp)
      if (n < w.rows) prefetch(to.gain, l.router.weight + n);
    if (n < w.rows && l.output.bias != nullptr && place.begins()) prefetch(to.bias, l.output.bias + n);
    return constants;
  }
  if (scale != nullptr) constants.scale = *scale;
  if (!V.prefiltered && yields_logits(stage)) constants.gain = block.m.noise.of(head_id(block, n));
  // With experts the bias of gate and up depends on the experts, which are not chosen yet (load_chosen_bias()).
  if (n < w.rows && (V.dense_mlp || stage != Stage::gate_up)) constants.bias = load_bias(block, stage, l, w.rows, 0, n);
  return constants;
}
// Loads the bias of gate and up after the experts have been chosen.
template <TokenVariant V>
__device__ __forceinline__ void load_chosen_bias(const TokenContext<V>& block, const LayerOf<V>& l,
                                                 RowConstants& constants) {
  constexpr Stage stage = Stage::gate_up;
  if (!includes_thread<V>(stage)) return;
  const EpilogueRow& place = row(block, stage);
  if (place.inside()) constants.bias = load_bias(block, stage, l, l.gate_up.w.rows, place.slot(), place.row);
}

// The largest sum of logit and noise among the rows of an epilogue thread.
template <TokenVariant V> __device__ __forceinline__ sampling::Best& best(const TokenContext<V>& block) {
  return reinterpret_cast<sampling::Best*>(block.head_memory())[thread<V>(Stage::head)];
}
// For tests of a missing block: the last block withholds its queries, keys and values. The other blocks wait for these
// words, not at a grid barrier.
template <TokenVariant V> __device__ __forceinline__ bool keeps_qkv_back(const TokenContext<V>& block, uint32_t i) {
  return block.m.token.grid.missing == kGridBarriersPerLayer * i + uint32_t(Stage::qkv) && blockIdx.x == gridDim.x - 1;
}
// `y` is this block's part of the row's sum, already scaled.
template <TokenVariant V>
__device__ __forceinline__ void finish_row(const TokenContext<V>& block, Stage stage, const LayerOf<V>& l, uint32_t i,
                                           uint32_t round, const EpilogueRow& place, const RowConstants& constants,
                                           float y) {
  const bool inside = place.inside() && !(stage == Stage::qkv && keeps_qkv_back(block, i));
  if (stage == Stage::gate_up) {
    y += constants.bias;
    const float up = __shfl_xor_sync(~0u, y, 1);
    constexpr Gate swiglu{.limit = 0, .alpha = 1, .up_offset = 0, .cubic = 0};
    const float channel = V.family ? gated(y, up, swiglu) : gated(y, up, l.gate_up.limit, l.gate_up.alpha);
    return publish_channel(block, place, l.gate_up.w, channel);
  }
  if (!V.prefiltered && yields_logits(stage)) {
    sampling::Best top;
    if (round > block.work(stage).first_sums) top = best(block);
    const NormProduct& head = block.m.token.head;
    if (inside) {
      head.y[place.row] = y;
      const uint32_t id = head_id(block, place.row);
      if (id < head.vocab) top.add(block.m.noise.sum(constants.gain, y), id);
    }
    best(block) = top;
    return;
  }
  if (place.begins()) y += constants.bias;
  if constexpr (V.ranks)
    if (stage != Stage::qkv) {  // output and down, whose numbers are added to the residual stream
      if (inside) rank_exchange::send_term(block, i, stage, place, y);
      return;
    }
  const bool routes = stage == Stage::output;
  if (inside)
    RowSum::add((routes                ? block.output_sums()
                 : stage == Stage::qkv ? block.qkv_sums(i)
                                       : block.down_sums(i)) +
                    place.row,
                y, place.terms());
  if (V.dense_mlp || !routes || !place.exists()) return;
  router::put_input(block, thread<V>(stage) / 16, threadIdx.x % 16,
                    inside ? constants.gain * (y + (place.begins() ? block.x()[place.row] : 0)) : 0);
}
// Called by the epilogue threads of the stage, in whole warps, after a barrier: adds a row's sums of all warps,
// finishes the row, and resets the sums to zero.
template <TokenVariant V>
__device__ __forceinline__ void finish_round(const TokenContext<V>& block, Stage stage, const LayerOf<V>& l, uint32_t i,
                                             uint32_t round, RowConstants constants, float output_scale) {
  if (stage == Stage::output) constants = block.m.output_rows[thread<V>(stage)];
  float(&sums)[kTokenWarps][16] = block.m.sums[thread<V>(stage) / 16];
  const uint32_t n = threadIdx.x % 16;
  const EpilogueRow place = row(block, stage);
  finish_row(block, stage, l, i, round, place, constants, sum_of_warps(sums, n) * (output_scale * constants.scale));
  if (place.exists())
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][n] = 0;
}

}  // namespace epilogue
}  // namespace ingot::decode
