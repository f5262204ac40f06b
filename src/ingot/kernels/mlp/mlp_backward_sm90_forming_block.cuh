#pragma once
// A block of the fast backward form that forms values (mlp_backward_sm90_forming.cuh): what it is told, its shared
// memory, its part of the plan, and its weights.
#include <cuda.h>

#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/mlp_backward_sm90_parts.cuh"

namespace ingot::cuda::backward_sm90 {

using ptx::Major;
using tile::operand;
using tile::wait_or_trap;

constexpr int kMaxStages = 8;
constexpr int kTileRows = 128;
constexpr int kChunk = 16;                               // tiles of a cluster whose h is formed at a time
constexpr int kDwRegisters = 160, kChainRegisters = 96;  // two warpgroups each, of 128 a thread

// What a block does with each tile. `entry`: dz_L = dy . f' of an activated last layer, then that layer.
enum class StageKind : int { single, pair, entry };
struct Stage {
  StageKind kind = StageKind::single;
  int upper = 0, lower = 0;   // layers; of `single` and `entry` only the lower is one
  int first = 0, copies = 1;  // ranks in the cluster
};

struct Arguments {
  LayerShape layer[kMlpMaxLayers];
  Stage stage[kMaxStages];
  int stages = 0, cluster = 1, layers = 0;
  float* partial = nullptr;
  int tiles = 0;
  Act act = Act::identity;
  bool want_dx = false, want_db = false;
  // Values formed here: of so many layers; a cluster has so many tiles of room in `formed`, which holds (clusters *
  // room * kTileRows, width) of each.
  int values = 0, room = 0;
  void* formed = nullptr;
  int64_t rows = 0;
};

// A warpgroup's buffers, one matrix of 64 rows each. With two layers: dz of both and h of both; with one, two of each
// in turns. kOut leaves for the stage below or for dx.
enum Buffer : uint32_t { kDz = 0, kH = 2, kOut = 4, kBuffers = 5 };

// A block's part of the plan. In shared memory, as dW and the chain need their registers.
struct Plan {
  int first_tile, tile_step;
  int upper, lower;  // h and W of these layers
  bool pair, entry, top, bottom;
  uint32_t above, below, below_buffer;  // ranks in the cluster; which dz buffer of the stage below
  uint32_t giver, taker;                // dW warpgroup `giver` adds its sums to those of block `taker`
  int rank, cluster, clusters, copy, copies;
  int tiles;  // of the cluster, where values are formed here
};
constexpr uint32_t kNobody = 2;

// How far a chain warpgroup is with values formed here: so many chunks begun, inputs read, other blocks' weights
// loaded.
struct Forming {
  uint32_t chunk = 0, inputs = 0, others = 0;
};

template <int kPanels> struct SharedMemory {
  static constexpr int kWidth = kPanel * kPanels;
  alignas(1024) uint8_t weight[2][kPanels][kWidth * 128];  // of the upper and the lower layer: panels of inputs
  uint8_t buffer[2][kBuffers][kPanels][kPanelBytes];
  uint64_t full[2][kOut], empty[2][kOut];
  uint64_t room[2][2];  // below, in the dz buffer of that number
  uint64_t weights_full;
  uint64_t input_full[2][2], other_weights_full;  // of values that are formed here
  uint64_t chunk_formed;                          // by all of the cluster
  Plan plan;
  Forming forming[2];
};

// Everybody has come here, in the neighbours too.
__device__ __forceinline__ void block_ends() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// For what may not be carried in registers from one chunk to the next, as Block::apart().
__device__ __forceinline__ uint32_t thread_anew() {
  uint32_t thread = threadIdx.x;
  ptx::settle(thread);
  return thread;
}

// Where ldmatrix and stmatrix find columns 0 .. 15 of this warp's 16 rows.
__device__ __forceinline__ uint32_t fragment_of(uint32_t thread) {
  return tile::swizzled<Swizzle::b128>(thread / 32 % 4 * 16 + thread % 16, thread % 32 / 16 * 16);
}

template <class T, int kPanels> struct Block {
  using Shared = SharedMemory<kPanels>;
  static constexpr int kWidth = Shared::kWidth;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;  // of a buffer
  // Steps of a dW in flight beside the running one: more would hold up the chain's products.
  static constexpr int kDwAhead = 1;

  Shared& s;
  const Maps& maps;
  const Arguments& a;

  __device__ const volatile Plan& plan() const { return s.plan; }
  __device__ bool single() const { return !plan().pair && !plan().entry; }
  __device__ void make_plan(uint32_t rank);
  __device__ void start_loading_weights();
  template <int kBy> __device__ void form_weights(int layer, uint32_t thread, uint32_t to, uint32_t apart);
  __device__ void form_identity();
  template <bool kSingle> __device__ void hold_dw(uint32_t w);
  __device__ void only_fill(uint32_t w);
  template <bool kSingle> __device__ void run_chain(uint32_t r);

 private:
  template <bool kSingle>
  __device__ void add_products(float (&dw)[kPanels][kWidth / 2], float (&db)[2], uint32_t w, uint32_t r, uint32_t n);
  // Step 0 or 1 of a tile, and dW warpgroup 0 or 1, use buffers kDz + i and kH + i; the tiles of a single layer take
  // turns. n counts this block's tiles.
  template <bool kSingle> __device__ static uint32_t buffer_of(uint32_t i, uint32_t n) { return kSingle ? n & 1 : i; }
  template <bool kSingle> __device__ static uint32_t phase_of(uint32_t n) { return (kSingle ? n >> 1 : n) & 1; }

  template <bool kSingle> __device__ void fill_behind(uint32_t w, uint32_t n, int tile);
  template <bool kSingle> __device__ void refill(uint32_t w, uint32_t r, uint32_t n, int tile);
  __device__ void load(uint32_t r, uint32_t buffer, const CUtensorMap& map, int row);

  // Of this block; where values are formed here.
  __device__ uint32_t tiles_a_chunk() const { return uint32_t(kChunk) >> (plan().copies - 1); }
  __device__ int tile_of(uint32_t n) const { return plan().first_tile + plan().tile_step * int(n); }
  __device__ int tile_of_cluster(uint32_t n) const { return plan().copy + plan().copies * int(n); }
  // Before this block's n-th tile.
  __device__ bool chunk_starts(uint32_t n) const { return (n & (tiles_a_chunk() - 1)) == 0; }
  // Where rows 64 r .. of the cluster's tile of that number lie in the workspace.
  __device__ int formed_row(int tile, uint32_t r) const {
    return (plan().cluster * a.room + tile % (2 * kChunk)) * kTileRows + int(r * kRows);
  }
  // This block, its addresses unknown to the compiler, which would otherwise carry what it makes of them through the
  // loops around the code that forms values: registers that the chain needs.
  __device__ __forceinline__ Block apart() const {
    uint32_t base = ptx::shared_address(&s);
    ptx::settle(base);
    return {*static_cast<Shared*>(__cvta_shared_to_generic(base)), maps, a};
  }
  __device__ bool in_next_chunk(uint32_t n, uint32_t r) const {
    return uint32_t(tile_of_cluster(n)) / kChunk == forming(r).chunk;
  }
  // Of the cluster's tiles in the chunk that begins with `first`; read anew each time to spare a register.
  __device__ int halves(int first) const { return 2 * min(kChunk, plan().tiles - first); }
  __device__ volatile Forming& forming(uint32_t r) const { return s.forming[r]; }
  template <bool kSingle> __device__ void wait_for_buffers(uint32_t r, uint32_t n);
  template <bool kSingle> __device__ void form_chunk(uint32_t r, uint32_t n);
  template <bool kSingle> __device__ void form_values(uint32_t r, int l, int first, uint32_t& inputs);
  template <bool kSingle> __device__ void load_other_weights(uint32_t r, int l, uint32_t to, uint32_t apart);
  __device__ void load_input(uint32_t r, int l, int first, int half, uint32_t number);
  __device__ void start_values(float (&acc)[kPanels][kPanel / 2], uint32_t h, uint32_t w, uint32_t apart);
  __device__ void start_from_bias(float (&acc)[kPanels][kPanel / 2], int l);
  __device__ void round_values(uint32_t r, int l, int first);

  template <bool kSingle> __device__ void release(uint32_t w, uint32_t r, uint32_t n);
  __device__ void give(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2]);
  __device__ void store_partial(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2], int l);
  __device__ void start_products(float (&acc)[kPanels][kPanel / 2], uint32_t dz, uint32_t slot);
  __device__ void wait_for_panel(float (&acc)[kPanels][kPanel / 2], int p);
  __device__ void wait_for_room(uint32_t step, uint32_t r, uint32_t n);
  __device__ void send(uint32_t step, uint32_t r, int tile);
  template <bool kSingle> __device__ void take_tile(uint32_t r, uint32_t n, int tile);
};

