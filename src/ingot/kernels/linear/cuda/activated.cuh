#pragma once
// The two products of activated.h on the core; a translation unit includes the form of the core before this file.
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/linear/cuda/activated.h"
#include "ingot/kernels/linear/sign_bits.h"

namespace ingot::cuda::activated_detail {

using ptx::Major;

constexpr int kSums = 64;  // of a thread in 64 rows of a tile
static_assert(kActivatedTile.n == sign_bits::kColumns && gemm::kWarpRows == sign_bits::kRows,
              "a thread's signs are one word");

// y = f(alpha sums + bias); also stores the sums or their signs where the caller keeps them.
template <class Core, class T, class F> class Activated {
 public:
  struct Params {
    typename Core::Target y, pre;
    const T* bias = nullptr;
    uint64_t* signs = nullptr;
    uint32_t rows = 0, columns = 0;
    float alpha = 1;
    bool keeps_pre = false;
  };
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ Activated(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    uint32_t signs[2] = {};
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      float v[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = p_.alpha * d[panel * 32 + i];
      if (p_.bias != nullptr) add_bias(v, column);
      if (p_.keeps_pre) send(v, &p_.pre, column, at.row);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        signs[panel] |= uint32_t(v[i] > 0) << i;
        v[i] = act_value<F, T>(v[i]);
      }
      send(v, &p_.y, column, at.row);
    }
    if (p_.signs != nullptr && at.row < p_.rows && at.column < p_.columns)
      p_.signs[sign_bits::word_at(at.row, at.column, p_.columns, threadIdx.x % 32)] =
          uint64_t(signs[1]) << 32 | signs[0];
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  __device__ __forceinline__ void add_bias(float (&v)[32], uint32_t column) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t c = column + 8 * j + threadIdx.x % 4 * 2;
      if (c >= p_.columns) break;  // columns are whole eights
      const float x = tile::to_float(p_.bias[c]), y = tile::to_float(p_.bias[c + 1]);
      v[4 * j] += x, v[4 * j + 1] += y, v[4 * j + 2] += x, v[4 * j + 3] += y;
    }
  }
  __device__ __forceinline__ void send(const float (&v)[32], const typename Core::Target* to, uint32_t column,
                                       uint32_t row) {
    uint32_t pairs[16];
    gemm::pack<T>(v, pairs);
    out_.write(pairs);
    out_.send(to, column, row, 0);
  }
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

// dx = sums * f', from the saved argument, or the value and its argument's sign.
template <class Core, class T, class F, bool kFromValue> class Sloped {
 public:
  using Exchange = typename Core::PanelExchange;
  struct Params {
    typename Core::Target dx, kept;
    const uint64_t* signs = nullptr;
    uint32_t rows = 0, columns = 0;
  };
  using Shared = typename Exchange::Memory;

  __device__ __forceinline__ Sloped(const Params& p, Shared& s, uint32_t warp) : p_(p), panels_(s, warp) {}

  // Called by the Hopper form only, a tile ahead.
  __device__ __forceinline__ void request(const gemm::WarpAt& at) {
    panels_.request(&p_.kept, at);
    (at.row / 64 % 2 == 0 ? signs_[0] : signs_[1]) = signs_of(at);
  }
  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    const uint64_t signs = !Exchange::kRequests ? signs_of(at) : at.row / 64 % 2 == 0 ? signs_[0] : signs_[1];
    panels_.await(&p_.kept, at);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t bits = uint32_t(signs >> 32 * panel);
      if (at.column + panel * 64 >= p_.columns) break;
      uint32_t pairs[16];
      panels_.take(panel, pairs);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float x, y;
        ptx::unpack(T{}, pairs[i], x, y);
        const int j = panel * 32 + 2 * i;
        pairs[i] = ptx::pack(T{}, d[j] * slope(x, bits >> 2 * i & 1), d[j + 1] * slope(y, bits >> (2 * i + 1) & 1));
      }
      panels_.send(pairs, panel, &p_.dx, at);
    }
  }
  __device__ __forceinline__ void end() { panels_.end(); }

 private:
  static __device__ __forceinline__ float slope(float kept, bool positive) {
    if constexpr (kFromValue)
      return act_slope_from_value_and_sign<F, T>(kept, positive);
    else
      return act_slope<F, T>(kept);
  }
  __device__ __forceinline__ uint64_t signs_of(const gemm::WarpAt& at) const {
    if (!kFromValue || at.row >= p_.rows || at.column >= p_.columns) return 0;
    return p_.signs[sign_bits::word_at(at.row, at.column, p_.columns, threadIdx.x % 32)];
  }
  const Params& p_;
  Exchange panels_;
  uint64_t signs_[2] = {};  // of the requested blocks of rows
};

