#pragma once
// A step of up to 8 rows by one persistent kernel with one block per SM. As in the token kernel
// (megakernel/megakernel.cuh), one warp of a block copies weights into a ring, across grid barriers, fifteen warps
// multiply the weights that have arrived, and blocks publish results as words with ready flags. The differences from
// the token kernel: all eight columns of the matrix instructions are used; the residual stream stays in global memory
// as sums; a team of three warps computes a whole unit of work, so that the unit's sum does not depend on how the
// blocks share the units; the router's logits are computed where a block turns channels of the residual stream into
// activation vectors of gate and up; and the distinct experts of all rows are listed once, each with the rows that
// chose the expert.
//    qkv | attention | output | router, gate and up | down | ... | head
//
//   row_context.cuh    a block's memory
//   row_vectors.cuh    activation vectors, and the router's logits
//   row_products.cuh   products
//   row_attention.cuh  attention
//   row_router.cuh     the choice of experts
//   row_loader.cuh     the copying warp
#include "ingot/gpu/launch.h"
#include "ingot/models/decode/row_kernel/row_loader.cuh"
#include "ingot/models/decode/row_kernel/row_products.cuh"
#include "ingot/models/decode/row_kernel/row_router.cuh"

namespace ingot::decode::rows {

// Resets the results of the preceding layer to zero. All blocks have read these results when the experts of a layer are
// chosen, and no block publishes results of the next layer before that time. The preceding step may have had more rows
// than this step.
__device__ __forceinline__ void clear_used_words(const Context& block, uint32_t layer) {
  const RowWords& words = block.m.step.words;
  char* const from = block.turn(block.m.epoch + layer + 1, 0);
  const uint32_t all = (layer == 0 ? kRows : block.m.step.T) * uint32_t(words.turn_bytes / 16);
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kTokenThreads + threadIdx.x; i < all; i += gridDim.x * kTokenThreads)
    ptx::store_relaxed_16(from + 16 * i, 0, 0);
  __threadfence();
}
__device__ __forceinline__ void prepare_layer(const Context& block, uint32_t layer) {
  const LayerStages* const next = block.m.step.layers + layer;
  copy_words_async(block.m.layers[layer % 2], *next);
  if (threadIdx.x < block.m.step.T)
    block.m.keys[layer % 2][threadIdx.x] =
        keys_of(next->attention, block.m.position[threadIdx.x], block.m.step.part_keys);
}

// One thread of the grid brings the weight of a norm, or the biases of a router, into the L2 cache.
__device__ __forceinline__ void prefetch_floats(const float* from, uint32_t count) {
  if (count >= 4 && blockIdx.x == gridDim.x - 1 && threadIdx.x == 32) ptx::prefetch_to_l2(from, count * 4 / 16 * 16);
}

// The stage that follows the product of qkv.
__device__ __forceinline__ void attention_stage(const Context& block, uint32_t i, megakernel::WeightReader& weights) {
  block.grid_barriers.end_stage();
  block.grid_barriers.pass();
  // The results of attention are complete where no word is zero, so no barrier is needed for them. This barrier states
  // that all blocks have multiplied qkv.
  block.grid_barriers.announce();
  prefetch_floats(block.layer(i).gate_up.weight, block.m.step.embedding.C);
  prefetch_floats(block.layer(i).router.bias, block.m.step.experts);
  attend(block, i, weights);
  block.grid_barriers.wait(false);
  if (i == 0 && blockIdx.x == 0 && threadIdx.x == 0)  // all blocks have read the epoch
    ptx::store_relaxed(block.m.step.words.last_epoch, block.m.epoch - 1 + block.m.step.count);
}
// The norm before the product of `stage`, and the places of its activation vectors.
template <WeightFormat kDense>
__device__ __forceinline__ NormedVectors normed_vectors(const Context& block, Stage stage, uint32_t i) {
  const LayerStages& l = block.layer(i);
  const bool experts = stage == Stage::gate_up;
  return {.weight = experts               ? l.gate_up.weight
                    : stage == Stage::qkv ? l.qkv.weight
                                          : block.m.step.head.weight,
          .input_scale = experts ? weight_tiles::Form<kExperts>::kInputScale : weight_tiles::Form<kDense>::kInputScale,
          .terms = block.terms(i, experts),
          .experts = experts,
          .epoch = block.m.epoch + i,
          .router = experts ? &l.router.w : nullptr,
          .wait = kGridBarriersPerLayer * (experts ? i : i - 1) + uint32_t(experts ? Stage::output : Stage::down)};
}
// The activation vectors of the product of `stage`; of down, those of the units `first` to `end - 1`.
__device__ __forceinline__ PublishedVectors published_vectors(const Context& block, Stage stage, uint32_t i,
                                                              uint32_t first, uint32_t end) {
  const Matrix& w = block.matrix(stage, i);
  const RowWords& words = block.m.step.words;
  PublishedVectors v{.from = block.turn(block.m.epoch + i, 0) + (stage == Stage::output    ? words.attended
                                                                 : stage == Stage::gate_up ? words.routed
                                                                 : stage == Stage::down    ? words.pairs
                                                                                           : words.normed),
                     .bytes = uint32_t(weight_tiles::vector_bytes(w.cols)),
                     .stride = weight_tiles::vector_stride(w.cols),
                     .count = block.m.step.T};
  if (stage == Stage::down) {
    const ExpertSlots& slots = block.m.slots;
    const uint32_t of_slot = w.row_tiles * block.split(stage).parts, first_pair = slots.before[first / of_slot];
    v.offset = slots.offset + first_pair;
    v.count = slots.before[(end + of_slot - 1) / of_slot] - first_pair;
  }
  return v;
}

