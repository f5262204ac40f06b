#pragma once
// The context that the parts of the token kernel share: the layout of a block's shared memory and of the words through
// which blocks exchange results, and how a thread waits for such words. Every part takes a TokenContext by reference.
#include <algorithm>
#include <array>
#include <type_traits>

#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/megakernel/split_kv_attention.cuh"
#include "ingot/megakernel/sums.cuh"
#include "ingot/megakernel/warp_ring.h"
#include "ingot/megakernel/weight_stream.cuh"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/megakernel/stage_table.h"
#include "ingot/models/decode/megakernel/token_kernel_form.h"
#include "ingot/models/decode/megakernel/work_range.h"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot::decode {

// Fifteen warps compute and one warp copies weights. With these sixteen warps a thread can have 128 registers.
constexpr uint32_t kTokenWarps = megakernel::kTeams * megakernel::kTeamWarps, kTokenThreads = 32 * kTokenWarps;
constexpr int kDim = kTokenHeadDim;    // of GPT-OSS
constexpr uint32_t kRoundGroups = 12;  // groups of 16 sums that a block has memory for, which is one round of a product
// Each epilogue thread finishes one row of a round. There are two sets: while the threads of one set finish the rows of
// a product, the threads of the other set prefetch bias and scale for the next product. The second set finishes the
// rows that are added to the residual stream. The first warp belongs to neither set, because this warp waits at the
// grid barrier.
constexpr uint32_t kEpilogueThreads = 16 * kRoundGroups, kFirstEpilogueThread = kTokenThreads - kEpilogueThreads,
                   kFirstResidualThread = 32;
static_assert(kFirstResidualThread + kEpilogueThreads <= kFirstEpilogueThread, "the two sets have no thread in common");
// Without the copy engine a round is as large as the number of threads allows. If 108 blocks share GPT-OSS's experts, a
// block has at most 14 row tiles of gate and up, which then fit into one round.
template <TokenVariant V> constexpr uint32_t kRoundGroupsOf = V.warp_rings ? 14 : kRoundGroups;
template <TokenVariant V> constexpr uint32_t kEpilogueThreadsOf = 16 * kRoundGroupsOf<V>;

using RowSum = megakernel::FixedSum<28>;  // a row's sum, to which at most two blocks add

// The row that an epilogue thread finishes in a round.
struct EpilogueRow {
  uint32_t row;   // row of the matrix
  uint32_t bits;  // the expert slot of the matrix from bit 5 on, and these bits:
  // the row tile exists, although the row may lie beyond the last row of the matrix
  static constexpr uint32_t kExists = 1;
  static constexpr uint32_t kBegins = 2;   // this block multiplies the first weight tile of the row
  static constexpr uint32_t kTerm = 4;     // terms of the row's sum that this block adds: two for a whole row tile
  static constexpr uint32_t kInside = 16;  // the row is a row of the matrix

  __device__ __forceinline__ bool exists() const { return (bits & kExists) != 0; }
  __device__ __forceinline__ bool begins() const { return (bits & kBegins) != 0; }
  __device__ __forceinline__ uint32_t terms() const { return bits / kTerm % 4; }
  __device__ __forceinline__ bool inside() const { return (bits & kInside) != 0; }
  __device__ __forceinline__ uint32_t slot() const { return bits / 32; }
};
// Prefetched numbers that the epilogue multiplies by and adds. `gain` is the weight of the router's norm for the
// output's rows, and the noise for the head's rows. `scale` is the scale of an fp8 row.
struct RowConstants {
  float bias, gain, scale;
};

struct ComputeThreads {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync_unaligned(3, kTokenThreads); }
};
// The start of dynamic shared memory; the parts whose size depends on the model follow at the offsets in Token.
template <TokenVariant V> struct TokenMemory {
  TokenOf<V> token;
  LayerOf<V> layers[2];  // this layer and the next
  split_kv_attention::Keys keys[2];
  megakernel::GridBarrierMemory grid_barriers;
  // the ring's barriers; where each warp has a ring, the numbers of the steps of each stage
  std::conditional_t<V.warp_rings, std::array<WarpSteps, kStageCount>, megakernel::WeightStreamMemory> stream;
  WorkRange work[kStageCount];  // the range of attention is unused, because attention has no weights
  // Completes once a layer, when the copying warp may continue: the router's logits are in shared memory, or with dense
  // MLPs the arguments of the next layer.
  uint64_t logits_ready;
  RowConstants output_rows[kEpilogueThreadsOf<V>];
  sampling::RowNoise noise;                        // of the token to be sampled
  uint32_t position;                               // position of the token
  uint32_t epoch;                                  // epoch of the token's first layer
  EpilogueRow rows[2][kEpilogueThreadsOf<V>];      // one array for each of the two sets of epilogue threads
  uint32_t clears, unused;                         // whether this block resets used words during attention
  float cos[kDim / 2], sin[kDim / 2];              // rotation of the token's position; not of the families
  float squares[kTokenWarps];                      // sums of squares of the residual stream, a part from each warp
  float sums[kRoundGroupsOf<V>][kTokenWarps][16];  // zeros between two products
  // The block's rows of the output: the residual stream times the weight of the router's norm, as two bf16 a number.
  alignas(4) uint16_t router_input[2][kRoundGroupsOf<V>][16];
};

