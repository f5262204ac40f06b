#pragma once
// The backward pass of a whole MLP whose values were kept, in one kernel: gradients of activations never leave the SMs,
// dW stays in registers.
//
//     dz_L = dy (. f'(z_L))    dz_{l-1} = (dz_l W_l) . f'(z_{l-1})    dx = dz_1 W_1    dW_l += dz_l^T h_{l-1}
//
// The layers are spread over the blocks of a cluster, one each, from the top down, for the whole launch. The unit of
// work is 64 rows; a cluster takes every so many. A block is given dz_l of a unit by the block above, in shared memory,
// and h_{l-1} by the copy engine. Both serve both products of the layer:
//   - Two warpgroups run the chain, one for each 64 inputs of the layer. Its product is transposed, inputs by rows: W^T
//     stays in their registers all the time and dz is read where it lies. The product of a unit runs while the slopes
//     of the one before are formed.
//   - One warpgroup holds dW in its registers.
//   - In the fourth warpgroup, a thread each loads h, loads dy or tells the block above that there is room, and sends
//     what each of the chain's warpgroups has formed to the block below, or to dx.
// Then the clusters' parts of dW are added, in fixed order: by a second kernel.
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
#include "ingot/kernels/mlp/to_128/layer_pipeline_sums.cuh"

namespace ingot::cuda::layer_pipeline {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;

constexpr int kThreads = 512;
constexpr int kHelperRegisters = 24, kChainRegisters = 144, kDwRegisters = 200;
constexpr uint32_t kDzSlots = 4, kHSlots = 6;
constexpr uint32_t kChain = 1;  // the named barrier of its warpgroups
constexpr int kFirstUnits = 2;  // asked for at once; the others when W is there, so that W does not wait for them

struct NoSlope {};  // in the place of an activation: below the lowest layer lies dx

struct Arguments {
  LayerShape layer[kMlpMaxLayers];
  int layers = 0, cluster = 1;
  bool entry = false;  // the first block of a cluster forms dz_L = dy . f' of an activated last layer
  float* partial = nullptr;
  int clusters = 0, units_each = 0, units_left = 0;  // each takes so many units, the first ones one more
  Act act = Act::identity;
  bool want_dx = false, want_db = false;
};

// A block's part of the plan.
struct Plan {
  int layer = 0;                         // or `layers`, of an entry
  int units = 0, row = 0, row_step = 0;  // of its cluster; the first one's row, and from each to the next
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
  uint64_t room[kDzSlots];         // below, in that slot, or in `out`, if that goes to memory
  uint64_t weights_full;
  uint64_t taken;       // the block below has all that was sent to it
  float scale[kWidth];  // of weight norm
  Plan plan;
};

template <class T, int kPanels> struct Block {
  using Shared = SharedMemory<kPanels>;
  static constexpr int kWidth = Shared::kWidth;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;
  static constexpr int kSums = kRows / 2;  // of a chain thread: 64 inputs by 64 rows
  // Chain warpgroups that work on one unit; with one panel they take turns.
  static constexpr uint32_t kTogether = kPanels;

  Shared& s;
  const Maps& maps;
  const Arguments& a;

  __device__ const volatile Plan& plan() const { return s.plan; }
  __device__ const CUtensorMap& map_of_h() const { return maps.h[s.plan.layer]; }

  // --- before the first unit

  // One thread. Little code, here and wherever all blocks start: they read it at once, and wait for it.
  __device__ void initialise() {
    const int cluster = a.cluster > 1 ? int(ptx::cluster_index()) : int(blockIdx.x);
    const uint32_t rank = a.cluster > 1 ? ptx::cluster_rank() : 0;
    Plan& p = s.plan;
    p.rank = rank, p.cluster = cluster;
    p.top = rank == 0, p.bottom = int(rank) + 1 == a.cluster;
    p.entry = p.top && a.entry;
    p.layer = a.layers - int(rank) - (a.entry ? 0 : 1);
    p.sends = !p.bottom || a.want_dx;
    p.units = a.units_each + (cluster < a.units_left);
    // From the last rows to the first: what a forward pass has stored last is still in L2.
    p.row = (a.units_each * a.clusters + a.units_left - 1 - cluster) * kRows, p.row_step = -a.clusters * kRows;
    // Warps that read a unit: of the chain, and of dW.
    const uint32_t readers = (p.sends ? 4 * kTogether : 0) + (p.entry ? 0 : 4);
    const uint32_t room = p.bottom ? kTogether : 1;
#pragma unroll 1
    for (uint32_t i = 0; i < kDzSlots; ++i) {
      ptx::mbarrier_init(&s.dz_full[i], 1);
      ptx::mbarrier_init(&s.dz_empty[i], readers);
      for (auto& of_warpgroup : s.out_full) ptx::mbarrier_init(&of_warpgroup[i], 4);
      ptx::mbarrier_init(&s.room[i], room);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < kHSlots; ++i) {
      ptx::mbarrier_init(&s.h_full[i], 1);
      ptx::mbarrier_init(&s.h_empty[i], readers);
    }
    ptx::mbarrier_init(&s.weights_full, 1);
    ptx::mbarrier_init(&s.taken, 1);
    ptx::fence_mbarrier_init();
  }
  __device__ bool loads_weights() const { return !s.plan.entry; }
  // The panels of W's (or v's) inputs lie one behind the other. One thread.
  __device__ void start_loading_weights() {
    if (!loads_weights()) return;
    ptx::mbarrier_arrive_expect_tx(&s.weights_full, kPanels * kWidth * 128);
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.out[0][0] + p * kWidth * 128, &maps.w[s.plan.layer], p * kPanel, 0, &s.weights_full);
  }

