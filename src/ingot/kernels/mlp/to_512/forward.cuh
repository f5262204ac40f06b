#pragma once
// The forward variant up to 512 wide. Described as a whole in docs/mlp-kernels.md.
//
// A block has two multiplying warpgroups, which take 64 rows each through the whole network, and four loading warps. A
// warpgroup's activations lie in shared memory, 64 KB, which each layer overwrites. A layer with more columns than a
// pass (160, 192, 224 or 256, as the widest layer needs) has two passes; the first pass's results wait in registers
// until the second has read the layer's input. W passes through a ring in slices of a pass' rows by 32 columns, again
// for every 128 rows. Both warpgroups of both blocks of a pair read each slice, and each block fetches half of the
// slice for both.
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/kernels/mlp/to_512/panels.cuh"

namespace ingot::cuda::to_512 {

using namespace to_512_panels;

constexpr uint32_t kGroups = 2, kPair = 2, kDepth = 32;
constexpr uint32_t kWarps = 4 * kGroups;  // of the multiplying warpgroups
constexpr int kThreads = 128 * (kGroups + 1), kRegisters = 232, kServeRegisters = 40;
constexpr tile::Swizzle kOfSlice = tile::Swizzle::b64;

// Shared memory of a block with passes of kColumns columns. Layers have at most twice as many; narrower layers leave
// room for more slices of W.
template <int kColumns> struct Memory {
  static constexpr int kPass = kColumns;
  static constexpr uint32_t kPanels = 2 * kPass / kMlpPanel, kSliceBytes = kPass * kDepth * 2;
  static constexpr uint32_t kRowBytes = kGroups * kPanels * kPanelBytes;
  static constexpr uint32_t kVectorBytes = (2 * kPass + kMlpMaxLayers) * sizeof(float) + 512;
  static constexpr uint32_t kSlots = (uint32_t(kMlpSharedBytes) - kRowBytes - kVectorBytes) / kSliceBytes;
  static constexpr uint32_t kLead = kSlots / 2;  // distance of the second warpgroup behind the first, in slices
  static_assert(kPass % 32 == 0 && kPass <= 256, "values are formed 32 columns at a time");

  alignas(1024) char rows[kGroups][kPanels][kPanelBytes];  // x, then each layer's values; A of the products
  char w[kSlots][kSliceBytes];
  float bias[kGroups][kPass];  // of a pass
  uint64_t w_full[kSlots], w_empty[kSlots];
  uint64_t x_full[kGroups][kPanels], x_empty[kGroups];
};

__device__ __forceinline__ uint32_t slices_of(const LayerParams& layer) { return (layer.k + kDepth - 1) / kDepth; }
template <int kPass> __device__ __forceinline__ uint32_t passes_of(const LayerParams& layer) {
  return layer.n > kPass ? 2 : 1;
}

// Calls each(layer, pass) for all passes of a round; the same for all rounds of this block's pair.
template <int kPass, class Each> __device__ __forceinline__ void each_pass(const Params& p, Each&& each) {
  for (int l = 0; l < p.layers; ++l)
    for (uint32_t pass = 0; pass < passes_of<kPass>(p.layer[l]); ++pass) each(l, pass);
}

template <class Each> __device__ __forceinline__ void each_round(uint32_t tiles, Each&& each) {
  for (uint32_t first = blockIdx.x / kPair * kPair; first < tiles; first += gridDim.x * kGroups) each();
}

// --- the loading warps

// Loads all slices of all rounds; called by a single thread: this block's part of each, for all blocks of the cluster.
template <class Memory>
__device__ __forceinline__ void load_weights(const Params& p, const Maps& maps, Memory& s, uint32_t tiles) {
  constexpr uint32_t kPass = Memory::kPass, kRows = kPass / kPair, kSliceBytes = Memory::kSliceBytes;
  const uint32_t rank = ptx::cluster_rank();
  tile::RingCursor<Memory::kSlots> at;
  each_round(tiles, [&] {
    each_pass<kPass>(p, [&](int l, uint32_t pass) {
      for (uint32_t i = 0; i < slices_of(p.layer[l]); ++i, at.advance()) {
        tile::wait_or_trap(&s.w_empty[at.stage], at.phase ^ 1);
        uint64_t* const full = &s.w_full[at.stage];
        ptx::mbarrier_arrive_expect_tx(full, kSliceBytes);
        char* const to = s.w[at.stage] + rank * (kSliceBytes / kPair);
        const int column = int(i * kDepth), row = int(pass * kPass + rank * kRows);
        ptx::tensor_load_multicast(to, &maps.w[l], column, row, full, ptx::multicast_mask(0, kPair));
      }
    });
  });
}
// Loads rows of x for both warpgroups; called by a single thread; the next rows are prefetched into L2 a round ahead.
template <class Memory>
__device__ __forceinline__ void load_rows(const Params& p, const Maps& maps, Memory& s, uint32_t tiles) {
  const uint32_t panels = (p.layer[0].k + kMlpPanel - 1) / kMlpPanel, step = gridDim.x * kGroups;
  for (uint32_t round = 0, first = blockIdx.x; first < tiles; first += step, ++round) {
    for (uint32_t g = 0; g < kGroups; ++g) {
      const uint32_t tile = first + g * gridDim.x;
      if (tile >= tiles) continue;
      tile::wait_or_trap(&s.x_empty[g], (round & 1) ^ 1);
      for (uint32_t i = 0; i < panels; ++i) {
        ptx::mbarrier_arrive_expect_tx(&s.x_full[g][i], kPanelBytes);
        ptx::tensor_load(s.rows[g][i], &maps.x, int(i * kMlpPanel), int(tile * kTileRows), &s.x_full[g][i]);
      }
    }
    for (uint32_t tile = first + step; tile < min(tiles, first + 2 * step); tile += gridDim.x)
      for (uint32_t i = 0; i < panels; ++i) ptx::tensor_prefetch(&maps.x, int(i * kMlpPanel), int(tile * kTileRows));
  }
}
// --- the multiplying warpgroups

template <class T, class F, Save kSave, class Memory> struct Multiplier {
  static constexpr int kPass = Memory::kPass;
  static constexpr uint32_t kSlots = Memory::kSlots, kLead = Memory::kLead;
  static constexpr bool kSaves = kSave != Save::nothing;
  static constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, Finish::scale_and_bias>;

  const Params& p;
  const Maps& maps;
  Memory& s;
  const uint32_t group;
  const uint32_t empty;  // address of a block's w_empty, for the lanes returning slices
  tile::RingCursor<kSlots> at = {};

  __device__ __forceinline__ void release(uint32_t slot) const {
    if (lane() < kPair) ptx::mbarrier_arrive_remote_relaxed(empty + slot * uint32_t(sizeof(uint64_t)));
  }
  __device__ __forceinline__ void sync_group() const { ptx::barrier_sync(2 + group, 128); }

  // d = A W^T of a pass. Turns keep the second warpgroup some slices behind, so that the first warpgroup activates
  // while the second multiplies.
  __device__ __forceinline__ void multiply(Sums<kPass>& d, uint32_t slices, bool of_x, uint32_t parity, bool turns) {
    constexpr uint64_t kOfA = tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(0);
    constexpr uint64_t kOfW = tile::operand_descriptor<tile::Major::k, kOfSlice>(0);
    const uint32_t rows = uint32_t(kOfA) + ((ptx::shared_address(s.rows[group]) & 0x3ffff) >> 4);
    const uint32_t weights = uint32_t(kOfW) + ((ptx::shared_address(s.w) & 0x3ffff) >> 4);
    if (turns && group == 1) ptx::barrier_sync(1, 256);
    ptx::fence_registers(d);
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < slices; ++i) {
      if (of_x && i * kDepth % kMlpPanel == 0)
        tile::wait_warp_or_trap(&s.x_full[group][i * kDepth / kMlpPanel], parity);
      tile::wait_warp_or_trap(&s.w_full[at.stage], at.phase);
      const uint32_t a = rows + i * kDepth / kMlpPanel * (kPanelBytes >> 4) + i * kDepth % kMlpPanel * 2 / 16;
      const uint32_t w = weights + at.stage * (Memory::kSliceBytes >> 4);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kDepth / 16; ++k)
        ptx::wgmma<T, kPass>(d, (kOfA >> 32 << 32) | (a + 2 * k), (kOfW >> 32 << 32) | (w + 2 * k), i + k > 0);
      ptx::wgmma_commit_group();
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        release(before);
      }
      if (turns && group == 0 && i + 1 == kLead) ptx::barrier_arrive(1, 256);
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(d);
    release(before);
  }
  // A round without rows: slices are returned as they arrive.
  __device__ __forceinline__ void pass_by() {
    each_pass<kPass>(p, [&](int l, uint32_t) {
      for (uint32_t i = 0; i < slices_of(p.layer[l]); ++i, at.advance()) {
        tile::wait_warp_or_trap(&s.w_full[at.stage], at.phase);
        release(at.stage);
      }
    });
  }
  // A pass' bias, zero where absent, two columns per thread. The bias is loaded before the products, and given to the
  // warpgroup after the products, between two of the warpgroup's barriers.
  __device__ __forceinline__ uint32_t bias_column() const { return threadIdx.x % 128 * 2; }
  __device__ __forceinline__ uint32_t load_bias(const LayerParams& layer, uint32_t pass) const {
    const uint32_t column = pass * kPass + bias_column();
    if (layer.b == nullptr || column >= layer.n) return 0;
    return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(layer.b) + column));
  }
  __device__ __forceinline__ void put_bias(uint32_t bias, float times) const {
    float2 b;
    ptx::unpack(T{}, bias, b.x, b.y);
    b.x *= times, b.y *= times;
    if (bias_column() < kPass) *reinterpret_cast<float2*>(&s.bias[group][bias_column()]) = b;
    sync_group();
  }

  // Columns 32 i to 32 i + 31 of the sums: scaled, and the bias added.
  __device__ __forceinline__ void finish_block(Sums<kPass>& d, int i, float factor) const {
    const uint32_t from = 32 * i + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(s.bias[group] + from + 8 * j);
      float* const v = d + 4 * (4 * i + j);
      v[0] = fmaf(v[0], factor, b.x), v[1] = fmaf(v[1], factor, b.y);
      v[2] = fmaf(v[2], factor, b.x), v[3] = fmaf(v[3], factor, b.y);
    }
  }
  // Turns a pass' sums into values in the layout of A. The values for backward go to memory, except for values of
  // hidden layers, which are stored from shared memory.
  __device__ __forceinline__ void activate(Sums<kPass>& d, Rows<kPass>& a, int l, uint32_t pass, int64_t first) {
    const LayerParams& layer = p.layer[l];
    const bool last = l + 1 == p.layers, f32 = kSave == Save::any_type && p.saved_f32;
    const bool saves = kSaves && p.saves && (f32 || last || !has_slope_from_value<F>);
    const uint32_t element = f32 ? 4 : 2;
    const Target saved = columns_from(pass * kPass, layer.saved, layer.n * int64_t(element), layer.n, element);
    const float factor = domain_of<kTimesLog2e>(l, p.layers).sums;
    const auto save = [&](int i) {
      if (!saves) return;
      if (f32)
        store_block_f32<kPass>(d, i, false, saved, first, p.rows);
      else
        store_columns<kPass>(a, i, saved, first, p.rows);
    };
#pragma unroll
    for (int i = 0; i < kPass / 32; ++i) {
      finish_block(d, i, factor);
      form_block<T, F, kPass, kSave, kTimesLog2e>(d, a, i, f32, p.number, save);
      if constexpr (kStoresLater<F, T, kSave>) save(i);  // of the last layer
    }
  }
  __device__ __forceinline__ void finish(Sums<kPass>& d, Rows<kPass>& a, int l) {
#pragma unroll
    for (int i = 0; i < kPass / 32; ++i) {
      finish_block(d, i, domain_of<kTimesLog2e>(l, p.layers).sums);
      pack_block<T, kPass>(a, d, i);
    }
  }
  // Writes a pass' values to their place in the next layer's A.
  template <uint32_t kNumber> __device__ __forceinline__ void put(const Rows<kPass>& a) const {
    constexpr uint32_t kFirst = kNumber * kPass / 16;
    const uint32_t row = threadIdx.x % 128 / 32 * kWarpRows + matrix_row();
    const uint32_t to =
        ptx::shared_address(s.rows[group]) + tile::swizzled<tile::Swizzle::b128>(row, matrix_chunk() * 16);
#pragma unroll
    for (uint32_t k = 0; k < kPass / 16; ++k)
      ptx::stmatrix((to ^ (kFirst + k) % 4 * 32) + (kFirst + k) / 4 * kPanelBytes, a[k]);
  }
  // Stores the layer's values, the next layer's input, from shared memory to `saved`.
  __device__ __forceinline__ void store_rows(int l, uint32_t tile) const {
    if (threadIdx.x % 128 != 0) return;
    for (uint32_t i = 0; i * kMlpPanel < p.layer[l].n; ++i)
      ptx::tensor_store(&maps.saved[l], int(i * kMlpPanel), int(tile * kTileRows), s.rows[group][i]);
    ptx::bulk_commit_group();
  }
  // Before the rows' memory is overwritten: waits until the copy engine has read the rows.
  __device__ __forceinline__ void wait_for_stores() const {
    if (kSaves && threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
  }

  __device__ __forceinline__ void run_tile(uint32_t tile, uint32_t parity, bool takes_turns) {
    Sums<kPass> d;
    Rows<kPass> a;
    const int64_t first = first_row(tile);
    for (int l = 0; l < p.layers; ++l) {
      const LayerParams& layer = p.layer[l];
      const uint32_t slices = slices_of(layer), passes = passes_of<kPass>(layer);
      const bool last = l + 1 == p.layers;
      for (uint32_t pass = 0; pass < passes; ++pass) {
        const uint32_t bias = load_bias(layer, pass);
        multiply(d, slices, l == 0 && pass == 0, parity, takes_turns && slices >= kLead && slices + kLead > kSlots);
        const bool has_read = pass + 1 == passes;
        if (has_read) {
          wait_for_stores();
          if (last) {
            __syncwarp();
            if (lane() == 0) ptx::mbarrier_arrive(&s.x_empty[group]);
          }
        }
        sync_group();
        if (has_read && !last && pass == 1) put<0>(a);
        put_bias(bias, domain_of<kTimesLog2e>(l, p.layers).bias);
        if (!last || (kSaves && p.activate_last))
          activate(d, a, l, pass, first);
        else
          finish(d, a, l);
        if (last) {
          const Target y = columns_from(pass * kPass, p.y, p.y_stride_bytes, layer.n, 2);
#pragma unroll
          for (int i = 0; i < kPass / 32; ++i) store_columns<kPass>(a, i, y, first, p.rows);
        } else if (has_read) {
          if (pass == 1)
            put<1>(a);
          else
            put<0>(a);
          ptx::fence_proxy_async_shared();
          sync_group();
          if (kSaves && stores_panels<F>(p, l)) store_rows(l, tile);
        }
      }
    }
  }
  __device__ __forceinline__ void run(uint32_t tiles) {
    uint32_t tile = blockIdx.x + gridDim.x * group, parity = 0;
    each_round(tiles, [&] {
      if (tile < tiles)
        run_tile(tile, parity, group == 1 || tile + gridDim.x < tiles);
      else
        pass_by();
      tile += kGroups * gridDim.x, parity ^= 1;
    });
    if (kSaves && threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
  }
};

template <class Memory> __device__ __forceinline__ void prepare(Memory& s) {
  static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "a block must fit the shared memory");
  for (uint32_t i = 0; i < Memory::kSlots; ++i) {
    ptx::mbarrier_init(&s.w_full[i], 1);
    ptx::mbarrier_init(&s.w_empty[i], kWarps * kPair);
  }
  for (uint32_t g = 0; g < kGroups; ++g) {
    for (uint32_t i = 0; i < Memory::kPanels; ++i) ptx::mbarrier_init(&s.x_full[g][i], 1);
    ptx::mbarrier_init(&s.x_empty[g], 4);
  }
  ptx::fence_mbarrier_init();
}

