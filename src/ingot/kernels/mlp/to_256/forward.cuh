#pragma once
// The forward variant up to 256 wide. Described as a whole in docs/mlp-kernels.md.
//
// A block has two multiplying warpgroups and a copying warp. A warpgroup takes 64 rows through the whole network as in
// to_128/many_rows.cuh, activations in registers. Shared memory does not hold the W of two layers: all layers pass
// through a ring as panels of 64 columns, again for every round of tiles, and both warpgroups read each panel, half a
// layer apart: the first multiplies while the second activates.
//
// These kernels do not handle weight norm: W is computed before (parts/formed_weights.h).
#include "ingot/kernels/mlp/to_256/forward_operands.cuh"

namespace ingot::cuda::to_256 {

// d = a W^T of a layer, panel by panel as the panels arrive, without a wait for the last product. During the product of
// a panel, meanwhile(panel) may read a.
template <class T, class Meanwhile>
__device__ __forceinline__ void multiply(Sums<kWidth>& d, const Rows<kWidth>& a, const PanelRing& ring, uint32_t panels,
                                         uint32_t weights, uint32_t upper, tile::RingCursor<kSlots>& at,
                                         Meanwhile&& meanwhile) {
  ptx::fence_registers(d);
  uint32_t before = 0;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (uint32_t(panel) >= panels) break;
    ring.wait_for(at);
    ptx::wgmma_fence();  // for each panel: the compiler's own would be divergent beside a branch, and serialise
    const uint32_t slot = weights + at.stage * (kPanelBytes >> 4);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::wgmma<T, kWidth>(d, a[4 * panel + k], uint64_t(upper) << 32 | (slot + 2 * k), panel + k > 0);
    ptx::wgmma_commit_group();
    meanwhile(panel);
    if (panel > 0) {
      ptx::wgmma_wait_group<1>();
      ring.release(before);
    }
    before = at.stage;
    at.advance();
  }
}

// 64 columns of a warp's rows on their way to memory through its staging, 16 at a time.
struct PanelStore {
  char* staging;

  __device__ __forceinline__ void begin() const {
    ptx::bulk_wait_group_read<0>();  // the previous contents are on their way
    __syncwarp();
  }
  __device__ __forceinline__ void put(int step, const uint32_t (&columns)[4]) const {
    const uint32_t at =
        ptx::shared_address(staging) + tile::swizzled<tile::Swizzle::b128>(matrix_row(), matrix_chunk() * 16);
    ptx::stmatrix(at ^ step * 32, columns);
  }
  __device__ __forceinline__ void end(int panel, const CUtensorMap& to, int64_t first) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) ptx::tensor_store(&to, 64 * panel, int(first), staging);
    ptx::bulk_commit_group();
  }
};
__device__ __forceinline__ void store_panel(const Rows<kWidth>& a, int panel, const PanelStore& store,
                                            const CUtensorMap& to, int64_t first) {
  store.begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) store.put(k, a[4 * panel + k]);
  store.end(panel, to, first);
}

// Turns a layer's sums into the next layer's A, or y; the values for backward go to memory.
template <class T, class F, Save kSave>
__device__ __forceinline__ void activate(Sums<kWidth>& d, Rows<kWidth>& a, const Params& p, int l, const Factors& of,
                                         char* staging, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, Finish::scale_and_bias>;
  const LayerParams& layer = p.layer[l];
  const Target saved = {static_cast<char*>(layer.saved), layer.n * int64_t(p.saved_f32 ? 4 : 2), layer.n};
  const auto save = [&](int i) {
    if (kSave != Save::any_type || !p.saves) return;
    if (p.saved_f32)
      store_block_f32<kWidth>(d, i, false, saved, first, p.rows);
    else
      store_block<kWidth>(a, i, staging, saved, first, p.rows);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    of.finish_block(d, i, l);
    form_block<T, F, kWidth, kSave, kTimesLog2e>(d, a, i, p.saved_f32, p.number, save);
  }
}
// The same for kernels that store slopes, or the activation's arguments, in T and compute the values from the
// arguments. The branch for columns beyond the layer's width also keeps the compiler from interleaving the formulas of
// all columns, which would need too many registers.
template <class T, class F, bool kSlopes>
__device__ __forceinline__ void activate_and_store(Sums<kWidth>& d, Rows<kWidth>& a, int l, uint32_t columns,
                                                   float number, const Factors& of, const PanelStore& store,
                                                   const CUtensorMap& to, int64_t first) {
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    if (uint32_t(32 * i) < columns) {
      if (i % 2 == 0) store.begin();
      of.finish_block(d, i, l);
#pragma unroll
      for (int k = 2 * i; k < 2 * i + 2; ++k) {
        uint32_t stored[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const z = d + 8 * k + 2 * j;
          float of_two[4] = {act_value<F, T>(z[0], number), act_value<F, T>(z[1], number), z[0], z[1]};
          if constexpr (kSlopes) of_two[2] = act_slope<F, T>(z[0], number), of_two[3] = act_slope<F, T>(z[1], number);
          a[k][j] = ptx::pack(T{}, of_two[0], of_two[1]);
          stored[j] = ptx::pack(T{}, of_two[2], of_two[3]);
        }
        store.put(k % 4, stored);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) a[2 * i + j / 4][j % 4] = 0;
    }
    if (i % 2 == 1 && uint32_t(32 * (i - 1)) < columns) store.end(i / 2, to, first);
  }
}
template <class T> __device__ __forceinline__ void finish(Sums<kWidth>& d, Rows<kWidth>& a, const Factors& of, int l) {
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    of.finish_block(d, i, l);
    pack_block<T, kWidth>(a, d, i);
  }
}

