#pragma once
// The context that the parts of the row kernel share: a block's shared memory, the units of a product, and how a thread
// waits for words of other blocks.
#include <algorithm>

#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/megakernel/sums.cuh"
#include "ingot/megakernel/weight_stream.cuh"
#include "ingot/models/decode/megakernel/token_context.cuh"
#include "ingot/models/decode/row_kernel/row_kernel.h"

namespace ingot::decode::rows {

constexpr uint32_t kRows = kKernelRows, kTeams = megakernel::kTeams, kTeamThreads = 32 * megakernel::kTeamWarps;
constexpr uint32_t kListedBarrier = 1, kFirstTeamBarrier = 4;
constexpr WeightFormat kExperts = WeightFormat::mxfp4;

// All fifteen warps reach these barriers at the same instruction, for which the aligned form has less code.
struct ComputeThreads {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync(3, kTokenThreads); }
};

// A sum over all blocks in steps of 2^-20. The word's count of terms may overflow its ten bits, because a reader knows
// the number of earlier terms.
using Sum = megakernel::FixedSum<20>;
__device__ __forceinline__ uint64_t first_word(float value) {
  return uint64_t(__float2ll_rn(value * 0x1p20f)) << Sum::kCountBits;
}
__device__ __forceinline__ bool has_terms(uint64_t word, uint32_t count) {
  return Sum::count(word) == (count & ((1u << Sum::kCountBits) - 1));
}
__device__ __forceinline__ float value_of(uint64_t word, uint32_t count) { return Sum::value(word - count); }

using split_kv_attention::Keys;
// The keys that a row sees, in parts of nearly equal size of about `part_keys` keys. The division follows from the
// row's position alone.
__device__ __forceinline__ Keys keys_of(const decode_attention::Params& p, uint32_t position, uint32_t part_keys) {
  constexpr uint32_t kStep = split_kv_attention::kPartStep<kDim>;
  Keys keys(p, position);
  const uint32_t all = keys.fresh + 1 - keys.low, parts = max(1u, (all + part_keys / 2) / part_keys);
  keys.each = max(keys.each, ((all + parts - 1) / parts + kStep - 1) / kStep * kStep);
  keys.parts = (all + keys.each - 1) / keys.each;
  return keys;
}
using AttentionMemory = split_kv_attention::Memory<kDim, kRows>;
using Attention = split_kv_attention::Attention<kDim, kTokenThreads, ComputeThreads, kRows>;

// The distinct experts of all rows, in the order of their numbers. A pair is a row and one of its chosen experts; the
// pairs of an expert slot are consecutive.
struct ExpertSlots {
  uint32_t count;
  int32_t expert[kMostRowSlots];
  uint8_t mask[kMostRowSlots];        // bit mask of the rows that chose the expert
  uint8_t before[kMostRowSlots + 1];  // the number of pairs of all earlier slots; one more entry for the end
  uint8_t pair[kMostRowSlots];        // row * k + choice
  uint8_t row[kMostRowSlots];         // the row of each pair
  // of the pair's activation vector of down in the results of a layer, less RowWords::pairs, in units of 16 bytes
  uint16_t offset[kMostRowSlots];

  // The index of row `row` among the pairs of a slot; 0 where the row did not choose the expert.
  __device__ __forceinline__ uint32_t place(uint32_t slot, uint32_t row) const {
    return (mask[slot] >> row & 1) != 0 ? uint32_t(__popc(mask[slot] & ((1u << row) - 1))) : 0;
  }
  __device__ __forceinline__ bool has(uint32_t slot, uint32_t row) const { return (mask[slot] >> row & 1) != 0; }
};

static_assert(kRows <= 8 && kMostRowSlots < 256, "rows are bits, and pairs numbers, of a byte");
// The start of dynamic shared memory.
struct Memory {
  RowStep step;
  LayerStages layers[2];  // this layer and the next
  Keys keys[2][kRows];    // for these two layers
  megakernel::GridBarrierMemory grid_barriers;
  megakernel::WeightStreamMemory stream;
  ExpertSlots slots;
  uint32_t epoch;  // of the first layer
  uint32_t position[kRows];
  uint32_t first_fresh[kRows];  // position of the first row of this step in the row's sequence
  int32_t token[kRows];
  int64_t offset[kRows];  // from the first slot of the decoder to the row's slot, in bytes
  float cos[kRows][kDim / 2], sin[kRows][kDim / 2];
  float rstd[kRows];                      // 1 / rms of the residual stream of each row
  float sums[2][kTokenWarps][16][kRows];  // for two units in turn
  // A weight tile's part of the rows' activation vectors, for the router.
  alignas(16) char normed_tile[kRows][weight_tiles::kVectorTileBytes];
};

