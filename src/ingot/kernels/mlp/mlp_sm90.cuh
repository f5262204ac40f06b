#pragma once
// The body of the many-rows form, instantiated by mlp_sm90_f16.cu, mlp_sm90_f16_training.cu and so on.
// docs/mlp-megakernel.md tells it as a whole.
//
// One block per SM holds all weights in shared memory. Each of its warpgroups takes 64 rows through the whole network
// by itself: x into the registers that wgmma reads A from, every layer's sums turned in place into the next layer's A,
// y from registers to memory. A warp's 16 rows never leave it, so after the weights have arrived no warp waits for
// another.
//
// The rows of the last weight matrix are permuted in shared memory so that the 8 features that a thread holds of a row
// in 4 adjacent column groups of an accumulator are adjacent in y, 16 bytes: column 32 i + 8 j + 2 q + e of the last
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
#include "ingot/kernels/mlp/mlp_forward.h"
#include "ingot/kernels/mlp/mlp_weights_sm90.cuh"

namespace ingot::cuda::mlp_sm90_detail {

using Params = MlpForwardParams;
using LayerParams = MlpLayerParams;

constexpr uint32_t kTileRows = 64, kWarpRows = 16;  // what a warpgroup takes at a time, and each of its warps
template <int kWidth> constexpr int kMostLayers = kWidth == 64 ? kMlpMaxLayers : kMlpSm90Layers;

// What a training forward pass stores of a layer: in the network's type, or in a type known at run time only.
enum class Save { nothing, own_type, any_type };

// The most warpgroups whose share of the register file holds a tile; some formulas, and saving, take much of it.
template <class F, int kWidth, Save kSave> constexpr int most_warpgroups() {
  constexpr bool kSaves = kSave != Save::nothing;
  if (kWidth == 128 && (F::name == Sigmoid::name || (F::name == Tanh::name && kSaves))) return 2;
  return kWidth == 64 || (F::name == Softplus::name && !kSaves) ? 4 : 3;
}
constexpr int64_t kFewTiles = kMlpSm90FewRows / kTileRows;

template <int kWidth> constexpr uint32_t weight_bytes() { return kWidth * kWidth * 2; }
template <int kWidth> constexpr uint32_t panel_bytes() { return kWidth * 128; }        // 64 of the columns
template <int kWidth> constexpr uint32_t x_bytes() { return kWarpRows * kWidth * 2; }  // of a warp
constexpr uint32_t kStagingBytes = kWarpRows * 64;  // 32 columns of what a warp saves

// Where things lie in shared memory, in bytes.
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

// One warpgroup's 64 rows in the layout of A: step k / 16, then the four registers of a step.
template <int kWidth> using Rows = uint32_t[kWidth / 16][4];
template <int kWidth> using Sums = float[kWidth / 2];

__device__ inline uint32_t lane() { return threadIdx.x % 32; }
// The first of the warp's rows in a tile.
__device__ inline int64_t first_row(uint32_t tile) {
  return int64_t(tile) * kTileRows + threadIdx.x % 128 / 32 * kWarpRows;
}
// Where the lane's row of matrix lane / 8 lies in A's 16 rows and 16 columns, for ldmatrix and stmatrix: matrices 0 and
// 2 are the upper 8 rows, 2 and 3 the right 8 columns.
__device__ inline uint32_t matrix_row() { return lane() % 16; }
__device__ inline uint32_t matrix_chunk() { return lane() / 16; }

// The warp's 16 rows of x, on their way to its own shared memory: panels of 64 columns, swizzled by 128 bytes.
template <int kWidth> struct ArrivingRows {
  static constexpr uint32_t kPanel = kWarpRows * 128;
  char* rows;
  uint64_t* barrier;
  uint32_t parity = 0;

  __device__ __forceinline__ void prefetch(const CUtensorMap& x, uint32_t tile) const {
    if (lane() != 0) return;
#pragma unroll
    for (int i = 0; i < kWidth / 64; ++i) ptx::tensor_prefetch(&x, 64 * i, int(first_row(tile)));
  }
  __device__ __forceinline__ void load(const CUtensorMap& x, uint32_t tile) const {
    if (lane() != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, x_bytes<kWidth>());
#pragma unroll
    for (int i = 0; i < kWidth / 64; ++i)
      ptx::tensor_load(rows + i * kPanel, &x, 64 * i, int(first_row(tile)), barrier);
  }
  __device__ __forceinline__ void take(Rows<kWidth>& a) {
    tile::wait_warp_or_trap(barrier, parity);
    parity ^= 1;
    const uint32_t from =
        ptx::shared_address(rows) + tile::swizzled<tile::Swizzle::b128>(matrix_row(), matrix_chunk() * 16);
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) ptx::ldmatrix(a[k], (from ^ k % 4 * 32) + k / 4 * kPanel);
  }
};

