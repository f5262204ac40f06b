#pragma once
// The row tiles that a team of warps multiplies in a pass for 2 to 16 tokens: of one matrix, or of the matrices of the
// chosen experts.
#include "ingot/models/decode/small_batch/weight_ring.cuh"

namespace ingot::decode::small_batch {

struct Unit {
  uint32_t index, expert_slot, row_tile;
};
__device__ __forceinline__ const uint8_t* data_of(const Matrix& w, const int32_t* expert, const Unit& u) {
  return w.data + (expert == nullptr ? 0 : uint32_t(expert[u.expert_slot]) * w.matrix_bytes) +
         u.row_tile * w.row_tile_bytes;
}
// The size of the sums of all warps, for two units in turn.
template <int kCols> constexpr int64_t kSumsBytes = 2 * int64_t(kWarps) * kBlocks8<kCols> * 512;
template <int kCols> struct Memory {
  float rstd[kCols];
  uint32_t expert_slots;  // number of expert slots in the lists
};
// Shared memory that a block needs in addition to activation vectors and lists, with one slot for each warp.
INGOT_HD constexpr int64_t least_bytes(uint32_t T) {
  return (T <= 8 ? kSumsBytes<8> : kSumsBytes<16>)+int64_t(kWarps) * Ring<WeightFormat::bf16>::kSlotBytes;
}
template <WeightFormat F, int kCols, uint32_t kTeam> class Bank {
  static constexpr uint32_t kTeams = kWarps / kTeam;

 public:
  static constexpr int kBlocks = kBlocks8<kCols>;
  // For experts: a block's run of the units of the `count` experts that `expert` names in shared memory. `sums` has
  // kSumsBytes.
  __device__ __forceinline__ Bank(const Matrix& w, const Ring<F>& ring, char* sums, const int32_t* expert,
                                  uint32_t count, At at)
      : Bank(w, ring, sums, expert, uint32_t(uint64_t(at.block) * count * w.row_tiles / at.blocks),
             uint32_t(uint64_t(at.block + 1) * count * w.row_tiles / at.blocks), 1) {}
  // For a single matrix: each block takes every `blocks`-th row tile.
  __device__ __forceinline__ Bank(const Matrix& w, const Ring<F>& ring, char* sums, At at)
      : Bank(w, ring, sums, nullptr, at.block, w.row_tiles, at.blocks) {}

  __device__ __forceinline__ uint32_t first() const { return first_; }
  __device__ __forceinline__ uint32_t end() const { return end_; }
  // Requests the first chunks.
  __device__ __forceinline__ void ask() {
    for (uint32_t i = 0; i < ring_.slots(); ++i) put_ahead();
  }
  // Multiplies the team's units before `stop`. vectors(unit, mine) sets the addresses of this lane's activation
  // vectors. prepare(unit, ends) prefetches the constants that finish(unit, sums, constants) takes. One warp of the
  // team finishes each unit: lane 4 g + t has rows g and g + 8 of the activation vectors 2 t and 2 t + 1 of every 8.
  template <class Vectors, class Prepare, class Finish>
  __device__ __forceinline__ void multiply(uint32_t stop, Vectors&& vectors, Prepare&& prepare, Finish&& finish) {
    const uint32_t team = threadIdx.x / (32 * kTeam), warp = threadIdx.x / 32 % kTeam, lane = threadIdx.x % 32;
#pragma unroll 1
    while (here_.index < stop) {
      const bool ends = turn_ == warp;
      auto prepared = prepare(here_, ends);
      const char* mine[kBlocks];
      vectors(here_, mine);
      float sum[kBlocks][4] = {};
#pragma unroll 1
      for (uint32_t r = 0; r < rounds_; ++r) {
        ring_.multiply(r + 1 < rounds_ ? Ring<F>::kChunkTiles : last_, mine,
                       (mine_ + r * Ring<F>::kChunkTiles) * weight_tiles::kVectorTileBytes, sum);
        put_ahead();
      }
      float4* const part = sums_ + parity_ * kWarps * kBlocks * 32 + lane;
#pragma unroll
      for (int k = 0; k < kBlocks; ++k)
        part[(threadIdx.x / 32 * kBlocks + k) * 32] = make_float4(sum[k][0], sum[k][1], sum[k][2], sum[k][3]);
      ptx::barrier_sync(1 + team, 32 * kTeam);
      if (ends) {
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          const float4* const from = part + (team * kTeam * kBlocks + k) * 32;
          float4 all = from[0];
#pragma unroll
          for (uint32_t i = 1; i < kTeam; ++i) {
            const float4 one = from[i * kBlocks * 32];
            all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
          }
          sum[k][0] = all.x, sum[k][1] = all.y, sum[k][2] = all.z, sum[k][3] = all.w;
        }
        finish(here_, sum, prepared);
      }
      parity_ ^= 1;  // the warp that finishes this unit is done before the next unit's barrier
      turn_ = turn_ + 1 == kTeam ? 0 : turn_ + 1;
      advance(here_);
    }
  }