// Follows TokenMemory in shared memory where several GPUs compute the token.
struct RankMemory {
  Ranks ranks;
  uint32_t epoch, unused;  // number of the last exchange before this token
};

template <TokenVariant V>
constexpr int64_t kBestBytes = kEpilogueThreadsOf<V> *
                               sizeof(sampling::Best);  // lies behind the head's activation vector

// Sets the offsets of the memory behind TokenMemory, and the number of ring slots that fit into the rest.
template <TokenVariant V> void place_memory(TokenOf<V>& t, const LayerOf<V>& l, int64_t most_bytes) {
  const auto up = [](int64_t n, int64_t to) { return uint32_t((n + to - 1) / to * to); };
  t.choice = up(sizeof(TokenMemory<V>) + (t.ranks != nullptr ? sizeof(RankMemory) : 0), 16);
  t.x = up(t.choice + ChoiceMemory::bytes(1, t.experts, t.k), 16);
  t.stage = up(t.x + int64_t(weight_tiles::padded(l.qkv.w.cols)) * 4, 128);
  t.ring = up(t.stage + std::max({int64_t(sizeof(split_kv_attention::Memory<int(V.head_dim)>)),
                                  int64_t(weight_tiles::vector_stride(l.qkv.w.cols)) + kBestBytes<V>,
                                  int64_t(weight_tiles::vector_stride(l.output.w.cols)),
                                  t.k * weight_tiles::vector_bytes(l.down.w.cols)}),
              128);
  if constexpr (V.warp_rings) {
    t.stream.slots = t.stream.ahead = megakernel::warp_slots(most_bytes - t.ring, kTokenWarps);
    t.bytes = t.ring + t.stream.slots * kTokenWarps * megakernel::kWarpSlotBytes;
    return;
  }
  const int64_t slots = (most_bytes - t.ring) / megakernel::kSlotBytes;
  t.stream.slots = uint32_t(std::clamp<int64_t>(slots, 0, megakernel::kMostSlots));
  constexpr uint32_t kTeams = megakernel::kTeams;
  t.stream.ahead = std::min(t.stream.ahead, t.stream.slots > kTeams ? t.stream.slots - kTeams : 0);
  t.bytes = t.ring + t.stream.slots * megakernel::kSlotBytes;
}

// The number of row tiles of the residual stream that a block adds up where several GPUs compute the token.
INGOT_HD constexpr uint32_t exchanged_row_tiles(uint32_t C, uint32_t blocks) {
  return ((C + 15) / 16 + blocks - 1) / blocks;
}

// The most weight tiles of a chunk.
template <WeightFormat F> constexpr uint32_t kMostChunkTiles = megakernel::kSlotBytes / weight_tiles::Form<F>::kBytes;

// The note that the copying warp sends to the readers of a chunk.
__device__ __forceinline__ megakernel::WeightNote note_of(const Chunk& c) {
  return {c.slot, c.row_tile, c.first, c.count};
}
__device__ __forceinline__ Chunk noted_chunk(const megakernel::WeightNote& n) {
  return {nullptr, n.word[0], n.word[1], n.word[2], n.word[3]};
}

template <class T> __device__ __forceinline__ void copy_words(T& to, const T& from) {
  static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
  for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kTokenThreads)
    reinterpret_cast<uint64_t*>(&to)[w] = reinterpret_cast<const uint64_t*>(&from)[w];
}
// The same asynchronously: complete after join_copies() in all threads and a barrier.
template <class T> __device__ __forceinline__ void copy_words_async(T& to, const T& from) {
  static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kTokenThreads)
    ptx::cp_async<8>(ptx::shared_address(reinterpret_cast<uint64_t*>(&to) + w),
                     reinterpret_cast<const uint64_t*>(&from) + w);
}
__device__ __forceinline__ void join_copies() {
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

// A row's sum over all warps. The order of the additions determines the rounding.
__device__ __forceinline__ float sum_of_warps(const float (&sums)[kTokenWarps][16], uint32_t row) {
  static_assert(kTokenWarps == 15, "the last four have three terms");
  float fours[4];
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w)
    fours[w] = (sums[4 * w][row] + sums[4 * w + 1][row]) + (sums[4 * w + 2][row] + (w < 3 ? sums[4 * w + 3][row] : 0));
  return (fours[0] + fours[1]) + (fours[2] + fours[3]);
}

