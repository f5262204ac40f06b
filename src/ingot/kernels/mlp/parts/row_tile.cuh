#pragma once
// 64 rows in the registers of a warpgroup: loading of x, products with W in shared memory, conversion of sums in place
// into the next layer's A, and stores of y and of the values for training. Shared code of the forward forms for Hopper.
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
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/forward_params.h"
#include "ingot/kernels/mlp/parts/weight_norm_tile.cuh"

namespace ingot::cuda::mlp_parts {

using Params = MlpForwardParams;
using LayerParams = MlpLayerParams;

constexpr uint32_t kTileRows = 64, kWarpRows = 16;  // rows per warpgroup and per warp

// The stored values of a layer in a training forward pass: in the network's type, or in a type known only at run time.
enum class Save { nothing, own_type, any_type };

template <int kWidth> constexpr uint32_t weight_bytes() { return kWidth * kWidth * 2; }
template <int kWidth> constexpr uint32_t panel_bytes() { return kWidth * 128; }        // 64 of the columns
template <int kWidth> constexpr uint32_t x_bytes() { return kWarpRows * kWidth * 2; }  // staging memory of a warp
constexpr uint32_t kStagingBytes = kWarpRows * 64;  // 32 columns of a warp's saved values

// One warpgroup's 64 rows in the layout of A: step k / 16, then the four registers of a step.
template <int kWidth> using Rows = uint32_t[kWidth / 16][4];
template <int kWidth> using Sums = float[kWidth / 2];

__device__ inline uint32_t lane() { return threadIdx.x % 32; }
// The warp's first row in a tile.
__device__ inline int64_t first_row(uint32_t tile) {
  return int64_t(tile) * kTileRows + threadIdx.x % 128 / 32 * kWarpRows;
}
// The place of the lane's row of matrix lane / 8 in A's 16 rows and 16 columns, for ldmatrix and stmatrix: matrices 0
// and 2 are the upper 8 rows, 2 and 3 the right 8 columns.
__device__ inline uint32_t matrix_row() { return lane() % 16; }
__device__ inline uint32_t matrix_chunk() { return lane() / 16; }

// Loads the warp's 16 rows of x into its own shared memory: panels of 64 columns, swizzled by 128 bytes.
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

// The feature of column (or weight row) c of the last product.
__device__ inline uint32_t last_feature(uint32_t c) { return c / 32 * 32 + c % 8 / 2 * 8 + c / 8 % 4 * 2 + c % 2; }

// An element of a bias or a gain: zero where absent, and beyond the last feature.
template <class T> __device__ __forceinline__ T element(const void* vector, const LayerParams& of, uint32_t n) {
  return vector != nullptr && n < of.n ? static_cast<const T*>(vector)[n] : tile::from_float<T>(0.f);
}

// The factor of a layer's sums and bias. Softplus in pairs with a bias works on h log2 e, so that the factor of its
// exponentials costs nothing.
struct Domain {
  float sums, bias;
};
template <bool kTimesLog2e> __device__ __forceinline__ Domain domain_of(int l, int layers) {
  if (!kTimesLog2e) return {1, 1};
  if (l + 1 == layers) return {l == 0 ? 1 : 1 / detail::kLog2e, 1};
  return {l == 0 ? detail::kLog2e : 1, detail::kLog2e};
}

// The linear map of the sums' columns before the activation: none; times the layer's factor plus the bias; or times a
// scale per column plus the bias.
enum class Finish { none, bias, scale_and_bias };
struct Vectors {
  const float *bias, *scale;  // for all layers' columns
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

// Issues d = a W^T without waiting. Only the lower half of a descriptor depends on the address.
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
template <class T, class F, int kWidth>
__device__ __forceinline__ void activate_block(Sums<kWidth>& d, int i, float number) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    d[16 * i + j] = act_value<F, T>(d[16 * i + j], number);
    if constexpr (kernel_fit<F>.one_by_one) ptx::settle_in_turn(d[16 * i + j]);
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

// Softplus of a pair of sums as fp16. The exponentials are fp32; e q(e) + max(x, 0) is then computed for both sums at
// once in fp16, with 2/3 of the instructions and of the register reads, which compete with the products' reads. This
// adds roundings of e, q and max(x, 0): a hidden value is off by 1.4 times its unavoidable rounding, nearly all of it
// by the rounding of max(x, 0); y of 3 to 5 layers by 1.25 times the error with one rounding per layer. Values saved in
// fp32 are not computed in this way.
template <class F> constexpr bool kHasPairForm = false;
template <> inline constexpr bool kHasPairForm<Softplus> = true;
template <class F, class T> constexpr bool kHasPairs = kHasPairForm<F>&& std::is_same_v<T, f16>;
template <class F, class T, Save kSave> constexpr bool kInPairs = kHasPairs<F, T>&& kSave != Save::any_type;
template <class F, class T, Save kSave> constexpr bool kStoresLater = kInPairs<F, T, kSave>&& kSave == Save::own_type;
template <class F, class T, Save kSave, Finish kFinish>
constexpr bool kInLog2e = kInPairs<F, T, kSave>&& kSave == Save::nothing&& kFinish != Finish::none;
// With kTimesLog2e the argument is x log2 e and the result softplus(x) log2 e. The root mean square of the errors is
// the same; the error of the left tail alone is 1.9 instead of 1.5 times a rounding, because the constant term is off
// by 0.4 units in the last place.
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

// A matrix in memory for a tile's rows.
struct Target {
  char* rows;
  int64_t stride_bytes;
  uint32_t cols;
};
// Stores the last product's columns from the sums: 16 bytes per thread, because of the permutation.
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
    if (to.cols == kWidth) {  // the compiler makes four plain stores of this form only
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i) ptx::store_streaming(line + 64 * i, w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        if (32 * i + 8 * q < to.cols) ptx::store_streaming(line + 64 * i, w[i]);
    }
  }
}
// Stores columns 32 i to 32 i + 31 of another product from the layout of A, through the warp's shared memory: 16 bytes
// per lane.
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
// The same if all products' columns are permuted like the last product's: 16 bytes per thread without staging.
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
// The same columns of any product, unpermuted in fp32.
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

