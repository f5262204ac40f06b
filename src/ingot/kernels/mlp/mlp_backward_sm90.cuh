#pragma once
// The backward pass of a whole MLP in one kernel: gradients of activations never leave the SMs, dW stays in registers.
//
//     dz_L = dy (. f'(z_L))    dz_{l-1} = (dz_l W_l) . f'(z_{l-1})    dx = dz_1 W_1    dW_l += dz_l^T h_{l-1}
//
// The depth is spread over the blocks of a cluster: a stage is one or two layers, and a block runs one stage for the
// whole launch. It holds that stage's W in shared memory and its dW in registers, takes tiles of 128 rows of dz from
// the stage above and pushes what it forms into the shared memory of the stage below. Where one stage has a single
// layer, the others run in two blocks, which take turns, so that all are busy. A cluster walks over every so many
// tiles.
//
// Of a block's four warpgroups two run the chain, 64 rows of the tile each; the other two hold a layer's dW each (of a
// single layer, the sums of one chain warpgroup's rows each) and give the copy engine its work. They lag behind the
// chain and fill the gaps of its epilogues. The second kernel adds the blocks' partial sums in fixed order.
//
// Where nothing was kept, or fp32 values, a cluster's tiles come in chunks: before the gradients of a chunk its blocks'
// chain warpgroups share out its rows and form h, layer by layer (or round what was kept), in a workspace that L2
// holds. From there on all is as with values kept in 16 bits.
#include <cuda.h>

#include "ingot/core/dtype.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/mlp_backward.cuh"
#include "ingot/kernels/mlp/mlp_cuda.h"
#include "ingot/kernels/mlp/mlp_weights.cuh"

