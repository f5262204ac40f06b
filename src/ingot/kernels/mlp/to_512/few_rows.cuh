#pragma once
// The forward variant up to 512 wide for few rows. Described as a whole in docs/mlp-kernels.md. A cluster's blocks go
// through all layers together (cluster_tile.cuh).
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/mlp/to_512/cluster_tile.cuh"
#include "ingot/kernels/mlp/to_512/panels.cuh"

namespace ingot::cuda::to_512_few_rows {

using to_512_cluster::kColumns;
using to_512_cluster::kMostThreads;
using to_512_cluster::kPanelBytes;
using to_512_cluster::kPanels;
using to_512_cluster::Memory;
using to_512_cluster::Share;
using to_512_cluster::slices_of;
using to_512_cluster::Slot;
using namespace mlp_parts;
using to_512_panels::columns_from;
using to_512_panels::Maps;
using to_512_panels::maps_of;
using to_512_panels::store_columns;
using to_512_panels::stores_panels;

// Loads all slices for a warpgroup; called by a single thread.
__device__ __forceinline__ void load_weights(const Params& p, const Maps& maps, Memory& s, const Share& of) {
  Slot at(of);
  for (int l = 0; l < p.layers; ++l) {
    const LayerParams& layer = p.layer[l];
    if (!of.has(layer.n)) continue;
    const uint32_t slices = slices_of(layer.k);
    for (uint32_t i = 0; i < slices; ++i)
      to_512_cluster::load_slice(s, at, maps.w[l], of.slice(i, slices) * kMlpPanel, of.panel() * kColumns);
  }
}

template <class T, class F> struct Multiplier {
  const Params& p;
  const Maps& maps;
  Memory& s;
  const Share of;
  const uint32_t tile;
  Slot at;

  __device__ __forceinline__ void sync_group() const { to_512_cluster::sync_group(of); }
  __device__ __forceinline__ void wait_for_panel(int l, uint32_t panel) const {
    to_512_cluster::wait_for_panel(s, l, panel);
  }
  __device__ __forceinline__ void release(uint32_t slot) const { to_512_cluster::release(s, slot); }
  // d = A W^T of the panel. Squares of the rows of W are summed meanwhile where there is weight norm, two threads a
  // row.
  __device__ __forceinline__ void multiply(Sums<kColumns>& d, int l, float& sum) {
    constexpr uint64_t kOperand = tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(0);
    const uint32_t slices = slices_of(p.layer[l].k), set = l % 2;
    const bool normed = p.layer[l].g != nullptr;
    uint32_t before = 0;
    ptx::fence_registers(d);
#pragma unroll 1
    for (uint32_t i = 0; i < slices; ++i) {
      const uint32_t slice = of.slice(i, slices);
      wait_for_panel(l, slice);
      tile::wait_warp_or_trap(&s.w_full[at.number], at.phase);
      const uint32_t a = uint32_t(kOperand) + ((ptx::shared_address(s.rows[set][slice]) & 0x3ffff) >> 4);
      const uint32_t w = uint32_t(kOperand) + ((ptx::shared_address(s.w[at.number]) & 0x3ffff) >> 4);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kMlpPanel / 16; ++k)
        ptx::wgmma<T, kColumns>(d, (kOperand >> 32 << 32) | (a + 2 * k), (kOperand >> 32 << 32) | (w + 2 * k),
                                i + k > 0);
      ptx::wgmma_commit_group();
      if (normed) {
        const uint32_t row = threadIdx.x % 128 / 2, first = threadIdx.x % 2 * 4;
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
          sum += squares<T>(
              *reinterpret_cast<const WeightChunk<T>*>(s.w[at.number] + row * 128 + ((first + c) ^ row % 8) * 16));
        __syncwarp();
      }
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        release(before);
      }
      before = at.number;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(d);
    release(before);
  }
  __device__ __forceinline__ void find_scales(int l, float sum) const {
    const LayerParams& layer = p.layer[l];
    sum += __shfl_xor_sync(~0u, sum, 1);
    const uint32_t row = threadIdx.x % 128 / 2, n = of.panel() * kColumns + row;
    if (threadIdx.x % 2 == 0)
      s.scale[of.group][row] = tile::to_float(element<T>(layer.g, layer, n)) * inverse_norm(sum);
    sync_group();
  }
  // Eight words of bias, two columns each.
  __device__ __forceinline__ void load_bias(uint32_t (&bias)[8], const LayerParams& layer) const {
    const uint32_t first = of.panel() * kColumns + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bias[j] = 0;
      if (layer.b != nullptr && first + 8 * j < layer.n)
        bias[j] = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(layer.b) + first + 8 * j));
    }
  }
  __device__ __forceinline__ void scale_and_add(Sums<kColumns>& d, const uint32_t (&bias)[8], bool normed) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 f = {1, 1}, b;
      if (normed) f = *reinterpret_cast<const float2*>(&s.scale[of.group][8 * j + threadIdx.x % 4 * 2]);
      ptx::unpack(T{}, bias[j], b.x, b.y);
      float* const v = d + 4 * j;
      v[0] = fmaf(v[0], f.x, b.x), v[1] = fmaf(v[1], f.y, b.y);
      v[2] = fmaf(v[2], f.x, b.x), v[3] = fmaf(v[3], f.y, b.y);
    }
  }
  // Turns the sums into values, in the layout of A. The values for backward go to memory, except for values of hidden
  // layers, which are stored from shared memory.
  __device__ __forceinline__ void activate(Sums<kColumns>& d, Rows<kColumns>& a, int l) const {
    const LayerParams& layer = p.layer[l];
    const bool saves = p.saves && !stores_panels<F>(p, l);
    const uint32_t element = p.saved_f32 ? 4 : 2;
    const Target saved = columns_from(of.panel() * kColumns, layer.saved, layer.n * int64_t(element), layer.n, element);
    const auto save = [&](int i) {
      if (!saves) return;
      if (p.saved_f32)
        store_block_f32<kColumns>(d, i, false, saved, first_row(tile), p.rows);
      else
        store_columns<kColumns>(a, i, saved, first_row(tile), p.rows);
    };
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
      form_block<T, F, kColumns, Save::any_type, false>(d, a, i, p.saved_f32, p.number, save);
  }
  // Copies the panel to its place in every block.
  __device__ __forceinline__ void share(const Rows<kColumns>& a, int l) const {
    const uint32_t panel = of.panel();
    char* const to = s.rows[(l + 1) % 2][panel];
    const bool stores = stores_panels<F>(p, l);
    if (stores) {  // the copy engine has read the data of two layers ago
      if (threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
      sync_group();
    }
    const uint32_t row = threadIdx.x % 128 / 32 * kWarpRows + matrix_row();
    const uint32_t at = ptx::shared_address(to) + tile::swizzled<tile::Swizzle::b128>(row, matrix_chunk() * 16);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) ptx::stmatrix(at ^ k * 32, a[k]);
    ptx::fence_proxy_async_shared();
    to_512_cluster::announce(s, of, l, kPanelBytes);
    if (stores && threadIdx.x % 128 == 0) {
      ptx::tensor_store(&maps.saved[l], int(panel * kMlpPanel), int(tile * kTileRows), to);
      ptx::bulk_commit_group();
    }
  }
  __device__ __forceinline__ void run() {
    Sums<kColumns> d;
    Rows<kColumns> a;
    for (int l = 0; l < p.layers; ++l) {
      const LayerParams& layer = p.layer[l];
      const bool last = l + 1 == p.layers;
      if (!of.has(layer.n)) {
        for (uint32_t i = 0; i < kPanels; ++i) wait_for_panel(l, i);
        if (!last) to_512_cluster::announce(s, of, l, 0);
      } else {
        uint32_t bias[8];
        float sum = 0;
        load_bias(bias, layer);
        multiply(d, l, sum);
        for (uint32_t i = slices_of(layer.k); i < kPanels; ++i) wait_for_panel(l, i);
        if (layer.g != nullptr) find_scales(l, sum);
        scale_and_add(d, bias, layer.g != nullptr);
        if (!last || p.activate_last) {
          activate(d, a, l);
        } else {
#pragma unroll
          for (int i = 0; i < kColumns / 32; ++i) pack_block<T, kColumns>(a, d, i);
        }
        if (last) {
          const Target y = columns_from(of.panel() * kColumns, p.y, p.y_stride_bytes, layer.n, 2);
#pragma unroll
          for (int i = 0; i < kColumns / 32; ++i) store_columns<kColumns>(a, i, y, first_row(tile), p.rows);
        } else {
          share(a, l);
        }
      }
    }
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
  }
};

