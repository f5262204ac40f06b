#pragma once
// Both projections and the gate in one kernel: B's tile is 64 rows of the gate's weights above 64 rows of up's, so that
// a thread's sums hold gate and up of the same 32 elements. Backward, both halves are a single product again: dx runs
// through K of the first and then of the second; dW are two products of one launch.
#include <type_traits>

#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/swiglu/gate.cuh"
#include "ingot/kernels/swiglu/gated.h"

namespace ingot::cuda::gated_detail {

using gemm::Pair;
using ptx::Major;

constexpr int kColumns = kGatedTile.n / 2;  // columns of h in a tile: one panel of a warp
static_assert(kColumns == 64, "a warp writes its columns of h as one panel");

// Computes h from a tile's sums, and stores gate and up where the caller keeps them.
template <class Core, class T, bool kPlain> class Epilogue {
 public:
  struct Params {
    typename Core::Target h, gate, up;
    const T *b_gate = nullptr, *b_up = nullptr;
    uint32_t columns = 0;
    bool keeps = false, writes_h = true;
    GateNumbers numbers;
  };
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ Epilogue(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  __device__ __forceinline__ void operator()(float (&d)[kColumns], const gemm::WarpAt& at) {
    const uint32_t column = at.column / 2;
    float gate[32], up[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) gate[i] = d[i], up[i] = d[32 + i];
    if (p_.b_gate != nullptr) add_bias(gate, p_.b_gate, column);
    if (p_.b_up != nullptr) add_bias(up, p_.b_up, column);
    if (p_.keeps) {
      send(gate, &p_.gate, column, at);
      send(up, &p_.up, column, at);
    }
    if (!p_.writes_h) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) gate[i] = gated<false, kPlain>(p_.numbers, gate[i], up[i]);
    send(gate, &p_.h, column, at);
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  __device__ __forceinline__ void add_bias(float (&v)[32], const T* bias, uint32_t column) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t c = column + 8 * j + threadIdx.x % 4 * 2;
      if (c >= p_.columns) break;  // columns are whole eights
      const float x = tile::to_float(bias[c]), y = tile::to_float(bias[c + 1]);
      v[4 * j] += x, v[4 * j + 1] += y, v[4 * j + 2] += x, v[4 * j + 3] += y;
    }
  }
  __device__ __forceinline__ void send(const float (&v)[32], const typename Core::Target* to, uint32_t column,
                                       const gemm::WarpAt& at) {
    uint32_t pairs[16];
    gemm::pack<T>(v, pairs);
    out_.write(pairs);
    out_.send(to, column, at.row, 0);
  }
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class Core, class T, Major kWeights, bool kPlain> struct Forward {
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(kGatedTile);
  using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, kWeights, kTile.n, true, Pair::stacked>;
  using Schedule = gemm::Grid;
  using Epilogue = gated_detail::Epilogue<Core, T, kPlain>;
};

template <class Core, class T, Major kWeights, bool kPlain> void launch_forward(const GatedLinear& g, Stream stream) {
  using Op = Forward<Core, T, kWeights, kPlain>;
  constexpr int kCluster = Op::kTile.cluster;
  const int64_t hidden = kWeights == Major::k ? g.w_gate.rows() : g.w_gate.cols();
  const gemm::Grid schedule = gemm::Grid::of(gated_problem(g.x.rows(), hidden, g.x.cols()), Op::kTile);
  typename Op::Epilogue::Params out{.b_gate = g.b_gate ? g.b_gate.ptr<T>() : nullptr,
                                    .b_up = g.b_up ? g.b_up.ptr<T>() : nullptr,
                                    .columns = uint32_t(hidden),
                                    .keeps = bool(g.gate),
                                    .writes_h = bool(g.h),
                                    .numbers = gate_numbers(g.options)};
  if (g.h) out.h = Core::template target<T>("gated_linear: h", g.h);
  if (g.gate) out.gate = Core::template target<T>("gated_linear: gate", g.gate);
  if (g.gate) out.up = Core::template target<T>("gated_linear: up", g.up);
  Core::template launch<Op>("gated_linear",
                            {.a = Op::A::template params<kCluster>("gated_linear: x", g.x),
                             .b = Op::B::template params<kCluster>("gated_linear: weights", g.w_gate, g.w_up),
                             .schedule = schedule,
                             .epilogue = out},
                            g.x.device.index, stream, schedule.tiles);
}

template <class Core, class T, Major kWeights> struct InputGradient {
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(kGatedTile);
  using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false, Pair::chained>;
  using B = typename Core::template Operand<T, kWeights, kTile.n, true, Pair::chained>;
  using Schedule = gemm::Grid;
  using Epilogue = gemm::Store<T, gemm::AsIs, 1, 2, Core>;
};
template <class Core, class T, Major kWeights> void launch_dx(const GatedGradients& g, Stream stream) {
  using Op = InputGradient<Core, T, kWeights>;
  constexpr int kCluster = Op::kTile.cluster;
  gemm::Grid schedule = gemm::Grid::of({g.dx.rows(), g.dx.cols(), g.dgate.cols()}, Op::kTile);
  schedule.k_steps *= 2;  // the K steps of the second half follow those of the first
  Core::template launch<Op>("gated_linear_backward",
                            {.a = Op::A::template params<kCluster>("gated_linear_backward: dgate, dup", g.dgate, g.dup),
                             .b = Op::B::template params<kCluster>("gated_linear_backward: weights", g.w_gate, g.w_up),
                             .schedule = schedule,
                             .epilogue = Op::Epilogue::params("gated_linear_backward: dx", g.dx)},
                            g.dx.device.index, stream, schedule.tiles);
}

// dW (H, C): its rows belong to dgate and dup; transposed (C, H): its columns.
template <class Core, class T, class Sum, bool kTransposed> struct WeightGradient {
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(kGatedTile);
  static constexpr bool kPairIsA = !kTransposed;
  using A = typename Core::template Operand<T, Major::mn, gemm::kTileM, false, kPairIsA ? Pair::by_batch : Pair::same>;
  using B = typename Core::template Operand<T, Major::mn, kTile.n, true, kPairIsA ? Pair::same : Pair::by_batch>;
  using Schedule = gemm::Grid;
  using Epilogue = gemm::Store<Sum, gemm::AsIs, 2, 2, Core>;
};
template <class Core, class T, class Sum, bool kTransposed> void launch_dw(const GatedGradients& g, Stream stream) {
  using Op = WeightGradient<Core, T, Sum, kTransposed>;
  constexpr int kCluster = Op::kTile.cluster;
  const char* const name = "gated_linear_backward: dgate, dup, x";
  const gemm::Grid schedule = gemm::Grid::of({g.dw_gate.rows(), g.dw_gate.cols(), g.x.rows(), 2}, Op::kTile);
  const auto of = [&]<class Source>(std::type_identity<Source>, bool pair) {
    return pair ? Source::template params<kCluster>(name, g.dgate, g.dup)
                : Source::template params<kCluster>(name, g.x);
  };
  Core::template launch<Op>(
      "gated_linear_backward",
      {.a = of(std::type_identity<typename Op::A>{}, Op::kPairIsA),
       .b = of(std::type_identity<typename Op::B>{}, !Op::kPairIsA),
       .schedule = schedule,
       .epilogue = Op::Epilogue::params("gated_linear_backward: dw", g.dw_gate, !g.overwrite, {}, g.dw_up)},
      g.x.device.index, stream, schedule.tiles);
}

}  // namespace ingot::cuda::gated_detail

namespace ingot::cuda {

template <class Core, class T> void launch_gated(const GatedLinear& g, Stream stream) {
  using namespace gated_detail;
  const bool plain = is_plain(g.options);
  if (g.transposed)
    return (plain ? launch_forward<Core, T, Major::mn, true> : launch_forward<Core, T, Major::mn, false>)(g, stream);
  (plain ? launch_forward<Core, T, Major::k, true> : launch_forward<Core, T, Major::k, false>)(g, stream);
}
// The product's K dimension runs across the rows in memory: MN-major unless transposed.
template <class Core, class T> void launch_gated_dx(const GatedGradients& g, Stream stream) {
  using namespace gated_detail;
  (g.transposed ? launch_dx<Core, T, Major::k> : launch_dx<Core, T, Major::mn>)(g, stream);
}
template <class Core, class T> void launch_gated_dw(const GatedGradients& g, Stream stream) {
  using namespace gated_detail;
  if (g.dw_gate.dtype == DType::f32)
    return (g.transposed ? launch_dw<Core, T, float, true> : launch_dw<Core, T, float, false>)(g, stream);
  (g.transposed ? launch_dw<Core, T, T, true> : launch_dw<Core, T, T, false>)(g, stream);
}

}  // namespace ingot::cuda
