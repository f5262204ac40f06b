#pragma once
// The weights of many_rows_linear_output.cuh: their copy into shared memory, and W of weight norm, computed in place.
#include "ingot/kernels/mlp/to_128/many_rows.cuh"
#include "ingot/kernels/mlp/to_128/many_rows.h"

namespace ingot::cuda::to_128_many_rows {

constexpr int kLinearOutputWidth = 128, kLinearOutputLayers = kMostLayers<kLinearOutputWidth>;

struct LinearOutputMaps {
  CUtensorMap x;
  CUtensorMap w[kLinearOutputLayers];  // panels of 64 columns; groups of eight rows of a permuted last layer
};

// The warps that compute W of weight norm, in place as v arrives: none; or all warps, before their own rows; or, for
// the first layers, the last warpgroup and four additional warps, which compute the later layers while the first are in
// use.
enum class Norm { none, first, aside };
constexpr uint32_t kHelpedLayers = 2;  // layers with the last warpgroup's help
template <class F, Save kSave> constexpr bool kFormsAside = most_warpgroups<F, kLinearOutputWidth, kSave>() == 4;
// Whether the columns of all layers' products are permuted, not only of the last one's: this costs nothing where W is
// computed here, and pays where values are stored.
template <Save kSave, Norm kNorm> constexpr bool kTurnsAll = kSave != Save::nothing&& kNorm != Norm::none;

// Loads W into shared memory; each layer is awaited before its use.
struct LinearOutputWeights {
  char* weights;
  // Of each layer: W or v has arrived; W has been computed. The same barrier without weight norm.
  uint64_t *loaded, *ready;

  __device__ __forceinline__ char* layer(int l) const { return weights + l * weight_bytes<kLinearOutputWidth>(); }
  __device__ __forceinline__ void expect(int l) const {
    ptx::mbarrier_arrive_expect_tx(loaded + l, weight_bytes<kLinearOutputWidth>());
  }
  // Called by a single thread.
  __device__ __forceinline__ void load(const LinearOutputMaps& maps, int l) const {
    expect(l);
#pragma unroll
    for (int panel = 0; panel < kLinearOutputWidth / 64; ++panel)
      ptx::tensor_load(layer(l) + panel * panel_bytes<kLinearOutputWidth>(), &maps.w[l], 64 * panel, 0, loaded + l);
  }
  // Called by a single thread: rows 32 i to 32 i + 31 of the last layer, permuted. Row 32 i + 8 j + 2 q + e is the
  // feature 8 (4 i + q) + 2 j + e: a box spans two rows of four eights.
  __device__ __forceinline__ void load_turned(const LinearOutputMaps& maps, int l, int i) const {
#pragma unroll 1
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int panel = 0; panel < kLinearOutputWidth / 64; ++panel)
        ptx::tensor_load_3d(layer(l) + panel * panel_bytes<kLinearOutputWidth>() + (32 * i + 8 * j) * 128, &maps.w[l],
                            64 * panel, 2 * j, 4 * i, loaded + l);
  }
  __device__ __forceinline__ void wait_for(int l) const {
    tile::wait_warp_or_trap(ready + l, 0);
    if (ready != loaded) ptx::fence_proxy_async_shared();
  }
};

// Where the columns of every product are permuted as the last layer's, a thread holds 16 adjacent bytes of a hidden
// layer's values for training; the next layer's inputs are permuted in the same way. Both permutations swap q and j of
// 32 i + 8 q + 2 j + e, in place while W is computed, so a warp takes 16 rows whose permutation stays among these rows:
// row r of a part goes from `from` to `to`.
struct TurnedRow {
  uint32_t from, to = 0;
  __device__ __forceinline__ explicit TurnedRow(uint32_t natural) : from(natural) {}
  __device__ __forceinline__ TurnedRow(uint32_t part, uint32_t r) {
    // j + 4 q of every two rows: of even parts 00 11 22 33 01 10 23 32, of odd ones 02 20 13 31 03 30 12 21.
    const uint32_t two = (part % 2 == 0 ? 0xeb41fa50u : 0x96c3d782u) >> r / 2 * 4, q = two / 4 % 4, j = two % 4;
    const uint32_t first = part / 2 * 32 + r % 2;
    from = first + 8 * q + 2 * j, to = first + 8 * j + 2 * q;
  }
};

// W = factor gain v / |v| in place, as in normalise_rows(), except for the sums of squares: on tensor cores kept busy
// by the multiplying warps, a few products of this warp would wait for their turn again and again. For a part of 16
// rows; kTurned: the rows and, where they are a layer's values, the columns exchange places.
template <class T, bool kTurned>
__device__ __forceinline__ void form_rows(uint32_t panels, uint32_t part, bool turns_columns, const T* gain,
                                          float factor) {
  const auto row = [&](uint32_t r) { return kTurned ? TurnedRow(part, r) : TurnedRow{part * kNormalisedRows + r}; };
  RowsOfV<T, kLinearOutputWidth> rows(panels, row(lane() % 16).from);
  // Each half of the rows in two chains.
  float sums[2][2] = {};
#pragma unroll
  for (int k = 0; k < rows.kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[2];
      ptx::unpack(T{}, rows.v[k][i], x[0], x[1]);
      float& sum = sums[i % 2][i / 2];
      sum = fmaf(x[0], x[0], sum);
      sum = fmaf(x[1], x[1], sum);
    }
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = sums[half][0] + sums[half][1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float times = factor * tile::to_float(gain[row(lane() / 4 + 8 * half).from]);
    scale[half] = times * ptx::rsqrt_approx(sum + kWeightNormEps);
  }
  if constexpr (!kTurned) {
    rows.store_times(scale);
  } else if (turns_columns) {
    const uint32_t chunk = lane() % 4;
#pragma unroll
    for (int i = 0; i < kLinearOutputWidth / 32; ++i) {
      rows.multiply(2 * i, scale), rows.multiply(2 * i + 1, scale);
      const auto &left = rows.v[2 * i], &right = rows.v[2 * i + 1];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t w[4] = {left[half], left[2 + half], right[half], right[2 + half]};
        const uint32_t place =
            tile::swizzled<tile::Swizzle::b128>(row(lane() / 4 + 8 * half).to, 16 * (i % 2 * 4 + chunk));
        ptx::store_shared(panels + i / 2 * panel_bytes<kLinearOutputWidth>() + place, w);
      }
    }
  } else {
    rows.from = rows.first_place(panels, row(lane() % 16).to);
    rows.store_times(scale);
  }
}

}  // namespace ingot::cuda::to_128_many_rows