// The loop of the multiplying warps. A single loop over the stages lets all dense products share their code, and all
// products of experts, because a program larger than the instruction cache is slowed by instruction fetches.
template <WeightFormat kDense> __device__ __forceinline__ void compute_step(const Context& block, sampling::Best& top) {
  const RowStep& step = block.m.step;
  block.grid_barriers.begin();
  megakernel::WeightReader weights(step.stream, block.m.stream, block.memory + step.ring, threadIdx.x / kTeamThreads,
                                   kTeams);
  uint32_t i = 0;
#pragma unroll 1
  for (Stage stage = step.count > 0 ? Stage::qkv : Stage::head; stage != Stage::head || step.head_rows > 0;) {
    const LayerStages& l = block.layer(i);
    const auto units = [&] {
      return block.units((uses_experts(stage) ? block.m.slots.count : 1) * block.matrix(stage, i).row_tiles *
                         block.split(stage).parts);
    };
    // The experts of gate and up are not chosen yet.
    WeightTileRange range = stage == Stage::gate_up ? WeightTileRange{} : units();
    uint32_t first = range.begin, end = range.end;
    bool is_continued = false;
#pragma unroll 1
    do {
      // Down takes as many units at a time as there is shared memory for activation vectors.
      if (stage == Stage::down) end = block.end_of_group(block.matrix(stage, i), block.split(stage), first, range.end);
      if (is_continued) ComputeThreads::sync();
      if (i == 0 && is_normed(stage) && stage != Stage::gate_up) {
        const NormProduct& p = stage == Stage::qkv ? l.qkv : step.head;
        embed<kDense == WeightFormat::fp8>(block, p.weight, weight_tiles::Form<kDense>::kInputScale, p.eps);
      } else {
        const PublishedSquares normed{stage == Stage::gate_up, block.m.epoch + i};
        const bool has_row = threadIdx.x / 32 < step.T;  // the warp prepares a row of the step
        RowSquares squares;
        RowLogits logits;
        if (has_row && is_normed(stage)) squares.load(block, normed);
        if (has_row && stage == Stage::gate_up) logits.load(block, l.router, normed.epoch);
        copy_vectors(block, published_vectors(block, stage, i, first, end));
        if (has_row && is_normed(stage))
          squares.finish(block, normed,
                         stage == Stage::gate_up ? l.gate_up.eps
                         : stage == Stage::qkv   ? l.qkv.eps
                                                 : step.head.eps);
        if (stage == Stage::gate_up) join_copies();  // of the next layer's stages, which the copying warp reads
        if (has_row && stage == Stage::gate_up) logits.choose(block, l.router, normed.epoch);
        ComputeThreads::sync();
      }
      if (stage == Stage::gate_up) {
        list_experts(block, l.router);
        // The following work is done while the first weights of the experts are being copied.
        if (threadIdx.x / 32 < step.T) weigh_choices(block, l.router);
        clear_used_words(block, i);
        const bool is_last = i + 1 == step.count;
        prefetch_floats(is_last ? step.head.weight : block.layer(i + 1).qkv.weight, step.embedding.C);
        ComputeThreads::sync();
        range = units(), first = range.begin, end = range.end;
      }
      if (uses_experts(stage)) {
        multiply_experts(block, stage == Stage::down, i, first, end, weights);
      } else {
        top = {};  // until the head, `top` needs no registers
        multiply_dense<kDense>(block, stage, i, weights, top);
      }
      first = end, is_continued = true;
    } while (first < range.end);
    if (stage == Stage::head) break;
    if (stage == Stage::qkv) {
      attention_stage(block, i, weights);
      stage = Stage::output;
      continue;
    }
    if (stage == Stage::output) clear_masks(block);
    if (ends_layer(stage)) ++i;
    const Stage next = !ends_layer(stage) ? Stage(int(stage) + 1) : i == step.count ? Stage::head : Stage::qkv;
    if (adds_to_residual(stage)) {
      const NormedVectors v = normed_vectors<kDense>(block, next, i);
      if (kDense == WeightFormat::fp8 && !v.experts)
        publish_normed<true>(block, v);
      else
        publish_normed<false>(block, v);
    }
    block.grid_barriers.arrive(false);
    if (stage == Stage::gate_up && blockIdx.x == 0) publish_lists(block, i);
    if (stage == Stage::output && i + 1 < step.count) prepare_layer(block, i + 1);
    block.grid_barriers.wait(false);
    stage = next;
  }
  block.grid_barriers.end();
}