// One thread.
template <class T, int kPanels> __device__ void Block<T, kPanels>::make_plan(uint32_t rank) {
  int number = 0;
  while (number + 1 < a.stages && int(rank) >= a.stage[number + 1].first) ++number;
  const Stage at = a.stage[number];
  const int copy = int(rank) - at.first, clusters = int(gridDim.x) / a.cluster;
  Plan& p = s.plan;
  p.first_tile = int(blockIdx.x) / a.cluster + clusters * copy;
  p.tile_step = clusters * at.copies;
  p.upper = at.upper, p.lower = at.lower;
  p.pair = at.kind == StageKind::pair, p.entry = at.kind == StageKind::entry;
  p.top = number == 0, p.bottom = number + 1 == a.stages;
  // The copies of two stages pair off, but those above a single layer all feed that, a buffer each.
  const bool single = at.kind == StageKind::single;
  p.above = p.top ? 0 : uint32_t(a.stage[number - 1].first + (single ? 0 : copy));
  const bool feeds_single = !p.bottom && a.stage[number + 1].kind == StageKind::single;
  p.below = p.bottom ? 0 : uint32_t(a.stage[number + 1].first + (feeds_single ? 0 : copy));
  p.below_buffer = feeds_single ? uint32_t(copy) : 0;
  p.giver = single || at.copies == 2 ? uint32_t(1 - copy) : kNobody;
  p.taker = single ? rank : uint32_t(at.first + 1 - copy);
  p.rank = int(rank), p.cluster = int(blockIdx.x) / a.cluster, p.clusters = clusters;
  p.copy = copy, p.copies = at.copies;
  p.tiles = (a.tiles - p.cluster + clusters - 1) / clusters;
}

