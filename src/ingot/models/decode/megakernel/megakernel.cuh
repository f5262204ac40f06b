#pragma once
// A whole token by one persistent kernel with one block per SM. One warp of a block copies the block's part of the
// weights into a ring (megakernel/weight_stream.cuh), as far ahead as the router allows; fifteen warps multiply the
// weights that have arrived. A grid barrier follows each stage:
//   qkv | attention | output, with the router's logits | gate and up | down | ... | head
// Blocks publish results as words with ready flags (megakernel/sums.cuh, tile/epoch_words.cuh, TokenSums). A grid
// barrier therefore needs no fence, and a block may signal its arrival before its words are visible. Attention waits
// only for the words of its own heads. Every block keeps a copy of the whole residual stream and adds the sums of all
// blocks to this copy; the copying warp of each block chooses the experts.
//
// This file has the loop over the stages, the kernel and its launch. The other files:
//   stage_table.h           the stages and their properties
//   work_range.h            the weight tiles of a block
//   token_context.cuh       a block's memory, which all parts take by reference
//   loader.cuh              the copying warp; the next layer's arguments, in models with dense MLPs
//   warp_weights.cuh        weights without the copy engine, where each multiplying warp copies its own
//   activation_vectors.cuh  the activation vectors of the products
//   products.cuh            weights times activation vector
//   epilogue.cuh            the epilogue of the products
//   token_attention.cuh     attention
//   router.cuh              the choice of experts
//   head_norms.cuh          queries, keys and values of attention in models of the families
//   rank_exchange.cuh       exchange between several GPUs
//   prefilter/prefiltered_head.cuh  the head with the int8 prefilter
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
// visible: readers that find incomplete words load the words again. Not where the readers wait for the parts of other
// GPUs.
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

// The loop of the multiplying warps. `top` is the largest sum of logit and noise among this thread's rows. All products
// share one piece of code, as do all grid barriers, because a program larger than the instruction cache is slowed by
// instruction fetches.
template <TokenVariant V>
__device__ __forceinline__ void compute_token(const TokenContext<V>& block, sampling::Best& top) {
  block.grid_barriers.begin();
  auto weights = [&] {
    if constexpr (V.warp_rings)
      return WarpWeights<V>(block);
    else
      return megakernel::WeightReader(block.m.token.stream, block.m.stream, block.memory + block.m.token.ring,
                                      threadIdx.x / 32 / megakernel::kTeamWarps, megakernel::kTeams);
  }();
  embed_token(block);
  TokenStep step;
  Prefetched<V> prefetched;
#pragma unroll 1
  for (bool begins = true;; begins = false) {
    if (!begins) {
      const bool is_finished = compute(block, step, prefetched, weights);
      if (!V.prefiltered && is_finished && step.stage == Stage::head) {
        if (epilogue::includes_thread<V>(Stage::head) && !block.work(Stage::head).is_empty())
          top = epilogue::best(block);
        break;
      }
      is_finished ? finish_stage(block, step) : ComputeThreads::sync();
      advance<V>(step, is_finished, block.m.token.count);
    }
    prefetch(block, step, prefetched, weights);
    if (begins || step.is_continued) continue;
    wait_for_results(block, step);
    if (step.stage != Stage::head) continue;
    if (block.m.token.head_rows == 0) break;
    if constexpr (V.prefiltered) {
      prefiltered_head::run(block, top, weights);
      break;
    }
  }
  block.grid_barriers.end();
}

// In a traced kernel: records, behind the block's times, the bytes of weights that this block reads in each stage.
template <TokenVariant V> __device__ __forceinline__ void record_bytes(const TokenContext<V>& block) {
  const megakernel::Trace& t = block.m.token.grid.trace;
  if (blockIdx.x >= t.blocks || threadIdx.x >= kTracedBytes) return;
  const WorkRange& s = block.m.work[threadIdx.x];
  const uint32_t row_tiles = (s.range.end - 1) / s.weight_tiles - s.range.begin / s.weight_tiles + 1;
  const auto bytes_of_router = [&]() -> uint64_t {
    if constexpr (V.dense_mlp)
      return 0;
    else
      return uint64_t(row_tiles) * block.layer(0).router.w.row_tiles * router::kStepBytes;
  };
  t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + threadIdx.x] =
      uint64_t(s.range.end - s.range.begin) * uint64_t(s.weight_tile_bytes) +
      (threadIdx.x == uint32_t(Stage::output) && !s.is_empty() ? bytes_of_router() : 0);
}