// The shared state of the multiplying warps; x and staging belong to a single warp.
struct Block {
  PanelRing ring;
  Factors factors;
  TurningRows x;
  char* staging;
};

// The last layer of a kernel: never activated; always activated, where the kernel computes values alone; activated, and
// the slopes of all layers stored beside the values; or activated where the network requires it.
enum class Last { linear, activated, sloped, any };
// Values of T are stored while the next layer multiplies them, and arguments before.
template <class F, Save kSave, Last kLast>
constexpr bool kStoresMeanwhile = kSave == Save::own_type && (kLast == Last::sloped || has_slope_from_value<F>);
template <class F, Save kSave> constexpr bool kStoresArguments = kSave == Save::own_type && !has_slope_from_value<F>;
template <Last kLast> using MapsOf = std::conditional_t<kLast == Last::sloped, SlopeMaps, Maps>;

template <class T, class F, Save kSave, Last kLast>
__device__ __forceinline__ void run_rows(const Params& p, const MapsOf<kLast>& maps, const Block& block,
                                         uint32_t warpgroup, uint32_t tiles, uint32_t rounds) {
  const bool activates_last = kLast == Last::any ? p.activate_last : kLast != Last::linear;
  const uint32_t x_panels = panels_of(p.layer[0].k);
  const PanelRing& ring = block.ring;
  const uint64_t descriptor =
      tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(ptx::shared_address(ring.slots));
  const uint32_t weights = uint32_t(descriptor), upper = uint32_t(descriptor >> 32);
  Rows<kWidth> a;
  Sums<kWidth> d;
  tile::RingCursor<kSlots> at;
  uint32_t tile = blockIdx.x + gridDim.x * warpgroup;
  Turns<kGroups> turns{blockIdx.x + gridDim.x < tiles, warpgroup};
  turns.start();
  for (uint32_t round = 0; round < rounds; ++round, tile += kGroups * gridDim.x) {
    // In the last round the second warpgroup may have no rows. It then only releases the panels of the ring.
    if (tile >= tiles) {
      for (int l = 0; l < p.layers; ++l)
        for (uint32_t panel = 0; panel < panels_of(p.layer[l].k); ++panel, at.advance()) {
          ring.wait_for(at);
          ring.release(at.stage);
        }
      break;
    }
    if (warpgroup == 0) turns.on = tile + gridDim.x < tiles;
    block.x.take(a, round % 2, x_panels);
    if (tile + gridDim.x < tiles) block.x.load(block.x.others, maps.x, tile + gridDim.x, x_panels);
    for (int l = 0; l < p.layers; ++l) {
      turns.take();
      multiply<T>(d, a, ring, panels_of(p.layer[l].k), weights, upper, at, [&](int panel) {
        if constexpr (kStoresMeanwhile<F, kSave, kLast>)
          if (l > 0) store_panel(a, panel, {block.staging}, maps.saved[l - 1], first_row(tile));
      });
      turns.pass();
      wait<kWidth>(d, a);
      ring.release(at.stage == 0 ? kSlots - 1 : at.stage - 1);
      const auto activate_and_store_to = [&](const CUtensorMap& to) {
        activate_and_store<T, F, kLast == Last::sloped>(d, a, l, p.layer[l].n, p.number, block.factors, {block.staging},
                                                        to, first_row(tile));
      };
      if constexpr (kLast == Last::sloped)
        activate_and_store_to(maps.slopes[l]);
      else if (l + 1 < p.layers || activates_last)
        if constexpr (kStoresArguments<F, kSave>)
          activate_and_store_to(maps.saved[l]);
        else
          activate<T, F, kSave>(d, a, p, l, block.factors, block.staging, first_row(tile));
      else
        finish<T>(d, a, block.factors, l);
    }
    if constexpr (kSave == Save::own_type) {
      ptx::bulk_wait_group_read<0>();
      __syncwarp();
    }
    const Target y = {static_cast<char*>(p.y), p.y_stride_bytes, p.layer[p.layers - 1].n};
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) store_block<kWidth>(a, i, block.staging, y, first_row(tile), p.rows);
  }
}