namespace ingot::cuda::backward_sm90 {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;

constexpr int kMaxStages = 8, kMaxCluster = 8;
constexpr int kTileRows = 128;
constexpr int kRows = 64;  // of a chain warpgroup
constexpr int kPanel = kMlpPanel;
constexpr int kThreads = 512;
constexpr uint32_t kPanelBytes = kRows * kPanel * 2;
constexpr int kChunk = 16;                               // tiles of a cluster whose h is formed at a time
constexpr int kDwRegisters = 160, kChainRegisters = 96;  // two warpgroups each, of 128 a thread

// What a block does with each tile. `entry`: dz_L = dy . f' of an activated last layer, then that layer.
enum class StageKind : int { single, pair, entry };
struct Stage {
  StageKind kind = StageKind::single;
  int upper = 0, lower = 0;   // layers; of `single` and `entry` only the lower is one
  int first = 0, copies = 1;  // ranks in the cluster
};

struct LayerShape {
  const void* w = nullptr;      // (n, k), 16 bit
  const void* g = nullptr;      // (n), weight norm
  const void* b = nullptr;      // (n), bias: for values formed here
  const float* kept = nullptr;  // (rows, n), values kept in fp32
  int n = 0, k = 0;
  int first_part = 0;  // of its partial sums
};

struct Maps {
  CUtensorMap dy, dx;
  CUtensorMap h[kMlpMaxLayers + 1];  // h[0] is x, h[l] what layer l - 1 saved, or the workspace where it is formed
  CUtensorMap w[kMlpMaxLayers];
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

// Floats of one part: dW of a layer, then its db, of every so many rows apart. dW lies as the threads that summed it
// hold it: of rows r and r + 8, r % 16 < 8, columns c and c + 1, c even, four floats from part_float4() * 4.
constexpr int bias_rows(int panels) { return 4 / panels; }
constexpr int64_t part_floats(int panels) { return int64_t(64 * panels) * (64 * panels + bias_rows(panels)); }

constexpr int part_float4(int row, int column, int width) {
  return (row / 64 * (width / 8) + column / 8) * 128 + row / 16 % 4 * 32 + row % 8 * 4 + column % 8 / 2;
}

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

// --- a block ---

// Everybody has come here, in the neighbours too.
__device__ __forceinline__ void block_ends() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

template <class T, int kPanels, bool kForms> struct Block {
  using Shared = SharedMemory<kPanels>;
  static constexpr int kWidth = Shared::kWidth;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;  // of a buffer
  // Steps of a dW in flight beside the running one: more would hold up the chain's products. The instance that forms
  // values has no register to spare for trying.
  static constexpr int kDwAhead = kForms ? 1 : 0;

  Shared& s;
  const Maps& maps;
  const Arguments& a;

  __device__ const volatile Plan& plan() const { return s.plan; }
  __device__ bool single() const { return !plan().pair && !plan().entry; }
  __device__ void make_plan(uint32_t rank);
  __device__ void start_loading_weights();
  template <int kBy> __device__ void form_weights(int layer, uint32_t thread, uint32_t to, uint32_t apart);
  __device__ void form_identity();
  template <bool kSingle> __device__ void start_filling(uint32_t w);
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
  template <bool kSingle> static constexpr uint32_t kAhead = kSingle ? 2 : 1;  // tiles for which there are buffers

  template <bool kSingle> __device__ void fill_behind(uint32_t w, uint32_t n, int tile);
  template <bool kSingle> __device__ void refill(uint32_t w, uint32_t r, uint32_t n, int tile);
  __device__ void load(uint32_t r, uint32_t buffer, const CUtensorMap& map, int row);

  // Of this block; where values are formed here.
  __device__ uint32_t tiles_a_chunk() const { return uint32_t(kChunk) >> (plan().copies - 1); }
  __device__ int tile_of(uint32_t n) const { return plan().first_tile + plan().tile_step * int(n); }
  __device__ int tile_of_cluster(uint32_t n) const { return plan().copy + plan().copies * int(n); }
  // Before this block's n-th tile.
  __device__ bool chunk_starts(uint32_t n) const { return kForms && (n & (tiles_a_chunk() - 1)) == 0; }
  // Where rows 64 r .. of the cluster's tile of that number lie in the workspace.
  __device__ int formed_row(int tile, uint32_t r) const {
    return (plan().cluster * a.room + tile % (2 * kChunk)) * kTileRows + int(r * kRows);
  }
  // This block, its addresses unknown to the compiler, which would otherwise carry what it makes of them through the
  // loops around the code that forms values: registers that the chain needs.
  __device__ __forceinline__ Block apart() const {
    uint32_t base = ptx::shared_address(&s);
    asm volatile("" : "+r"(base));
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

  template <bool kSingle> __device__ void release(uint32_t w, uint32_t r, uint32_t n, int tile);
  __device__ void add_bias(float (&db)[2], uint32_t dz);
  __device__ void give(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2]);
  __device__ void store_partial(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2], int l);
  __device__ void start_products(float (&acc)[kPanels][kPanel / 2], uint32_t dz, uint32_t slot);
  __device__ void wait_for_panel(float (&acc)[kPanels][kPanel / 2], int p);
  __device__ void wait_for_room(uint32_t step, uint32_t r, uint32_t n);
  __device__ void send(uint32_t step, uint32_t r, int tile);
  template <bool kSingle> __device__ void take_tile(uint32_t r, uint32_t n, int tile);
};

// One thread.
template <class T, int kPanels, bool kForms> __device__ void Block<T, kPanels, kForms>::make_plan(uint32_t rank) {
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
template <class T, int kPanels, bool kForms> __device__ void Block<T, kPanels, kForms>::start_loading_weights() {
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

// The same of a weight-normalised layer, by kBy threads; 16 neighbouring lanes see a row whole.
template <class T, int kPanels, bool kForms>
template <int kBy>
__device__ void Block<T, kPanels, kForms>::form_weights(int layer, uint32_t thread, uint32_t to, uint32_t apart) {
  constexpr int kSteps = 4;  // at a time: more take too many registers
  const LayerShape at = a.layer[layer];
  const int chunk = int(thread) % 16;
#pragma unroll 1
  for (uint32_t first = thread / 16; first < uint32_t(kWidth); first += kSteps * kBy / 16) {
    WeightChunk<T> v[kSteps];
    float g[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = int(first) + i * kBy / 16;
      if (row < at.n && chunk * 8 < at.k) tile::load(v[i], static_cast<const T*>(at.w) + row * at.k + chunk * 8);
      g[i] = row < at.n ? tile::to_float(static_cast<const T*>(at.g)[row]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t row = first + i * kBy / 16;
      float sum[1] = {squares(v[i])};
      tile::warp_sum(sum, 16);  // as weight_inverse_norm() adds
      v[i] = scaled(v[i], g[i] * inverse_norm(sum[0]));
      if (chunk / 8 < kPanels && row < uint32_t(kWidth))
        ptx::store_shared(to + chunk / 8 * apart + tile::swizzled<Swizzle::b128>(row, uint32_t(chunk) % 8 * 16),
                          v[i].word[0]);
    }
  }
}

// The upper "weights" of an entry stage: its product then is dy, and all else is as with two layers. All threads.
template <class T, int kPanels, bool kForms> __device__ void Block<T, kPanels, kForms>::form_identity() {
  for (uint32_t i = threadIdx.x; i < kPanels * kWidth * 8; i += kThreads) {
    const uint32_t panel = i / (kWidth * 8), row = i / 8 % kWidth, chunk = i % 8;
    uint32_t v[4] = {};
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e)
      if (panel * 64 + chunk * 8 + 2 * e == row / 2 * 2) v[e] = row % 2 ? ptx::pack(T{}, 0, 1) : ptx::pack(T{}, 1, 0);
    ptx::store_shared(ptx::shared_address(s.weight[0][panel]) + tile::swizzled<Swizzle::b128>(row, chunk * 16), v);
  }
}

// --- dW, and the filling of the buffers ---

template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::load(uint32_t r, uint32_t buffer, const CUtensorMap& map,
                                                                int row) {
  ptx::mbarrier_arrive_expect_tx(&s.full[r][buffer], kBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::tensor_load(s.buffer[r][buffer][p], &map, p * kPanel, row, &s.full[r][buffer]);
}

// Fills the buffers that dW warpgroup w reads for this block's n-th tile, but for the dz that the chain writes. The dz
// of a stage that is not the top is pushed by the one above, which is told that there is room. One thread.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::refill(uint32_t w, uint32_t r, uint32_t n, int tile) {
  if (tile >= a.tiles) return;
  const uint32_t b = buffer_of<kSingle>(w, n), phase = phase_of<kSingle>(n);
  const int row = tile * kTileRows + int(r * kRows), l = kSingle || w == 1 ? plan().lower : plan().upper;
  const int in_cluster = tile_of_cluster(n);
  if (chunk_starts(n)) {
    tile::wait_cluster_or_trap(&s.chunk_formed, uint32_t(in_cluster) / kChunk % 2);
    ptx::fence_proxy_async();
  }
  if (kSingle || w == 0) {
    wait_or_trap(&s.empty[r][kDz + b], phase ^ 1);
    if (plan().top) {
      load(r, kDz + b, maps.dy, row);
    } else {
      ptx::mbarrier_arrive_expect_tx(&s.full[r][kDz + b], kBytes);
      ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.room[r][b], plan().above + (kSingle ? b : 0)));
    }
  }
  wait_or_trap(&s.empty[r][kH + b], phase ^ 1);
  load(r, kH + b, maps.h[l], kForms && l > 0 ? formed_row(in_cluster, r) : row);
}

// The products that read a tile's buffers are done.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::release(uint32_t w, uint32_t r, uint32_t n, int tile) {
  const uint32_t b = buffer_of<kSingle>(w, n);
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive(&s.empty[r][kDz + b]);
    ptx::mbarrier_arrive(&s.empty[r][kH + b]);
  }
  constexpr uint32_t kStep = kAhead<kSingle>;
  if (!kForms && threadIdx.x % 128 == 0) refill<kSingle>(w, r, n + kStep, tile + int(kStep) * plan().tile_step);
  __syncwarp();
}