// Which feature column (or weight row) c of the last product stands for.
__device__ inline uint32_t last_feature(uint32_t c) { return c / 32 * 32 + c % 8 / 2 * 8 + c / 8 % 4 * 2 + c % 2; }

// Of what layer and feature column i of all layers' columns is.
struct Column {
  int l;
  uint32_t n;
};
template <int kWidth> __device__ __forceinline__ Column column_of(const Params& p, uint32_t i) {
  const int l = int(i / kWidth);
  const uint32_t c = i % kWidth;
  return {l, l + 1 == p.layers ? last_feature(c) : c};
}
// Of a bias or a gain: zero where there is none, and beyond the last feature.
template <class T> __device__ __forceinline__ T element(const void* vector, const LayerParams& of, uint32_t n) {
  return vector != nullptr && n < of.n ? static_cast<const T*>(vector)[n] : tile::from_float<T>(0.f);
}

// A thread's part of the weights of a layer: 16 bytes of a row, a row in kWidth / 8 neighbouring lanes. A power of two
// of threads takes part, so that a step's rows lie at the same distance from the thread's first for all of them.
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
  // Sums over rows, some steps at once: each thread sums its own pieces' squares, and those of several rows are
  // exchanged such that a lane ends with one of them, and takes one root.
  static constexpr int kBatch = kSteps < 8 ? kSteps : 8, kBatches = kSteps / kBatch;
  static constexpr uint32_t kSame = kRowLanes / kBatch;  // lanes that end with the same row
  static __device__ __forceinline__ uint32_t own_row(int batch = 0) {
    return first_row() + (batch * kBatch + piece() / kSame) * kRowsAtOnce;
  }
  // 1 / |v| of that row.
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

// What a layer's sums and its bias are multiplied by: softplus in pairs with a bias works on h log2 e, as the factor
// that its exponentials want then costs nothing.
struct Domain {
  float sums, bias;
};
template <bool kTimesLog2e> __device__ __forceinline__ Domain domain_of(int l, int layers) {
  if (!kTimesLog2e) return {1, 1};
  if (l + 1 == layers) return {l == 0 ? 1 : 1 / detail::kLog2e, 1};
  return {l == 0 ? detail::kLog2e : 1, detail::kLog2e};
}

// The network on its way to shared memory: all copies start at once, and each layer is waited for when it is needed.
template <class T, int kWidth, int kGroups, bool kTimesLog2e> struct Network {
  using Pieces = WeightPieces<T, kWidth, kGroups>;
  static constexpr uint32_t kLoaders = Pieces::kThreads;
  char* weights;
  float* bias;
  T* gain;
  uint64_t *loaded, *ready;  // of each layer: v has come; W is there. The same without weight norm

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
  // Weight norm: W is made of v as it arrives, 16 rows by a warp at a time.
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
  // Bias and gain. They are asked for first of all: what is asked for after the weights comes after them.
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

// What the sums' columns get before the activation: nothing, or times the layer's factor plus their bias, or times
// their own scale plus their bias.
enum class Finish { none, bias, scale_and_bias };
struct Vectors {
  const float *bias, *scale;  // of all layers' columns
};
template <int kWidth, Finish kFinish>
__device__ __forceinline__ void finish_block(Sums<kWidth>& d, int i, const Vectors& of, int l, float factor) {
  if constexpr (kFinish == Finish::none) return;
  const uint32_t from = uint32_t(l) * kWidth + 32 * i + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(of.bias + from + 8 * j);
    float2 s = {factor, factor};
    if constexpr (kFinish == Finish::scale_and_bias) s = *reinterpret_cast<const float2*>(of.scale + from + 8 * j);
    float* const at = d + 4 * (4 * i + j);
    at[0] = fmaf(at[0], s.x, b.x), at[1] = fmaf(at[1], s.y, b.y);
    at[2] = fmaf(at[2], s.x, b.x), at[3] = fmaf(at[3], s.y, b.y);
  }
}

