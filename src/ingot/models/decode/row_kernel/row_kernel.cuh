#pragma once
// A step of 2 to 8 rows by one persistent kernel with one block per SM. As in the token kernel
// (megakernel/megakernel.cuh), one warp of a block copies weights into a ring, across grid barriers, fifteen warps
// multiply the weights that have arrived, and blocks publish results as words with ready flags. The differences from
// the token kernel: all eight columns of the matrix instructions are used; the residual stream stays in global memory
// as sums; a team of three warps computes a whole unit of work, so that the unit's sum does not depend on how the
// blocks share the units; the router is a stage of its own; and the distinct experts of all rows are listed once, each
// with the rows that chose the expert.
//    qkv | attention | output | router, gate and up | down | ... | head
//
//   row_context.cuh    a block's memory
//   row_vectors.cuh    activation vectors
//   row_products.cuh   products
//   row_attention.cuh  attention
//   row_router.cuh     the choice of experts
//   row_loader.cuh     the copying warp
#include "ingot/gpu/launch.h"
#include "ingot/models/decode/row_kernel/row_loader.cuh"
#include "ingot/models/decode/row_kernel/row_products.cuh"
#include "ingot/models/decode/row_kernel/row_router.cuh"

namespace ingot::decode::rows {

// Resets words that all blocks have read to zero: the sums of qkv of the preceding layer, its router's logits, and its
// activation vectors of down. The preceding step may have had more rows than this step.
__device__ __forceinline__ void clear_used_words(const Context& block, uint32_t layer) {
  const RowWords& words = block.m.step.words;
  const int64_t rows = layer == 0 ? kRows : block.m.step.T;
  const auto clear = [&](uint64_t* from, int64_t count) {
#pragma unroll 1
    for (int64_t i = int64_t(blockIdx.x) * kTokenThreads + threadIdx.x; i < count; i += gridDim.x * kTokenThreads)
      ptx::store_relaxed(from + i, uint64_t(0));
  };
  clear(block.qkv(block.m.epoch + layer + 1, 0), rows * words.qkv_width);
  clear(words.logits, rows * block.m.step.experts);
  clear(reinterpret_cast<uint64_t*>(words.vectors),
        rows * block.m.step.k * weight_tiles::vector_bytes(block.layer(layer).down.w.cols) / 8);
}
__device__ __forceinline__ void prepare_layer(const Context& block, uint32_t layer) {
  const LayerStages* const next = block.m.step.layers + layer;
  copy_words_async(block.m.layers[layer % 2], *next);
  if (threadIdx.x < block.m.step.T)
    block.m.keys[layer % 2][threadIdx.x] =
        keys_of(next->attention, block.m.position[threadIdx.x], block.m.step.least_part_keys);
}

// The stage that follows the product of qkv.
__device__ __forceinline__ void attention_stage(const Context& block, uint32_t i, megakernel::WeightReader& weights) {
  block.grid_barriers.end_stage();
  block.grid_barriers.pass();
  // The results of attention carry their epoch, so no barrier is needed for them. This barrier states that all blocks
  // have read the residual stream and the words of the preceding layer.
  clear_used_words(block, i);
  if (i + 1 < block.m.step.count) prepare_layer(block, i + 1);
  block.grid_barriers.end_stage();
  block.grid_barriers.announce(true);
  attend(block, i, weights);
  join_copies();
  block.grid_barriers.wait(false);
  if (i == 0 && blockIdx.x == 0 && threadIdx.x == 0)  // all blocks have read the epoch
    ptx::store_relaxed(block.m.step.words.last_epoch, block.m.epoch - 1 + block.m.step.count);
}
// The units of down, as many at a time as there is shared memory for activation vectors.
__device__ __forceinline__ uint32_t prepare_down(const Context& block, uint32_t i, uint32_t first,
                                                 const WeightTileRange& range) {
  const Matrix& w = block.layer(i).down.w;
  const RowSplit& split = block.split(Stage::down);
  const uint32_t end = block.end_of_group(w, split, first, range.end), of_slot = w.row_tiles * split.parts;
  if (first > range.begin) ComputeThreads::sync();
  write_pairs(block, w.cols, block.m.slots.before[first / of_slot],
              block.m.slots.before[(end + of_slot - 1) / of_slot]);
  ComputeThreads::sync();
  return end;
}

// The loop of the multiplying warps. A single loop over the stages lets all dense products share their code, and all
// products of experts, because a program larger than the instruction cache is slowed by instruction fetches.
template <WeightFormat kDense> __device__ __forceinline__ void compute_step(const Context& block, sampling::Best& top) {
  const RowStep& step = block.m.step;
  block.grid_barriers.begin();
  megakernel::WeightReader weights(step.stream, block.m.stream, block.memory + step.ring, threadIdx.x / kTeamThreads,
                                   kTeams);
  uint32_t parity = 0, i = 0;
#pragma unroll 1
  for (Stage stage = step.count > 0 ? Stage::qkv : Stage::head; stage != Stage::head || step.head_rows > 0;) {
    const LayerStages& l = block.layer(i);
    if (is_normed(stage)) {
      const bool experts = stage == Stage::gate_up;
      const float* const weight = experts ? l.gate_up.weight : stage == Stage::qkv ? l.qkv.weight : step.head.weight;
      const float scale = experts ? weight_tiles::Form<kExperts>::kInputScale : weight_tiles::Form<kDense>::kInputScale;
      const uint32_t terms = block.terms(i, experts);
      const bool embeds = i == 0 && !experts;
      if (kDense == WeightFormat::fp8 && !experts)
        write_normed<true>(block, weight, scale, terms, embeds);
      else
        write_normed<false>(block, weight, scale, terms, embeds);
    } else if (stage == Stage::output) {
      write_attended<kDense>(block, l.output.w.cols, block.m.epoch + i);
    }
    ComputeThreads::sync();
    if (stage == Stage::gate_up) {
      add_logits(block, l.router.w);
      read_logits(block, l.router, i);
      ComputeThreads::sync();
      choose(block, l.router);
      ComputeThreads::sync();
      list_experts(block, l.router);
    }
    if (uses_experts(stage)) {
      const bool down = stage == Stage::down;
      const WeightTileRange range =
          block.units(block.m.slots.count * block.matrix(stage, i).row_tiles * block.split(stage).parts);
#pragma unroll 1
      for (uint32_t first = range.begin; first < range.end;) {
        const uint32_t end = down ? prepare_down(block, i, first, range) : range.end;
        multiply_experts(block, down, i, first, end, weights, parity);
        first = end;
      }
    } else {
      multiply_dense<kDense>(block, stage, i, weights, parity, top);
    }
    if (stage == Stage::head) break;
    if (stage == Stage::qkv) {
      attention_stage(block, i, weights);
      stage = Stage::output;
      continue;
    }
    block.grid_barriers.arrive(false);
    if (stage == Stage::output) prefetch_router(l.router.w);
    if (stage == Stage::gate_up && blockIdx.x == 0) publish_lists(block, i);
    block.grid_barriers.wait(false);
    stage = !ends_layer(stage) ? Stage(int(stage) + 1) : ++i == step.count ? Stage::head : Stage::qkv;
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
    m.first = uint32_t(__ldcg(&step.embedding.state->position));
  }
  if (threadIdx.x < step.T) {
    const uint32_t j = threadIdx.x;
    const BatchedSequences& s = step.sequences;
    m.offset[j] = 0;
    if (s.input != nullptr) {
      m.offset[j] = int64_t(__ldcg(&s.input->slot[j])) * s.slot_bytes;
      const auto* const state = reinterpret_cast<const State*>(uintptr_t(s.state) + m.offset[j]);
      const int32_t given = __ldcg(&s.input->token[j]);
      m.token[j] = given >= 0 ? given : __ldcg(&state->tokens[0]);
      m.position[j] = uint32_t(__ldcg(&state->position));
    } else {
      m.token[j] = __ldcg(&step.embedding.state->tokens[j]);
      m.position[j] = uint32_t(__ldcg(&step.embedding.state->position)) + j;
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
  t.stream.ahead = std::min(t.stream.ahead, t.stream.slots > kTeams ? t.stream.slots - kTeams : 0);
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
