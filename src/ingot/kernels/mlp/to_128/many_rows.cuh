#pragma once
// The forward variant up to 128 wide for many rows. Described as a whole in docs/mlp-kernels.md.
//
// One block per SM holds all weights in shared memory. Each of its warpgroups takes 64 rows through the whole network
// by itself: x is loaded into wgmma's A registers, every layer's sums are turned in place into the next layer's A, and
// y goes from registers to memory. A warp's 16 rows never leave the warp, so after the weights have arrived no warp
// waits for another.
//
// The rows of the last weight matrix are permuted in shared memory so that a thread's 8 features of a row, in 4
// adjacent column groups of an accumulator, are adjacent in y, 16 bytes: column 32 i + 8 j + 2 q + e of the last
// product (thread q of four, group j, element e) stands for feature 32 i + 8 q + 2 j + e.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/row_tile.cuh"
#include "ingot/kernels/mlp/parts/weight_norm_tile.cuh"
#include "ingot/kernels/mlp/to_128/many_rows.h"

namespace ingot::cuda::to_128_many_rows {

using namespace mlp_parts;

template <int kWidth> constexpr int kMostLayers = kWidth == 64 ? kMlpMaxLayers : kMlpResidentLayers;

// The most warpgroups whose share of the register file holds a tile; some formulas, and storing values, need many
// registers.
template <class F, int kWidth, Save kSave> constexpr int most_warpgroups() {
  if (kWidth == 64) return 4;
  return kSave == Save::nothing ? kernel_fit<F>.warpgroups : kernel_fit<F>.warpgroups_storing;
}
constexpr int64_t kFewTiles = kMlpFewTileRows / kTileRows;

// Offsets in shared memory, in bytes.
struct Layout {
  uint32_t x, staging, bias, gain, barriers, size;
};
template <class T, int kWidth, Save kSave>
INGOT_HD constexpr Layout layout_of(int layers, int groups, bool has_bias, bool has_gain,
                                    bool stages = kSave != Save::nothing) {
  Layout at = {};
  const uint32_t warps = uint32_t(groups) * 4, features = uint32_t(layers) * kWidth;
  at.x = uint32_t(layers) * weight_bytes<kWidth>();
  at.staging = at.x + warps * x_bytes<kWidth>();
  at.bias = at.staging + (stages ? warps * kStagingBytes : 0);
  at.gain = at.bias + (has_bias ? features * uint32_t(sizeof(float)) : 0);
  at.barriers = at.gain + (has_gain ? features * uint32_t(sizeof(T)) : 0);
  at.size = at.barriers + (warps + 2 * kMlpMaxLayers) * uint32_t(sizeof(uint64_t));
  return at;
}

// The layer and the feature of column i of all layers' columns.
struct Column {
  int l;
  uint32_t n;
};
template <int kWidth> __device__ __forceinline__ Column column_of(const Params& p, uint32_t i) {
  const int l = int(i / kWidth);
  const uint32_t c = i % kWidth;
  return {l, l + 1 == p.layers ? last_feature(c) : c};
}
// A thread's part of the weights of a layer: 16 bytes of a row, a row in kWidth / 8 neighbouring lanes. A power of two
// of threads takes part, so that the rows of a step lie at the same distance from the first row for all threads.
template <class T, int kWidth, int kGroups> struct WeightPieces {
  static constexpr int kThreads = kGroups == 3 ? 256 : 128 * kGroups, kRowLanes = kWidth / 8;
  static constexpr uint32_t kRowsAtOnce = kThreads / kRowLanes;
  static constexpr int kSteps = kWidth / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kSteps >= 1, "steps keep the place in the swizzle's pattern");

  static __device__ __forceinline__ uint32_t piece() { return threadIdx.x % kRowLanes; }
  static __device__ __forceinline__ uint32_t first_row() { return threadIdx.x % kThreads / kRowLanes; }
  // Panels of 64 columns, swizzled by 128 bytes; a step is kRowsAtOnce rows further.
  static __device__ __forceinline__ uint32_t place() {
    return piece() / 8 * panel_bytes<kWidth>() + tile::swizzled<tile::Swizzle::b128>(first_row(), piece() % 8 * 16);
  }