struct Unit {
  uint32_t slot, row_tile, part;
};
// The units of a team, in the order of their numbers: the team takes every kTeams-th unit, and begins with `first`.
class UnitCursor {
 public:
  __device__ __forceinline__ UnitCursor(const Matrix& w, const RowSplit& s, const Unit& first)
      : row_tiles_(w.row_tiles),
        parts_(s.parts),
        row_tile_step_(s.row_tile_step),
        part_step_(s.part_step),
        at_(first) {}
  __device__ __forceinline__ const Unit& operator*() const { return at_; }
  __device__ __forceinline__ void advance() {
    at_.part += part_step_, at_.row_tile += row_tile_step_;
    if (at_.part >= parts_) at_.part -= parts_, ++at_.row_tile;
#pragma unroll 1
    while (at_.row_tile >= row_tiles_) at_.row_tile -= row_tiles_, ++at_.slot;
  }

 private:
  const uint32_t row_tiles_, parts_, row_tile_step_, part_step_;
  Unit at_;
};

struct Context {
  using GridBarriers = megakernel::GridBarriers<ComputeThreads>;
  char* const memory;
  Memory& m;
  const GridBarriers grid_barriers;

  __device__ __forceinline__ explicit Context(char* shared)
      : memory(shared), m(*reinterpret_cast<Memory*>(shared)), grid_barriers(m.step.grid, m.grid_barriers) {}

  __device__ __forceinline__ const LayerStages& layer(uint32_t i) const { return m.layers[i % 2]; }
  __device__ __forceinline__ const Matrix& matrix(Stage stage, uint32_t i) const {
    const LayerStages& l = layer(i);
    switch (stage) {
      case Stage::qkv: return l.qkv.w;
      case Stage::output: return l.output.w;
      case Stage::gate_up: return l.gate_up.w;
      case Stage::down: return l.down.w;
      case Stage::attention:
      case Stage::head: break;
    }
    return m.step.head.w;
  }
  __device__ __forceinline__ const RowSplit& split(Stage stage) const { return m.step.split[int(stage)]; }
  __device__ __forceinline__ char* vectors() const { return memory + m.step.vectors; }
  __device__ __forceinline__ ChoiceMemory choice() const {
    return {memory + m.step.choice, kRows, m.step.experts, m.step.k};
  }
  __device__ __forceinline__ uint64_t* x(uint32_t row) const { return m.step.words.x + row * m.step.words.x_stride; }
  // The results of a layer for which layers take turns (RowWords::turns).
  __device__ __forceinline__ char* turn(uint32_t epoch, uint32_t row) const {
    return m.step.words.turns + (epoch % 2 * kRows + row) * m.step.words.turn_bytes;
  }
  __device__ __forceinline__ uint64_t* qkv(uint32_t epoch, uint32_t row) const {
    return reinterpret_cast<uint64_t*>(turn(epoch, row));
  }
  __device__ __forceinline__ uint64_t* logits(uint32_t epoch, uint32_t row) const {
    return reinterpret_cast<uint64_t*>(turn(epoch, row) + m.step.words.logits);
  }
  __device__ __forceinline__ uint64_t* squares(bool experts, uint32_t row) const {
    return m.step.words.squares + (experts ? kRows + row : row) * (m.step.words.x_stride / 64);
  }
  // The number of terms in each sum of the residual stream after `layers` layers, and with `output` also after the next
  // layer's output.
  __device__ __forceinline__ uint32_t terms(uint32_t layers, bool output) const {
    const uint32_t of_output = split(Stage::output).parts;
    return layers * (of_output + m.step.k * split(Stage::down).parts) + (output ? of_output : 0);
  }

  // This block's units among `all` units, which are fewer than 2^32 / kMostBlocks.
  __device__ __forceinline__ WeightTileRange units(uint32_t all) const {
    return {all * blockIdx.x / gridDim.x, all * (blockIdx.x + 1) / gridDim.x};
  }
  __device__ __forceinline__ Unit unit(const Matrix& w, const RowSplit& s, uint32_t number) const {
    const uint32_t of_slot = w.row_tiles * s.parts, slot = number / of_slot, rest = number - slot * of_slot;
    return {slot, rest / s.parts, rest % s.parts};
  }
  // For down: the end of the group of units from `first` on whose activation vectors this block can hold at once.
  __device__ __forceinline__ uint32_t end_of_group(const Matrix& w, const RowSplit& s, uint32_t first,
                                                   uint32_t end) const {
    const uint32_t of_slot = w.row_tiles * s.parts;
    uint32_t slot = first / of_slot + 1;
    const uint32_t begin = m.slots.before[slot - 1];
    while (slot < m.slots.count && m.slots.before[slot + 1] - begin <= m.step.room) ++slot;
    return min(slot * of_slot, end);
  }

  // Loads again until the words are complete(). Call after a grid barrier.
  template <class Load, class Complete>
  __device__ __forceinline__ void read_again(Load&& load, Complete&& complete) const {
    megakernel::read_again(load, complete, m.step.grid.watch);
  }
  // Waits without a grid barrier until the words that load() reads are complete().
  template <class Load, class Complete>
  __device__ __forceinline__ void wait_for(Load&& load, Complete&& complete, uint32_t number) const {
    megakernel::wait_for_words(load, complete, m.step.grid.watch, number);
  }
};

}  // namespace ingot::decode::rows