// d = a W^T, issued and not waited for. Only the lower half of a descriptor depends on the address.
template <class T, int kWidth>
__device__ __forceinline__ void multiply(Sums<kWidth>& d, const Rows<kWidth>& a, uint32_t weights, uint32_t upper) {
  using tile::Swizzle;
  ptx::fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    const uint32_t lower =
        weights + uint32_t(tile::descriptor_step<tile::Major::k, Swizzle::b128>(16 * k, panel_bytes<kWidth>()));
    ptx::wgmma<T, kWidth>(d, a[k], uint64_t(upper) << 32 | lower, k > 0);
  }
  ptx::wgmma_commit_group();
}
template <int kWidth> __device__ __forceinline__ void wait(Sums<kWidth>& d, Rows<kWidth>& a) {
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(d);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) ptx::fence_registers(a[k]);
}

// Columns 32 i to 32 i + 31 of the sums: activated; and to 16 bits, in the layout of A.
template <class T, class F, int kWidth> __device__ __forceinline__ void activate_block(Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    d[16 * i + j] = act_value<F, T>(d[16 * i + j]);
    // Without this the compiler weaves the formulas of all elements into each other, and no registers are left.
    if constexpr (F::name == Gelu::name || F::name == Tanh::name) asm volatile("" : "+f"(d[16 * i + j])::"memory");
  }
}
template <class T, int kWidth>
__device__ __forceinline__ void pack_block(Rows<kWidth>& a, const Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      a[2 * i + j / 2][2 * (j % 2) + half] = ptx::pack(T{}, d[at], d[at + 1]);
    }
}

// Softplus of a pair of sums as fp16. The exponentials are fp32; what follows, e q(e) + max(x, 0), is done for both at
// once in fp16, which takes 2/3 of the instructions and of the register reads that compete with the products' own. It
// adds roundings of e, q and max(x, 0): a hidden value is off by 1.4 times the rounding that it suffers anyway, nearly
// all of it by that of max(x, 0); y of 3 to 5 layers by 1.25 times what it would be with one rounding a layer. Values
// that are saved in fp32 are not formed so.
template <class F, class T> constexpr bool kHasPairs = (F::name == Softplus::name) && std::is_same_v<T, f16>;
template <class F, class T, Save kSave> constexpr bool kInPairs = kHasPairs<F, T>&& kSave != Save::any_type;
template <class F, class T, Save kSave> constexpr bool kStoresLater = kInPairs<F, T, kSave>&& kSave == Save::own_type;
template <class F, class T, Save kSave, Finish kFinish>
constexpr bool kInLog2e = kInPairs<F, T, kSave>&& kSave == Save::nothing&& kFinish != Finish::none;
// With kTimesLog2e it takes x log2 e and gives softplus(x) log2 e; the root mean square of the errors is the same, that
// of the left tail alone 1.9 times one rounding's instead of 1.5, as the constant term is off by 0.4 units in the last
// place.
template <bool kTimesLog2e> __device__ __forceinline__ uint32_t softplus_pair(float x0, float x1) {
  const auto twice = [](uint32_t bits) { return bits << 16 | bits; };
  const auto exp2_of = [](float x) { return detail::fast_exp2(fabsf(x) * -(kTimesLog2e ? 1 : detail::kLog2e)); };
  const uint32_t e = ptx::pack(f16{}, exp2_of(x0), exp2_of(x1));
  // log1p_of_unit_4 in fp16: 0.041351, -0.15747, 0.30640, -0.49707, 1; or times log2 e, the best of its neighbours
  constexpr uint32_t kQ[2][5] = {{0x294b, 0xb10a, 0x34e7, 0xb7f4, 0x3c00}, {0x2ba3, 0xb346, 0x3711, 0xb9bb, 0x3dc5}};
  uint32_t q = ptx::multiply_add(f16{}, e, twice(kQ[kTimesLog2e][0]), twice(kQ[kTimesLog2e][1]));
#pragma unroll
  for (int i = 2; i < 5; ++i) q = ptx::multiply_add(f16{}, e, q, twice(kQ[kTimesLog2e][i]));
  return ptx::multiply_add(f16{}, e, q, ptx::pack_relu(f16{}, x0, x1));
}
template <int kWidth, bool kTimesLog2e>
__device__ __forceinline__ void softplus_block(Rows<kWidth>& a, const Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      a[2 * i + j / 2][2 * (j % 2) + half] = softplus_pair<kTimesLog2e>(d[at], d[at + 1]);
    }
}

