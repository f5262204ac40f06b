#pragma once
// The body of the wide form, instantiated by mlp_wide_f16.cu and so on: widest layer 136 to 256. docs/mlp-wide.md tells
// it as a whole.
//
// A block has two warpgroups that multiply and a warp that copies. A warpgroup takes 64 rows through the whole network
// as in mlp_sm90.cuh, activations in registers. W of a layer does not fit beside another: all layers pass through a
// ring as panels of 64 columns, again for every round of tiles, and both warpgroups read each panel, half a layer
// apart: one multiplies while the other one activates.
//
// Weight norm scales the sums' columns: the first warpgroup sums the squares while the first round's panels pass. The
// code for it, merely jumped over, costs 2 to 6 %, so only the kernels that can save have it.
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/kernels/mlp/mlp_sm90.cuh"
#include "ingot/kernels/mlp/mlp_wide.h"

namespace ingot::cuda::mlp_wide_detail {

using namespace mlp_sm90_detail;

constexpr int kWidth = kMlpWideWidth, kGroups = 2, kPanels = kWidth / 64;
constexpr uint32_t kSlots = 5, kPanelBytes = panel_bytes<kWidth>(), kWarps = 4 * kGroups;
constexpr int kThreads = 128 * (kGroups + 1), kRegisters = 240, kCopyRegisters = 24;

struct Maps {
  CUtensorMap x, w[kMlpMaxLayers];
};

// Where things lie in shared memory, in bytes; the ring is the first.
struct Layout {
  uint32_t x, staging, factors, barriers, size;
};
INGOT_HD constexpr Layout wide_layout(int layers) {
  Layout at = {};
  at.x = kSlots * kPanelBytes;
  at.staging = at.x + 4 * x_bytes<kWidth>();
  at.factors = at.staging + kWarps * kStagingBytes;
  at.barriers = at.factors + uint32_t(layers) * kWidth * uint32_t(sizeof(float2));
  at.size = at.barriers + (2 * kSlots + kMlpMaxLayers + kWarps) * uint32_t(sizeof(uint64_t));
  return at;
}
static_assert(wide_layout(kMlpMaxLayers).size <= kMlpSharedBytes, "the deepest network must fit the shared memory");

__device__ __forceinline__ uint32_t panels_of(uint32_t columns) { return (columns + 63) / 64; }

// 16 rows of x, for a warp of each warpgroup in turns: who has taken its own asks for the other one's.
struct TurningRows {
  static constexpr uint32_t kPanel = kWarpRows * 128;
  char* rows;
  uint64_t *mine, *others;

  __device__ __forceinline__ void load(uint64_t* barrier, const CUtensorMap& x, uint32_t tile, uint32_t panels) const {
    if (lane() != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, panels * kPanel);
    for (uint32_t i = 0; i < panels; ++i)
      ptx::tensor_load(rows + i * kPanel, &x, int(64 * i), int(first_row(tile)), barrier);
  }
  __device__ __forceinline__ void take(Rows<kWidth>& a, uint32_t parity, uint32_t panels) const {
    tile::wait_warp_or_trap(mine, parity);
    const uint32_t from =
        ptx::shared_address(rows) + tile::swizzled<tile::Swizzle::b128>(matrix_row(), matrix_chunk() * 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      if (uint32_t(panel) < panels)
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::ldmatrix(a[4 * panel + k], (from ^ k * 32) + panel * kPanel);
    __syncwarp();  // all lanes have theirs: the next rows may come
  }
};

struct PanelRing {
  char* slots;
  uint64_t *full, *empty;  // of each slot: its bytes are here; every warp has read it

  __device__ __forceinline__ void init() const {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(empty + i, kWarps);
    }
  }
  // All panels of all rounds, by one thread.
  __device__ __forceinline__ void fill(const Params& p, const Maps& maps, uint32_t rounds) const {
    tile::RingCursor<kSlots> at;
    for (uint32_t round = 0; round < rounds; ++round)
      for (int l = 0; l < p.layers; ++l)
        for (uint32_t panel = 0; panel < panels_of(p.layer[l].k); ++panel, at.advance()) {
          tile::wait_or_trap(empty + at.stage, at.phase ^ 1);
          ptx::mbarrier_arrive_expect_tx(full + at.stage, kPanelBytes);
          ptx::tensor_load(slots + at.stage * kPanelBytes, &maps.w[l], int(64 * panel), 0, full + at.stage);
        }
  }
  __device__ __forceinline__ void wait_for(const tile::RingCursor<kSlots>& at) const {
    tile::wait_warp_or_trap(full + at.stage, at.phase);
  }
  // What read the slot is done.
  __device__ __forceinline__ void release(uint32_t slot) const {
    if (lane() == 0) ptx::mbarrier_arrive(empty + slot);
  }
};

// The sums of squares of two rows of W, threadIdx.x % 128 and 128 further, over the panels that have passed.
struct Squares {
  float of[2] = {};
  template <class T> __device__ __forceinline__ void add(const char* panel) {
    const char* const row = panel + threadIdx.x % 128 * 128;
#pragma unroll 2
    for (uint32_t chunk = 0; chunk < 8; ++chunk)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        of[half] += squares(
            *reinterpret_cast<const WeightChunk<T>*>(row + half * (kPanelBytes / 2) + (chunk ^ threadIdx.x % 8) * 16));
    __syncwarp();  // the slot may be released
  }
};

// What the sums are multiplied by and what is added to them, two columns at a time: scale, scale, bias, bias.
struct Factors {
  float4* of;  // of each layer

