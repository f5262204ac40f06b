#pragma once
// The forward form to 512 for few rows. docs/mlp-to-512.md tells it as a whole.
//
// 64 rows are a cluster's, of 2, 4 or 8 blocks. A layer's columns are cut into panels of 64, of which each block has
// its warpgroups' worth, so that each SM takes in a part of W only. What a warpgroup makes of its panel goes to the
// shared memory of every block of the cluster; there are two sets of panels, for the layer that is read and the one
// that is written.
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/mlp/to_512/panels.cuh"

namespace ingot::cuda::to_512_few_rows {

using namespace to_512_panels;

constexpr int kColumns = kMlpPanel;                         // of a warpgroup
constexpr uint32_t kMostGroups = 4, kSlots = 12;            // of a block; slices of W for all warpgroups together
constexpr uint32_t kSliceBytes = kColumns * kMlpPanel * 2;  // 64 rows of W by 64 columns
constexpr int kMostThreads = 128 * (kMostGroups + 1);

struct Memory {
  alignas(1024) char rows[2][kPanels][kPanelBytes];
  char w[kSlots][kSliceBytes];
  float scale[kMostGroups][kColumns];
  uint64_t w_full[kSlots], w_empty[kSlots], full[2][kPanels];
};
static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "a block must fit the shared memory");

// A warpgroup's part of the ring, the panel that it makes of each layer, and the order in which it reads the others:
// first its own, whatever block has the others, so that sums do not depend on the cluster's size.
struct Share {
  uint32_t group, groups, rank, blocks;
  __device__ __forceinline__ uint32_t slots() const { return kSlots / groups; }
  __device__ __forceinline__ uint32_t panel() const { return rank * groups + group; }
  __device__ __forceinline__ bool has(const LayerParams& layer) const { return panel() * kColumns < layer.n; }
  __device__ __forceinline__ uint32_t slice(uint32_t i, uint32_t slices) const {
    const uint32_t at = i + (panel() < slices ? panel() : 0);
    return at < slices ? at : at - slices;
  }
};
__device__ __forceinline__ uint32_t slices_of(const LayerParams& layer) {
  return (layer.k + kMlpPanel - 1) / kMlpPanel;
}

struct Slot {
  uint32_t number, phase = 0;
  const uint32_t first, end;
  __device__ __forceinline__ explicit Slot(const Share& of)
      : number(of.group * of.slots()), first(number), end(number + of.slots()) {}
  __device__ __forceinline__ void advance() {
    if (++number == end) number = first, phase ^= 1;
  }
};

// All slices that a warpgroup needs, by one thread.
__device__ __forceinline__ void load_weights(const Params& p, const Maps& maps, Memory& s, const Share& of) {
  Slot at(of);
  for (int l = 0; l < p.layers; ++l) {
    if (!of.has(p.layer[l])) continue;
    const uint32_t slices = slices_of(p.layer[l]);
    for (uint32_t i = 0; i < slices; ++i, at.advance()) {
      tile::wait_or_trap(&s.w_empty[at.number], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(&s.w_full[at.number], kSliceBytes);
      ptx::tensor_load(s.w[at.number], &maps.w[l], int(of.slice(i, slices) * kMlpPanel), int(of.panel() * kColumns),
                       &s.w_full[at.number]);
    }
  }
}
// x, of which each block fetches some panels for all, by one thread.
__device__ __forceinline__ void load_rows(const Params& p, const Maps& maps, Memory& s, const Share& of,
                                          uint32_t tile) {
  const uint32_t panels = slices_of(p.layer[0]);
  for (uint32_t i = 0; i < kPanels; ++i) ptx::mbarrier_arrive_expect_tx(&s.full[0][i], i < panels ? kPanelBytes : 0);
  for (uint32_t i = of.rank; i < panels; i += of.blocks)
    ptx::tensor_load_multicast(s.rows[0][i], &maps.x, int(i * kMlpPanel), int(tile * kTileRows), &s.full[0][i],
                               ptx::multicast_mask(0, of.blocks));
}

template <class T, class F> struct Multiplier {
  const Params& p;
  const Maps& maps;
  Memory& s;
  const Share of;
  const uint32_t tile;
  Slot at;

  __device__ __forceinline__ void sync_group() const { ptx::barrier_sync(1 + of.group, 128); }

  __device__ __forceinline__ void wait_for_panel(int l, uint32_t panel) const {
    tile::wait_warp_or_trap(&s.full[l % 2][panel], l / 2 & 1);
  }
  // d = A W^T of the panel. Squares of the rows of W are summed meanwhile where there is weight norm, two threads a
  // row.
  __device__ __forceinline__ void multiply(Sums<kColumns>& d, int l, float& sum) {
    constexpr uint64_t kOperand = tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(0);
    const uint32_t slices = slices_of(p.layer[l]), set = l % 2;
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
  __device__ __forceinline__ void release(uint32_t slot) const {
    if (lane() == 0) ptx::mbarrier_arrive(&s.w_empty[slot]);
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
  // The sums become values, in the layout of A. What backward needs goes to memory, but for values of hidden layers
  // that are stored from shared memory.
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
  // Every block hears of every panel of every layer, also of one that has no columns: nobody is a layer ahead of those
  // who still wait for that layer's input, as then a barrier could be two phases ahead of them.
  __device__ __forceinline__ void announce(int l, uint32_t bytes) const {
    sync_group();
    const uint32_t set = (l + 1) % 2, peer = threadIdx.x % 128;
    if (peer >= of.blocks) return;
    uint64_t* const full = &s.full[set][of.panel()];
    if (peer == of.rank) return ptx::mbarrier_arrive(full);
    const uint32_t there = ptx::cluster_address(full, peer);
    ptx::mbarrier_arrive_expect_tx_remote(there, bytes);
    char* const panel = s.rows[set][of.panel()];
    if (bytes > 0) ptx::bulk_copy_to_cluster(ptx::cluster_address(panel, peer), panel, bytes, there);
  }
  // The panel goes to its place in every block.
  __device__ __forceinline__ void share(const Rows<kColumns>& a, int l) const {
    const uint32_t panel = of.panel();
    char* const to = s.rows[(l + 1) % 2][panel];
    const bool stores = stores_panels<F>(p, l);
    if (stores) {  // the copy engine has read what it was given two layers ago
      if (threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
      sync_group();
    }
    const uint32_t row = threadIdx.x % 128 / 32 * kWarpRows + matrix_row();
    const uint32_t at = ptx::shared_address(to) + tile::swizzled<tile::Swizzle::b128>(row, matrix_chunk() * 16);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) ptx::stmatrix(at ^ k * 32, a[k]);
    ptx::fence_proxy_async_shared();
    announce(l, kPanelBytes);
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
      if (!of.has(layer)) {
        for (uint32_t i = 0; i < kPanels; ++i) wait_for_panel(l, i);
        if (!last) announce(l, 0);
      } else {
        uint32_t bias[8];
        float sum = 0;
        load_bias(bias, layer);
        multiply(d, l, sum);
        for (uint32_t i = slices_of(layer); i < kPanels; ++i) wait_for_panel(l, i);
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
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(&s.w_full[i], 1);
      ptx::mbarrier_init(&s.w_empty[i], 4);
    }
    for (uint32_t i = 0; i < 2 * kPanels; ++i) ptx::mbarrier_init(&s.full[0][i], 1);
    ptx::fence_mbarrier_init();
  }
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
    if (of.group == 0) load_rows(p, maps, s, of, tile);
    if (of.group < groups) load_weights(p, maps, s, of);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // others may still send to this block, or read what it has sent
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