// A matrix in memory that takes a tile's rows.
struct Target {
  char* rows;
  int64_t stride_bytes;
  uint32_t cols;
};
// The last product's columns from the sums: 16 bytes a thread, thanks to the permutation.
template <class T, int kWidth>
__device__ __forceinline__ void store_last(const Sums<kWidth>& d, Target to, int64_t first, int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    if (row >= rows) continue;
    char* line = to.rows + row * to.stride_bytes + q * 16;
    uint32_t w[kWidth / 32][4];
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        w[i][j] = ptx::pack(T{}, d[4 * (4 * i + j) + 2 * half], d[4 * (4 * i + j) + 2 * half + 1]);
    if (to.cols == kWidth) {  // of this, and of nothing else, the compiler makes four plain stores
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i) ptx::store_streaming(line + 64 * i, w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        if (32 * i + 8 * q < to.cols) ptx::store_streaming(line + 64 * i, w[i]);
    }
  }
}
// Columns 32 i to 32 i + 31 of another product from the layout of A, through the warp's shared memory: 16 bytes a lane.
template <int kWidth>
__device__ __forceinline__ void store_block(const Rows<kWidth>& a, int i, char* staging, Target to, int64_t first,
                                            int64_t rows) {
  // Chunks are moved by row / 2, so that both directions meet all banks.
  const auto place = [&](uint32_t row, uint32_t chunk) { return row * 64 + (chunk ^ row / 2 % 4) * 16; };
#pragma unroll
  for (int t = 0; t < 2; ++t)
    ptx::stmatrix(ptx::shared_address(staging) + place(matrix_row(), 2 * t + matrix_chunk()), a[2 * i + t]);
  __syncwarp();
  const uint32_t chunk = lane() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = lane() / 4 + 8 * half;
    const uint4 v = *reinterpret_cast<const uint4*>(staging + place(row, chunk));
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    if (first + row < rows && 32 * i + 8 * chunk < to.cols)
      ptx::store_streaming(to.rows + (first + row) * to.stride_bytes + 64 * i + chunk * 16, w);
  }
  __syncwarp();
}
// The same where all products' columns are permuted as the last one's: 16 bytes a thread already.
template <int kWidth>
__device__ __forceinline__ void store_turned_block(const Rows<kWidth>& a, int i, Target to, int64_t first,
                                                   int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    const uint32_t w[4] = {a[2 * i][half], a[2 * i][2 + half], a[2 * i + 1][half], a[2 * i + 1][2 + half]};
    if (row < rows && 32 * i + 8 * q < to.cols)
      ptx::store_streaming(to.rows + row * to.stride_bytes + 64 * i + q * 16, w);
  }
}
// The same columns of any product as they are, in fp32.
template <int kWidth>
__device__ __forceinline__ void store_block_f32(const Sums<kWidth>& d, int i, bool turned, Target to, int64_t first,
                                                int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    if (row >= rows) continue;
    char* line = to.rows + row * to.stride_bytes;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t column = 32 * i + (turned ? 8 * q + 2 * j : 8 * j + 2 * q);
      const int at = 4 * (4 * i + j) + 2 * half;
      const uint32_t w[2] = {__float_as_uint(d[at]), __float_as_uint(d[at + 1])};
      if (column < to.cols) ptx::store_streaming(line + column * 4, w);
    }
  }
}