  // --- filling

  // Nobody reads these again, and in L2 they would take the place of what the forward pass has stored and nobody has
  // read yet.
  static constexpr uint64_t kHint = ptx::kEvictFirst;
  __device__ void load_h(tile::RingCursor<kHSlots> at, int row) {
    ptx::mbarrier_arrive_expect_tx(&s.h_full[at.stage], kBytes);
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.h[at.stage][p], &map_of_h(), p * kPanel, row, &s.h_full[at.stage], kHint);
  }
  __device__ void load_dy(tile::RingCursor<kDzSlots> at, int row) {
    ptx::mbarrier_arrive_expect_tx(&s.dz_full[at.stage], kBytes);
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.dz[at.stage][p], &maps.dy, p * kPanel, row, &s.dz_full[at.stage], kHint);
  }
  // When the copies of the last units are here, the block above may end. One thread.
  __device__ void tell_all_taken() {
    constexpr int kSlots = kDzSlots;
    for (int i = plan().units - 1; i >= 0 && i >= plan().units - kSlots; --i)
      wait_or_trap(&s.dz_full[i % kSlots], uint32_t(i / kSlots) & 1);
    ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.taken, plan().rank - 1));
  }
  // One thread each.
  __device__ void fill_h() {
    if (loads_weights()) wait_or_trap(&s.weights_full, 0);
    tile::RingCursor<kHSlots> at;
    int row = plan().row;
    for (int i = 0; i < plan().units; ++i, row += plan().row_step, at.advance()) {
      if (i < kFirstUnits) continue;
      wait_or_trap(&s.h_empty[at.stage], at.phase ^ 1);
      load_h(at, row);
    }
  }
  __device__ void fill_dz() {
    if (plan().top && loads_weights()) wait_or_trap(&s.weights_full, 0);
    tile::RingCursor<kDzSlots> at;
    int row = plan().row;
    for (int i = 0; i < plan().units; ++i, row += plan().row_step, at.advance()) {
      if (plan().top && i < kFirstUnits) continue;
      wait_or_trap(&s.dz_empty[at.stage], at.phase ^ 1);
      if (plan().top) {
        load_dy(at, row);
      } else {
        ptx::mbarrier_arrive_expect_tx(&s.dz_full[at.stage], kBytes);
        ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.room[at.stage], plan().rank - 1));
      }
    }
    if (!plan().top) tell_all_taken();
  }
  // What can be asked for before the neighbours have started. One thread.
  __device__ void start_filling() {
    static_assert(kFirstUnits <= int(kDzSlots) && kFirstUnits <= int(kHSlots));
    tile::RingCursor<kHSlots> at;
    int row = s.plan.row;
#pragma unroll 1
    for (int i = 0; i < s.plan.units && i < kFirstUnits; ++i, row += s.plan.row_step, at.advance()) {
      if (s.plan.top) load_dy({at.stage, 0}, row);
      if (i == 0) start_loading_weights();
      load_h(at, row);
    }
  }

  // --- dW

  __device__ void hold_dw() {
    float dw[kPanels][kWidth / 2], db[2] = {};
#pragma unroll
    for (int m = 0; m < kPanels; ++m)
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) dw[m][i] = 0;
    tile::RingCursor<kDzSlots> dz_at;
    tile::RingCursor<kHSlots> h_at;
    const int units = plan().units;
    for (int i = 0; i < units; ++i, dz_at.advance(), h_at.advance()) {
      wait_or_trap(&s.h_full[h_at.stage], h_at.phase);
      wait_or_trap(&s.dz_full[dz_at.stage], dz_at.phase);
      const uint32_t dz = ptx::shared_address(s.dz[dz_at.stage]), h = ptx::shared_address(s.h[h_at.stage]);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kRows; k += 16) {
#pragma unroll
        for (uint32_t m = 0; m < kPanels; ++m)
          ptx::wgmma<T, kWidth, Major::mn, Major::mn>(
              dw[m], operand<Major::mn, Swizzle::b128>(dz + m * kPanelBytes, k, kPanelBytes),
              operand<Major::mn, Swizzle::b128>(h, k, kPanelBytes), true);
        ptx::wgmma_commit_group();
        if (k + 16 < kRows) ptx::wgmma_wait_group<0>();
      }
      if (a.want_db) {
        add_bias_gradient<T, kPanels, 16>(db, dz);
        __syncwarp();  // all lanes have what they read before dz is given back
      }
      ptx::wgmma_wait_group<0>();
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(&s.dz_empty[dz_at.stage]);
        ptx::mbarrier_arrive(&s.h_empty[h_at.stage]);
      }
      __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < kPanels; ++m) ptx::fence_registers(dw[m]);
    store_partial(dw, db);
  }
  // As the threads hold them: the sums know where a row lies.
  __device__ __forceinline__ void store_partial(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* out = a.partial + (a.layer[plan().layer].first_part + plan().cluster) * part_floats(kPanels);
    float4* to = reinterpret_cast<float4*>(out) + threadIdx.x % 128;
#pragma unroll
    for (int m = 0; m < kPanels; ++m)
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i)
        to[(m * kWidth / 8 + i) * 128] =
            make_float4(dw[m][4 * i], dw[m][4 * i + 1], dw[m][4 * i + 2], dw[m][4 * i + 3]);
    if (!a.want_db) return;
    *reinterpret_cast<float2*>(out + kWidth * (kWidth + warp / kPanels) + warp % kPanels * kPanel + 2 * lane) =
        make_float2(db[0], db[1]);
  }

  // --- the chain

  // Where ldmatrix.trans and stmatrix.trans find 16 rows of this warp's 16 columns of a panel.
  __device__ static uint32_t fragment_of(uint32_t thread) {
    return tile::swizzled<Swizzle::b128>(thread % 32 / 16 * 8 + thread % 8, thread / 32 % 4 * 32 + thread / 8 % 2 * 16);
  }
  // Weight norm: W^T of v^T, a scale for each output. The chain finds them together, 16 rows of v a warp.
  struct Gains {
    float of[2] = {};  // of rows first_scaled() + lane / 4 and that 8 further
  };
  __device__ static uint32_t first_scaled() { return (threadIdx.x / 32 - 4) * kNormalisedRows; }
  __device__ __forceinline__ Gains load_gains(const LayerShape& at) const {
    Gains gains;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      if (const uint32_t n = first_scaled() + threadIdx.x % 32 / 4 + 8 * half; n < uint32_t(at.n))
        gains.of[half] = tile::to_float(static_cast<const T*>(at.g)[n]);
    return gains;
  }
  __device__ __forceinline__ void scale_weights(uint32_t (&w)[kWidth / 16][4], const Gains& gains) {
    const uint32_t lane = threadIdx.x % 32, first = first_scaled();
    if (first < uint32_t(kWidth)) {
      const RowsOfV<T, kWidth> rows(ptx::shared_address(s.out), first + lane % 16);
      float scale[2];
      rows.inverse_norms(scale);
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        if (lane % 4 == 0) s.scale[first + lane / 4 + 8 * half] = scale[half] * gains.of[half];
    }
    ptx::barrier_sync(kChain, 256);
#pragma unroll
    for (uint32_t k = 0; k < kWidth / 16; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float2 by = *reinterpret_cast<const float2*>(&s.scale[k * 16 + i / 2 * 8 + lane % 4 * 2]);
        w[k][i] = RowsOfV<T, kWidth>::scaled(w[k][i], by);
      }
  }
  // W^T, 64 inputs of panel p, as the products take it: registers of 16 outputs each.
  __device__ __forceinline__ void hold_weights(uint32_t (&w)[kWidth / 16][4], uint32_t p) {
    if (plan().entry) {  // its product is to give dy itself
      const uint32_t input = p * kPanel + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, two = threadIdx.x % 4 * 2;
#pragma unroll
      for (uint32_t k = 0; k < kWidth / 16; ++k)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t m = input + i % 2 * 8, at = k * 16 + i / 2 * 8 + two;
          w[k][i] = ptx::pack(T{}, m == at ? 1.f : 0.f, m == at + 1 ? 1.f : 0.f);
        }
    } else {
      const LayerShape& at = a.layer[plan().layer];
      Gains gains;
      if (at.g != nullptr) gains = load_gains(at);
      wait_or_trap(&s.weights_full, 0);
      const uint32_t from = ptx::shared_address(s.out) + p * kWidth * 128 + fragment_of(threadIdx.x);
#pragma unroll
      for (uint32_t k = 0; k < kWidth / 16; ++k) ptx::ldmatrix_trans(w[k], from + k * 2048);
      if (at.g != nullptr) scale_weights(w, gains);
    }
    ptx::barrier_sync(kChain, 256);  // the first units' results go where W was
  }
  // A unit's rows in parts of 16, between whose slopes the steps of the next product are started.
  static constexpr uint32_t kParts = kRows / 16;
  // Part j of acc = W^T dz^T.
  __device__ __forceinline__ static void start_product(float (&acc)[kSums], const uint32_t (&w)[kWidth / 16][4],
                                                       uint32_t dz, uint32_t j) {
    constexpr uint32_t kSteps = kWidth / 16 / kParts;
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t k = j * kSteps + i;
      ptx::wgmma<T, kRows, Major::k>(acc, w[k], operand<Major::k, Swizzle::b128>(dz, 16 * k, kPanelBytes), k > 0);
    }
  }
  // Of part j: `to` = acc . f'(h), or acc for NoSlope; `v` is h as ldmatrix gives it. The address of this lane's
  // fragment.
  template <class F>
  __device__ __forceinline__ static void form(const float (&acc)[kSums], uint32_t (&v)[4], uint32_t to, uint32_t j) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t at = 8 * j + 2 * i;
      float slope[2] = {1, 1};
      if constexpr (!std::is_same_v<F, NoSlope>) slopes_of<F, T>(v[i], slope);
      v[i] = ptx::pack(T{}, acc[at] * slope[0], acc[at + 1] * slope[1]);
    }
    ptx::stmatrix_trans(to + j * 2048, v);
  }

  // Where a chain warpgroup is: its buffers of dz and of h.
  struct Place {
    tile::RingCursor<kDzSlots> dz;
    tile::RingCursor<kHSlots> h;
  };
  static constexpr uint32_t kStep = kPanels == 2 ? 1 : 2;  // units from one of a chain warpgroup's to the next
  __device__ static void next(Place& at) {
#pragma unroll
    for (uint32_t i = 0; i < kStep; ++i) at.dz.advance(), at.h.advance();
  }
  __device__ static Place first_place(uint32_t r) {
    Place at;
    if (kPanels == 1 && r == 1) at.dz.advance(), at.h.advance();
    return at;
  }
  __device__ int units_of(uint32_t r) const { return kPanels == 2 ? plan().units : (plan().units + 1 - int(r)) / 2; }

  // What chain warpgroup r forms, to the block below or to dx. One thread.
  __device__ void send(uint32_t r) {
    const uint32_t p = kPanels == 2 ? r : 0, below = plan().rank + 1;
    const bool bottom = plan().bottom;
    Place at = first_place(r), before = at;
    const int units = units_of(r);
    int row = plan().row + (kPanels == 1 ? int(r) * plan().row_step : 0);
    if (bottom)
      for (uint32_t i = 0; i < kDzSlots / kStep; ++i) ptx::mbarrier_arrive(&s.room[(kPanels == 2 ? i : 2 * i + r)]);
    for (int i = 0; i < units; ++i, next(at), row += int(kStep) * plan().row_step) {
      wait_or_trap(&s.out_full[r][at.dz.stage], at.dz.phase);
      ptx::fence_proxy_async_shared();  // here and not where the chain has written: it would wait for the fence
      if (bottom) {
        ptx::tensor_store(&maps.dx, int(p) * kPanel, row, s.out[at.dz.stage][p]);
        ptx::bulk_commit_group();
        if (i == 0) continue;
        ptx::bulk_wait_group_read<1>();
        ptx::mbarrier_arrive(&s.room[before.dz.stage]);
        next(before);
      } else {
        ptx::bulk_copy_to_cluster(ptx::cluster_address(s.dz[at.dz.stage][p], below), s.out[at.dz.stage][p], kPanelBytes,
                                  ptx::cluster_address(&s.dz_full[at.dz.stage], below));
      }
    }
    if (bottom)
      ptx::bulk_wait_group<0>();
    else
      wait_or_trap(&s.taken, 0);
  }

  // Warpgroup r of two: panel r of every unit, or with one panel every second unit.
  __device__ void run_chain(uint32_t r) {
    uint32_t w[kWidth / 16][4];
    hold_weights(w, kPanels == 2 ? r : 0);
    if (plan().layer == 0)
      take_units<NoSlope>(w, r);
    else
      with_slope(
          a.act, [&](auto f) { take_units<decltype(f)>(w, r); }, Activations{});
  }
  // The next unit's product runs while this one's slopes are formed.
  template <class F> __device__ __forceinline__ void take_units(const uint32_t (&w)[kWidth / 16][4], uint32_t r) {
    int left = units_of(r);
    if (left == 0) return;
    Place at = first_place(r);
    float acc[2][kSums];
    wait_or_trap(&s.dz_full[at.dz.stage], at.dz.phase);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) start_product(acc[0], w, ptx::shared_address(s.dz[at.dz.stage]), j);
    ptx::wgmma_commit_group();
    for (;;) {
      take_unit<F>(acc[0], acc[1], w, at, r, --left > 0);
      if (left == 0) break;
      take_unit<F>(acc[1], acc[0], w, at, r, --left > 0);
      if (left == 0) break;
    }
    ptx::wgmma_wait_group<0>();  // of a product that nobody asked for
    ptx::fence_registers(acc[0]);
    ptx::fence_registers(acc[1]);
  }
  // Its product has been started; starts the next one's, a few steps before each part of the slopes, as a warp waits
  // for its turn at each. Without a next one that of whatever lies there: a branch around it would cost moves of
  // registers.
  template <class F>
  __device__ __forceinline__ void take_unit(float (&acc)[kSums], float (&acc_then)[kSums],
                                            const uint32_t (&w)[kWidth / 16][4], Place& at, uint32_t r, bool more) {
    Place then = at;
    next(then);
    const uint32_t fragment = fragment_of(threadIdx.x) + (kPanels == 2 ? r : 0) * kPanelBytes;
    const uint32_t h = ptx::shared_address(s.h[at.h.stage]) + fragment,
                   to = ptx::shared_address(s.out[at.dz.stage]) + fragment,
                   dz_then = ptx::shared_address(s.dz[then.dz.stage]);
    // One after the other, what is there already would take its time three times.
    for (uint32_t start = 0;;) {
      const bool h_there = ptx::mbarrier_try_wait(&s.h_full[at.h.stage], at.h.phase),
                 room = ptx::mbarrier_try_wait(&s.room[at.dz.stage], at.dz.phase),
                 dz_there = !more || ptx::mbarrier_try_wait(&s.dz_full[then.dz.stage], then.dz.phase);
      if (h_there && room && dz_there) break;
      const uint32_t now = tile::coarse_timer() | 1;
      if (start == 0) start = now;
      if (now - start > tile::kTrapAfter) ptx::trap();
    }
    __syncwarp();
    constexpr bool kSlopes = !std::is_same_v<F, NoSlope>;
    constexpr uint32_t kAhead = 2;  // parts of h asked for before they are needed
    uint32_t v[kParts][4];
#pragma unroll
    for (uint32_t j = 0; kSlopes && j < kAhead; ++j) ptx::ldmatrix_trans(v[j], h + j * 2048);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(acc);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.dz_empty[at.dz.stage]);
    __syncwarp();
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) {
      start_product(acc_then, w, dz_then, j);
      if (j + 1 == kParts) ptx::wgmma_commit_group();
      if (kSlopes && j + kAhead < kParts) ptx::ldmatrix_trans(v[j + kAhead], h + (j + kAhead) * 2048);
      form<F>(acc, v[j], to, j);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(&s.out_full[r][at.dz.stage]);
      ptx::mbarrier_arrive(&s.h_empty[at.h.stage]);
    }
    __syncwarp();
    at = then;
  }
};