// The weights of this block's layers through the copy engine, zeros outside a layer's widths. One thread.
template <class T, int kPanels> __device__ void Block<T, kPanels>::start_loading_weights() {
  const Plan& at = s.plan;
  uint32_t bytes = 0;
  for (int slot = at.pair ? 0 : 1; slot < 2; ++slot)
    if (a.layer[slot ? at.lower : at.upper].g == nullptr) bytes += sizeof(s.weight[0]);
  ptx::mbarrier_arrive_expect_tx(&s.weights_full, bytes);
  for (int slot = at.pair ? 0 : 1; slot < 2; ++slot) {
    const int l = slot ? at.lower : at.upper;
    if (a.layer[l].g == nullptr)
      for (int p = 0; p < kPanels; ++p) ptx::tensor_load(s.weight[slot][p], &maps.w[l], p * kPanel, 0, &s.weights_full);
  }
}

template <class T, int kPanels>
template <int kBy>
__device__ void Block<T, kPanels>::form_weights(int layer, uint32_t thread, uint32_t to, uint32_t apart) {
  const LayerShape at = a.layer[layer];
  form_normed_weights<T, kPanels, kBy>(at, thread, to, apart);
}

// The upper "weights" of an entry stage: its product then is dy, and all else is as with two layers. All threads.
template <class T, int kPanels> __device__ void Block<T, kPanels>::form_identity() {
  for (uint32_t i = threadIdx.x; i < kPanels * kWidth * 8; i += kThreads) {
    const uint32_t panel = i / (kWidth * 8), row = i / 8 % kWidth, chunk = i % 8;
    uint32_t v[4] = {};
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e)
      if (panel * 64 + chunk * 8 + 2 * e == row / 2 * 2) v[e] = row % 2 ? ptx::pack(T{}, 0, 1) : ptx::pack(T{}, 1, 0);
    ptx::store_shared(ptx::shared_address(s.weight[0][panel]) + tile::swizzled<Swizzle::b128>(row, chunk * 16), v);
  }
}

}  // namespace ingot::cuda::backward_sm90