template <TokenVariant V> class WarpWeights;
template <TokenVariant V> struct TokenContext {
  static constexpr WeightFormat kDense = V.dense, kExperts = V.experts;
  static constexpr int kHeadDim = int(V.head_dim);
  using Layer = LayerOf<V>;
  using WeightReader = std::conditional_t<V.warp_rings, WarpWeights<V>, megakernel::WeightReader>;
  // keys of attention that a warp multiplies at once
  static constexpr uint32_t kWarpKeys = V.warp_rings ? 8 : split_kv_attention::kWarpKeys<kHeadDim>,
                            kRoundKeys = split_kv_attention::kRound<kHeadDim, kWarpKeys>,
                            kPartStep = split_kv_attention::kPartStep<kHeadDim, kWarpKeys>,
                            kChunkKeys = split_kv_attention::kChunkKeys<kHeadDim, kWarpKeys>;
  using Attention = split_kv_attention::Attention<kHeadDim, kTokenThreads, ComputeThreads, 1, kWarpKeys>;
  using AttentionMemory = split_kv_attention::Memory<kHeadDim>;
  using GridBarriers = megakernel::GridBarriers<ComputeThreads, V.traced>;

  char* const memory;
  TokenMemory<V>& m;
  const GridBarriers grid_barriers;
  const PrefilteredHead* const prefiltered_head;  // set for prefiltered variants

  __device__ __forceinline__ TokenContext(char* shared, const PrefilteredHead* head)
      : memory(shared),
        m(*reinterpret_cast<TokenMemory<V>*>(shared)),
        grid_barriers(m.token.grid, m.grid_barriers),
        prefiltered_head(head) {}

  __device__ __forceinline__ const Layer& layer(uint32_t i) const { return m.layers[i % 2]; }
  __device__ __forceinline__ const WorkRange& work(Stage stage) const { return m.work[int(stage)]; }
  // Whether a stage multiplies by the matrices of chosen experts.
  __device__ __forceinline__ static constexpr bool uses_experts(Stage stage) {
    return !V.dense_mlp && decode::uses_experts(stage);
  }
  __device__ __forceinline__ const Matrix& matrix(Stage stage, const Layer& l) const {
    switch (stage) {
      case Stage::qkv: return l.qkv.w;
      case Stage::output: return l.output.w;
      case Stage::gate_up: return l.gate_up.w;
      case Stage::down: return l.down.w;
      case Stage::attention:
      case Stage::head: break;
    }
    return m.token.head.w;
  }

  // --- shared memory

  // The activation vectors of the product; during attention its scratch memory.
  __device__ __forceinline__ char* vectors() const { return memory + m.token.stage; }
  // The memory behind the head's activation vector.
  __device__ __forceinline__ char* head_memory() const {
    return vectors() + weight_tiles::vector_stride(m.token.embedding.C);
  }
  // The residual stream, of which every block keeps a whole copy.
  __device__ __forceinline__ float* x() const { return reinterpret_cast<float*>(memory + m.token.x); }
  __device__ __forceinline__ ChoiceMemory choice() const {
    return {memory + m.token.choice, 1, m.token.experts, m.token.k};
  }
  __device__ __forceinline__ const int32_t* chosen() const { return reinterpret_cast<const int32_t*>(choice().chosen); }
  __device__ __forceinline__ RankMemory& rank_memory() const {
    return *reinterpret_cast<RankMemory*>(memory + sizeof(TokenMemory<V>));
  }

  // --- words of all blocks

  __device__ __forceinline__ uint64_t* qkv_sums(uint32_t layer) const { return m.token.sums.qkv(m.epoch + layer); }
  __device__ __forceinline__ uint64_t* down_sums(uint32_t layer) const { return m.token.sums.down(m.epoch + layer); }
  __device__ __forceinline__ uint64_t* output_sums() const { return m.token.sums.output(); }
  __device__ __forceinline__ uint64_t* logit_sums() const { return output_sums() + m.token.sums.logits; }
  // The memory into which all blocks publish the activation vectors of `down`.
  __device__ __forceinline__ char* shared_vectors() const {
    return reinterpret_cast<char*>(output_sums() + m.token.sums.vectors);
  }

  // The number of units of attention in layer i.
  __device__ __forceinline__ uint32_t units(uint32_t i) const {
    return Attention::units(layer(i).attention, m.keys[i % 2]);
  }

  // Loads again until the words are complete(). Call after a grid barrier.
  template <class Load, class Complete>
  __device__ __forceinline__ void read_again(Load&& load, Complete&& complete) const {
    megakernel::read_again(load, complete, m.token.grid.watch);
  }
  // Waits without a grid barrier until the words that load() reads are complete().
  template <class Load, class Complete>
  __device__ __forceinline__ void wait_for(Load&& load, Complete&& complete, uint32_t number) const {
    megakernel::wait_for_words(load, complete, m.token.grid.watch, number);
  }
};

// The id of a row of the head.
template <TokenVariant V> __device__ __forceinline__ uint32_t head_id(const TokenContext<V>& block, uint32_t row) {
  return (V.ranks ? block.m.token.head.first_id : 0) + row;
}

}  // namespace ingot::decode