template <class T, int kPanels>
__global__ void __launch_bounds__(kThreads, 1)
    layer_pipeline_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t base = ptx::shared_address(memory);
  ptx::settle(base);  // else the compiler forms the address of the block's window anew at every access
  Block<T, kPanels> block{*static_cast<SharedMemory<kPanels>*>(__cvta_shared_to_generic(base)), maps, a};
  if (threadIdx.x == 0) block.initialise();
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) block.start_filling();
  __syncwarp();
  const auto& plan = block.plan();
  ptx::cluster_wait();                                                // the barriers are ready, also the neighbours'
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler then knows it for uniform
  if (warpgroup == 3) {
    ptx::increase_registers<kDwRegisters>();
    if (!plan.entry) block.hold_dw();
  } else if (warpgroup != 0) {
    ptx::increase_registers<kChainRegisters>();
    if (plan.sends) block.run_chain(warpgroup - 1);
  } else {
    ptx::decrease_registers<kHelperRegisters>();
    if (threadIdx.x == 0) block.fill_h();
    if (threadIdx.x == 32) block.fill_dz();
    if (threadIdx.x % 32 == 0 && threadIdx.x >= 64 && plan.sends) block.send(threadIdx.x / 32 - 2);
    __syncwarp();
  }
  // Blocks end one by one, so that those of the next kernel find room early. Nobody writes to this one's shared memory
  // or reads it any more: all copies and all arrivals, also of `room`, have been waited for.
}

}  // namespace ingot::cuda::layer_pipeline