  static __device__ __forceinline__ void load(const LayerParams& layer, bool last, char* weights) {
    const uint32_t n0 = last ? last_feature(first_row()) : first_row(), stride = layer.k * uint32_t(sizeof(T));
    const char* const from = static_cast<const char*>(layer.w) + n0 * stride + piece() * 16;
    const uint32_t to = ptx::shared_address(weights) + place();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      // Steps in 32 rows: where several, columns 8 j become features 2 j.
      constexpr uint32_t kPer32 = kRowsAtOnce >= 32 ? 1 : 32 / kRowsAtOnce;
      const uint32_t further =
          !last || kRowsAtOnce >= 32 ? s * kRowsAtOnce : s / kPer32 * 32 + s % kPer32 * (kRowsAtOnce / 4);
      const bool there = n0 + further < layer.n && piece() * 8 < layer.k;
      ptx::cp_async<16>(to + s * kRowsAtOnce * 128, there ? from + further * stride : from, there ? 16 : 0);
    }
  }
  // Sums over rows, some steps at once: each thread sums its own pieces' squares, and the sums of several rows are
  // exchanged so that each lane ends with a single sum, and takes a single root.
  static constexpr int kBatch = kSteps < 8 ? kSteps : 8, kBatches = kSteps / kBatch;
  static constexpr uint32_t kSame = kRowLanes / kBatch;  // lanes ending with the same row
  static __device__ __forceinline__ uint32_t own_row(int batch = 0) {
    return first_row() + (batch * kBatch + piece() / kSame) * kRowsAtOnce;
  }
  // 1 / |v| of the row.
  static __device__ __forceinline__ float inverse_norm_of_own_row(const char* weights, int batch = 0) {
    const WeightChunk<T>* const mine =
        reinterpret_cast<const WeightChunk<T>*>(weights + place()) + batch * kBatch * kRowsAtOnce * 8;
    float sum[kBatch];
#pragma unroll
    for (int s = 0; s < kBatch; ++s) sum[s] = squares(mine[s * kRowsAtOnce * 8]);
#pragma unroll
    for (int mask = kRowLanes / 2, rows = kBatch; mask > 0; mask /= 2) {
      const bool upper = piece() & mask;
#pragma unroll
      for (int s = 0; s < rows / 2; ++s) {
        const float low = sum[s], high = sum[s + rows / 2];
        sum[s] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, mask);
      }
      if (rows == 1) sum[0] += __shfl_xor_sync(~0u, sum[0], mask);
      rows = rows > 1 ? rows / 2 : 1;
    }
    return inverse_norm(sum[0]);
  }
};

