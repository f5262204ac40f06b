#pragma once
// The parts of a stage of the token kernel, as the multiplying warps execute them: prefetch, the wait for the stage
// before, the activation vector, the product with its epilogue, and the end of the stage.
#include "ingot/gpu/launch.h"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/models/decode/megakernel/epilogue.cuh"
#include "ingot/models/decode/megakernel/loader.cuh"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/megakernel/products.cuh"
#include "ingot/models/decode/megakernel/token_attention.cuh"
#include "ingot/models/decode/megakernel/warp_weights.cuh"
#include "ingot/models/decode/prefilter/prefiltered_head.cuh"

namespace ingot::decode {

// The position of the multiplying warps in the program: a round of a stage.
struct TokenStep {
  Stage stage = Stage::qkv;
  uint32_t layer = 0;
  uint32_t round = 0;         // the first group of sums of the round
  bool is_continued = false;  // an earlier round of the same product preceded this round
};
// The data of a step that are loaded before its activation vector is complete.
template <TokenVariant V> struct Prefetched {
  RowConstants row;
  PrefetchedChunk<V> chunk;
};

// Whether a block signals its arrival when its first warps have multiplied their last weights, before the results are
// visible. This is possible because readers load incomplete words again. It is not done in stages whose readers wait
// for the parts of other GPUs.
template <TokenVariant V> __device__ __forceinline__ bool arrives_early(Stage stage) {
  return stage == Stage::gate_up || (!V.ranks && adds_to_residual(stage));
}

template <TokenVariant V> __device__ __forceinline__ void embed_token(const TokenContext<V>& block) {
  const Embedding& e = block.m.token.embedding;
  // A step that was started before the host noticed an error finds the token -1.
  const bf16* const row = e.table + int64_t(max(__ldcg(&e.state->tokens[0]), 0)) * e.C;
  for (uint32_t c = threadIdx.x; c < weight_tiles::padded(e.C); c += kTokenThreads)
    block.x()[c] = c < e.C ? float(row[c]) : 0;
  ComputeThreads::sync();
}
// One thread of the grid brings a norm's weight into the L2 cache.
__device__ __forceinline__ void prefetch_norm(const float* weight, const Matrix& w) {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 32) ptx::prefetch_to_l2(weight, w.cols * 4 / 16 * 16);
}

// Prefetches everything of a step that does not depend on the results of other blocks.
template <TokenVariant V>
__device__ __forceinline__ void prefetch(const TokenContext<V>& block, TokenStep& step, Prefetched<V>& prefetched,
                                         typename TokenContext<V>::WeightReader& weights) {
  const Stage stage = step.stage;
  const uint32_t i = step.layer;
  const auto& token = block.m.token;
  const LayerOf<V>& l = block.layer(i);
  // The output's rows are prepared during attention, while the queries are being loaded: all threads wait for attention
  // at that point.
  const Stage product = stage == Stage::attention ? Stage::output : stage;
  const WorkRange& s = block.work(product);
  if (!step.is_continued) step.round = s.first_sums;
  if (stage != Stage::output || step.is_continued)
    prefetched.row = epilogue::begin_row(block, product, l, s, step.round);
  prefetched.chunk = {};
  if (stage == Stage::attention) {
    clear_used_words(block, i);
    const bool last = i + 1 == token.count;
    if constexpr (V.dense_mlp)
      if (i > 0) layer_arguments::wait_for_loader();
    if (!last) copy_words_async(block.m.layers[(i + 1) % 2], layers_of(token)[i + 1]);
    if (!last && threadIdx.x == 0)
      block.m.keys[(i + 1) % 2] = {layers_of(token)[i + 1].attention, block.m.position, TokenContext<V>::kRoundKeys,
                                   TokenContext<V>::kPartStep};
    return;
  }
  if (stage == Stage::gate_up) {
    prefetch_norm(l.gate_up.weight, l.gate_up.w);
  } else if (stage == Stage::down) {
    if constexpr (!V.dense_mlp) {
      const ChoiceMemory m = block.choice();
      if (blockIdx.x == 0) routing::make_lists(m.chosen, m.weights, l.router.k, l.router.lists);
    }
  } else {
    const NormProduct& p = yields_logits(stage) ? token.head : l.qkv;
    prefetch_norm(p.weight, p.w);
  }
  if constexpr (V.prefiltered)
    if (yields_logits(stage)) return prefiltered_head::write_noise(block);
  if constexpr (!V.warp_rings)
    if (!block.uses_experts(stage))
      prefetch_chunk<V>(step.round, s.chunks_in_round(step.round, kRoundGroupsOf<V>), weights, prefetched.chunk);
}

// Completes the wait for the stage before `step`.
template <TokenVariant V>
__device__ __forceinline__ void wait_for_results(const TokenContext<V>& block, const TokenStep& step) {
  if (step.stage != Stage::attention) block.grid_barriers.wait(false);
  if constexpr (!V.dense_mlp)
    if (step.stage == Stage::gate_up) router::route(block, block.layer(step.layer));
  // all blocks have read the epoch
  if (step.stage == Stage::output && step.layer == 0 && blockIdx.x == 0 && threadIdx.x == 0)
    ptx::store_relaxed(block.m.token.last_epoch, block.m.epoch - 1 + block.m.token.count);
}