template <class C, class T, Major kWeights, class E> struct Product {
  using Core = C;
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(kActivatedTile);
  using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, kWeights, kTile.n, true>;
  using Schedule = gemm::Grid;
  using Epilogue = E;
};
template <class Op>
void launch(const char* name, const Tensor& a, const Tensor& w, const gemm::Problem& size,
            const typename Op::Epilogue::Params& out, Stream stream) {
  constexpr int kCluster = Op::kTile.cluster;
  const gemm::Grid schedule = gemm::Grid::of(size, Op::kTile);
  Op::Core::template launch<Op>(name,
                                {.a = Op::A::template params<kCluster>(name, a),
                                 .b = Op::B::template params<kCluster>(name, w),
                                 .schedule = schedule,
                                 .epilogue = out},
                                a.device.index, stream, schedule.tiles);
}

template <class Core, class T, class F> void launch_forward(const Linear& a, Stream stream) {
  using Op = Product<Core, T, Major::k, Activated<Core, T, F>>;
  typename Op::Epilogue::Params out{.y = Core::template target<T>("linear: y", a.y),
                                    .bias = a.b ? a.b.ptr<T>() : nullptr,
                                    .signs = a.signs ? static_cast<uint64_t*>(a.signs.data) : nullptr,
                                    .rows = uint32_t(a.y.rows()),
                                    .columns = uint32_t(a.y.cols()),
                                    .alpha = float(a.alpha),
                                    .keeps_pre = bool(a.pre)};
  if (a.pre) out.pre = Core::template target<T>("linear: pre", a.pre);
  launch<Op>("linear", a.x, a.w, {a.y.rows(), a.y.cols(), a.x.cols()}, out, stream);
}

template <class Core, class T, class F, bool kFromValue> void launch_backward(const LinearBackward& a, Stream stream) {
  using Op = Product<Core, T, Major::mn, Sloped<Core, T, F, kFromValue>>;
  const Tensor& kept = kFromValue ? a.x : a.pre;
  launch<Op>("linear_backward", a.dy, a.w, {a.dx.rows(), a.dx.cols(), a.dy.cols()},
             {.dx = Core::template target<T>("linear_backward: dx", a.dx),
              .kept = Core::template target<T>("linear_backward: x or pre", kept),
              .signs = a.signs ? static_cast<const uint64_t*>(a.signs.data) : nullptr,
              .rows = uint32_t(a.dx.rows()),
              .columns = uint32_t(a.dx.cols())},
             stream);
}

template <class Use> void with_fused(Act act, Use&& use) {
  for_each_activation(
      [&](auto f) {
        if (act_of<decltype(f)> == act) use(f);
      },
      FusedActivations{});
}

}  // namespace ingot::cuda::activated_detail

namespace ingot::cuda {

template <class Core, class T> void launch_activated(const Linear& a, Stream stream) {
  activated_detail::with_fused(a.act,
                               [&](auto f) { activated_detail::launch_forward<Core, T, decltype(f)>(a, stream); });
}
template <class Core, class T> void launch_sloped(const LinearBackward& a, Stream stream) {
  activated_detail::with_fused(a.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (has_slope_from_value_and_sign<F> && std::is_same_v<T, bf16>)
      if (a.signs) return activated_detail::launch_backward<Core, T, F, true>(a, stream);
    activated_detail::launch_backward<Core, T, F, false>(a, stream);
  });
}

}  // namespace ingot::cuda
