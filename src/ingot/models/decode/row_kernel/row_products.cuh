#pragma once
// A block's units of a product: multiplies weights from the ring by the activation vectors of all rows, and publishes
// the sums. A team takes every kTeams-th unit and multiplies its chunks in order. The sum of a unit is added over the
// team's three warps, so the sum depends on the row and the matrix alone.
#include "ingot/models/decode/megakernel/products.cuh"
#include "ingot/models/decode/row_kernel/row_context.cuh"

namespace ingot::decode::rows {

// The biases and scales of the two rows of a row tile that a lane finishes. One warp of a team finishes a unit; the
// warps take turns. Lane 8 q + p finishes rows 2 p and 2 p + 1 of the row tile, for the columns q, q + 4, ... of the
// unit.
struct Constants {
  float bias[2] = {0, 0}, scale[2] = {1, 1};
};
__device__ __forceinline__ uint32_t finished_number() { return threadIdx.x % 8 * 2; }

// Multiplies this warp's weight tiles of a chunk: every third from `first` on.
template <WeightFormat F>
__device__ __forceinline__ void multiply_chunk(const char* chunk, uint32_t first, uint32_t count, const char* vector,
                                               float (&sum)[1][4]) {
  constexpr uint32_t kStep = megakernel::kTeamWarps, kBytes = weight_tiles::Form<F>::kBytes,
                     kVectorBytes = weight_tiles::kVectorTileBytes;
  const uint32_t lane = threadIdx.x % 32;
  chunk += first * kBytes;
  const char* mine[1] = {vector + first * kVectorBytes};
#pragma unroll 1
  for (; first + kStep < count; first += 2 * kStep) {
    weight_tiles::Stored<F> one, two;
    load_from_ring(one, chunk, lane);
    load_from_ring(two, chunk + kStep * kBytes, lane);
    weight_tiles::multiply<F, 1>(one, mine, 0, sum);
    weight_tiles::multiply<F, 1>(two, mine, kStep * kVectorBytes, sum);
    chunk += 2 * kStep * kBytes, mine[0] += 2 * kStep * kVectorBytes;
  }
  if (first >= count) return;
  weight_tiles::Stored<F> last;
  load_from_ring(last, chunk, lane);
  weight_tiles::multiply<F, 1>(last, mine, 0, sum);
}

// Multiplies the units `first` to `end - 1`. vector(unit, row) returns the address of a row's activation vector. The
// finishing warp requests constants by prepare(unit, constants) before the weights, and calls finish(unit, q, row,
// exists, sums, constants) for the columns q of the unit, where row = row_of(unit, q) is the row of the step to which
// column q belongs. A lane without a column (q >= columns(unit)) gets exists = false.
template <WeightFormat F, class Vector, class Prepare, class Columns, class RowOf, class Finish>
__device__ __forceinline__ void multiply_units(const Context& block, const Matrix& w, const RowSplit& split,
                                               uint32_t first, uint32_t end, megakernel::WeightReader& weights,
                                               Vector&& vector, Prepare&& prepare, Columns&& columns, RowOf&& row_of,
                                               Finish&& finish) {
  constexpr uint32_t team_warps = megakernel::kTeamWarps;
  const uint32_t team = threadIdx.x / kTeamThreads, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
                 chunks = split.chunks, all = (end - first + kTeams - 1) / kTeams * chunks * kTeams,
                 row = min(lane / 4, block.m.step.T - 1), number_end = first + all / chunks;
  uint32_t turn = warp % team_warps, parity = 0;  // where `turn` is zero, this warp finishes the unit
  UnitCursor units(w, split, block.unit(w, split, first + team));
#pragma unroll 1
  for (uint32_t number = first + team; number < number_end; number += kTeams, units.advance()) {
    const bool is_unit = number < end;  // without a unit, the chunks are void
    const Unit& unit = *units;
    Constants constants;
    const char* mine = nullptr;
    if (is_unit) {
      if (turn == 0) prepare(unit, constants);
      mine = vector(unit, row) + lane % 4 * 16;
    }
    float sum[1][4] = {};
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < chunks; ++chunk)
      weights.read_one(all, [&](const char* weight_tile, const megakernel::WeightNote& note) {
        // The weight tiles of all chunks of a unit are dealt to the warps in turn.
        multiply_chunk<F>(weight_tile, (warp + 2 * note.word[1]) % team_warps, note.word[0],
                          mine + note.word[1] * weight_tiles::kVectorTileBytes, sum);
      });
    if (!is_unit) continue;
    auto& sums = block.m.sums[parity];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(&sums[warp][lane / 4 + 8 * h][lane % 4 * 2]) =
          make_float2(sum[0][2 * h], sum[0][2 * h + 1]);
    ptx::barrier_sync(kFirstTeamBarrier + team, kTeamThreads);
    if (turn == 0) {
      const uint32_t count = columns(unit), two = finished_number();
#pragma unroll 1
      for (uint32_t begin = 0; begin < count; begin += 4) {
        const uint32_t q = begin + lane / 8, column = q < count ? row_of(unit, q) : 0;
        float y[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h)
          y[h] = (sums[team * team_warps][two + h][column] + sums[team * team_warps + 1][two + h][column] +
                  sums[team * team_warps + 2][two + h][column]) *
                 constants.scale[h];
        finish(unit, q, column, q < count, y, constants);
      }
    }
    turn = turn == 0 ? team_warps - 1 : turn - 1;
    parity ^= 1;  // a warp writes these sums again after the barrier of the next unit
  }
  weights.finish(all);
}

