#pragma once
// A block of the layer pipeline: its arguments, its place in the plan, its shared memory.
#include <type_traits>

#include "ingot/core/dtype.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/parts/weight_norm_tile.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_layout.cuh"

namespace ingot::cuda::layer_pipeline {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;

constexpr int kThreads = 512;
constexpr int kHelperRegisters = 24, kChainRegisters = 144, kDwRegisters = 200;
constexpr uint32_t kDzSlots = 4, kHSlots = 6;
constexpr uint32_t kChain = 1;  // the named barrier of its warpgroups
constexpr int kFirstUnits = 2;  // requested at once; the remaining units when W has arrived, so that W does not wait

struct Arguments {
  LayerShape layer[kMlpMaxLayers];
  int layers = 0, cluster = 1;
  bool entry = false;  // the first block of a cluster forms dz_L = dy . f' of an activated last layer
  float* partial = nullptr;
  int clusters = 0, units_each = 0, units_left = 0;  // units of each cluster; the first clusters take an additional
                                                     // unit
  Act act = Act::identity;
  bool want_dx = false, want_db = false;
};

// A block's part of the plan.
struct Plan {
  int layer = 0;                         // or `layers`, of an entry
  int units = 0, row = 0, row_step = 0;  // units of its cluster; first unit's row, and the distance between two units
  bool entry = false, top = false, bottom = false, sends = false;
  uint32_t rank = 0;
  int cluster = 0;
};

template <int kPanels> struct SharedMemory {
  static constexpr int kWidth = kPanel * kPanels;
  using Unit = uint8_t[kPanels][kPanelBytes];  // a matrix of 64 rows
  alignas(1024) Unit dz[kDzSlots];
  Unit h[kHSlots];
  Unit out[kDzSlots];  // W before the first unit
  uint64_t dz_full[kDzSlots], dz_empty[kDzSlots], h_full[kHSlots], h_empty[kHSlots];
  uint64_t out_full[2][kDzSlots];  // of each chain warpgroup
  uint64_t room[kDzSlots];         // free room: in the same slot of the block below, or in `out` if the result goes to
                                   // memory
  uint64_t weights_full;
  uint64_t taken;       // the block below has received all its data
  float scale[kWidth];  // of weight norm
  Plan plan;
};

// The state shared by all threads of a block in any role.
template <class T, int kPanels> struct BlockView {
  using Shared = SharedMemory<kPanels>;
  static constexpr int kWidth = Shared::kWidth;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;
  // Chain warpgroups per unit; with a single panel the warpgroups take turns.
  static constexpr uint32_t kTogether = kPanels;

  Shared& s;
  const Maps& maps;
  const Arguments& a;

  __device__ const volatile Plan& plan() const { return s.plan; }
  __device__ bool loads_weights() const { return !s.plan.entry; }
};

}  // namespace ingot::cuda::layer_pipeline
