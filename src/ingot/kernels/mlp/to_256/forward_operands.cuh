#pragma once
// The operands of the forward variant up to 256 wide (forward.cuh) in shared memory: rows of x, the ring of panels of
// W, and the factors of the sums.
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/kernels/mlp/parts/row_tile.cuh"
#include "ingot/kernels/mlp/to_256/forward.h"

namespace ingot::cuda::to_256 {

using namespace mlp_parts;

constexpr int kWidth = kMlpTo256, kGroups = 2, kPanels = kWidth / 64;
constexpr uint32_t kSlots = 5, kPanelBytes = panel_bytes<kWidth>(), kWarps = 4 * kGroups;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr uint32_t kStagedPanel = kWarpRows * 128;  // 64 columns of a warp's rows, on their way to memory
static_assert(kStagedPanel >= kStagingBytes, "store_block() uses it as well");

struct Maps {
  CUtensorMap x, w[kMlpMaxLayers];
  CUtensorMap saved[kMlpMaxLayers];  // for values stored in the type of the next product
};
struct SlopeMaps : Maps {
  CUtensorMap slopes[kMlpMaxLayers];
};

// Offsets in shared memory, in bytes; the ring comes first.
struct Layout {
  uint32_t x, staging, factors, barriers, size;
};
INGOT_HD constexpr Layout to_256_layout(int layers) {
  Layout at = {};
  at.x = kSlots * kPanelBytes;
  at.staging = at.x + 4 * x_bytes<kWidth>();
  at.factors = at.staging + kWarps * kStagedPanel;
  at.barriers = at.factors + uint32_t(layers) * kWidth * uint32_t(sizeof(float2));
  at.size = at.barriers + (2 * kSlots + kWarps) * uint32_t(sizeof(uint64_t));
  return at;
}
static_assert(to_256_layout(kMlpMaxLayers).size <= kMlpSharedBytes, "the deepest network must fit the shared memory");

__device__ __forceinline__ uint32_t panels_of(uint32_t columns) { return (columns + 63) / 64; }

// The memory of 16 rows of x, which a warp of each warpgroup uses in turn: a warp that has read its own rows issues the
// copy of the rows of the other warpgroup's warp into the same memory.
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
    __syncwarp();  // all lanes have read their part, so the next rows may be loaded
  }
};

struct PanelRing {
  char* slots;
  uint64_t *full, *empty;  // of each slot: its bytes have arrived; every warp has read it

  __device__ __forceinline__ void init(uint32_t readers) const {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(empty + i, readers);
    }
  }
  // Copies all panels of all rounds; called by a single thread.
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
  // Releases the slot after its product is complete.
  __device__ __forceinline__ void release(uint32_t slot) const {
    if (lane() == 0) ptx::mbarrier_arrive(empty + slot);
  }
};

// The factors and summands of the sums, two columns at a time: scale, scale, bias, bias.
struct Factors {
  float4* of;  // of each layer

  static __device__ __forceinline__ uint32_t place(int l, uint32_t n) { return (l * kWidth + n) / 2 * 4 + n % 2; }
  template <class T, bool kTimesLog2e> __device__ __forceinline__ void load(const Params& p) const {
    const uint32_t n = threadIdx.x;
    for (int l = 0; l < p.layers; ++l) {
      const LayerParams& layer = p.layer[l];
      const Domain domain = domain_of<kTimesLog2e>(l, p.layers);
      float* const to = reinterpret_cast<float*>(of) + place(l, n);
      to[0] = domain.sums;
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
};
static_assert(kWidth == 128 * kGroups, "a column of each layer to each thread");

}  // namespace ingot::cuda::to_256