// The scales of two rows of an fp8 row tile.
template <WeightFormat F> __device__ __forceinline__ void load_scales(const Matrix& w, const Unit& u, Constants& to) {
  if constexpr (F == WeightFormat::fp8) {
    const auto* const scale = reinterpret_cast<const float*>(w.data + u.row_tile * w.row_tile_bytes +
                                                             w.weight_tiles * weight_tiles::Form<F>::kBytes);
    to.scale[0] = scale[finished_number()], to.scale[1] = scale[finished_number() + 1];
  }
}
// Loads the biases of two rows, which only the first part of a row tile adds.
__device__ __forceinline__ void load_biases(const float* bias, const Matrix& w, const Unit& u, Constants& to) {
  const uint32_t n = 16 * u.row_tile + finished_number();
  if (bias == nullptr || u.part > 0) return;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h)
    if (n + h < w.rows) to.bias[h] = bias[n + h];
}
// Computes a product of qkv, of the output or of the head.
template <WeightFormat F>
__device__ __forceinline__ void multiply_dense(const Context& block, Stage stage, uint32_t layer,
                                               megakernel::WeightReader& weights, sampling::Best& top) {
  const LayerStages& l = block.layer(layer);
  const NormProduct& head = block.m.step.head;
  const Matrix& w = block.matrix(stage, layer);
  const RowSplit& split = block.split(stage);
  const WeightTileRange range = block.units(w.row_tiles * split.parts);
  const uint32_t stride = weight_tiles::vector_stride(w.cols), T = block.m.step.T;
  const float* const bias = stage == Stage::qkv ? l.qkv.bias : stage == Stage::output ? l.output.bias : nullptr;
  // The sums of row j begin j * sum_bytes behind `sums`.
  char* const sums = stage == Stage::qkv ? block.turn(block.m.epoch + layer, 0) : reinterpret_cast<char*>(block.x(0));
  const int64_t sum_bytes = stage == Stage::qkv ? block.m.step.words.turn_bytes : block.m.step.words.x_stride * 8;
  const uint32_t skipped = T - block.m.step.head_rows;  // rows without logits
  multiply_units<F>(
      block, w, split, range.begin, range.end, weights,
      [&](const Unit&, uint32_t row) { return block.vectors() + row * stride; },
      [&](const Unit& u, Constants& to) {
        load_scales<F>(w, u, to);
        load_biases(bias, w, u, to);
      },
      [&](const Unit&) { return T; }, [&](const Unit&, uint32_t q) { return q; },
      [&](const Unit& u, uint32_t, uint32_t row, bool exists, const float(&y)[2], const Constants& c) {
        const float scale = stage == Stage::output ? weight_tiles::Form<F>::kOutputScale
                                                   : weight_tiles::Form<F>::kOutputScale * block.m.rstd[row];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const uint32_t n = 16 * u.row_tile + finished_number() + h;
          const float value = y[h] * scale + c.bias[h];
          if (!exists || n >= w.rows) continue;
          if (!yields_logits(stage)) {
            Sum::add(reinterpret_cast<uint64_t*>(sums + row * sum_bytes) + n, value, 1);
          } else if (row >= skipped) {
            head.y[int64_t(row - skipped) * head.y_stride + n] = value;
            if (row + 1 == T && n < head.vocab) top.add(value, n);
          }
        }
      });
}