template <class T, class F, Save kSave, class Memory>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_to_512_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  using Own = Multiplier<T, F, kSave, Memory>;
  extern __shared__ __align__(1024) char shared[];
  Memory& s = *reinterpret_cast<Memory*>(shared);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows);
  if (threadIdx.x == 0) prepare(s);
  __syncwarp();
  tile::sync_cluster();
  ptx::let_next_kernel_start();
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  ptx::wait_for_earlier_kernels();
  if (warp < kWarps) {
    ptx::increase_registers<kRegisters>();
    Own{p, maps, s, warp / 4, ptx::cluster_address(s.w_empty, lane() % kPair)}.run(tiles);
  } else {
    ptx::decrease_registers<kServeRegisters>();
    if (warp == kWarps && lane() == 0) load_weights(p, maps, s, tiles);
    if (warp == kWarps + 1 && lane() == 0) load_rows(p, maps, s, tiles);
  }
  __syncwarp();
  // The neighbour may still write to this block's memory, or return slices. No block waits for the last slices returned
  // by this block, so these arrivals come before this barrier.
  tile::sync_cluster();
}

// Whether the common cases have kernels of their own: with some formulas the compiler would spill registers.
template <class F> constexpr bool kHasOwn = kernel_fit<F>.own_to_512;