// Columns 32 i to 32 i + 31 of a hidden layer, from finished sums to the next layer's A. save(i) is called when what
// backward needs is there: in `d`, or for all but fp32 in `a`.
template <class T, class F, int kWidth, Save kSave, bool kTimesLog2e, class SaveBlock>
__device__ __forceinline__ void form_block(Sums<kWidth>& d, Rows<kWidth>& a, int i, bool f32, SaveBlock&& save) {
  constexpr bool kSaves = kSave != Save::nothing;
  if constexpr (kSaves && !has_slope_from_value<F>) {
    if (!f32) pack_block<T, kWidth>(a, d, i);
    save(i);
  }
  if constexpr (kInPairs<F, T, kSave>) {
    softplus_block<kWidth, kTimesLog2e>(a, d, i);
  } else {
    activate_block<T, F, kWidth>(d, i);
    pack_block<T, kWidth>(a, d, i);
  }
  if constexpr (kSaves && has_slope_from_value<F> && !kStoresLater<F, T, kSave>) save(i);
}
// A hidden layer's sums become the next layer's A; what backward needs goes to memory. kTurned: columns are permuted as
// the last layer's.
template <class T, class F, int kWidth, Save kSave, Finish kFinish, bool kTurned = false>
__device__ __forceinline__ void activate(Sums<kWidth>& d, Rows<kWidth>& a, const Params& p, int l, const Vectors& of,
                                         char* staging, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, kFinish>;
  const bool f32 = kSave == Save::any_type && p.saved_f32;
  const int64_t element = f32 ? 4 : 2;
  const Target saved = {static_cast<char*>(p.layer[l].saved), p.layer[l].n * element, p.layer[l].n};
  const auto save = [&](int i) {
    if (f32)
      store_block_f32<kWidth>(d, i, kTurned, saved, first, p.rows);
    else if constexpr (kTurned)
      store_turned_block<kWidth>(a, i, saved, first, p.rows);
    else
      store_block<kWidth>(a, i, staging, saved, first, p.rows);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    finish_block<kWidth, kFinish>(d, i, of, l, domain_of<kTimesLog2e>(l, p.layers).sums);
    form_block<T, F, kWidth, kSave, kTimesLog2e>(d, a, i, f32, save);
  }
}
// What of A must be stored, while the next layer's products run.
template <class T, class F, int kWidth, Save kSave, bool kTurned = false>
__device__ __forceinline__ void store_later(const Rows<kWidth>& a, const Params& p, int l, char* staging,
                                            int64_t first) {
  if constexpr (kStoresLater<F, T, kSave>) {
    const Target saved = {static_cast<char*>(p.layer[l].saved), p.layer[l].n * 2, p.layer[l].n};
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
      if constexpr (kTurned)
        store_turned_block<kWidth>(a, i, saved, first, p.rows);
      else
        store_block<kWidth>(a, i, staging, saved, first, p.rows);
  }
}
// The last layer's sums become y.
template <class T, class F, int kWidth, Save kSave, Finish kFinish>
__device__ __forceinline__ void finish(Sums<kWidth>& d, const Params& p, const Vectors& of, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, kFinish>, kSaves = kSave != Save::nothing;
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i)
    finish_block<kWidth, kFinish>(d, i, of, p.layers - 1, domain_of<kTimesLog2e>(p.layers - 1, p.layers).sums);
  const LayerParams& layer = p.layer[p.layers - 1];
  const auto save = [&] {
    if (kSave == Save::any_type && p.saved_f32) {
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        store_block_f32<kWidth>(d, i, true, {static_cast<char*>(layer.saved), layer.n * 4, layer.n}, first, p.rows);
    } else {
      store_last<T, kWidth>(d, {static_cast<char*>(layer.saved), layer.n * 2, layer.n}, first, p.rows);
    }
  };
  if (p.activate_last) {
    if constexpr (kSaves && !has_slope_from_value<F>) save();
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) activate_block<T, F, kWidth>(d, i);
    if constexpr (kSaves && has_slope_from_value<F>) save();
    if (kSaves && p.y == layer.saved) return;  // whoever forms values again wants the last ones once
  }
  store_last<T, kWidth>(d, {static_cast<char*>(p.y), p.y_stride_bytes, layer.n}, first, p.rows);
}

// Whose turn it is to issue a layer's products. Where a warpgroup has few tiles, all are in the same layer after the
// start and stay so: they would wait for the tensor cores together and then for the activation's units. In turns they
// do not.
template <int kGroups> struct Turns {
  bool on;
  uint32_t warpgroup;
  __device__ __forceinline__ void take() const {
    if (on) ptx::barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass() const {
    if (on) ptx::barrier_arrive(warpgroup == kGroups - 1 ? 1 : 2 + warpgroup, 256);
  }
  __device__ __forceinline__ void start() const {
    if (warpgroup == kGroups - 1) pass();
  }
  // At the end: the block's first warpgroup may have had one tile more than this one, whose next would be `tile`.
  __device__ __forceinline__ void end(uint32_t tile, uint32_t tiles, int layers) const {
    const bool is_short = on && tile - warpgroup * gridDim.x < tiles;
    for (int l = 0; is_short && l < layers; ++l) {
      take();
      pass();
    }
  }
};

template <class T, class F, int kWidth, int kGroups, Save kSave, Finish kFinish>
__global__ void __launch_bounds__(128 * kGroups, 1)
    mlp_sm90_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map) {
  extern __shared__ __align__(1024) char shared[];
  const Layout at = layout_of<T, kWidth, kSave>(p.layers, kGroups, kFinish != Finish::none, p.has_gain);
  // The same in all lanes, and known to be: the loop below must not diverge.
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
  // What is rare stands behind the rest: code is slow the first time, and all of this runs once.
  constexpr bool kHasBias = kFinish != Finish::none;
  const bool has_gain = __builtin_expect(p.has_gain, false);
  if (kHasBias || has_gain) network.template load_vectors<kHasBias>(p, elements);
  // The first warpgroup's rows, then the weights, then the others' rows: nobody waits long for what is wanted later.
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
  if (tile >= tiles) network.wait_for(p.layers - 1);  // no thread leaves with copies under way
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
        __syncwarp();  // all lanes have what they took from where the next rows go
        x.load(x_map, tile + step);
      }
      wait<kWidth>(d, a);
      if (l + 1 < p.layers) activate<T, F, kWidth, kSave, kFinish>(d, a, p, l, vectors, staging, first_row(tile));
    }
    finish<T, F, kWidth, kSave, kFinish>(d, p, vectors, first_row(tile));
  }
  turns.end(tile, tiles, p.layers);
}

