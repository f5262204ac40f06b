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
//   token_stages.cuh        the parts of a stage: prefetch, wait, activation vector, product, end
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
#include "ingot/models/decode/megakernel/token_stages.cuh"

namespace ingot::decode {

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
// The kernel of the families. AnyToken is DenseToken or MixtureToken.
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