// db += the columns of 64 rows of dz. A warp takes a panel of every so many rows, a lane two columns.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::add_bias(float (&db)[2], uint32_t dz) {
  constexpr uint32_t kGroups = bias_rows(kPanels);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t panel = dz + warp % kPanels * kPanelBytes, group = warp / kPanels;
#pragma unroll 8
  for (uint32_t row = 0; row < kRows / kGroups; ++row) {
    uint32_t v[1];
    float low, high;
    ptx::load_shared(v, panel + tile::swizzled<Swizzle::b128>(group * (kRows / kGroups) + row, lane * 4));
    ptx::unpack(T{}, v[0], low, high);
    db[0] += low;
    db[1] += high;
  }
}

// The first tiles' buffers of dW warpgroup w. One thread.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ void Block<T, kPanels, kForms>::start_filling(uint32_t w) {
  const int tile = s.plan.first_tile;
  if (kSingle) {
    refill<true>(w, w, 0, tile);
    refill<true>(w, w, 1, tile + s.plan.tile_step);
  } else {
    refill<false>(w, 0, 0, tile);
    refill<false>(w, 1, 0, tile);
  }
}

// The same behind tile n, where chunks of values are formed here: between them all buffers run empty. One thread.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::fill_behind(uint32_t w, uint32_t n, int tile) {
  if (kSingle && !chunk_starts(n + 1) && chunk_starts(n + 2)) return;
  const uint32_t first = kSingle && chunk_starts(n + 1) ? 1 : 2;
#pragma unroll 1
  for (uint32_t i = kSingle ? first : 1; i <= 2; ++i)
    if (kSingle)
      refill<true>(w, w, n + i, tile + int(i) * plan().tile_step);
    else
      refill<false>(w, i - 1, n + 1, tile + plan().tile_step);
}

// Starts dw += dz^T h of the rows of chain warpgroup r.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::add_products(float (&dw)[kPanels][kWidth / 2],
                                                                        float (&db)[2], uint32_t w, uint32_t r,
                                                                        uint32_t n) {
  const uint32_t b = buffer_of<kSingle>(w, n), phase = phase_of<kSingle>(n);
  wait_or_trap(&s.full[r][kDz + b], phase);
  wait_or_trap(&s.full[r][kH + b], phase);
  const uint32_t dz = ptx::shared_address(s.buffer[r][kDz + b]), h = ptx::shared_address(s.buffer[r][kH + b]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kRows; k += 16) {
#pragma unroll
    for (uint32_t m = 0; m < kPanels; ++m)
      ptx::wgmma<T, kWidth, Major::mn, Major::mn>(
          dw[m], operand<Major::mn, Swizzle::b128>(dz + m * kPanelBytes, k, kPanelBytes),
          operand<Major::mn, Swizzle::b128>(h, k, kPanelBytes), true);
    ptx::wgmma_commit_group();
    if (k + 16 < kRows) ptx::wgmma_wait_group<kDwAhead>();
  }
  if (a.want_db) add_bias(db, dz);
}