// Writes the activation vector of a product, unless an earlier round of the product has written the vector.
template <TokenVariant V>
__device__ __forceinline__ void write_vector(const TokenContext<V>& block, const TokenStep& step,
                                             Prefetched<V>& prefetched,
                                             typename TokenContext<V>::WeightReader& weights) {
  const Stage stage = step.stage;
  const uint32_t i = step.layer;
  const LayerOf<V>& l = block.layer(i);
  if (!V.dense_mlp && stage == Stage::gate_up) {  // the router has written the vector
    epilogue::load_chosen_bias(block, l, prefetched.row);
  } else if (stage == Stage::output) {
    write_attention_vector<V.dense>(block, step.is_continued ? 0 : l.output.w.cols, block.m.epoch + i, [&] {
      join_copies();
      if constexpr (V.dense_mlp) {
        if (!step.is_continued) layer_arguments::announce(block);
      } else if (!V.ranks)
        router::prefetch_weights(block, l, step.round,
                                 block.work(stage).groups_in_round(step.round, kRoundGroupsOf<V>));
    });
  } else if (step.is_continued) {
    // The vector of the preceding round is still in place.
  } else if (stage == Stage::down) {
    write_expert_vectors(block, l.down.w.cols, block.m.token.k);
  } else if (V.dense_mlp && stage == Stage::gate_up) {
    write_normed_vector<V.dense>(block, l.gate_up.weight, l.gate_up.w, block.output_sums());
  } else {
    const NormProduct& p = stage == Stage::qkv ? l.qkv : block.m.token.head;
    write_normed_vector<V.dense>(block, p.weight, p.w, i > 0 ? block.down_sums(i - 1) : nullptr);
  }
  if constexpr (V.warp_rings) weights.fill(stage, i);
  ComputeThreads::sync();
}

// Computes one round of this block's part of a product, up to publishing the result words.
template <TokenVariant V>
__device__ __forceinline__ void multiply(const TokenContext<V>& block, const TokenStep& step, Prefetched<V>& prefetched,
                                         typename TokenContext<V>::WeightReader& weights) {
  write_vector(block, step, prefetched, weights);
  const Stage stage = step.stage;
  const LayerOf<V>& l = block.layer(step.layer);
  const WorkRange& s = block.work(stage);
  const bool experts = block.uses_experts(stage), routes = !V.ranks && !V.dense_mlp && stage == Stage::output,
             last = step.round + kRoundGroupsOf<V> >= s.end_sums;
  float output_scale =
      experts ? weight_tiles::Form<V.experts>::kOutputScale : weight_tiles::Form<V.dense>::kOutputScale;
  // the product multiplies the normalized residual stream
  if (epilogue::includes_thread<V>(stage) && !adds_to_residual(stage))
    output_scale *= residual_rstd(block, stage == Stage::qkv       ? l.qkv.eps
                                         : stage == Stage::gate_up ? l.gate_up.eps
                                                                   : block.m.token.head.eps);
  const uint32_t chunks = s.chunks_in_round(step.round, kRoundGroupsOf<V>);
  if constexpr (V.warp_rings) {
    if (experts)
      multiply_steps<V.experts, true>(block, s, (stage == Stage::down ? l.down.w : l.gate_up.w).data,
                                      block.m.stream[int(stage)], step.round, weights);
    else
      multiply_steps<V.dense, false>(block, s, nullptr, block.m.stream[int(stage)], step.round, weights);
  } else if (experts)
    multiply_chunks<V.experts, true>(block, s, (stage == Stage::down ? l.down.w : l.gate_up.w).data, chunks, step.round,
                                     prefetched.chunk, weights);
  else
    multiply_chunks<V.dense, false>(block, s, nullptr, chunks, step.round, prefetched.chunk, weights);
  if (last && arrives_early<V>(stage)) block.grid_barriers.announce();
  if (s.is_empty()) return;
  ComputeThreads::sync();
  if (epilogue::includes_thread<V>(stage))
    epilogue::finish_round(block, stage, l, step.layer, step.round, prefetched.row, output_scale);
  if constexpr (!V.dense_mlp)
    if (routes) {
      ComputeThreads::sync();
      router::add_logits(block, l, step.round, s.groups_in_round(step.round, kRoundGroupsOf<V>), last ? 1 : 0);
    }
}

// Ends a stage: the first half of its grid barrier.
template <TokenVariant V>
__device__ __forceinline__ void finish_stage(const TokenContext<V>& block, const TokenStep& step) {
  const Stage stage = step.stage;
  if constexpr (V.ranks)
    if (adds_to_residual(stage)) rank_exchange::add_ranks(block, step.layer, stage, block.layer(step.layer));
  // Where the block has already signalled its arrival, the first warp begins to wait while the epilogue threads finish
  // their rows.
  const bool arrived = stage == Stage::attention ? blockIdx.x < block.units(step.layer) : arrives_early<V>(stage);
  block.grid_barriers.end_stage(!arrived);
  if (stage == Stage::qkv)
    block.grid_barriers.pass();
  else if (!arrived)
    block.grid_barriers.announce(stage == Stage::attention && block.m.clears != 0);
}
// Computes a step. Returns whether the step was the last of its stage.
template <TokenVariant V>
__device__ __forceinline__ bool compute(const TokenContext<V>& block, const TokenStep& step, Prefetched<V>& prefetched,
                                        typename TokenContext<V>::WeightReader& weights) {
  if (step.stage == Stage::attention) {
    attend(block, step.layer, weights);
    return true;
  }
  multiply(block, step, prefetched, weights);
  return step.round + kRoundGroupsOf<V> >= block.work(step.stage).end_sums;
}
template <TokenVariant V> __device__ __forceinline__ void advance(TokenStep& step, bool is_finished, uint32_t layers) {
  step.is_continued = !is_finished;
  if (!is_finished)
    step.round += kRoundGroupsOf<V>;
  else if (!ends_layer(step.stage))
    step.stage = Stage(int(step.stage) + 1);
  else
    step.stage = ++step.layer == layers ? Stage::head : Stage::qkv;
}

}  // namespace ingot::decode