template <class T, class F, Save kSave, class Memory> void launch_as(const Mlp& m, const Params& p, Stream stream) {
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows, most = sm_count(m.x.device.index) / kPair * kPair;
  gpu::launch("mlp", mlp_to_512_kernel<T, F, kSave, Memory>,
              {.grid = std::min<int64_t>((tiles + kPair - 1) / kPair * kPair, most),
               .block = kThreads,
               .smem = sizeof(Memory),
               .cluster = kPair,
               .overlap = true,
               .device = m.x.device.index},
              stream, p, maps_of(m, p, {.rows = Memory::kPass / int(kPair), .cols = int(kDepth), .swizzle = kOfSlice}));
}

}  // namespace ingot::cuda::to_512

namespace ingot::cuda {

template <class T, int kPass, bool kSaves> void launch_mlp_to_512(const Mlp& m, Stream stream) {
  using namespace to_512;
  using Memory = Memory<kPass>;
  const Params p = mlp_forward_params(m);
  with_formula(m.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (!kSaves && !kHasOwn<F>) return launch_mlp_to_512<T, kPass, true>(m, stream);
    if constexpr (!kSaves && kHasOwn<F>) return launch_as<T, F, Save::nothing, Memory>(m, p, stream);
    if constexpr (kSaves && kHasPairs<F, T>)
      if (!p.saved_f32 && p.layers <= kMlpResidentLayers) return launch_as<T, F, Save::own_type, Memory>(m, p, stream);
    if constexpr (kSaves) launch_as<T, F, Save::any_type, Memory>(m, p, stream);
  });
}

}  // namespace ingot::cuda