// Fills the block's shared memory, and this block's part of the residual stream with the rows of the embedding.
__device__ __forceinline__ void begin_step(const Context& block, const RowStep& step) {
  Memory& m = block.m;
  copy_words(m.step, step);
  if (threadIdx.x == 0) {
    m.stream.begin();
    m.epoch = ptx::load_relaxed(step.words.last_epoch) + 1;  // the memory starts as zeros, so the first epoch is 1
  }
  if (threadIdx.x < step.T) {
    const uint32_t j = threadIdx.x;
    const BatchedSequences& s = step.sequences;
    m.offset[j] = 0;
    if (s.input != nullptr) {
      const uint32_t slot = __ldcg(&s.input->slot[j]);
      m.offset[j] = int64_t(slot) * s.slot_bytes;
      const auto* const state = reinterpret_cast<const State*>(uintptr_t(s.state) + m.offset[j]);
      const int32_t given = __ldcg(&s.input->token[j]);
      m.token[j] = given >= 0 ? given : max(__ldcg(&state->tokens[0]), 0);  // a slot without a token has the id -1
      m.position[j] = uint32_t(__ldcg(step.draft ? &s.input->position[j] : &state->position));
      m.first_fresh[j] = m.position[j];
#pragma unroll 1
      for (uint32_t i = j; step.draft && i > 0 && __ldcg(&s.input->slot[i - 1]) == slot; --i) --m.first_fresh[j];
    } else {
      m.token[j] = __ldcg(&step.embedding.state->tokens[j]);
      m.first_fresh[j] = uint32_t(__ldcg(&step.embedding.state->position));
      m.position[j] = m.first_fresh[j] + j;
    }
  }
  __syncthreads();
  if (step.count > 0 && threadIdx.x < kTokenThreads) prepare_layer(block, 0);
  join_copies();
  const Embedding& e = step.embedding;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < step.T * e.C; i += gridDim.x * blockDim.x)
    ptx::store_relaxed(block.x(i / e.C) + i % e.C,
                       first_word(float(e.table[int64_t(m.token[i / e.C]) * e.C + i % e.C])));
  __syncthreads();
  const auto& rotation = m.layers[0].attention;
  const uint32_t half = rotation.dim / 2;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < step.T * half; i += blockDim.x) {
    const size_t from = size_t(m.position[i / half]) * half + i % half;
    m.cos[i / half][i % half] = rotation.cos[from], m.sin[i / half][i % half] = rotation.sin[from];
  }
  __syncthreads();
}
// Runs after all blocks have computed: appends the rows of one sequence, or without a head only advances the position.
__device__ __forceinline__ void end_step(const Context& block, const sampling::Best& top) {
  const RowStep& step = block.m.step;
  if (step.sequences.input != nullptr) return;
  if (step.head_rows == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && block.grid_barriers.all_came())
      step.head.state->position += int32_t(step.T);
    return;
  }
  uint64_t key;
  if (likeliest_of_grid(step.head, top, key) && block.grid_barriers.all_came()) append(step.head, key);
}