// Warpgroup w adds dz^T h of every tile: with two layers of layer w, with one of the rows of chain warpgroup w.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ void Block<T, kPanels, kForms>::hold_dw(uint32_t w) {
  float dw[kPanels][kWidth / 2], db[2] = {};
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) dw[m][i] = 0;
  if (kForms && threadIdx.x % 128 == 0) fill_behind<kSingle>(w, ~0u, plan().first_tile - plan().tile_step);
  __syncwarp();
  uint32_t n = 0;
  for (int tile = plan().first_tile; tile < a.tiles; tile += plan().tile_step, ++n) {
    if (kSingle) {
      add_products<true>(dw, db, w, w, n);
      ptx::wgmma_wait_group<0>();
      release<true>(w, w, n, tile);
    } else {
      add_products<false>(dw, db, w, 0, n);
      add_products<false>(dw, db, w, 1, n);
      ptx::wgmma_wait_group<kDwAhead>();
      release<false>(w, 0, n, tile);
      ptx::wgmma_wait_group<0>();
      release<false>(w, 1, n, tile);
    }
    if (kForms && threadIdx.x % 128 == 0) fill_behind<kSingle>(w, n, tile);
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < kPanels; ++m) ptx::fence_registers(dw[m]);
  // Of the two that hold the same layer one gives, so that fewer partial sums reach memory.
  block_ends();
  if (w == plan().giver) give(dw, db);
  block_ends();
  if (w != plan().giver) store_partial(dw, db, kSingle || w == 1 ? plan().lower : plan().upper);
}

// What hold_dw() does for other warpgroups where there is no dW: above the top layer.
template <class T, int kPanels, bool kForms> __device__ void Block<T, kPanels, kForms>::only_fill(uint32_t w) {
  if (kForms && threadIdx.x % 128 == 0) fill_behind<false>(w, ~0u, plan().first_tile - plan().tile_step);
  __syncwarp();
  uint32_t n = 0;
  for (int tile = plan().first_tile; tile < a.tiles; tile += plan().tile_step, ++n) {
    for (uint32_t r = 0; r < 2; ++r) {
      wait_or_trap(&s.full[r][kDz + w], n & 1);
      wait_or_trap(&s.full[r][kH + w], n & 1);
      release<false>(w, r, n, tile);
    }
    if (kForms && threadIdx.x % 128 == 0) fill_behind<false>(w, n, tile);
    __syncwarp();
  }
  block_ends();
  block_ends();
}

// The sums of a warpgroup through the memory of the block that takes them, a thread's by 16 bytes, 128 threads apart.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::give(const float (&dw)[kPanels][kWidth / 2],
                                                                const float (&db)[2]) {
  const uint32_t to = ptx::cluster_address(s.weight, plan().taker) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const uint32_t v[4] = {__float_as_uint(dw[m][4 * i]), __float_as_uint(dw[m][4 * i + 1]),
                             __float_as_uint(dw[m][4 * i + 2]), __float_as_uint(dw[m][4 * i + 3])};
      ptx::cluster_store(to + (m * kWidth / 8 + i) * 2048, v);
    }
  const uint32_t v[4] = {__float_as_uint(db[0]), __float_as_uint(db[1]), 0, 0};
  ptx::cluster_store(to + kPanels * kWidth / 8 * 2048, v);
}
// A warpgroup's sums, and those it was given, in the same order: the second kernel knows where a row lies.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::store_partial(const float (&dw)[kPanels][kWidth / 2],
                                                                         const float (&db)[2], int l) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int part = int(blockIdx.x) / a.cluster;
  const uint32_t given = ptx::shared_address(s.weight) + threadIdx.x % 128 * 16;
  const bool adds = plan().giver != kNobody;
  float* out = a.partial + (a.layer[l].first_part + part) * part_floats(kPanels);
  float4* to = reinterpret_cast<float4*>(out) + threadIdx.x % 128;
  uint32_t v[4] = {};
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      if (adds) ptx::load_shared(v, given + (m * kWidth / 8 + i) * 2048);
      to[(m * kWidth / 8 + i) * 128] =
          make_float4(dw[m][4 * i] + __uint_as_float(v[0]), dw[m][4 * i + 1] + __uint_as_float(v[1]),
                      dw[m][4 * i + 2] + __uint_as_float(v[2]), dw[m][4 * i + 3] + __uint_as_float(v[3]));
    }
  if (!a.want_db) return;
  if (adds) ptx::load_shared(v, given + kPanels * kWidth / 8 * 2048);
  *reinterpret_cast<float2*>(out + kWidth * (kWidth + warp / kPanels) + warp % kPanels * kPanel + 2 * lane) =
      make_float2(db[0] + __uint_as_float(v[0]), db[1] + __uint_as_float(v[1]));
}

