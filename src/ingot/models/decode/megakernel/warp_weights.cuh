#pragma once
// The weights of the form without the copy engine (megakernel/warp_ring.cuh): which steps of a product a warp
// multiplies, in which order it requests them, ahead of the products, and the products themselves. A step is 512 bytes
// of a weight tile, and in MXFP4 a whole weight tile.
#include "ingot/megakernel/warp_ring.cuh"
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode {

template <WeightFormat F> constexpr uint32_t kTileSteps = weight_tiles::Form<F>::kBytes / 512;
template <WeightFormat F> constexpr uint32_t kStepBytes = weight_tiles::Form<F>::kBytes / kTileSteps<F>;
static_assert(kStepBytes<WeightFormat::mxfp4> == megakernel::kWarpSlotBytes, "a slot has room for a step");

// The steps of this warp in the round of a product that begins with the sums `round`.
template <TokenVariant V>
__device__ __forceinline__ WeightTileRange steps_of_warp(const WorkRange& s, uint32_t round, uint32_t tile_steps) {
  return WarpSteps::of_warp(s, tile_steps, round, kRoundGroupsOf<V>, threadIdx.x / 32, kTokenWarps);
}

// The steps of all products of a token in their order, as far as they are known: the steps of gate and up are known
// only after the choice of experts.
template <TokenVariant V> class WarpRequests {
 public:
  __device__ __forceinline__ explicit WarpRequests(const TokenContext<V>& block) : block_(block) {}
  // The experts of layer i are chosen.
  __device__ __forceinline__ void allow(uint32_t i) { chosen_layers_ = i + 1; }
  // Requests the warp's next step. Returns false where no further step is known.
  __device__ __forceinline__ bool operator()(uint32_t slot) {
    if (left_ == 0 && !find()) return false;
    copy(true, slot, uses_experts(stage_));
    --left_;
    return true;
  }
  // The number of steps, at most `most`, that can be requested by copy() before the next call of this function, or 0.
  __device__ __forceinline__ uint32_t begin(uint32_t most) {
    if (left_ == 0 && !find()) return 0;
    const uint32_t count = min(left_, most);
    left_ -= count;
    return count;
  }
  // Whether the steps to be requested are of experts.
  __device__ __forceinline__ bool are_experts() const { return uses_experts(stage_); }
  // Requests a step where `copies` holds. `experts`: the step is one of experts.
  __device__ __forceinline__ void copy(bool copies, uint32_t slot, bool experts) {
    constexpr bool kDense = V.dense == WeightFormat::mxfp4, kExperts = V.experts == WeightFormat::mxfp4;
    const uint32_t lane = threadIdx.x % 32;
    ptx::cp_async_16_if(copies, slot + lane * 16, at_);
    if constexpr (kDense || kExperts)  // two lanes copy the scales
      ptx::cp_async_16_if(copies && lane < 2 && (kDense == kExperts || experts == kExperts), slot + 512 + lane * 16,
                          at_ + 512);
    at_ += experts ? kStepBytes<V.experts> : kStepBytes<V.dense>;
  }

 private:
  // Finds the warp's next row tile. Returns false where no further steps are known.
  __device__ __forceinline__ bool find() {
#pragma unroll 1
    while (next_ == end_) {
      const uint32_t groups = block_.work(stage_).end_sums;
      if (round_ + kRoundGroupsOf<V> < groups) {
        round_ += kRoundGroupsOf<V>;
      } else {
        if (stage_ == Stage::head || (stage_ == Stage::output && layer_ == chosen_layers_)) return false;
        const bool ends = ends_layer(stage_);
        if (ends && layer_ + 1 == block_.m.token.count) {
          if (block_.m.token.head_rows == 0) return false;
          stage_ = Stage::head;
        } else if (ends) {
          stage_ = Stage::qkv, ++layer_;
        } else {
          stage_ = stage_ == Stage::qkv ? Stage::output : Stage(int(stage_) + 1);
        }
        round_ = block_.work(stage_).first_sums;
      }
      const WeightTileRange r = steps_of_warp<V>(block_.work(stage_), round_, tile_steps());
      next_ = r.begin, end_ = r.end;
    }
    const WorkRange& s = block_.work(stage_);
    const RowTileSteps of = block_.m.stream[int(stage_)].row_tile_of(s, next_, end_);
    const bool experts = uses_experts(stage_);
    const uint32_t step_bytes = experts ? kStepBytes<V.experts> : kStepBytes<V.dense>;
    at_ = block_.matrix(stage_, block_.layer(layer_)).data + of.row_tile * s.row_tile_bytes + of.first * step_bytes +
          threadIdx.x % 32 * 16;
    if (experts) at_ += block_.chosen()[of.slot] * s.matrix_bytes;
    left_ = of.count, next_ += of.count;
    return true;
  }
  __device__ __forceinline__ uint32_t tile_steps() const {
    return uses_experts(stage_) ? kTileSteps<V.experts> : kTileSteps<V.dense>;
  }

  const TokenContext<V>& block_;
  const uint8_t* at_ = nullptr;  // of this lane
  uint32_t left_ = 0;            // steps of the row tile from `at_` on
  uint32_t next_ = 0, end_ = 0;  // further steps of the round
  uint32_t round_ = ~0u - kRoundGroupsOf<V>, layer_ = ~0u, chosen_layers_ = 0;
  Stage stage_ = Stage::down;  // before layer 0
};

// A warp's view of the weights.
template <TokenVariant V> class WarpWeights {
 public:
  __device__ __forceinline__ explicit WarpWeights(const TokenContext<V>& block)
      : requests_(block),
        ring_(block.m.token.stream.slots,
              block.memory + block.m.token.ring +
                  threadIdx.x / 32 * block.m.token.stream.slots * megakernel::kWarpSlotBytes) {}
  // Requests the next weights, before the product of `stage` in layer i begins.
  __device__ __forceinline__ void fill(Stage stage, uint32_t i) {
    if (stage == Stage::gate_up) requests_.allow(i);
    ring_.fill(requests_);
  }
  // Calls use(step) for the next `count` steps, and requests as many further ones where they are known. `kExperts`: the
  // steps are of experts.
  template <WeightFormat F, bool kExperts, class Use> __device__ __forceinline__ void read(uint32_t count, Use&& use) {
#pragma unroll 1
    while (count > 0) {
      const uint32_t requests = requests_.begin(count), steps = requests > 0 ? requests : count;
      // The steps of gate and up are requested only after the experts are known, so a product by a dense matrix
      // requests steps of dense matrices only.
      const bool experts = kExperts && requests_.are_experts();
      const auto take = [&] {
        const megakernel::WarpStep step = ring_.template take<F == WeightFormat::mxfp4>();
        requests_.copy(requests > 0, ring_.slot(), experts);
        ring_.advance();
        return step;
      };
      // A step is taken while the one before is multiplied.
      megakernel::WarpStep step = take();
#pragma unroll 1
      for (uint32_t n = steps; n > 0; --n) {
        megakernel::WarpStep next{};
        if (n > 1) next = take();
        use(step);
        step = next;
      }
      if (requests == 0) ring_.shrink(steps);
      count -= steps;
    }
  }

 private:
  WarpRequests<V> requests_;
  megakernel::WarpRing ring_;
};

// The bytes of an activation vector that a step multiplies, and where a lane's part of them begins.
template <WeightFormat F> constexpr uint32_t kStepVectorBytes = weight_tiles::kVectorTileBytes / kTileSteps<F>;
template <WeightFormat F> __device__ __forceinline__ const char* vector_of_step(const char* vector, uint32_t step) {
  if constexpr (F == WeightFormat::bf16) return vector + step / 2 * 64 + step % 2 * 8;
  return vector + step * kStepVectorBytes<F>;
}
// sum += a step times the activation vector, of which `vector` is this lane's part for the step (vector_of_step()).
template <WeightFormat F>
__device__ __forceinline__ void multiply_step(const megakernel::WarpStep& w, const char* vector, float (&sum)[1][4]) {
  if constexpr (F == WeightFormat::mxfp4) {
    const weight_tiles::Stored<F> tile{{{w.words.x, w.words.y, w.words.z, w.words.w}}, w.scales};
    const char* const mine[1] = {vector};
    weight_tiles::multiply<F, 1>(tile, mine, 0, sum);
  } else if constexpr (F == WeightFormat::bf16) {
    const uint2 b = *reinterpret_cast<const uint2*>(vector);
    const uint32_t a[4] = {w.words.x, w.words.y, w.words.z, w.words.w}, two[2] = {b.x, b.y};
    ptx::mma_m16n8k16(bf16{}, sum[0], a, two);
  } else {
    const uint4 b = *reinterpret_cast<const uint4*>(vector);
    const uint32_t words[4] = {w.words.x, w.words.y, w.words.z, w.words.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = weight_tiles::even_of_fp8(words[2 * half + i]);
        a[2 + i] = weight_tiles::odd_of_fp8(words[2 * half + i]);
      }
      const uint32_t two[2] = {half == 0 ? b.x : b.z, half == 0 ? b.y : b.w};
      ptx::mma_m16n8k16(bf16{}, sum[0], a, two);
    }
  }
}