// Loads the network into shared memory: all copies start at once, and each layer is awaited before its use.
template <class T, int kWidth, int kGroups, bool kTimesLog2e> struct Network {
  using Pieces = WeightPieces<T, kWidth, kGroups>;
  static constexpr uint32_t kLoaders = Pieces::kThreads;
  char* weights;
  float* bias;
  T* gain;
  uint64_t *loaded, *ready;  // of each layer: v has arrived; W has been computed. The same barrier without weight norm

  __device__ __forceinline__ void init(const Params& p) const {
    if (threadIdx.x >= uint32_t(p.layers)) return;
    ptx::mbarrier_init(loaded + threadIdx.x, kLoaders);
    if (p.has_gain) ptx::mbarrier_init(ready + threadIdx.x, kWidth / kNormalisedRows);
  }

  __device__ __forceinline__ char* layer(int l) const { return weights + l * weight_bytes<kWidth>(); }
  __device__ __forceinline__ void load_weights(const Params& p) const {
    for (int l = 0; threadIdx.x < kLoaders && l < p.layers; ++l) {
      Pieces::load(p.layer[l], l + 1 == p.layers, layer(l));
      ptx::cp_async_mbarrier_arrive(loaded + l);
    }
  }
  // Weight norm: W is computed from v as v arrives, 16 rows by a warp at a time.
  __device__ __forceinline__ void normalise(const Params& p, uint32_t warp) const {
    constexpr uint32_t kParts = kWidth / kNormalisedRows;
#pragma unroll 1
    for (uint32_t i = warp; i < uint32_t(p.layers) * kParts; i += 4 * kGroups) {
      const int l = int(i / kParts);
      tile::wait_warp_or_trap(loaded + l, 0);
      if (p.layer[l].g != nullptr)
        normalise_rows<T, kWidth>(ptx::shared_address(layer(l)), i % kParts * kNormalisedRows,
                                  [&](uint32_t n) { return tile::to_float(gain[l * kWidth + n]); });
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(ready + l);
    }
  }
  __device__ __forceinline__ void wait_for(int l) const {
    tile::wait_warp_or_trap(ready + l, 0);
    ptx::fence_proxy_async_shared();
  }
  // Bias and gain. Both are loaded first, because loads issued after the weights arrive after the weights.
  static constexpr int kEach = (kMostLayers<kWidth> * kWidth + 128 * kGroups - 1) / (128 * kGroups);
  struct Elements {
    T bias[kEach], gain[kEach];
  };
  template <bool kHasBias> __device__ __forceinline__ void load_vectors(const Params& p, Elements& v) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t i = threadIdx.x + j * 128 * kGroups;
      if (i >= uint32_t(p.layers) * kWidth) break;
      const auto [l, n] = column_of<kWidth>(p, i);
      const LayerParams& of = p.layer[l];
      if (kHasBias) v.bias[j] = element<T>(of.b, of, n);
      if (p.has_gain) v.gain[j] = element<T>(of.g, of, n);
    }
  }
  template <bool kHasBias> __device__ __forceinline__ void keep_vectors(const Params& p, const Elements& v) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t i = threadIdx.x + j * 128 * kGroups;
      if (i >= uint32_t(p.layers) * kWidth) break;
      const int l = int(i / kWidth);
      if (kHasBias) bias[i] = domain_of<kTimesLog2e>(l, p.layers).bias * tile::to_float(v.bias[j]);
      if (p.has_gain) gain[i] = v.gain[j];
    }
    __syncthreads();
  }
};