template <WeightFormat kDense>
__global__ void __launch_bounds__(kTokenThreads + 32, 1) row_kernel(const __grid_constant__ RowStep step) {
  const Context block(tile::dynamic_shared<char>());
  begin_step(block, step);
  sampling::Best top;
  if (threadIdx.x < kTokenThreads)
    compute_step<kDense>(block, top);
  else
    loader::copy_step<kDense>(block);
  __syncthreads();
  end_step(block, top);
}

// --- launcher

// Sets the offsets of the memory behind Memory, and the number of ring slots that fit into the rest.
inline void place_memory(RowStep& t, const LayerStages& l, int64_t most_bytes) {
  const auto up = [](int64_t n, int64_t to) { return uint32_t((n + to - 1) / to * to); };
  const int64_t rows = t.T, down = weight_tiles::vector_stride(l.down.w.cols);
  t.choice = up(sizeof(Memory), 16);
  t.vectors = up(t.choice + ChoiceMemory::bytes(kRows, t.experts, t.k), 128);
  const int64_t all =
      std::max({int64_t(sizeof(AttentionMemory)), rows * int64_t(weight_tiles::vector_stride(l.qkv.w.cols)),
                rows * int64_t(weight_tiles::vector_stride(l.output.w.cols)), rows * down});
  t.room = uint32_t(all / down);
  t.ring = up(t.vectors + all, 128);
  const int64_t slots = (most_bytes - int64_t(t.ring)) / megakernel::kSlotBytes;
  t.stream.slots = uint32_t(std::clamp<int64_t>(slots, 0, megakernel::kMostSlots));
  // With more rows a step spends more of its time in products, where more chunks in flight pay.
  t.stream.ahead = std::min({2 + t.T, 6u, t.stream.slots > kTeams ? t.stream.slots - kTeams : 0});
  t.bytes = t.ring + t.stream.slots * megakernel::kSlotBytes;
}
// The split of each stage; `blocks` is the size of the grid.
template <WeightFormat kDense> void split_products(RowStep& t, const LayerStages& l, uint32_t blocks) {
  const auto split = [&](Stage stage, const Matrix& w, uint32_t most_tiles, uint32_t most_parts) {
    t.split[int(stage)] = row_split_of(w.row_tiles, w.weight_tiles, most_tiles, most_parts, blocks);
  };
  split(Stage::qkv, l.qkv.w, kMostChunkTiles<kDense>, 16);
  split(Stage::output, l.output.w, kMostChunkTiles<kDense>, 16);
  split(Stage::gate_up, l.gate_up.w, kMostChunkTiles<kExperts>, 1);
  // A part is one chunk, because few experts give few units.
  const uint32_t chunks = (l.down.w.weight_tiles + kMostChunkTiles<kExperts> - 1) / kMostChunkTiles<kExperts>;
  RowSplit& down = t.split[int(Stage::down)];
  split(Stage::down, l.down.w, kMostChunkTiles<kExperts>, 1);
  if (chunks <= 4) {
    down.tiles = down.chunk_tiles = even_chunk_tiles(l.down.w.weight_tiles, kMostChunkTiles<kExperts>);
    down.parts = (l.down.w.weight_tiles + down.tiles - 1) / down.tiles, down.chunks = 1;
    down.set_steps();
  }
  split(Stage::head, t.head.w, kMostChunkTiles<kDense>, 1);
}

}  // namespace ingot::decode::rows

namespace ingot::decode {

template <WeightFormat kDense>
void RowKernel<kDense>::launch(const RowStep& step, const LayerStages& layer, int64_t blocks, Stream stream) {
  RowStep p = step;
  rows::place_memory(p, layer, kMostShared);
  gpu::Launch at{
      .block = kTokenThreads + 32, .smem = p.bytes, .device = std::max(0, gpu::current_device()), .cooperative = true};
  const auto kernel = rows::row_kernel<kDense>;
  at.grid = blocks > 0 ? blocks : std::min<int64_t>(gpu::resident_blocks("decode rows", kernel, at), kMostBlocks);
  rows::split_products<kDense>(p, layer, uint32_t(at.grid));
  gpu::launch("decode rows", kernel, at, stream, p);
}

}  // namespace ingot::decode