// Fills the block's shared memory.
template <TokenVariant V>
__device__ __forceinline__ void begin_token(const TokenContext<V>& block, const TokenOf<V>& token) {
  TokenMemory<V>& m = block.m;
  copy_words(m.token, token);
  copy_words(m.layers[0], layers_of(token)[0]);
  if constexpr (V.ranks) rank_exchange::begin(block, *token.ranks);
  for (uint32_t i = threadIdx.x; i < sizeof(m.sums) / 4; i += blockDim.x) (&m.sums[0][0][0])[i] = 0;
  if (threadIdx.x == 0) {
    if constexpr (!V.warp_rings) {
      m.stream.begin();
      ptx::mbarrier_init(&m.logits_ready, kTokenWarps);
      ptx::fence_mbarrier_init();
    }
    m.position = uint32_t(__ldcg(&token.embedding.state->position));
    m.noise = {__ldcg(&token.head.noise->seed), __ldcg(&token.head.noise->step),
               __ldcg(&token.head.noise->temperature)};
    m.epoch = ptx::load_relaxed(token.last_epoch) + 1;  // the memory starts as zeros, so the first epoch is 1
  }
  __syncthreads();
  const auto& rotation = m.layers[0].attention;
  if (threadIdx.x == 0) m.keys[0] = {rotation, m.position, TokenContext<V>::kRoundKeys, TokenContext<V>::kPartStep};
  if (!V.family && threadIdx.x < rotation.dim / 2) {
    m.cos[threadIdx.x] = rotation.cos[size_t(m.position) * (rotation.dim / 2) + threadIdx.x];
    m.sin[threadIdx.x] = rotation.sin[size_t(m.position) * (rotation.dim / 2) + threadIdx.x];
  }
  if (threadIdx.x < kStageCount) {
    const Stage stage = Stage(threadIdx.x);
    m.work[threadIdx.x] = loader::work_range(block, stage, block.layer(0));
    if constexpr (V.warp_rings)
      m.stream[threadIdx.x] =
          WarpSteps(m.work[threadIdx.x], block.uses_experts(stage) ? kTileSteps<V.experts> : kTileSteps<V.dense>);
  }
  __syncthreads();
  if constexpr (V.traced) record_bytes(block);
}
// Runs after all blocks have computed: appends the token, or without a head only advances the position.
template <TokenVariant V>
__device__ __forceinline__ void end_token(const TokenContext<V>& block, const sampling::Best& top) {
  const NormProduct& head = block.m.token.head;
  if (block.m.token.head_rows == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && block.grid_barriers.all_came()) head.state->position += 1;
    if constexpr (V.ranks) rank_exchange::end(block, blockIdx.x == 0 && threadIdx.x == 0);
    return;
  }
  uint64_t key;
  const bool last = likeliest_of_grid(head, top, key);
  if constexpr (V.ranks) key = last ? rank_exchange::largest_key(block, key) : 0;
  if (last && block.grid_barriers.all_came()) append(head, key);
  if constexpr (V.ranks) rank_exchange::end(block, last);
}

template <TokenVariant V>
__device__ __forceinline__ void run_token(const TokenContext<V>& block, const TokenOf<V>& token) {
  begin_token(block, token);
  sampling::Best top;
  if (threadIdx.x < kTokenThreads)
    compute_token(block, top);
  else if constexpr (V.warp_rings)
    loader::choose_experts(block);
  else
    loader::copy_token(block);
  __syncthreads();
  end_token(block, top);
}

// The kernel's parameters: the token, and for a prefiltered variant its head.
template <class AnyToken, bool kPrefiltered> struct TokenArguments {
  AnyToken token;
  __device__ __forceinline__ const PrefilteredHead* prefiltered_head() const { return nullptr; }
};
template <class AnyToken> struct TokenArguments<AnyToken, true> {
  AnyToken token;
  PrefilteredHead head;
  __device__ __forceinline__ const PrefilteredHead* prefiltered_head() const { return &head; }
};