template <class T, class F>
__global__ void __launch_bounds__(kMostThreads, 1)
    mlp_to_512_few_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared[];
  Memory& s = *reinterpret_cast<Memory*>(shared);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  const uint32_t groups = blockDim.x / 128 - 1;
  Share of{warp / 4, groups, ptx::cluster_rank(), ptx::cluster_size()};
  const uint32_t tile = ptx::cluster_index();
  if (threadIdx.x == 0) to_512_cluster::prepare(s);
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::let_next_kernel_start();
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  ptx::wait_for_earlier_kernels();
  ptx::cluster_wait();
  if (warp < 4 * groups) {
    Multiplier<T, F>{p, maps, s, of, tile, Slot(of)}.run();
  } else if (lane() == 0) {
    of.group = warp - 4 * groups;
    if (of.group == 0) to_512_cluster::load_rows(s, of, maps.x, p.layer[0].k, tile);
    if (of.group < groups) load_weights(p, maps, s, of);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // further blocks may still send to this block, or read its data
  ptx::cluster_wait();
}

}  // namespace ingot::cuda::to_512_few_rows

namespace ingot::cuda {

template <class T> void launch_mlp_to_512_few_rows(const Mlp& m, int cluster, Stream stream) {
  using namespace to_512_few_rows;
  const Params p = mlp_forward_params(m);
  with_formula(m.act, [&](auto f) {
    gpu::launch("mlp", mlp_to_512_few_rows_kernel<T, decltype(f)>,
                {.grid = (p.rows + kTileRows - 1) / kTileRows * cluster,
                 .block = 128 * (int(kPanels) / cluster + 1),
                 .smem = sizeof(Memory),
                 .cluster = cluster,
                 .overlap = true,
                 .device = m.x.device.index},
                stream, p, maps_of(m, p, {.rows = kColumns, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128}));
  });
}

}  // namespace ingot::cuda