// --- the chain ---

// Starts acc = dz W of the layer in `slot`, panel by panel: the first is finished while the second still runs.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::start_products(float (&acc)[kPanels][kPanel / 2],
                                                                          uint32_t dz, uint32_t slot) {
  const uint32_t w = ptx::shared_address(s.weight[slot]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t p = 0; p < kPanels; ++p) {
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kPanel, Major::k, Major::mn>(
          acc[p], operand<Major::k, Swizzle::b128>(dz, k, kPanelBytes),
          operand<Major::mn, Swizzle::b128>(w + p * kWidth * 128, k, kPanelBytes), k > 0);
    ptx::wgmma_commit_group();
  }
}
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::wait_for_panel(float (&acc)[kPanels][kPanel / 2], int p) {
  if (p + 1 < kPanels)
    ptx::wgmma_wait_group<1>();
  else
    ptx::wgmma_wait_group<0>();
  ptx::fence_registers(acc[p]);
}

// Until what this tile's step forms may be written: its buffer is free, and of kOut also what it goes to.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::wait_for_room(uint32_t step, uint32_t r, uint32_t n) {
  if (step == 0) {
    wait_or_trap(&s.empty[r][kDz + 1], (n & 1) ^ 1);
  } else if (plan().bottom) {
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
    ptx::barrier_sync(1 + r, 128);
  } else {
    // Room for this one also says that the last one has been read: no other block feeds that buffer.
    wait_or_trap(&s.room[r][plan().below_buffer], n & 1);
  }
}

// For what may not be carried in registers from one chunk to the next, as Block::apart().
__device__ __forceinline__ uint32_t thread_anew() {
  uint32_t thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// Where ldmatrix and stmatrix find columns 0 .. 15 of this warp's 16 rows.
__device__ __forceinline__ uint32_t fragment_of(uint32_t thread) {
  return tile::swizzled<Swizzle::b128>(thread / 32 % 4 * 16 + thread % 16, thread % 32 / 16 * 16);
}

// `to` = acc . f'(h), or acc where h is 0, of one panel. Addresses of this lane's fragment.
template <class T>
__device__ __forceinline__ void form_dz(const float (&acc)[kPanel / 2], uint32_t h, uint32_t to, Act act) {
  if (h == 0) {
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
      uint32_t dz[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) dz[i] = ptx::pack(T{}, acc[8 * b + 2 * i], acc[8 * b + 2 * i + 1]);
      ptx::stmatrix(to ^ (b << 5), dz);
    }
    return;
  }
  // Two chunks at a time: the latencies of one hide behind the other's.
  const auto by_slopes = [&](auto f) {
#pragma unroll
    for (uint32_t b = 0; b < 4; b += 2) {
      uint32_t v[2][4];
      float slope[2][4][2];
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) ptx::ldmatrix(v[c], h ^ ((b + c) << 5));
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) slopes_of<decltype(f), T>(v[c][i], slope[c][i]);
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[c][i] =
              ptx::pack(T{}, acc[8 * (b + c) + 2 * i] * slope[c][i][0], acc[8 * (b + c) + 2 * i + 1] * slope[c][i][1]);
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) ptx::stmatrix(to ^ ((b + c) << 5), v[c]);
    }
  };
  with_slope(act, by_slopes, Activations{});
}

// What a step has written, to whoever waits for it. One thread of the warpgroup, after its barrier.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::send(uint32_t step, uint32_t r, int tile) {
  if (step == 0) {
    ptx::mbarrier_arrive(&s.full[r][kDz + 1]);
  } else if (plan().bottom) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_store(&maps.dx, p * kPanel, tile * kTileRows + int(r) * kRows, s.buffer[r][kOut][p]);
    ptx::bulk_commit_group();
  } else {
    const uint32_t below = plan().below, to = kDz + plan().below_buffer;
    ptx::bulk_copy_to_cluster(ptx::cluster_address(s.buffer[r][to], below), s.buffer[r][kOut], kBytes,
                              ptx::cluster_address(&s.full[r][to], below));
  }
}

// --- values formed here: nothing was kept, or fp32 ---

// `to` = f(acc) of one panel.
template <class T> __device__ __forceinline__ void form_h(const float (&acc)[kPanel / 2], uint32_t to, Act act) {
  const auto by_values = [&](auto f) {
    using F = decltype(f);
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
      uint32_t h[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        h[i] = ptx::pack(T{}, act_value<F, T>(acc[8 * b + 2 * i]), act_value<F, T>(acc[8 * b + 2 * i + 1]));
        // Without this the compiler weaves long formulas of all elements into each other, and no registers are left.
        if constexpr (F::name == Tanh::name || F::name == Sigmoid::name) asm volatile("" : "+r"(h[i])::"memory");
      }
      ptx::stmatrix(to ^ (b << 5), h);
    }
  };
  with_slope(act, by_values, Activations{});
}

