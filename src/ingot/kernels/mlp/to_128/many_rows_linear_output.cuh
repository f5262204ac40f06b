#pragma once
// The many-rows variant for networks whose last layer is linear, 128 wide, with weight norm on all layers or on none.
// The chain of products and activations is the same as in many_rows.cuh. These kernels contain only code that such
// networks need. Code that is skipped also costs time: the first pass fetches the neighbouring code, and additional
// branches change the order in which the compiler places the activation's instructions. The copy engine brings the
// weights, so that no warp waits while issuing loads.
#include "ingot/kernels/mlp/to_128/linear_output_weights.cuh"

namespace ingot::cuda::to_128_many_rows {

// Softplus of pairs as in softplus_pair(), times log2 e, with q of degree 3 and the constant log2 e, so that small h
// are exact but for roundings: off by 7.5e-4 at most, where half a unit is 4.9e-4. Hidden values are off by 1.45 times
// a rounding, root mean square, with degree 4 by 1.37.
__device__ __forceinline__ void short_softplus(Rows<kLinearOutputWidth>& a, const Sums<kLinearOutputWidth>& d) {
  // The best neighbours of log2 e times -0.077393, 0.25879, -0.48877, 1; twice
  constexpr uint32_t kQ[4] = {0xaf06af06, 0x35ed35ed, 0xb9a1b9a1, 0x3dc53dc5};
#pragma unroll
  for (int j = 0; j < kLinearOutputWidth / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x[2] = {d[4 * j + 2 * half], d[4 * j + 2 * half + 1]};
      const uint32_t e = ptx::pack(f16{}, detail::fast_exp2(-fabsf(x[0])), detail::fast_exp2(-fabsf(x[1])));
      uint32_t q = ptx::multiply_add(f16{}, e, kQ[0], kQ[1]);
#pragma unroll
      for (int k = 2; k < 4; ++k) q = ptx::multiply_add(f16{}, e, q, kQ[k]);
      a[j / 2][2 * (j % 2) + half] = ptx::multiply_add(f16{}, e, q, ptx::pack_relu(f16{}, x[0], x[1]));
    }
}

template <int kGroups, Norm kNorm> constexpr int linear_output_threads() {
  return 128 * (kGroups + (kNorm == Norm::aside));
}
template <class T, int kGroups, Save kSave, Finish kFinish, Norm kNorm>
INGOT_HD constexpr Layout linear_output_layout(int layers) {
  return layout_of<T, kLinearOutputWidth, kSave>(layers, kGroups, kFinish != Finish::none, kNorm != Norm::none,
                                                 kSave != Save::nothing && !kTurnsAll<kSave, kNorm>);
}

// A thread's view of its block; run() is in order of time.
template <class T, class F, int kGroups, Save kSave, Finish kFinish, Norm kNorm> struct LinearOutputBlock {
  static constexpr int kWidth = kLinearOutputWidth;
  static constexpr bool kHasBias = kFinish != Finish::none, kNorms = kNorm != Norm::none;
  static constexpr bool kTurned = kTurnsAll<kSave, kNorm>;
  static_assert(!kHasBias || !kNorms, "networks with both are others' business");
  // Softplus in inference: the first and the last layer have code of their own, so that no branch stands between a
  // product and the use of its result. Where no gains carry the factor log2 e, the sums of these layers are multiplied
  // by log2 e: two multiplications per element for all layers instead of one for each layer.
  static constexpr bool kPeels = kInPairs<F, T, kSave> && kSave == Save::nothing && !kHasBias;
  static constexpr bool kTimesLog2e = kPeels || kInLog2e<F, T, kSave, kFinish>;
  static constexpr uint32_t kWarps = 4 * kGroups, kAllWarps = linear_output_threads<kGroups, kNorm>() / 32;
  // With weight norm: the first of the warps that form W, the number of threads from this warp on, and the number of
  // gains that each of these threads loads.
  static constexpr uint32_t kForms = kNorm == Norm::aside ? kAllWarps - 8 : 0;
  static constexpr uint32_t kFormers = 32 * (kAllWarps - kForms);
  static constexpr uint32_t kEach = (kLinearOutputLayers * kWidth + kFormers - 1) / kFormers;
  using Gains = T[kEach];

  const Params& p;
  const LinearOutputMaps& maps;
  char* const shared;
  const Layout at = linear_output_layout<T, kGroups, kSave, kFinish, kNorm>(p.layers);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  ArrivingRows<kWidth> x = rows_of(warp);
  float* const bias = reinterpret_cast<float*>(shared + at.bias);
  T* const gain = reinterpret_cast<T*>(shared + at.gain);
  const LinearOutputWeights network{shared, barriers, barriers + (kNorms ? kMlpMaxLayers : 0)};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  const uint32_t first_tile = blockIdx.x + gridDim.x * (warp / 4);
  const int last = p.layers - 1;

  __device__ __forceinline__ bool takes_rows() const { return kNorm != Norm::aside || warp < kWarps; }
  __device__ __forceinline__ bool forms() const {
    return kNorm == Norm::first || (kNorm == Norm::aside && warp >= kForms);
  }
  __device__ __forceinline__ ArrivingRows<kWidth> rows_of(uint32_t w) const {
    return {shared + at.x + w * x_bytes<kWidth>(), barriers + 2 * kMlpMaxLayers + w};
  }

  // The data read first is prefetched into L2 before anything else. Prefetching the rows of all warpgroups would delay
  // this data, and the end of the preceding kernel as well, because the memory is saturated.
  __device__ __forceinline__ void prepare() {
    if (warp < 4 && first_tile < tiles) x.prefetch(maps.x, first_tile);
    if (threadIdx.x < uint32_t(p.layers)) {
      ptx::mbarrier_init(network.loaded + threadIdx.x, 1);
      if (kNorms) ptx::mbarrier_init(network.ready + threadIdx.x, kWidth / kNormalisedRows);
    }
    if (lane() == 0 && takes_rows()) ptx::mbarrier_init(x.barrier, 1);
    ptx::fence_mbarrier_init();
    __syncthreads();
    ptx::let_next_kernel_start();
    if (warp == 1 && lane() < uint32_t(p.layers)) ptx::prefetch_tensor_map(&maps.w[lane()]);
    if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
    ptx::wait_for_earlier_kernels();
  }
  // Gains are loaded before the weights, because gains loaded later would arrive after all weights.
  __device__ __forceinline__ void load_gains(Gains& gains) const {
    const uint32_t features = uint32_t(p.layers) * kWidth, former = threadIdx.x - 32 * kForms;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j)
      if (forms() && former + j * kFormers < features) {
        const auto [l, n] = column_of<kWidth>(p, former + j * kFormers);
        gains[j] = element<T>(p.layer[l].g, p.layer[l], kTurned ? (former + j * kFormers) % kWidth : n);
      }
  }
  // The first layer and the first warpgroup's rows, then the rows of the remaining warpgroups, then the remaining
  // layers, so that no warp waits long for data of later use. A layer with weight norm is needed earlier than its
  // product. A warp of the second warpgroup issues the copies: this warp has no earlier work, while the warps that
  // compute W need the gains.
  __device__ __forceinline__ void ask() {
    constexpr int kAheadOfRows = kNorm == Norm::none ? 1 : kNorm == Norm::aside ? 3 : kLinearOutputLayers;
    if (first_tile < tiles && warp < 4) x.load(maps.x, first_tile);
    if (warp == 4 && lane() == 0) {
      for (int l = 0; l < min(kAheadOfRows, last + kTurned); ++l) network.load(maps, l);
      for (uint32_t w = 4; w < kWarps; ++w) {
        const uint32_t its = blockIdx.x + gridDim.x * (w / 4);
        if (its >= tiles) break;
        const ArrivingRows<kWidth> rows = rows_of(w);
        ptx::mbarrier_arrive_expect_tx(rows.barrier, x_bytes<kWidth>());
#pragma unroll
        for (int i = 0; i < kWidth / 64; ++i)
          ptx::tensor_load(rows.rows + i * rows.kPanel, &maps.x, 64 * i, int(its * kTileRows + w % 4 * kWarpRows),
                           rows.barrier);
      }
      for (int l = kAheadOfRows; l < last; ++l) network.load(maps, l);
      if (!kTurned) network.expect(last);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void keep_bias() const {
    // Warp 4 is busy with the copies of the weights.
    const uint32_t first = warp == 4 ? uint32_t(p.layers) * kWidth : threadIdx.x - (warp > 4 ? 32 : 0);
    for (uint32_t i = first; i < uint32_t(p.layers) * kWidth; i += 128 * kGroups - 32) {
      const auto [l, n] = column_of<kWidth>(p, i);
      const LayerParams& of = p.layer[l];
      bias[i] = domain_of<kTimesLog2e>(l, p.layers).bias * tile::to_float(element<T>(of.b, of, n));
    }
    __syncthreads();
  }
  // The last layer takes 32 copies. The last warpgroup issues these copies after the arrival of the first layer, early
  // enough for their use.
  __device__ __forceinline__ void ask_for_last_layer() const {
    if (last > 0) network.wait_for(0);
    if (lane() == 0) network.load_turned(maps, last, int(warp % 4));
    __syncwarp();
  }
  // Weight norm.
  __device__ __forceinline__ void form_weights(const Gains& gains) const {
    const uint32_t features = uint32_t(p.layers) * kWidth, former = threadIdx.x - 32 * kForms;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j)
      if (const uint32_t i = former + j * kFormers; i < features) gain[i] = gains[j];
    ptx::barrier_sync(kGroups + 1, kFormers);
    if (!kTurned && warp >= kAllWarps - 4 && lane() == 0) network.load_turned(maps, last, int(warp % 4));
    __syncwarp();
    constexpr uint32_t kParts = kWidth / kNormalisedRows, kHelped = kHelpedLayers * kParts;
    const uint32_t all = uint32_t(p.layers) * kParts;
    const uint32_t end = kNorm == Norm::aside && warp < kWarps ? min(kHelped, all) : all;
#pragma unroll 1
    for (uint32_t i = warp - kForms; i < end; i += kNorm == Norm::first ? kAllWarps : i + 4 < kHelped ? 8 : 4) {
      const int l = int(i / kParts);
      tile::wait_warp_or_trap(network.loaded + l, 0);
      form_rows<T, kTurned>(ptx::shared_address(network.layer(l)), i % kParts, l > 0, gain + l * kWidth,
                            domain_of<kTimesLog2e>(l, p.layers).sums);
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(network.ready + l);
    }
  }
  // To hidden values times log2 e, and back.
  static __device__ __forceinline__ void scale(Sums<kWidth>& d, float factor) {
    if constexpr (!kNorms) {
#pragma unroll
      for (float& sum : d) sum *= factor;
    }
  }
  // This warpgroup's tiles.
  __device__ __forceinline__ void take_tiles() {
    char* const staging = shared + at.staging + warp * kStagingBytes;
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
    uint32_t tile = first_tile;
    for (; tile < tiles; is_first = false, tile += step) {
      x.take(a);
      for (int l = 0; !kPeels && l < p.layers; ++l) {
        if (is_first) network.wait_for(l);
        turns.take();
        multiply<T, kWidth>(d, a, weights + l * kLayerStep, upper);
        turns.pass();
        if (l > 0) store_later<T, F, kWidth, kSave, kTurned>(a, p, l - 1, staging, first_row(tile));
        if (l == 0 && tile + step < tiles) {
          __syncwarp();  // all lanes have finished reading the memory of the next rows
          x.load(maps.x, tile + step);
        }
        wait<kWidth>(d, a);
        if (l + 1 < p.layers)
          activate<T, F, kWidth, kSave, kFinish, kTurned>(d, a, p, l, vectors, staging, first_row(tile));
      }
      if constexpr (kPeels) {
        const auto product = [&](int l) {
          if (is_first) network.wait_for(l);
          turns.take();
          multiply<T, kWidth>(d, a, weights + l * kLayerStep, upper);
          turns.pass();
        };
        product(0);
        if (tile + step < tiles) {
          __syncwarp();
          x.load(maps.x, tile + step);
        }
        wait<kWidth>(d, a);
        scale(d, detail::kLog2e);
        short_softplus(a, d);
#pragma unroll 1
        for (int l = 1; l < last; ++l) {
          product(l);
          wait<kWidth>(d, a);
          short_softplus(a, d);
        }
        product(last);
        wait<kWidth>(d, a);
        scale(d, 1 / detail::kLog2e);
      }
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        finish_block<kWidth, kFinish>(d, i, vectors, last, domain_of<kTimesLog2e>(last, p.layers).sums);
      store_last<T, kWidth>(d, {static_cast<char*>(p.y), p.y_stride_bytes, p.layer[last].n}, first_row(tile), p.rows);
    }
    turns.end(tile, tiles, p.layers);
  }

  __device__ __forceinline__ void run() {
    prepare();
    Gains gains;
    if constexpr (kNorms) load_gains(gains);
    ask();
    if constexpr (kHasBias) keep_bias();
    if (!kNorms && warp / 4 == kGroups - 1) ask_for_last_layer();
    if (forms()) form_weights(gains);
    if (takes_rows()) take_tiles();
  }
};

template <class T, class F, int kGroups, Save kSave, Finish kFinish, Norm kNorm>
__global__ void __launch_bounds__(linear_output_threads<kGroups, kNorm>(), 1)
    mlp_to_128_linear_output_kernel(const __grid_constant__ Params p, const __grid_constant__ LinearOutputMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  LinearOutputBlock<T, F, kGroups, kSave, kFinish, kNorm>{p, maps, shared}.run();
}

inline LinearOutputMaps linear_output_maps(const Mlp& m, const Operands& o, bool turned) {
  LinearOutputMaps maps = {.x = o.x_map};
  for (size_t l = 0; l + !turned < m.layers.size(); ++l)
    maps.w[l] = gpu::tensor_map("mlp: w", m.layers[l].w,
                                {.rows = kLinearOutputWidth, .cols = 64, .swizzle = tile::Swizzle::b128});
  if (turned) return maps;
  const Tensor& w = m.layers.back().w;
  maps.w[m.layers.size() - 1] =
      gpu::tensor_map("mlp: last w", Tensor(w.data, w.dtype, {w.rows() / 8, 8, w.cols()}, w.device),
                      {.rows = 2, .cols = 64, .swizzle = tile::Swizzle::b128, .outer = 4});
  return maps;
}

template <class T, class F, int kGroups, Save kSave, Finish kFinish, Norm kNorm>
void launch_linear_output_kernel(const Mlp& m, const Operands& o, Stream stream) {
  const int64_t tiles = (o.p.rows + kTileRows - 1) / kTileRows;
  gpu::launch("mlp", mlp_to_128_linear_output_kernel<T, F, kGroups, kSave, kFinish, kNorm>,
              {.grid = std::min<int64_t>(tiles, sm_count(o.device)),
               .block = linear_output_threads<kGroups, kNorm>(),
               .smem = linear_output_layout<T, kGroups, kSave, kFinish, kNorm>(o.p.layers).size,
               .overlap = true,
               .device = o.device},
              stream, o.p, linear_output_maps(m, o, kTurnsAll<kSave, kNorm>));
}
template <class T, class F, Save kSave> void launch_linear_output_as(const Mlp& m, const Operands& o, Stream stream) {
  constexpr int kMost = most_warpgroups<F, kLinearOutputWidth, kSave>();
  const auto launch = [&](auto groups, auto finish, auto norm) {
    launch_linear_output_kernel<T, F, groups(), kSave, finish(), norm()>(m, o, stream);
  };
  constexpr std::integral_constant<int, 3> three;
  constexpr std::integral_constant<int, kMost> most;
  constexpr std::integral_constant<Finish, Finish::none> sums;
  constexpr std::integral_constant<Norm, Norm::none> as_is;
  if (o.p.has_gain) {
    if constexpr (kFormsAside<F, kSave>)
      if (o.p.rows <= kMlpFewTileRows) return launch(three, sums, std::integral_constant<Norm, Norm::aside>());
    constexpr std::integral_constant<Norm, Norm::first> first;
    // Four warpgroups compute W sooner. Deep networks use three where the fourth would have no tiles.
    const int64_t at_once = kTileRows * int64_t(sm_count(o.device));
    const bool idles = o.p.layers > 3 && o.p.rows > at_once && o.p.rows <= 3 * at_once;
    if constexpr (kInPairs<F, T, kSave> && kSave == Save::own_type)
      if (o.p.rows <= kMlpFewTileRows && !idles) return launch(std::integral_constant<int, 4>(), sums, first);
    return launch(most, sums, first);
  }
  const auto launch_finish = [&](auto finish) {
    if constexpr (kMost == 4)
      if (mlp_three_warpgroups_suffice(o.p) ||
          linear_output_layout<T, kMost, kSave, finish(), Norm::none>(o.p.layers).size > kMlpSharedBytes)
        return launch(three, finish, as_is);
    launch(most, finish, as_is);
  };
  o.p.has_bias ? launch_finish(std::integral_constant<Finish, Finish::bias>()) : launch_finish(sums);
}

}  // namespace ingot::cuda::to_128_many_rows

namespace ingot::cuda {

template <class T, bool kSave> void launch_mlp_to_128_linear_output(const Mlp& m, Stream stream) {
  using namespace to_128_many_rows;
  with_operands(m, [&](auto f, const Operands& o) {
    with_save<T, decltype(f), kSave>(o.p,
                                     [&](auto save) { launch_linear_output_as<T, decltype(f), save()>(m, o, stream); });
  });
}

}  // namespace ingot::cuda