// The template arguments are the fields of a TokenVariant: nvcc does not compile a kernel whose argument is a struct.
template <WeightFormat kDense, WeightFormat kExperts, bool kTraced, bool kRanks, bool kPrefiltered, bool kWarpRings>
__global__ void __launch_bounds__(kTokenThreads + 32, 1)
    token_kernel(const __grid_constant__ TokenArguments<Token, kPrefiltered> p) {
  constexpr TokenVariant kVariant{.dense = kDense,
                                  .experts = kExperts,
                                  .traced = kTraced,
                                  .ranks = kRanks,
                                  .prefiltered = kPrefiltered,
                                  .warp_rings = kWarpRings};
  const TokenContext<kVariant> block(tile::dynamic_shared<char>(), p.prefiltered_head());
  run_token(block, p.token);
}
// Of the families. AnyToken is DenseToken or MixtureToken.
template <WeightFormat kFormat, class AnyToken, uint32_t kHeadDim, bool kTraced, bool kPrefiltered>
__global__ void __launch_bounds__(kTokenThreads + 32, 1)
    family_token_kernel(const __grid_constant__ TokenArguments<AnyToken, kPrefiltered> p) {
  constexpr TokenVariant kVariant{.dense = kFormat,
                                  .experts = kFormat,
                                  .traced = kTraced,
                                  .prefiltered = kPrefiltered,
                                  .family = true,
                                  .dense_mlp = std::is_same_v<AnyToken, DenseToken>,
                                  .head_dim = kHeadDim};
  const TokenContext<kVariant> block(tile::dynamic_shared<char>(), p.prefiltered_head());
  run_token(block, p.token);
}

// --- launcher

template <class Layer> BlockWork work_of_block(const Token& t, const Layer& l, uint32_t blocks) {
  const auto shared_rows = [&](const Matrix& w, uint32_t slots) {
    return weight_tiles_per_block(uint64_t(w.row_tiles) * slots, w.weight_tiles, blocks);
  };
  const auto whole_rows = [&](const Matrix& w, uint32_t slots) {
    return whole_row_tiles_per_block(uint64_t(w.row_tiles) * slots, w.weight_tiles, blocks);
  };
  // The experts' terms of a row of down are added in a single block, before they become a term of the row's sum.
  const uint32_t output = shared_rows(l.output.w, 1),
                 down = std::max(shared_rows(l.down.w, t.k), t.k > 1 ? l.down.w.weight_tiles * t.k : 0);
  BlockWork work{{shared_rows(l.qkv.w, 1), 0, output, whole_rows(l.gate_up.w, t.k), down, whole_rows(t.head.w, 1)}};
  work.router_blocks = (l.output.w.row_tiles * l.output.w.weight_tiles + output - 1) / output;
  if (t.ranks != nullptr) {
    const uint32_t each = exchanged_row_tiles(t.embedding.C, blocks);
    work.router_blocks = ((t.embedding.C + 15) / 16 + each - 1) / each;
  }
  return work;
}

template <TokenVariant V>
void Megakernel<V>::launch(const TokenOf<V>& token, const PrefilteredHead& head, const LayerOf<V>& layer,
                           const TokenLimits& limits, Stream stream) {
  TokenOf<V> placed = token;
  place_memory<V>(placed, layer, limits.shared_bytes);
  gpu::Launch at{.block = kTokenThreads + 32,
                 .smem = placed.bytes,
                 .device = std::max(0, gpu::current_device()),
                 .cooperative = true};
  const auto launch_on = [&](auto kernel) {
    at.grid = limits.exact ? limits.blocks : std::min(gpu::resident_blocks("decode token", kernel, at), limits.blocks);
    placed.work = work_of_block(placed, layer, uint32_t(at.grid));
    TokenArguments<TokenOf<V>, V.prefiltered> p{placed};
    if constexpr (V.prefiltered) p.head = head;
    gpu::launch("decode token", kernel, at, stream, p);
  };
  if constexpr (V.family)
    launch_on(family_token_kernel<V.dense, TokenOf<V>, V.head_dim, V.traced, V.prefiltered>);
  else
    launch_on(token_kernel<V.dense, V.experts, V.traced, V.ranks, V.prefiltered, V.warp_rings>);
}

}  // namespace ingot::decode
