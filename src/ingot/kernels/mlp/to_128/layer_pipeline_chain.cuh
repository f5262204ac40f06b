#pragma once
// The layer pipeline's two warpgroups for the gradients from layer to layer, and the threads that send the results on.
#include "ingot/kernels/mlp/to_128/layer_pipeline_block.cuh"

namespace ingot::cuda::layer_pipeline {

struct NoSlope {};  // takes the place of an activation below the lowest layer, where the result is dx

template <class T, int kPanels> struct GradientChain : BlockView<T, kPanels> {
  using View = BlockView<T, kPanels>;
  using View::kWidth, View::s, View::maps, View::a, View::plan;
  static constexpr int kSums = kRows / 2;  // of a chain thread: 64 inputs by 64 rows

  // The address for ldmatrix.trans and stmatrix.trans of 16 rows of this warp's 16 columns of a panel.
  __device__ static uint32_t fragment_of(uint32_t thread) {
    return tile::swizzled<Swizzle::b128>(thread % 32 / 16 * 8 + thread % 8, thread / 32 % 4 * 32 + thread / 8 % 2 * 16);
  }
  // Weight norm: W^T from v^T and a scale for each output. The chain's warps compute the scales together, 16 rows of v
  // per warp.
  struct Gains {
    float of[2] = {};  // of the rows first_scaled() + lane / 4 and of the row 8 further
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
  // W^T, 64 inputs of panel p, in the layout for the products: registers of 16 outputs each.
  __device__ __forceinline__ void hold_weights(uint32_t (&w)[kWidth / 16][4], uint32_t p) {
    if (plan().entry) {  // its product must reproduce dy
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
    ptx::barrier_sync(kChain, 256);  // the first units' results are written where W was
  }
  // A unit's rows are taken in parts of 16; between the slopes of two parts the next steps of the following product are
  // issued.
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
  // Writes acc . f'(h) of part j, or acc for NoSlope. `v` is h as loaded by ldmatrix; `to` is the address of this
  // lane's fragment.
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

  // The position of a chain warpgroup: its buffers of dz and of h.
  struct Place {
    tile::RingCursor<kDzSlots> dz;
    tile::RingCursor<kHSlots> h;
  };
  static constexpr uint32_t kStep = kPanels == 2 ? 1 : 2;  // distance between two units of a chain warpgroup
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

  // Sends the results of chain warpgroup r to the block below, or to dx. Called by a single thread.
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
      ptx::fence_proxy_async_shared();  // here and not after the chain's stores, because the chain would wait for the
                                        // fence
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

  // Warpgroup r of two: panel r of every unit, or with a single panel every second unit.
  __device__ void run_chain(uint32_t r) {
    uint32_t w[kWidth / 16][4];
    hold_weights(w, kPanels == 2 ? r : 0);
    if (plan().layer == 0)
      take_units<NoSlope>(w, r);
    else
      with_slope(
          a.act, [&](auto f) { take_units<decltype(f)>(w, r); }, Activations{});
  }
  // The next unit's product runs while this unit's slopes are computed.
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
    ptx::wgmma_wait_group<0>();  // of a product whose result is not used
    ptx::fence_registers(acc[0]);
    ptx::fence_registers(acc[1]);
  }
  // The unit's product has been started. The function starts the next unit's product, a few steps before each part of
  // the slopes, because a warp waits for its turn at each step. Without a next unit the function multiplies the old
  // contents of the buffer, because a branch around the product would cost moves of registers.
  template <class F>
  __device__ __forceinline__ void take_unit(float (&acc)[kSums], float (&acc_then)[kSums],
                                            const uint32_t (&w)[kWidth / 16][4], Place& at, uint32_t r, bool more) {
    Place then = at;
    next(then);
    const uint32_t fragment = fragment_of(threadIdx.x) + (kPanels == 2 ? r : 0) * kPanelBytes;
    const uint32_t h = ptx::shared_address(s.h[at.h.stage]) + fragment,
                   to = ptx::shared_address(s.out[at.dz.stage]) + fragment,
                   dz_then = ptx::shared_address(s.dz[then.dz.stage]);
    // Three waits in turn would take three times as long when the data has already arrived.
    tile::ask_then_poll_or_trap([&] {
      const bool h_there = ptx::mbarrier_try_wait(&s.h_full[at.h.stage], at.h.phase),
                 room = ptx::mbarrier_try_wait(&s.room[at.dz.stage], at.dz.phase),
                 dz_there = !more || ptx::mbarrier_try_wait(&s.dz_full[then.dz.stage], then.dz.phase);
      return h_there && room && dz_there;
    });
    __syncwarp();
    constexpr bool kSlopes = !std::is_same_v<F, NoSlope>;
    constexpr uint32_t kAhead = 2;  // parts of h loaded ahead of their use
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

}  // namespace ingot::cuda::layer_pipeline
