#pragma once
// The ends of a token's products: which thread ends which row, what it has to know of it, which is asked for while the
// column is on its way, and where the row's number goes: to the sums of all blocks, the other ranks, the columns of
// `down` or the likeliest id.
#include "ingot/models/decode/megakernel/token_ranks.cuh"

namespace ingot::decode {

template <WeightFormat D, WeightFormat E, bool kTraced, bool kRanks, bool kScreened>
class TokenRows : public TokenBlock {
 public:
  // Whose rows are ended by the threads from kFirstOfOthers on.
  __device__ __forceinline__ static bool by_others(Stage stage) {
    return stage == Stage::output || stage == Stage::down;
  }
  // The number of a thread among those that end a product's rows; of others kEnding or more.
  __device__ __forceinline__ static uint32_t ending(Stage stage) {
    return threadIdx.x - (by_others(stage) ? kFirstOfOthers : kFirstEnding);
  }
  __device__ __forceinline__ RowPlace& place_of(Stage stage) const { return m_.rows[by_others(stage)][ending(stage)]; }
  // All that a thread can know of the row that it will end in the round that begins with band `round`.
  __device__ __forceinline__ RowNumbers begin(Stage stage, const LayerStages& l, const Section& s,
                                              uint32_t round) const {
    RowNumbers e{.scale = 1};
    const uint32_t v = round + ending(stage) / 16, begin = v * s.of_sums();
    if (ending(stage) >= kEnding) return e;
    RowPlace& place = place_of(stage);
    place.what = 0;
    if (v >= s.end_sums) return e;
    const bool begins = s.range.begin <= begin, ends = s.range.end >= begin + s.of_sums();
    const uint32_t entry = stage == Stage::gate_up ? v / s.bands : 0, band = v - entry * s.bands,
                   n = 16 * band + threadIdx.x % 16;
    const Matrix& w = matrix(stage, l);
    place = {n, 32 * entry + RowPlace::kEnds + (begins ? RowPlace::kBegins + RowPlace::kTerm : 0) +
                    (ends ? RowPlace::kTerm : 0) + (n < w.rows ? RowPlace::kMine : 0)};
    const float* const scale = D == WeightFormat::fp8 && stage != Stage::gate_up && stage != Stage::down
                                   ? reinterpret_cast<const float*>(w.data + band * w.band_bytes +
                                                                    w.weight_tiles * weight_tiles::Form<D>::kBytes) +
                                         threadIdx.x % 16
                                   : nullptr;
    if (stage == Stage::output) {
      // They travel while others are waited for, and take no registers.
      RowNumbers& to = m_.output_rows[ending(stage)];
      to = {};
      if (scale != nullptr)
        bring(to.scale, scale);
      else
        to.scale = 1;
      if (n < w.rows) bring(to.gain, l.router.weight + n);
      if (n < w.rows && l.output.bias != nullptr && place.begins()) bring(to.bias, l.output.bias + n);
      return e;
    }
    if (scale != nullptr) e.scale = *scale;
    if (n >= w.rows) return e;
    if (stage != Stage::gate_up) e.bias = bias_of(stage, l, w.rows, 0, n);
    return e;
  }
  __device__ __forceinline__ float bias_of(Stage stage, const LayerStages& l, uint32_t rows, uint32_t entry,
                                           uint32_t n) const {
    const float* const bias = stage == Stage::qkv       ? l.qkv.bias
                              : stage == Stage::output  ? l.output.bias
                              : stage == Stage::gate_up ? l.gate_up.bias
                              : stage == Stage::down    ? l.down.bias
                                                        : nullptr;
    if (bias == nullptr) return 0;
    if (stage == Stage::gate_up) return bias[int64_t(chosen()[entry]) * rows + n];
    if (stage != Stage::down) return bias[n];
    float sum = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < m_.token.k; ++j) sum += choice().weights[j] * bias[int64_t(chosen()[j]) * rows + n];
    return sum;
  }
  // The likeliest id of what an ending thread has seen.
  __device__ __forceinline__ sampling::Best& best() const {
    return reinterpret_cast<sampling::Best*>(behind_column())[ending(Stage::head)];
  }
  // By the ending threads, whole warps of them, after a barrier: a row's sum over all warps goes where it belongs.
  __device__ __forceinline__ void end(Stage stage, const LayerStages& l, uint32_t i, uint32_t round, RowNumbers row,
                                      float drop) const {
    static_assert(kTokenWarps == 15, "the sum's tree");
    if (stage == Stage::output) row = m_.output_rows[ending(stage)];
    float(&sums)[kTokenWarps][16] = m_.sums[ending(stage) / 16];
    const uint32_t of = threadIdx.x % 16;
    const RowPlace place = place_of(stage);
    finish(stage, l, i, round, place, row, of_warps(sums, of) * (drop * row.scale));
    if (place.ends())
#pragma unroll
      for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][of] = 0;
  }

 private:
  __device__ __forceinline__ static void bring(float& to, const float* from) {
    ptx::cp_async<4>(ptx::shared_address(&to), from);
  }
  __device__ __forceinline__ void finish(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                         const RowPlace& place, const RowNumbers& row, float y) const {
    const bool mine = place.mine() && !(stage == Stage::qkv && is_missing(i));
    if (stage == Stage::gate_up) {
      y += row.bias;
      const float up = __shfl_xor_sync(~0u, y, 1);
      return columns_.put_channel<E>(place, l.gate_up.w, gated(y, up, l.gate_up.limit, l.gate_up.alpha));
    }
    if (!kScreened && stage == Stage::head) {
      sampling::Best top;
      if (round > m_.sections[int(stage)].begin_sums) top = best();
      if (mine) {
        m_.token.head.y[place.n] = y;
        const uint32_t id = (kRanks ? m_.token.head.first_id : 0) + place.n;
        if (id < m_.token.head.vocab) top.add(y, id);
      }
      best() = top;
      return;
    }
    if (place.begins()) y += row.bias;
    if constexpr (kRanks)
      if (stage != Stage::qkv) {
        if (mine) ranks_.send_part(i, stage, place, y);
        return;
      }
    const bool routes = stage == Stage::output;
    if (mine)
      RowSum::add((routes                ? m_.token.sums.output()
                   : stage == Stage::qkv ? qkv_sums(i)
                                         : down_sums(i)) +
                      place.n,
                  y, place.terms());
    if (!routes || !place.ends()) return;
    router_.put_normed(ending(stage) / 16, threadIdx.x % 16,
                       mine ? row.gain * (y + (place.begins() ? x()[place.n] : 0)) : 0);
  }
  // For tests: this block's queries, keys and values stay away, which no grid barrier announces.
  __device__ __forceinline__ bool is_missing(uint32_t i) const {
    return m_.token.grid.missing == kGridBarriersPerLayer * i + uint32_t(Stage::qkv) && blockIdx.x == gridDim.x - 1;
  }

  const TokenColumns columns_;
  const TokenRouter router_;
  const TokenRanks<kTraced> ranks_;
};

}  // namespace ingot::decode