// What the launchers of this form and of the deep one have in common: use(F{}, operands), and a launch.
struct Operands {
  Params p;
  CUtensorMap x_map;
  int device;
};
template <class Use> void with_operands(const Mlp& m, Use&& use) {
  if (m.x.rows() == 0) return;
  const gpu::TmaBox of_warp{.rows = kWarpRows, .cols = 64, .swizzle = tile::Swizzle::b128};
  const Operands o{mlp_forward_params(m), gpu::tensor_map("mlp: x", mlp_matrix(m.x), of_warp), m.x.device.index};
  with_activation(m.act, [&](auto f) { use(f, o); });
}
// use(std::integral_constant<Save, ...>): what is stored is part of the type where a formula depends on it.
template <class T, class F, bool kSave, class Use> void with_save(const Params& p, Use&& use) {
  if constexpr (!kSave) return use(std::integral_constant<Save, Save::nothing>());
  if constexpr (kSave && kHasPairs<F, T>)
    if (!p.saved_f32) return use(std::integral_constant<Save, Save::own_type>());
  if constexpr (kSave) use(std::integral_constant<Save, Save::any_type>());
}
inline void launch_blocks(void (*kernel)(Params, CUtensorMap), int groups, uint32_t smem, const Operands& o,
                          Stream stream) {
  gpu::launch("mlp", kernel,
              {.grid = std::min<int64_t>((o.p.rows + kTileRows - 1) / kTileRows, sm_count(o.device)),
               .block = 128 * groups,
               .smem = smem,
               .overlap = true,
               .device = o.device},
              stream, o.p, o.x_map);
}

template <class T, class F, int kWidth, Save kSave> void launch_as(const Operands& o, Stream stream) {
  const Params& p = o.p;
  // 128 wide, nearly all networks without a bias are others' (mlp_sm90_plain.cuh): the rest add zeros.
  constexpr bool kAddsZeros = kWidth == 128;
  const bool has_bias = kAddsZeros || p.has_bias;
  const auto smem = [&](int groups) {
    return layout_of<T, kWidth, kSave>(p.layers, groups, has_bias, p.has_gain).size;
  };
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    constexpr Finish kNoBias = kAddsZeros ? Finish::bias : Finish::none;
    launch_blocks(has_bias ? mlp_sm90_kernel<T, F, kWidth, kGroups, kSave, Finish::bias>
                           : mlp_sm90_kernel<T, F, kWidth, kGroups, kSave, kNoBias>,
                  kGroups, smem(kGroups), o, stream);
  };
  constexpr int kMost = most_warpgroups<F, kWidth, kSave>(), kLeast = std::min(kMost, 3);
  static_assert(layout_of<T, kWidth, kSave>(kMostLayers<kWidth>, kLeast, true, true).size <= kMlpSharedBytes,
                "the deepest network must fit the shared memory");
  if constexpr (kMost == 4 && F::name == Softplus::name && kWidth == 128)
    if (mlp_sm90_three_suffice(p) || smem(4) > kMlpSharedBytes) return launch(std::integral_constant<int, 3>());
  launch(std::integral_constant<int, kMost>());
}

}  // namespace ingot::cuda::mlp_sm90_detail

namespace ingot::cuda {

template <class T, int kWidth, bool kSave> void launch_mlp_sm90(const Mlp& m, Stream stream) {
  using namespace mlp_sm90_detail;
  with_operands(m, [&](auto f, const Operands& o) {
    with_save<T, decltype(f), kSave>(o.p, [&](auto save) { launch_as<T, decltype(f), kWidth, save()>(o, stream); });
  });
}

}  // namespace ingot::cuda