// Until this block's buffers of warpgroup r are free, before its n-th tile.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::wait_for_buffers(uint32_t r, uint32_t n) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t next = kSingle ? n + ((n ^ i) & 1) : n;  // the tile that takes buffer i
    wait_or_trap(&s.empty[r][kDz + i], phase_of<kSingle>(next) ^ 1);
    wait_or_trap(&s.empty[r][kH + i], phase_of<kSingle>(next) ^ 1);
  }
}

// Forms h of a chunk of the cluster's tiles, this warpgroup its share of their halves, before this block's n-th tile.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::form_chunk(uint32_t r, uint32_t n) {
  wait_for_buffers<kSingle>(r, n);
  uint32_t inputs = forming(r).inputs;
  const int first = int(forming(r).chunk) * kChunk;
  for (int l = 0; l < a.values; ++l)
    if (a.layer[l].kept != nullptr)
      round_values(r, l, first);
    else
      form_values<kSingle>(r, l, first, inputs);
  ptx::fence_proxy_async();  // other blocks' copy engines read what this thread wrote
  ptx::barrier_sync(1 + r, 128);
  if (threadIdx.x % 128 == 0) {
    forming(r).chunk = forming(r).chunk + 1, forming(r).inputs = inputs;
    ptx::bulk_wait_group<0>();
    ptx::fence_proxy_async();
    for (int rank = 0; rank < a.cluster; ++rank)
      ptx::mbarrier_arrive_remote(ptx::cluster_address(&s.chunk_formed, uint32_t(rank)));
  }
  ptx::barrier_sync(1 + r, 128);  // f is back
}

// h of layer l, from its input. The last tile's W is there, or is read into buffers that nobody uses now.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::form_values(uint32_t r, int l, int first, uint32_t& inputs) {
  const bool upper = plan().pair && l == plan().upper, resident = upper || l == plan().lower;
  const uint32_t apart = kSingle || resident ? sizeof(s.weight[0][0]) : sizeof(s.buffer[0]);
  uint32_t w = ptx::shared_address(resident  ? s.weight[upper ? 0 : 1][0]
                                   : kSingle ? s.weight[0][0]
                                             : s.buffer[0][kDz + 1][0]);
  if (!resident) load_other_weights<kSingle>(r, l, w, apart);
  const uint32_t fragment = fragment_of(thread_anew()), out = ptx::shared_address(s.buffer[r][kDz]);
  const bool issues = threadIdx.x % 128 == 0;
  const int step = 2 * a.cluster;
  int half = 2 * plan().rank + int(r);
  if (issues && half < halves(first)) {
    ptx::bulk_wait_group<0>();  // what this thread stored of the layer below has landed
    load_input(r, l, first, half, inputs);
  }
  for (; half < halves(first); half += step, ++inputs) {
    tile::wait_warp_or_trap(&s.input_full[r][inputs & 1], inputs >> 1 & 1);
    asm volatile("" : "+r"(w));  // else 16 descriptors stay in registers through the loop
    float acc[kPanels][kPanel / 2];
    start_from_bias(acc, l);
    start_values(acc, ptx::shared_address(s.buffer[r][kH + (inputs & 1)]), w, apart);
    if (issues) ptx::bulk_wait_group_read<0>();
    ptx::barrier_sync(1 + r, 128);  // `out` is free, and the products before these are done
    if (issues && half + step < halves(first)) load_input(r, l, first, half + step, inputs + 1);
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      wait_for_panel(acc, p);
      form_h<T>(acc[p], out + p * kPanelBytes + fragment, a.act);
    }
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(1 + r, 128);
    if (issues) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p)
        ptx::tensor_store(&maps.h[l + 1], p * kPanel, formed_row(first + half / 2, uint32_t(half) & 1),
                          s.buffer[r][kDz][p]);
      ptx::bulk_commit_group();
    }
    __syncwarp();
  }
}

// A layer's W that this block does not hold. Both chain warpgroups.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::load_other_weights(uint32_t r, int l, uint32_t to,
                                                                              uint32_t apart) {
  const uint32_t others = forming(r).others;
  ptx::barrier_sync(3, 256);  // nobody reads what lies there, and all have read `others`
  if (a.layer[l].g != nullptr) {
    form_weights<256>(l, thread_anew() - 256, to, apart);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(3, 256);
    return;
  }
  if (threadIdx.x % 128 == 0) forming(r).others = others + 1;
  if (threadIdx.x == 256) {
    ptx::mbarrier_arrive_expect_tx(&s.other_weights_full, sizeof(s.weight[0]));
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(kSingle ? s.weight[0][p] : s.buffer[p][kDz + 1][0], &maps.w[l], p * kPanel, 0,
                       &s.other_weights_full);
  }
  __syncwarp();
  tile::wait_warp_or_trap(&s.other_weights_full, others & 1);
}

