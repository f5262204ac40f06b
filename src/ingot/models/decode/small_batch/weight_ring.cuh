#pragma once
// The ring of a warp in a pass for 2 to 16 tokens: its next weight tiles, on their way from memory.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/small_batch/small_batch_router.cuh"

namespace ingot::decode::small_batch {

constexpr uint32_t kWarps = 24, kThreads = 32 * kWarps;
// Warps that multiply one row tile of an expert's matrix together; of 45 weight tiles (2,880 columns) each warp has 15.
constexpr uint32_t kTeam = 3;
constexpr uint32_t kMatrixTeam = 12;  // the same for a row tile of any other matrix

constexpr uint32_t kMostSlots = 3;
// Chunks of weight tiles are copied asynchronously to the warp's own slots in shared memory. Loads into registers would
// wait for each other, because a warp has only six scoreboard counters for outstanding loads.
template <WeightFormat F> class Ring {
 public:
  static constexpr uint32_t kChunkTiles = F == WeightFormat::mxfp4 ? 3 : F == WeightFormat::fp8 ? 2 : 1;
  static constexpr uint32_t kWeightTile = weight_tiles::Form<F>::kBytes, kSlotBytes = kChunkTiles * kWeightTile;

  __device__ __forceinline__ Ring(char* memory, uint32_t slots)
      : slots_(memory + threadIdx.x / 32 * slots * kSlotBytes), count_(slots), put_(0), taken_(0) {}
  __device__ __forceinline__ uint32_t slots() const { return count_; }
  // Called by the whole warp: copies a chunk into the next slot, which must be empty. `from` is the address of this
  // lane's bytes.
  __device__ __forceinline__ void put(const uint8_t* from, uint32_t weight_tiles) {
    const uint32_t mine = threadIdx.x % 32 * 16, to = ptx::shared_address(slots_ + put_) + mine;
    if (weight_tiles == kChunkTiles) {
#pragma unroll
      for (uint32_t at = 0; at < kSlotBytes; at += 512)
        if (at + 512 <= kSlotBytes || at + mine < kSlotBytes) ptx::cp_async<16>(to + at, from + at);
    } else {
#pragma unroll 1
      for (uint32_t at = 0; at + mine < weight_tiles * kWeightTile; at += 512) ptx::cp_async<16>(to + at, from + at);
    }
    put_none();
    advance(put_);
  }
  __device__ __forceinline__ void put_none() const { ptx::cp_async_commit_group(); }
  // Adds to `sum` the weight tiles of the next chunk times the activation vectors, which begin at byte `at`. Call put()
  // once after each call.
  template <int kBlocks>
  __device__ __forceinline__ void multiply(uint32_t count, const char* const (&vectors)[kBlocks], uint32_t at,
                                           float (&sum)[kBlocks][4]) {
    if (count_ == 3)
      ptx::cp_async_wait_group<2>();
    else if (count_ == 2)
      ptx::cp_async_wait_group<1>();
    else
      ptx::cp_async_wait_group<0>();
    __syncwarp();
    const char* const from = slots_ + taken_;
    if (kBlocks == 1 && count == kChunkTiles) {  // without a branch between the weight tiles
      weight_tiles::Stored<F> held[kChunkTiles];
#pragma unroll
      for (uint32_t u = 0; u < kChunkTiles; ++u) load(held[u], from + u * kWeightTile);
#pragma unroll
      for (uint32_t u = 0; u < kChunkTiles; ++u)
        weight_tiles::multiply<F>(held[u], vectors, at + u * weight_tiles::kVectorTileBytes, sum);
    } else {
#pragma unroll 1
      for (uint32_t u = 0; u < count; ++u) {
        weight_tiles::Stored<F> held;
        load(held, from + u * kWeightTile);
        weight_tiles::multiply<F>(held, vectors, at + u * weight_tiles::kVectorTileBytes, sum);
      }
    }
    __syncwarp();
    advance(taken_);
  }

 private:
  __device__ __forceinline__ void advance(uint32_t& slot) const {
    slot = slot + kSlotBytes == count_ * kSlotBytes ? 0 : slot + kSlotBytes;
  }
  __device__ __forceinline__ static void load(weight_tiles::Stored<F>& s, const char* weight_tile) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < int(sizeof(s.word) / 16); ++i) {
      const uint4 w = *reinterpret_cast<const uint4*>(weight_tile + i * 512 + lane * 16);
      s.word[i][0] = w.x, s.word[i][1] = w.y, s.word[i][2] = w.z, s.word[i][3] = w.w;
    }
    if constexpr (F == WeightFormat::mxfp4)
      s.scales = *reinterpret_cast<const uint32_t*>(weight_tile + 512 + lane / 4 * 4);
  }
  char* const slots_;
  const uint32_t count_;
  uint32_t put_, taken_;  // offsets in bytes of the next slot to fill and the next slot to read
};

}  // namespace ingot::decode::small_batch