  static __device__ __forceinline__ uint32_t place(int l, uint32_t n) { return (l * kWidth + n) / 2 * 4 + n % 2; }
  template <class T, bool kTimesLog2e> __device__ __forceinline__ void load(const Params& p) const {
    const uint32_t n = threadIdx.x;
    for (int l = 0; l < p.layers; ++l) {
      const LayerParams& layer = p.layer[l];
      const Domain domain = domain_of<kTimesLog2e>(l, p.layers);
      float* const to = reinterpret_cast<float*>(of) + place(l, n);
      to[0] = domain.sums * (layer.g == nullptr ? 1 : tile::to_float(element<T>(layer.g, layer, n)));
      to[2] = domain.bias * tile::to_float(element<T>(layer.b, layer, n));
    }
  }
  __device__ __forceinline__ void finish_block(Sums<kWidth>& d, int i, int l) const {
    const float4* const from = of + (l * kWidth + 32 * i) / 2 + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 v = from[4 * j];
      float* const at = d + 4 * (4 * i + j);
      at[0] = fmaf(at[0], v.x, v.z), at[1] = fmaf(at[1], v.y, v.w);
      at[2] = fmaf(at[2], v.x, v.z), at[3] = fmaf(at[3], v.y, v.w);
    }
  }
  __device__ __forceinline__ void normalise(const Params& p, int l, const Squares& squares) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (p.layer[l].g != nullptr)
        reinterpret_cast<float*>(of)[place(l, threadIdx.x % 128 + 128 * half)] *= inverse_norm(squares.of[half]);
  }
};
static_assert(kWidth == 128 * kGroups, "a column of each layer to each thread");

// d = a W^T of a layer as its panels come, the last of them not waited for.
template <class T, bool kNorms>
__device__ __forceinline__ void multiply(Sums<kWidth>& d, const Rows<kWidth>& a, const PanelRing& ring, uint32_t panels,
                                         uint32_t weights, uint32_t upper, tile::RingCursor<kSlots>& at,
                                         bool normalises, Squares& squares) {
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
    if (panel > 0) {
      ptx::wgmma_wait_group<1>();
      ring.release(before);
    }
    if constexpr (kNorms)
      if (normalises) squares.add<T>(ring.slots + at.stage * kPanelBytes);
    before = at.stage;
    at.advance();
  }
}

// A layer's sums become the next layer's A, or y; what backward needs goes to memory.
template <class T, class F, Save kSave>
__device__ __forceinline__ void activate(Sums<kWidth>& d, Rows<kWidth>& a, const Params& p, int l, const Factors& of,
                                         char* staging, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, Finish::scale_and_bias>;
  const LayerParams& layer = p.layer[l];
  const Target saved = {static_cast<char*>(layer.saved), layer.n * int64_t(p.saved_f32 ? 4 : 2), layer.n};
  const auto save = [&](int i) {
    if (!p.saves) return;
    if (p.saved_f32)
      store_block_f32<kWidth>(d, i, false, saved, first, p.rows);
    else
      store_block<kWidth>(a, i, staging, saved, first, p.rows);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    of.finish_block(d, i, l);
    form_block<T, F, kWidth, kSave, kTimesLog2e>(d, a, i, p.saved_f32, save);
  }
}
template <class T> __device__ __forceinline__ void finish(Sums<kWidth>& d, Rows<kWidth>& a, const Factors& of, int l) {
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    of.finish_block(d, i, l);
    pack_block<T, kWidth>(a, d, i);
  }
}

// What the warps that multiply share; x and staging are the warp's own.
struct Block {
  PanelRing ring;
  Factors factors;
  uint64_t* normed;  // of each layer, by each warp that forms its scales
  TurningRows x;
  char* staging;
};