// Converts columns 32 i to 32 i + 31 of a hidden layer from finished sums to the next layer's A. save(i) is called when
// the values for the backward pass are complete: in `d`, or for all types except fp32 in `a`.
template <class T, class F, int kWidth, Save kSave, bool kTimesLog2e, class SaveBlock>
__device__ __forceinline__ void form_block(Sums<kWidth>& d, Rows<kWidth>& a, int i, bool f32, float number,
                                           SaveBlock&& save) {
  constexpr bool kSaves = kSave != Save::nothing;
  if constexpr (kSaves && !has_slope_from_value<F>) {
    if (!f32) pack_block<T, kWidth>(a, d, i);
    save(i);
  }
  if constexpr (kInPairs<F, T, kSave>) {
    softplus_block<kWidth, kTimesLog2e>(a, d, i);
  } else {
    activate_block<T, F, kWidth>(d, i, number);
    pack_block<T, kWidth>(a, d, i);
  }
  if constexpr (kSaves && has_slope_from_value<F> && !kStoresLater<F, T, kSave>) save(i);
}
// Converts a hidden layer's sums to the next layer's A and stores the values for the backward pass. kTurned: columns
// are permuted like the last layer's.
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
    form_block<T, F, kWidth, kSave, kTimesLog2e>(d, a, i, f32, p.number, save);
  }
}
// Stores the saved parts of A, while the next layer's products run.
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
// Converts the last layer's sums to y.
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
    for (int i = 0; i < kWidth / 32; ++i) activate_block<T, F, kWidth>(d, i, p.number);
    if constexpr (kSaves && has_slope_from_value<F>) save();
    if (kSaves && p.y == layer.saved) return;  // a recomputation of values needs the last values only once
  }
  store_last<T, kWidth>(d, {static_cast<char*>(p.y), p.y_stride_bytes, layer.n}, first, p.rows);
}

// Turns at issuing a layer's products. With few tiles per warpgroup all warpgroups would stay in the same layer after
// the start, and wait for the tensor cores together and then for the activation's units. Turns prevent this.
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
  // At the end: the block's first warpgroup may have had a tile more than this warpgroup. `tile`: the next tile of this
  // warpgroup.
  __device__ __forceinline__ void end(uint32_t tile, uint32_t tiles, int layers) const {
    const bool is_short = on && tile - warpgroup * gridDim.x < tiles;
    for (int l = 0; is_short && l < layers; ++l) {
      take();
      pass();
    }
  }
};

// Shared code of launchers: use(the activation's formula, operands), and a launch.
struct Operands {
  Params p;
  CUtensorMap x_map;
  int device;
};
template <class Use> void with_operands(const Mlp& m, Use&& use) {
  if (m.x.rows() == 0) return;
  const gpu::TmaBox of_warp{.rows = kWarpRows, .cols = 64, .swizzle = tile::Swizzle::b128};
  const Operands o{mlp_forward_params(m), gpu::tensor_map("mlp: x", mlp_matrix(m.x), of_warp), m.x.device.index};
  with_formula(m.act, [&](auto f) { use(f, o); });
}
// use(std::integral_constant<Save, ...>): the stored values are part of the type where a formula depends on the stored
// values.
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

}  // namespace ingot::cuda::mlp_parts