// Multiplies this warp's part of a round, whose first group of sums is `round`. With kSlots the matrices are those of
// the chosen experts, which begin at `data`.
template <WeightFormat F, bool kSlots, TokenVariant V>
__device__ __forceinline__ void multiply_steps(const TokenContext<V>& block, const WorkRange& s, const uint8_t* data,
                                               const WarpSteps& steps, uint32_t round, WarpWeights<V>& weights) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool by_row_tile = kSlots && s.by_row_tile;
  const uint32_t stride = by_row_tile ? s.vector_stride : 0;
  const char* const vectors = block.vectors() + lane % 4 * 16;
  const WeightTileRange mine = steps_of_warp<V>(s, round, kTileSteps<F>);
#pragma unroll 1
  for (uint32_t step = mine.begin; step < mine.end;) {
    const RowTileSteps of = steps.row_tile_of(s, step, mine.end);
    const char* const vector = vectors + of.slot * stride;
    float sum[1][4] = {};
    uint32_t at = of.first;
    weights.template read<F, kSlots>(
        of.count, [&](const megakernel::WarpStep& w) { multiply_step<F>(w, vector_of_step<F>(vector, at++), sum); });
    step += of.count;
    float scale[2] = {1, 1};
    if (by_row_tile) scale[0] = scale[1] = block.choice().weights[of.slot];
    if constexpr (kSlots && F == WeightFormat::fp8) {
      float row_scale[2];
      weight_tiles::load_row_scales(data + s.expert[of.slot] * s.matrix_bytes + of.row_tile * s.row_tile_bytes,
                                    s.weight_tiles, row_scale);
      scale[0] *= row_scale[0], scale[1] *= row_scale[1];
    }
    // The four lanes that share g all hold the sums of rows g and g + 8.
    float(&to)[16] = block.m.sums[of.group - round][warp];
    if (lane % 4 == 0) to[lane / 4] += scale[0] * sum[0][0], to[lane / 4 + 8] += scale[1] * sum[0][2];
  }
}

}  // namespace ingot::decode