template <class T, class F, int kWidth, int kGroups, Save kSave, Finish kFinish>
__global__ void __launch_bounds__(128 * kGroups, 1)
    mlp_to_128_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map) {
  extern __shared__ __align__(1024) char shared[];
  const Layout at = layout_of<T, kWidth, kSave>(p.layers, kGroups, kFinish != Finish::none, p.has_gain);
  // Visibly uniform over the warp for the compiler: the loop below must not diverge.
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  ArrivingRows<kWidth> x{shared + at.x + warp * x_bytes<kWidth>(), barriers + 2 * kMlpMaxLayers + warp};
  char* const staging = shared + at.staging + warp * kStagingBytes;
  const Network<T, kWidth, kGroups, kInLog2e<F, T, kSave, kFinish>> network{
      shared, reinterpret_cast<float*>(shared + at.bias), reinterpret_cast<T*>(shared + at.gain), barriers,
      barriers + (p.has_gain ? kMlpMaxLayers : 0)};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  uint32_t tile = blockIdx.x + gridDim.x * (warp / 4);

  network.init(p);
  if (lane() == 0) ptx::mbarrier_init(x.barrier, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  ptx::let_next_kernel_start();
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  if (tile < tiles) x.prefetch(x_map, tile);
  ptx::wait_for_earlier_kernels();
  typename decltype(network)::Elements elements;
  // Rare cases come last in the code. All of this code runs only once, and the first execution of code is slow because
  // the code must be fetched.
  constexpr bool kHasBias = kFinish != Finish::none;
  const bool has_gain = __builtin_expect(p.has_gain, false);
  if (kHasBias || has_gain) network.template load_vectors<kHasBias>(p, elements);
  // The first warpgroup's rows, then the weights, then the rows of the remaining warpgroups, so that no warp waits long
  // for data of later use.
  if (tile < tiles && warp < 4) x.load(x_map, tile);
  network.load_weights(p);
  if (tile < tiles && warp >= 4) x.load(x_map, tile);
  if (kHasBias || has_gain) network.template keep_vectors<kHasBias>(p, elements);
  const uint64_t descriptor =
      tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(ptx::shared_address(shared));
  const uint32_t weights = uint32_t(descriptor), upper = uint32_t(descriptor >> 32);
  constexpr uint32_t kLayerStep = weight_bytes<kWidth>() >> 4;

  const Vectors vectors = {network.bias, nullptr};
  Rows<kWidth> a;
  Sums<kWidth> d;
  const Turns<kGroups> turns{kGroups > 2 && tiles > step && tiles <= kFewTiles, warp / 4};
  turns.start();
  if (has_gain) network.normalise(p, warp);
  if (tile >= tiles) network.wait_for(p.layers - 1);  // no thread ends with copies in flight
  bool is_first = true;
  for (; tile < tiles; is_first = false, tile += step) {
    x.take(a);
    for (int l = 0; l < p.layers; ++l) {
      if (is_first) network.wait_for(l);
      turns.take();
      multiply<T, kWidth>(d, a, weights + l * kLayerStep, upper);
      turns.pass();
      if (l > 0) store_later<T, F, kWidth, kSave>(a, p, l - 1, staging, first_row(tile));
      if (l == 0 && tile + step < tiles) {
        __syncwarp();  // all lanes have finished reading the memory of the next rows
        x.load(x_map, tile + step);
      }
      wait<kWidth>(d, a);
      if (l + 1 < p.layers) activate<T, F, kWidth, kSave, kFinish>(d, a, p, l, vectors, staging, first_row(tile));
    }
    finish<T, F, kWidth, kSave, kFinish>(d, p, vectors, first_row(tile));
  }
  turns.end(tile, tiles, p.layers);
}

template <class T, class F, int kWidth, Save kSave> void launch_as(const Operands& o, Stream stream) {
  const Params& p = o.p;
  // At 128 wide, nearly all networks without a bias use to_128/many_rows_linear_output.cuh. The remaining networks
  // without a bias add zeros.
  constexpr bool kAddsZeros = kWidth == 128;
  const bool has_bias = kAddsZeros || p.has_bias;
  const auto smem = [&](int groups) {
    return layout_of<T, kWidth, kSave>(p.layers, groups, has_bias, p.has_gain).size;
  };
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    constexpr Finish kNoBias = kAddsZeros ? Finish::bias : Finish::none;
    launch_blocks(has_bias ? mlp_to_128_kernel<T, F, kWidth, kGroups, kSave, Finish::bias>
                           : mlp_to_128_kernel<T, F, kWidth, kGroups, kSave, kNoBias>,
                  kGroups, smem(kGroups), o, stream);
  };
  constexpr int kMost = most_warpgroups<F, kWidth, kSave>(), kLeast = std::min(kMost, 3);
  static_assert(layout_of<T, kWidth, kSave>(kMostLayers<kWidth>, kLeast, true, true).size <= kMlpSharedBytes,
                "the deepest network must fit the shared memory");
  if constexpr (kMost == 4 && kWidth == 128)
    if (mlp_three_warpgroups_suffice(p) || smem(4) > kMlpSharedBytes) return launch(std::integral_constant<int, 3>());
  launch(std::integral_constant<int, kMost>());
}

}  // namespace ingot::cuda::to_128_many_rows

namespace ingot::cuda {

template <class T, int kWidth, bool kSave> void launch_mlp_to_128(const Mlp& m, Stream stream) {
  using namespace to_128_many_rows;
  with_operands(m, [&](auto f, const Operands& o) {
    with_save<T, decltype(f), kSave>(o.p, [&](auto save) { launch_as<T, decltype(f), kWidth, save()>(o, stream); });
  });
}

}  // namespace ingot::cuda