// Computes the units `first` to `end - 1` of gate and up, or of down, whose activation vectors are in shared memory.
__device__ __forceinline__ void multiply_experts(const Context& block, bool down, uint32_t layer, uint32_t first,
                                                 uint32_t end, megakernel::WeightReader& weights) {
  const ExpertSlots& slots = block.m.slots;
  const LayerStages& l = block.layer(layer);
  const GateUp& p = l.gate_up;
  const Matrix& w = down ? l.down.w : p.w;
  const float* const biases = down ? l.down.bias : p.bias;
  const RowSplit& split = block.split(down ? Stage::down : Stage::gate_up);
  const uint32_t stride = weight_tiles::vector_stride(w.cols), width = p.w.rows / 2,
                 first_pair = down ? uint32_t(slots.before[first / (w.row_tiles * split.parts)]) : 0;
  constexpr float kOutputScale = weight_tiles::Form<kExperts>::kOutputScale;
  multiply_units<kExperts>(
      block, w, split, first, end, weights,
      [&](const Unit& u, uint32_t row) {
        const uint32_t place = down ? slots.before[u.slot] - first_pair + slots.place(u.slot, row) : row;
        return block.vectors() + place * stride;
      },
      [&](const Unit& u, Constants& to) {
        if (biases != nullptr) load_biases(biases + int64_t(slots.expert[u.slot]) * w.rows, w, u, to);
      },
      [&](const Unit& u) { return uint32_t(slots.before[u.slot + 1]) - slots.before[u.slot]; },
      [&](const Unit& u, uint32_t q) { return uint32_t(slots.row[slots.before[u.slot] + q]); },
      [&](const Unit& u, uint32_t q, uint32_t row, bool exists, const float(&y)[2], const Constants& c) {
        const uint32_t pair = exists ? uint32_t(slots.pair[slots.before[u.slot] + q]) : 0;
        const float scale = down ? kOutputScale : kOutputScale * block.m.rstd[row];
        float value[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) value[h] = y[h] * scale + c.bias[h];
        if (down) {
          const uint32_t n = 16 * u.row_tile + finished_number();
          const float weight = block.choice().weights[pair];
#pragma unroll
          for (uint32_t h = 0; h < 2; ++h)
            if (exists && n + h < w.rows) Sum::add(block.x(row) + n + h, weight * value[h], 1);
          return;
        }
        // Channel n. The channels of two neighbouring lanes form a word of an activation vector of down.
        const uint32_t n = 8 * u.row_tile + finished_number() / 2;
        constexpr float kInputScale = weight_tiles::Form<kExperts>::kInputScale;
        const float channel = n < width ? gated(value[0], value[1], p.limit, p.alpha) : 0,
                    next = __shfl_down_sync(~0u, channel, 1);
        if (n % 2 != 0 || !exists) return;
        char* const to = block.turn(block.m.epoch + layer, 0) + block.m.step.words.pairs +
                         16 * uint32_t(slots.offset[slots.before[u.slot] + q]);
        const auto put = [&](uint32_t at, uint32_t word) {
          ptx::store_relaxed(reinterpret_cast<uint32_t*>(to + 2 * weight_tiles::place(false, at)), ~word);
        };
        put(n, ptx::pack(bf16{}, channel * kInputScale, next * kInputScale));
        if (u.row_tile + 1 == w.row_tiles)
#pragma unroll 1
          for (uint32_t behind = n + 8; behind < weight_tiles::padded(width); behind += 8) put(behind, 0);
      });
}

}  // namespace ingot::decode::rows