template <class T, class F, Save kSave>
__device__ __forceinline__ void run_rows(const Params& p, const Maps& maps, const Block& block, uint32_t warpgroup,
                                         uint32_t tiles, uint32_t rounds) {
  constexpr bool kRare = kSave != Save::nothing;
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
    // In the last round the second warpgroup may be without rows: it hands the panels back.
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
      const bool has_gain = kRare && p.has_gain && round == 0, normalises = has_gain && warpgroup == 0;
      Squares squares;
      turns.take();
      multiply<T, kRare>(d, a, ring, panels_of(p.layer[l].k), weights, upper, at, normalises, squares);
      turns.pass();
      wait<kWidth>(d, a);
      ring.release(at.stage == 0 ? kSlots - 1 : at.stage - 1);
      if (normalises) {
        block.factors.normalise(p, l, squares);
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(block.normed + l);
      }
      if (has_gain) tile::wait_warp_or_trap(block.normed + l, 0);
      if (l + 1 < p.layers || (kRare && p.activate_last))
        activate<T, F, kSave>(d, a, p, l, block.factors, block.staging, first_row(tile));
      else
        finish<T>(d, a, block.factors, l);
    }
    const Target y = {static_cast<char*>(p.y), p.y_stride_bytes, p.layer[p.layers - 1].n};
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) store_block<kWidth>(a, i, block.staging, y, first_row(tile), p.rows);
  }
}

template <class T, class F, Save kSave>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_wide_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared[];
  const Layout at = wide_layout(p.layers);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  uint64_t* const x_barriers = barriers + 2 * kSlots + kMlpMaxLayers;
  const Block block{
      {shared, barriers, barriers + kSlots},
      {reinterpret_cast<float4*>(shared + at.factors)},
      barriers + 2 * kSlots,
      {shared + at.x + warp % 4 * x_bytes<kWidth>(), x_barriers + warp % kWarps, x_barriers + (warp % kWarps ^ 4)},
      shared + at.staging + warp % kWarps * kStagingBytes};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  const uint32_t rounds = (tiles - blockIdx.x + step - 1) / step;

  if (threadIdx.x == 0) {
    block.ring.init();
    for (int l = 0; l < kMlpMaxLayers; ++l) ptx::mbarrier_init(block.normed + l, 4);
  }
  if (warp < kWarps && lane() == 0) ptx::mbarrier_init(block.x.mine, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  ptx::let_next_kernel_start();
  if (threadIdx.x < uint32_t(p.layers)) prefetch_weights(p, threadIdx.x);
  ptx::wait_for_earlier_kernels();
  if (warp < kWarps) {
    ptx::increase_registers<kRegisters>();
    if (warp < 4) block.x.load(block.x.mine, maps.x, blockIdx.x, panels_of(p.layer[0].k));
    block.factors.load<T, kInLog2e<F, T, kSave, Finish::scale_and_bias>>(p);
    ptx::barrier_sync(kGroups + 1, 32 * kWarps);
    run_rows<T, F, kSave>(p, maps, block, warp / 4, tiles, rounds);
  } else {
    ptx::decrease_registers<kCopyRegisters>();
    if (warp == kWarps && lane() == 0) block.ring.fill(p, maps, rounds);
  }
}

// Whether what is not rare has kernels of its own. In these two the compiler would weave the formulas of more elements
// into each other than registers hold, and the branches of the others keep it from that.
template <class F> constexpr bool kHasOwn = (F::name != Sigmoid::name) && (F::name != Tanh::name);

inline Maps wide_maps(const Mlp& m) {
  Maps maps = {
      .x = gpu::tensor_map("mlp: x", mlp_matrix(m.x), {.rows = kWarpRows, .cols = 64, .swizzle = tile::Swizzle::b128})};
  for (size_t l = 0; l < m.layers.size(); ++l)
    maps.w[l] = gpu::tensor_map("mlp: w", m.layers[l].w, {.rows = kWidth, .cols = 64, .swizzle = tile::Swizzle::b128});
  return maps;
}

template <class T, class F, Save kSave> void launch_as(const Mlp& m, const Params& p, Stream stream) {
  gpu::launch("mlp", mlp_wide_kernel<T, F, kSave>,
              {.grid = std::min<int64_t>((p.rows + kTileRows - 1) / kTileRows, sm_count(m.x.device.index)),
               .block = kThreads,
               .smem = wide_layout(p.layers).size,
               .overlap = true,
               .device = m.x.device.index},
              stream, p, wide_maps(m));
}

}  // namespace ingot::cuda::mlp_wide_detail

namespace ingot::cuda {

template <class T, bool kRare> void launch_mlp_wide(const Mlp& m, Stream stream) {
  using namespace mlp_wide_detail;
  const Params p = mlp_forward_params(m);
  with_activation(m.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (!kRare && !kHasOwn<F>)
      launch_mlp_wide<T, true>(m, stream);
    else
      launch_as<T, F, kRare ? Save::any_type : Save::nothing>(m, p, stream);
  });
}

}  // namespace ingot::cuda
