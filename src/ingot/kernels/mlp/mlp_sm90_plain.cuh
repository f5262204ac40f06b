#pragma once
// The many-rows form for networks without weight norm whose last layer is linear, 128 wide: the same chain of products
// and activations as in mlp_sm90.cuh. There is nothing in these kernels that such networks do not need: code that is
// jumped over costs time as well, as the first pass waits for its neighbours and as the activation's instructions are
// ordered otherwise beside it. And the copy engine brings the weights, so that no warp waits in asking for them.
#include "ingot/kernels/mlp/mlp_sm90.cuh"
#include "ingot/kernels/mlp/mlp_sm90.h"

namespace ingot::cuda::mlp_sm90_detail {

constexpr int kPlainWidth = 128, kPlainLayers = kMostLayers<kPlainWidth>;

struct PlainMaps {
  CUtensorMap x;
  CUtensorMap w[kPlainLayers];  // panels of 64 columns; of the last one eights of rows: turned_rows()
};

// W on its way to shared memory; each layer is waited for when it is needed.
struct PlainWeights {
  char* weights;
  uint64_t* loaded;  // of each layer

  __device__ __forceinline__ char* layer(int l) const { return weights + l * weight_bytes<kPlainWidth>(); }
  __device__ __forceinline__ void expect(int l) const {
    ptx::mbarrier_arrive_expect_tx(loaded + l, weight_bytes<kPlainWidth>());
  }
  // One thread.
  __device__ __forceinline__ void load(const PlainMaps& maps, int l) const {
    expect(l);
#pragma unroll
    for (int panel = 0; panel < kPlainWidth / 64; ++panel)
      ptx::tensor_load(layer(l) + panel * panel_bytes<kPlainWidth>(), &maps.w[l], 64 * panel, 0, loaded + l);
  }
  // One thread: rows 32 i to 32 i + 31 of the last layer, permuted. Row 32 i + 8 j + 2 q + e is the feature
  // 8 (4 i + q) + 2 j + e: a box spans two rows of four eights.
  __device__ __forceinline__ void load_turned(const PlainMaps& maps, int l, int i) const {
#pragma unroll 1
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int panel = 0; panel < kPlainWidth / 64; ++panel)
        ptx::tensor_load_3d(layer(l) + panel * panel_bytes<kPlainWidth>() + (32 * i + 8 * j) * 128, &maps.w[l],
                            64 * panel, 2 * j, 4 * i, loaded + l);
  }
  __device__ __forceinline__ void wait_for(int l) const { tile::wait_warp_or_trap(loaded + l, 0); }
};

// Softplus of pairs as softplus_pair() has it, with q of degree 3 whose constant is 1, so that small h are exact but
// for roundings: off by 7.5e-4 at most, where half a unit is 4.9e-4. Hidden values are off by 1.45 times one rounding,
// root mean square, with degree 4 by 1.37.
__device__ __forceinline__ void short_softplus_block(Rows<kPlainWidth>& a, const Sums<kPlainWidth>& d, int i) {
  const auto twice = [](uint32_t bits) { return bits << 16 | bits; };
  const auto exp2_of = [](float x) { return detail::fast_exp2(fabsf(x) * -detail::kLog2e); };
  constexpr uint32_t kQ[4] = {0xacf4, 0x3424, 0xb7d2, 0x3c00};  // -0.077393, 0.25879, -0.48877, 1
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      const uint32_t e = ptx::pack(f16{}, exp2_of(d[at]), exp2_of(d[at + 1]));
      uint32_t q = ptx::multiply_add(f16{}, e, twice(kQ[0]), twice(kQ[1]));
#pragma unroll
      for (int k = 2; k < 4; ++k) q = ptx::multiply_add(f16{}, e, q, twice(kQ[k]));
      a[2 * i + j / 2][2 * (j % 2) + half] = ptx::multiply_add(f16{}, e, q, ptx::pack_relu(f16{}, d[at], d[at + 1]));
    }
}

