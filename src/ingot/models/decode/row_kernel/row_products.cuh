#pragma once
// A block's units of a product: multiplies weights from the ring by the activation vectors of all rows, and publishes
// the sums. A team takes every fifth unit and multiplies its chunks in order. The sum of a unit is added over the
// team's three warps, so the sum depends on the row and the matrix alone.
#include "ingot/models/decode/megakernel/products.cuh"
#include "ingot/models/decode/row_kernel/row_context.cuh"

namespace ingot::decode::rows {

// A thread that finishes units: its row of the step, and the first of its two rows of a row tile.
struct Finisher {
  uint32_t row, two;
  bool finishes;
  __device__ __forceinline__ Finisher()
      : row(threadIdx.x % kTeamThreads / 8), two(threadIdx.x % 8 * 2), finishes(threadIdx.x % kTeamThreads < 64) {}
};
struct Constants {
  float bias[2] = {0, 0}, scale[2] = {1, 1};
};

// Multiplies the units `first` to `end - 1`. vector(unit, row) returns the address of a row's activation vector,
// prepare(unit) requests constants before the weights, and whole warps call finish(unit, sums, constants).
template <WeightFormat F, class Vector, class Prepare, class Finish>
__device__ __forceinline__ void multiply_units(const Context& block, const Matrix& w, const RowSplit& split,
                                               uint32_t first, uint32_t end, megakernel::WeightReader& weights,
                                               uint32_t& parity, Vector&& vector, Prepare&& prepare, Finish&& finish) {
  constexpr uint32_t team_warps = megakernel::kTeamWarps;
  const uint32_t team = threadIdx.x / kTeamThreads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t all = (end - first + kTeams - 1) / kTeams * split.chunks * kTeams,
                 row = min(lane / 4, block.m.step.T - 1);
  const Finisher f;
#pragma unroll 1
  for (uint32_t number = first + team; number < first + all / split.chunks; number += kTeams) {
    const bool is_unit = number < end;  // without a unit, the chunks are void
    Unit unit{};
    Constants constants;
    const char* mine = nullptr;
    if (is_unit) {
      unit = block.unit(w, split, number);
      if (f.finishes) prepare(unit, constants);
      mine = vector(unit, row) + lane % 4 * 16;
    }
    float sum[1][4] = {};
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < split.chunks; ++chunk)
      weights.read_one(all, [&](const char* weight_tile, const megakernel::WeightNote& note) {
        const char* const vectors[1] = {mine + note.word[1] * weight_tiles::kVectorTileBytes};
        // The weight tiles of all chunks of a unit are dealt to the warps in turn.
#pragma unroll 1
        for (uint32_t g = (warp + 2 * note.word[1]) % team_warps; g < note.word[0]; g += team_warps) {
          weight_tiles::Stored<F> stored;
          load_from_ring(stored, weight_tile + g * weight_tiles::Form<F>::kBytes, lane);
          weight_tiles::multiply<F, 1>(stored, vectors, g * weight_tiles::kVectorTileBytes, sum);
        }
      });
    if (!is_unit) continue;
    auto& sums = block.m.sums[parity];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(&sums[warp][lane / 4 + 8 * h][lane % 4 * 2]) =
          make_float2(sum[0][2 * h], sum[0][2 * h + 1]);
    ptx::barrier_sync(kFirstTeamBarrier + team, kTeamThreads);
    if (f.finishes) {
      float y[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h)
        y[h] = (sums[team * team_warps][f.two + h][f.row] + sums[team * team_warps + 1][f.two + h][f.row] +
                sums[team * team_warps + 2][f.two + h][f.row]) *
               constants.scale[h];
      finish(unit, y, constants);
    }
    parity ^= 1;  // a warp writes these sums again after the barrier of the next unit
  }
  weights.finish(all);
}