 private:
  __device__ __forceinline__ Bank(const Matrix& w, const Ring<F>& ring, char* sums, const int32_t* expert,
                                  uint32_t first, uint32_t end, uint32_t step)
      : w_(w),
        expert_(expert),
        first_(first),
        end_(end),
        step_(step),
        sums_(reinterpret_cast<float4*>(sums)),
        ring_(ring) {
    const uint32_t warp = threadIdx.x / 32 % kTeam, each = (w.weight_tiles + kTeam - 1) / kTeam;
    mine_ = min(warp * each, w.weight_tiles);
    const uint32_t weight_tiles = min(each, w.weight_tiles - mine_);  // the last warps may have fewer chunks, or none
    rounds_ = (weight_tiles + Ring<F>::kChunkTiles - 1) / Ring<F>::kChunkTiles;
    last_ = weight_tiles - (rounds_ > 0 ? (rounds_ - 1) * Ring<F>::kChunkTiles : 0);
    here_.index = here_.row_tile = first + threadIdx.x / (32 * kTeam) * step;
    here_.expert_slot = 0;
    if (expert != nullptr) here_.expert_slot = here_.index / w.row_tiles, here_.row_tile = here_.index % w.row_tiles;
    ahead_ = here_, left_ = rounds_;
    find();
  }
  __device__ __forceinline__ void advance(Unit& u) const {
    u.index += kTeams * step_, u.row_tile += kTeams * step_;
    while (expert_ != nullptr && u.row_tile >= w_.row_tiles) u.row_tile -= w_.row_tiles, ++u.expert_slot;
  }
  // Finds the address of this lane's part of unit `ahead_`; null where there is no such unit.
  __device__ __forceinline__ void find() {
    from_ = nullptr;
    if (ahead_.index < end_ && rounds_ > 0)
      from_ = data_of(w_, expert_, ahead_) + mine_ * Ring<F>::kWeightTile + threadIdx.x % 32 * 16;
  }
  // Requests the next chunk, if there is one.
  __device__ __forceinline__ void put_ahead() {
    if (from_ == nullptr) return ring_.put_none();
    const bool last = --left_ == 0;
    ring_.put(from_, last ? last_ : Ring<F>::kChunkTiles);
    from_ += Ring<F>::kSlotBytes;
    if (last) left_ = rounds_, advance(ahead_), find();
  }

  const Matrix& w_;
  const int32_t* const expert_;
  const uint32_t first_, end_, step_;
  // the same for every row tile: first weight tile, number of chunks, weight tiles of the last chunk
  uint32_t mine_, rounds_, last_;
  Unit here_, ahead_;
  uint32_t left_;  // chunks of `ahead_` that have not been requested
  const uint8_t* from_ = nullptr;
  float4* const sums_;
  uint32_t parity_ = 0, turn_ = 0;
  Ring<F> ring_;
};

}  // namespace ingot::decode::small_batch