template <class T, class F, int kGroups, Save kSave, Finish kFinish>
__global__ void __launch_bounds__(128 * kGroups, 1)
    mlp_sm90_plain_kernel(const __grid_constant__ Params p, const __grid_constant__ PlainMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kWidth = kPlainWidth;
  constexpr bool kHasBias = kFinish != Finish::none, kTimesLog2e = kInLog2e<F, T, kSave, kFinish>;
  const Layout at = layout_of<T, kWidth, kSave>(p.layers, kGroups, kHasBias, false);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  ArrivingRows<kWidth> x{shared + at.x + warp * x_bytes<kWidth>(), barriers + 2 * kMlpMaxLayers + warp};
  char* const staging = shared + at.staging + warp * kStagingBytes;
  float* const bias = reinterpret_cast<float*>(shared + at.bias);
  const PlainWeights network{shared, barriers};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  uint32_t tile = blockIdx.x + gridDim.x * (warp / 4);

  if (threadIdx.x < uint32_t(p.layers)) ptx::mbarrier_init(barriers + threadIdx.x, 1);
  if (lane() == 0) ptx::mbarrier_init(x.barrier, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  ptx::let_next_kernel_start();
  if (warp == 1 && lane() < uint32_t(p.layers)) ptx::prefetch_tensor_map(&maps.w[lane()]);
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  if (tile < tiles) x.prefetch(maps.x, tile);
  ptx::wait_for_earlier_kernels();
  // The first layer and the first warpgroup's rows, then the others' rows, then the other layers: nobody waits long for
  // what is wanted later.
  const int last = p.layers - 1;
  if (tile < tiles && warp < 4) x.load(maps.x, tile);
  if (warp == 4 && lane() == 0) {
    if (last > 0) network.load(maps, 0);
    for (uint32_t w = 4; w < 4 * kGroups; ++w) {
      const uint32_t its = blockIdx.x + gridDim.x * (w / 4);
      if (its >= tiles) break;
      const ArrivingRows<kWidth> rows{shared + at.x + w * x_bytes<kWidth>(), barriers + 2 * kMlpMaxLayers + w};
      ptx::mbarrier_arrive_expect_tx(rows.barrier, x_bytes<kWidth>());
#pragma unroll
      for (int i = 0; i < kWidth / 64; ++i)
        ptx::tensor_load(rows.rows + i * rows.kPanel, &maps.x, 64 * i, int(its * kTileRows + w % 4 * kWarpRows),
                         rows.barrier);
    }
    for (int l = 1; l < last; ++l) network.load(maps, l);
    network.expect(last);
  }
  __syncwarp();
  if constexpr (kHasBias) {
    // The warp that asks for the weights is busy.
    const uint32_t first = warp == 4 ? uint32_t(p.layers) * kWidth : threadIdx.x - (warp > 4 ? 32 : 0);
    for (uint32_t i = first; i < uint32_t(p.layers) * kWidth; i += 128 * kGroups - 32) {
      const int l = int(i / kWidth);
      const LayerParams& of = p.layer[l];
      const uint32_t n = l == last ? last_feature(i % kWidth) : i % kWidth;
      const bool there = of.b != nullptr && n < of.n;
      bias[i] = there ? domain_of<kTimesLog2e>(l, p.layers).bias * tile::to_float(static_cast<const T*>(of.b)[n]) : 0;
    }
    __syncthreads();
  }
  // The last layer is 32 copies. The last warpgroup asks for them when the first layer is there, which is early enough.
  if (warp / 4 == kGroups - 1) {
    if (last > 0) network.wait_for(0);
    if (lane() == 0) network.load_turned(maps, last, int(warp % 4));
    __syncwarp();
  }
  const uint64_t descriptor =
      tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(ptx::shared_address(shared));
  const uint32_t weights = uint32_t(descriptor), upper = uint32_t(descriptor >> 32);
  constexpr uint32_t kLayerStep = weight_bytes<kWidth>() >> 4;

  const Vectors vectors = {bias, nullptr};
  Rows<kWidth> a;
  Sums<kWidth> d;
  const Turns<kGroups> turns{kGroups > 2 && tiles > step && tiles <= kFewTiles, warp / 4};
  turns.start();
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
        x.load(maps.x, tile + step);
      }
      wait<kWidth>(d, a);
      if (l + 1 < p.layers) {
        if constexpr (kInPairs<F, T, kSave> && kSave == Save::nothing && !kHasBias) {
#pragma unroll
          for (int i = 0; i < kWidth / 32; ++i) short_softplus_block(a, d, i);
        } else {
          activate<T, F, kWidth, kSave, kFinish>(d, a, p, l, vectors, staging, first_row(tile));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
      finish_block<kWidth, kFinish>(d, i, vectors, last, domain_of<kTimesLog2e>(last, p.layers).sums);
    store_last<T, kWidth>(d, {static_cast<char*>(p.y), p.y_stride_bytes, p.layer[last].n}, first_row(tile), p.rows);
  }
  // The block's first warpgroup may have had one tile more.
  const bool is_short = turns.on && tile - warp / 4 * gridDim.x < tiles;
  for (int l = 0; is_short && l < p.layers; ++l) {
    turns.take();
    turns.pass();
  }
}

inline PlainMaps plain_maps(const Mlp& m, const Operands& o) {
  PlainMaps maps = {.x = o.x_map};
  for (size_t l = 0; l + 1 < m.layers.size(); ++l)
    maps.w[l] =
        gpu::tensor_map("mlp: w", m.layers[l].w, {.rows = kPlainWidth, .cols = 64, .swizzle = tile::Swizzle::b128});
  const Tensor& w = m.layers.back().w;
  maps.w[m.layers.size() - 1] =
      gpu::tensor_map("mlp: last w", Tensor(w.data, w.dtype, {w.rows() / 8, 8, w.cols()}, w.device),
                      {.rows = 2, .cols = 64, .swizzle = tile::Swizzle::b128, .outer = 4});
  return maps;
}

template <class T, class F, Save kSave> void launch_plain_as(const Mlp& m, const Operands& o, Stream stream) {
  const Params& p = o.p;
  const auto smem = [&](int groups) {
    return layout_of<T, kPlainWidth, kSave>(p.layers, groups, p.has_bias, false).size;
  };
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    gpu::launch("mlp",
                p.has_bias ? mlp_sm90_plain_kernel<T, F, kGroups, kSave, Finish::bias>
                           : mlp_sm90_plain_kernel<T, F, kGroups, kSave, Finish::none>,
                {.grid = std::min<int64_t>((p.rows + kTileRows - 1) / kTileRows, sm_count(o.device)),
                 .block = 128 * kGroups,
                 .smem = smem(kGroups),
                 .overlap = true,
                 .device = o.device},
                stream, p, plain_maps(m, o));
  };
  constexpr int kMost = most_warpgroups<F, kPlainWidth, kSave>();
  if constexpr (kMost == 4)
    if (mlp_sm90_three_suffice(p) || smem(4) > kMlpSharedBytes) return launch(std::integral_constant<int, 3>());
  launch(std::integral_constant<int, kMost>());
}

}  // namespace ingot::cuda::mlp_sm90_detail

namespace ingot::cuda {

template <class T, bool kSave> void launch_mlp_sm90_plain(const Mlp& m, Stream stream) {
  using namespace mlp_sm90_detail;
  with_operands(m, [&](auto f, const Operands& o) {
    with_save<T, decltype(f), kSave>(o.p, [&](auto save) { launch_plain_as<T, decltype(f), save()>(m, o, stream); });
  });
}

}  // namespace ingot::cuda