// The scales of two rows of an fp8 row tile.
template <WeightFormat F>
__device__ __forceinline__ void load_scales(const Matrix& w, const Unit& u, uint32_t two, Constants& to) {
  if constexpr (F == WeightFormat::fp8) {
    const auto* const scale = reinterpret_cast<const float*>(w.data + u.row_tile * w.row_tile_bytes +
                                                             w.weight_tiles * weight_tiles::Form<F>::kBytes);
    to.scale[0] = scale[two], to.scale[1] = scale[two + 1];
  }
}
// Computes a product of qkv, of the output or of the head.
template <WeightFormat F>
__device__ __forceinline__ void multiply_dense(const Context& block, Stage stage, uint32_t layer,
                                               megakernel::WeightReader& weights, uint32_t& parity,
                                               sampling::Best& top) {
  const LayerStages& l = block.layer(layer);
  const NormProduct& head = block.m.step.head;
  const Matrix& w = block.matrix(stage, layer);
  const RowSplit& split = block.split(stage);
  const WeightTileRange range = block.units(w.row_tiles * split.parts);
  const uint32_t stride = weight_tiles::vector_stride(w.cols), T = block.m.step.T;
  const float* const bias = stage == Stage::qkv ? l.qkv.bias : stage == Stage::output ? l.output.bias : nullptr;
  const Finisher f;
  const bool mine = f.finishes && f.row < T;
  float scale = weight_tiles::Form<F>::kOutputScale;
  if (mine && stage != Stage::output) scale *= block.rstd(f.row, stage == Stage::qkv ? l.qkv.eps : head.eps);
  uint64_t* const sums = stage == Stage::qkv ? block.qkv(block.m.epoch + layer, f.row) : block.x(f.row);
  const uint32_t skipped = T - block.m.step.head_rows;  // rows without logits
  float* const logits = head.y + int64_t(f.row - skipped) * head.y_stride;
  multiply_units<F>(
      block, w, split, range.begin, range.end, weights, parity,
      [&](const Unit&, uint32_t row) { return block.vectors() + row * stride; },
      [&](const Unit& u, Constants& to) {
        load_scales<F>(w, u, f.two, to);
        const uint32_t n = 16 * u.row_tile + f.two;
        if (bias == nullptr || u.part > 0) return;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h)
          if (n + h < w.rows) to.bias[h] = bias[n + h];
      },
      [&](const Unit& u, const float(&y)[2], const Constants& c) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const uint32_t n = 16 * u.row_tile + f.two + h;
          const float value = y[h] * scale + c.bias[h];
          if (!mine || n >= w.rows) continue;
          if (!yields_logits(stage)) {
            Sum::add(sums + n, value, 1);
          } else if (f.row >= skipped) {
            logits[n] = value;
            if (f.row + 1 == T && n < head.vocab) top.add(value, n);
          }
        }
      });
}

// Computes the units `first` to `end - 1` of gate and up, or of down, whose activation vectors are in shared memory.
__device__ __forceinline__ void multiply_experts(const Context& block, bool down, uint32_t layer, uint32_t first,
                                                 uint32_t end, megakernel::WeightReader& weights, uint32_t& parity) {
  const ExpertSlots& slots = block.m.slots;
  const LayerStages& l = block.layer(layer);
  const GateUp& p = l.gate_up;
  const Matrix& w = down ? l.down.w : p.w;
  const float* const biases = down ? l.down.bias : p.bias;
  const RowSplit& split = block.split(down ? Stage::down : Stage::gate_up);
  const uint32_t stride = weight_tiles::vector_stride(w.cols), width = p.w.rows / 2,
                 first_pair = down ? slots.before[first / (w.row_tiles * split.parts)] : 0;
  const Finisher f;
  float scale = weight_tiles::Form<kExperts>::kOutputScale;
  if (!down && f.finishes && f.row < block.m.step.T) scale *= block.rstd(f.row, p.eps);
  multiply_units<kExperts>(
      block, w, split, first, end, weights, parity,
      [&](const Unit& u, uint32_t row) {
        const uint32_t place = down ? slots.before[u.slot] - first_pair + slots.place(u.slot, row) : row;
        return block.vectors() + place * stride;
      },
      [&](const Unit& u, Constants& to) {
        const uint32_t n = 16 * u.row_tile + f.two;
        if (biases == nullptr || u.part > 0 || !slots.has(u.slot, f.row)) return;
        const float* const bias = biases + int64_t(slots.expert[u.slot]) * w.rows + n;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h)
          if (n + h < w.rows) to.bias[h] = bias[h];
      },
      [&](const Unit& u, const float(&y)[2], const Constants& c) {
        const bool has = slots.has(u.slot, f.row);
        const uint32_t pair = has ? slots.pair[slots.before[u.slot] + slots.place(u.slot, f.row)] : 0;
        float value[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) value[h] = y[h] * scale + c.bias[h];
        if (down) {
          const uint32_t n = 16 * u.row_tile + f.two;
          const float weight = block.choice().weights[pair];
#pragma unroll
          for (uint32_t h = 0; h < 2; ++h)
            if (has && n + h < w.rows) Sum::add(block.x(f.row) + n + h, weight * value[h], 1);
          return;
        }
        // Channel n. The channels of two neighbouring threads form a word of an activation vector of down.
        const uint32_t n = 8 * u.row_tile + f.two / 2;
        constexpr float kInputScale = weight_tiles::Form<kExperts>::kInputScale;
        const float channel = n < width ? gated(value[0], value[1], p.limit, p.alpha) : 0,
                    next = __shfl_down_sync(~0u, channel, 1);
        if (n % 2 != 0 || !has) return;
        char* const vector = block.shared_vector(pair);
        const auto put = [&](uint32_t at, uint32_t word) {
          ptx::store_relaxed(reinterpret_cast<uint32_t*>(vector + 2 * weight_tiles::place(false, at)), ~word);
        };
        put(n, ptx::pack(bf16{}, channel * kInputScale, next * kInputScale));
        if (u.row_tile + 1 == w.row_tiles)
#pragma unroll 1
          for (uint32_t behind = n + 8; behind < weight_tiles::padded(width); behind += 8) put(behind, 0);
      });
}

}  // namespace ingot::decode::rows