// The input of layer l: half a tile, into the buffers that h of this warpgroup takes later. One thread.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::load_input(uint32_t r, int l, int first, int half,
                                                                      uint32_t number) {
  const int tile = first + half / 2;  // of the cluster
  const uint32_t sub = uint32_t(half) & 1;
  const int row =
      l > 0 ? formed_row(tile, sub) : (plan().cluster + plan().clusters * tile) * kTileRows + int(sub * kRows);
  ptx::mbarrier_arrive_expect_tx(&s.input_full[r][number & 1], kBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p)
    ptx::tensor_load(s.buffer[r][kH + (number & 1)][p], &maps.h[l], p * kPanel, row, &s.input_full[r][number & 1]);
}

// Starts acc += h W^T, panel by panel as start_products().
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::start_values(float (&acc)[kPanels][kPanel / 2], uint32_t h,
                                                                        uint32_t w, uint32_t apart) {
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::fence_registers(acc[p]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t p = 0; p < kPanels; ++p) {
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kPanel, Major::k, Major::k>(
          acc[p], operand<Major::k, Swizzle::b128>(h, k, kPanelBytes),
          operand<Major::k, Swizzle::b128>(w + k / kPanel * apart + p * kPanelBytes, k % kPanel, 0), true);
    ptx::wgmma_commit_group();
  }
}

// acc = the bias of layer l; zero outside.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::start_from_bias(float (&acc)[kPanels][kPanel / 2], int l) {
  const LayerShape& at = a.layer[l];
#pragma unroll
  for (int p = 0; p < kPanels; ++p)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = p * kPanel + 8 * j + 2 * int(threadIdx.x % 4);
      uint32_t pair = 0;
      if (at.b != nullptr && column < at.n)
        pair = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(at.b) + column));
      ptx::unpack(T{}, pair, acc[p][4 * j], acc[p][4 * j + 1]);
      acc[p][4 * j + 2] = acc[p][4 * j], acc[p][4 * j + 3] = acc[p][4 * j + 1];
    }
}

// h of layer l from what was kept of it in fp32.
template <class T, int kPanels, bool kForms>
__device__ __forceinline__ void Block<T, kPanels, kForms>::round_values(uint32_t r, int l, int first) {
  constexpr int kChunks = kWidth / 8, kSteps = kRows * kChunks / 128,
                kAtOnce = 4 * kPanels;  // 8 columns a thread and step
  const LayerShape& at = a.layer[l];
  T* const to = static_cast<T*>(a.formed) + int64_t(l) * plan().clusters * a.room * kTileRows * kWidth;
  const int thread = int(thread_anew()), column = thread % kChunks * 8, in_half = thread % 128 / kChunks;
  for (int half = 2 * plan().rank + int(r); half < halves(first); half += 2 * a.cluster) {
    const int tile = plan().cluster + plan().clusters * (first + half / 2);
    const int64_t row = int64_t(tile) * kTileRows + half % 2 * kRows + in_half;
    T* const out = to + int64_t(formed_row(first + half / 2, uint32_t(half) & 1) + in_half) * kWidth + column;
#pragma unroll 1
    for (int i = 0; i < kSteps; i += kAtOnce) {
      float4 v[kAtOnce][2] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t from = row + (i + k) * (128 / kChunks);
        if (from >= a.rows || column >= at.n) continue;
        v[k][0] = __ldcs(reinterpret_cast<const float4*>(at.kept + from * at.n + column));
        v[k][1] = __ldcs(reinterpret_cast<const float4*>(at.kept + from * at.n + column + 4));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        *reinterpret_cast<uint4*>(out + (i + k) * (128 / kChunks) * kWidth) =
            make_uint4(ptx::pack(T{}, v[k][0].x, v[k][0].y), ptx::pack(T{}, v[k][0].z, v[k][0].w),
                       ptx::pack(T{}, v[k][1].x, v[k][1].y), ptx::pack(T{}, v[k][1].z, v[k][1].w));
    }
  }
}

// Rows 64 r .. of a tile through this block's layers.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels, kForms>::take_tile(uint32_t r, uint32_t n, int tile) {
  const uint32_t fragment = fragment_of(kForms ? thread_anew() : threadIdx.x);