template <class T, class F, Save kSave, Last kLast>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_to_256_kernel(const __grid_constant__ Params p, const __grid_constant__ MapsOf<kLast> maps) {
  extern __shared__ __align__(1024) char shared[];
  const Layout at = to_256_layout(p.layers);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  uint64_t* const x_barriers = barriers + 2 * kSlots;
  const Block block{
      {shared, barriers, barriers + kSlots},
      {reinterpret_cast<float4*>(shared + at.factors)},
      {shared + at.x + warp % 4 * x_bytes<kWidth>(), x_barriers + warp % kWarps, x_barriers + (warp % kWarps ^ 4)},
      shared + at.staging + warp % kWarps * kStagedPanel};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  const uint32_t rounds = (tiles - blockIdx.x + step - 1) / step;

  if (threadIdx.x == 0) block.ring.init(kWarps);
  if (warp < kWarps && lane() == 0) ptx::mbarrier_init(block.x.mine, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  ptx::let_next_kernel_start();
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  ptx::wait_for_earlier_kernels();
  if (warp < kWarps) {
    ptx::increase_registers<240>();
    if (warp < 4) block.x.load(block.x.mine, maps.x, blockIdx.x, panels_of(p.layer[0].k));
    block.factors.load<T, kInLog2e<F, T, kSave, Finish::scale_and_bias>>(p);
    ptx::barrier_sync_unaligned(kGroups + 1, 32 * kWarps);  // the factors have arrived
    run_rows<T, F, kSave, kLast>(p, maps, block, warp / 4, tiles, rounds);
  } else {
    ptx::decrease_registers<24>();
    if (warp == kWarps && lane() == 0) block.ring.fill(p, maps, rounds);
  }
}

// Whether the common cases have kernels of their own. With some formulas the compiler would interleave more elements
// than registers can hold, and the branches of the general kernel prevent this. Instances for stored arguments have
// branches anyway.
template <class F> constexpr bool kHasOwn = kernel_fit<F>.own_to_256;

constexpr gpu::TmaBox kBoxOfWarp{.rows = kWarpRows, .cols = 64, .swizzle = tile::Swizzle::b128};
template <bool kStores> Maps wide_maps(const Mlp& m, const Params& p) {
  Maps maps = {.x = gpu::tensor_map("mlp: x", mlp_matrix(m.x), kBoxOfWarp)};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    maps.w[l] = gpu::tensor_map("mlp: w", m.layers[l].w, {.rows = kWidth, .cols = 64, .swizzle = tile::Swizzle::b128});
    if (kStores && p.layer[l].saved != nullptr)
      maps.saved[l] = gpu::tensor_map(
          "mlp: saved", Tensor(p.layer[l].saved, m.x.dtype, {p.rows, int64_t(p.layer[l].n)}, m.x.device), kBoxOfWarp);
  }
  return maps;
}

inline SlopeMaps slope_maps(const Mlp& m, const Params& p, const Tensor& slopes) {
  SlopeMaps maps{wide_maps<true>(m, p)};
  char* at = static_cast<char*>(slopes.data);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const Tensor of_layer(at, m.x.dtype, {p.rows, int64_t(p.layer[l].n)}, m.x.device);
    maps.slopes[l] = gpu::tensor_map("mlp: slopes", of_layer, kBoxOfWarp);
    at += of_layer.bytes();
  }
  return maps;
}

template <class T, class F, Save kSave, Last kLast>
void launch_as(const Mlp& m, const Params& p, const MapsOf<kLast>& maps, Stream stream) {
  gpu::launch("mlp", mlp_to_256_kernel<T, F, kSave, kLast>,
              {.grid = std::min<int64_t>((p.rows + kTileRows - 1) / kTileRows, sm_count(m.x.device.index)),
               .block = kThreads,
               .smem = to_256_layout(p.layers).size,
               .overlap = true,
               .device = m.x.device.index},
              stream, p, maps);
}

}  // namespace ingot::cuda::to_256

namespace ingot::cuda {

template <class T, MlpTo256Kernel kKernel> void launch_mlp_to_256(const Mlp& m, Stream stream) {
  using namespace to_256;
  const Params p = mlp_forward_params(m);
  with_formula(m.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (kKernel == MlpTo256Kernel::general) {
      launch_as<T, F, Save::any_type, Last::any>(m, p, wide_maps<false>(m, p), stream);
    } else {
      constexpr Save kSave = kKernel == MlpTo256Kernel::inference ? Save::nothing : Save::own_type;
      constexpr Last kLast = kKernel == MlpTo256Kernel::values ? Last::activated : Last::linear;
      if constexpr (kStoresArguments<F, kSave> ? kLast == Last::linear : kHasOwn<F>)
        launch_as<T, F, kSave, kLast>(m, p, wide_maps<kSave == Save::own_type>(m, p), stream);
      else
        launch_mlp_to_256<T, MlpTo256Kernel::general>(m, stream);
    }
  });
}

template <class T> void launch_mlp_to_256_slopes(const Mlp& m, const Tensor& slopes, Stream stream) {
  using namespace to_256;
  const Params p = mlp_forward_params(m);
  with_formula(m.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (!has_slope_from_value<F>)
      launch_as<T, F, Save::own_type, Last::sloped>(m, p, slope_maps(m, p, slopes), stream);
  });
}

}  // namespace ingot::cuda