#pragma unroll 1
  for (uint32_t step = kSingle ? 1 : 0; step < 2; ++step) {
    const uint32_t b = buffer_of<kSingle>(step, n), phase = phase_of<kSingle>(n);
    const uint32_t dz = ptx::shared_address(s.buffer[r][kDz + b]), h = ptx::shared_address(s.buffer[r][kH + b]);
    const bool slopes = !kSingle && (step == 0 || !plan().bottom),  // a single layer is the lowest
        forms = slopes || a.want_dx;
    wait_or_trap(&s.full[r][kDz + b], phase);
    if (forms) {
      float acc[kPanels][kPanel / 2];
      start_products(acc, dz, step);
      wait_for_room(step, r, n);
      wait_or_trap(&s.full[r][kH + b], phase);
      const uint32_t to = ptx::shared_address(s.buffer[r][step == 0 ? kDz + 1 : uint32_t(kOut)]);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        wait_for_panel(acc, p);
        form_dz<T>(acc[p], slopes ? h + p * kPanelBytes + fragment : 0, to + p * kPanelBytes + fragment, a.act);
      }
      ptx::fence_proxy_async_shared();
      ptx::barrier_sync(1 + r, 128);
      if (threadIdx.x % 128 == 0) send(step, r, tile);
    } else {
      wait_or_trap(&s.full[r][kH + b], phase);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(&s.empty[r][kDz + b]);
      ptx::mbarrier_arrive(&s.empty[r][kH + b]);
    }
  }
}

// Warpgroup r takes rows 64 r .. of every tile.
template <class T, int kPanels, bool kForms>
template <bool kSingle>
__device__ void Block<T, kPanels, kForms>::run_chain(uint32_t r) {
  wait_or_trap(&s.weights_full, 0);
  uint32_t n = 0;
  do {
    if (kForms) apart().template form_chunk<kSingle>(r, n);
    Block block = kForms ? apart() : *this;
    for (; block.tile_of(n) < a.tiles && !(kForms && block.in_next_chunk(n, r)); ++n)
      block.template take_tile<kSingle>(r, n, block.tile_of(n));
    // Of the last chunk this block may have rows to form, and no tile.
  } while (kForms && int(forming(r).chunk) * kChunk < plan().tiles);
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
  __syncwarp();
  block_ends();
  block_ends();
}

// --- the kernel ---

template <int kPanels> __device__ void initialise(SharedMemory<kPanels>& s, int cluster) {
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < kOut; ++i) {
      ptx::mbarrier_init(&s.full[r][i], 1);
      ptx::mbarrier_init(&s.empty[r][i], 8);  // warps: of the chain and of a dW warpgroup
    }
    for (uint64_t& room : s.room[r]) ptx::mbarrier_init(&room, 1);
  }
  ptx::mbarrier_init(&s.weights_full, 1);
  for (auto& of_warpgroup : s.input_full)
    for (uint64_t& full : of_warpgroup) ptx::mbarrier_init(&full, 1);
  ptx::mbarrier_init(&s.other_weights_full, 1);
  ptx::mbarrier_init(&s.chunk_formed, 2 * uint32_t(cluster));
  s.forming[0] = s.forming[1] = {};
  ptx::fence_mbarrier_init();
}

template <class T, int kPanels, bool kForms>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_backward_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t base = ptx::shared_address(memory);
  asm("" : "+r"(base));  // else the compiler forms the address of the block's window anew at every access
  auto& s = *static_cast<SharedMemory<kPanels>*>(__cvta_shared_to_generic(base));
  Block<T, kPanels, kForms> block{s, maps, a};
  if (threadIdx.x == 0) {
    initialise(s, a.cluster);
    block.make_plan(a.cluster > 1 ? ptx::cluster_rank() : 0);
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) block.start_loading_weights();
  __syncwarp();
  ptx::cluster_wait();  // the barriers are ready, also the neighbours'
  const Plan& plan = s.plan;
  if (!kForms && threadIdx.x % 128 == 0 && threadIdx.x < 256)
    block.single() ? block.template start_filling<true>(threadIdx.x / 128)
                   : block.template start_filling<false>(threadIdx.x / 128);
  __syncwarp();
  const bool upper_normed = plan.pair && a.layer[plan.upper].g != nullptr,
             lower_normed = a.layer[plan.lower].g != nullptr;
  if (plan.entry) block.form_identity();
  const auto form = [&](int slot, int layer) {
    block.template form_weights<kThreads>(layer, threadIdx.x, ptx::shared_address(s.weight[slot]),
                                          sizeof(s.weight[0][0]));
  };
  if (upper_normed) form(0, plan.upper);
  if (lower_normed) form(1, plan.lower);
  if (plan.entry || upper_normed || lower_normed) {
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler then knows it for uniform
  if (warpgroup < 2) {
    ptx::increase_registers<kDwRegisters>();
    if (block.single())
      block.template hold_dw<true>(warpgroup);
    else if (warpgroup == 1 || block.plan().pair)
      block.template hold_dw<false>(warpgroup);
    else
      block.only_fill(warpgroup);
  } else {
    ptx::decrease_registers<kChainRegisters>();
    block.single() ? block.template run_chain<true>(warpgroup - 2) : block.template run_chain<false>(warpgroup - 2);
  }
}

using Kernel = void (*)(Maps, Arguments);
Kernel forming_kernel(DType type, int panels);  // with kForms

}  // namespace ingot::cuda::backward_sm90
