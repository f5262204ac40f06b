#pragma once
#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/muon/newton_schulz.h"

namespace ingot::cuda::newton_schulz_detail {

using ptx::Major;

constexpr gemm::Tile kTile = gemm::kTurns128;

// Writes alpha sums + beta add; for a symmetric result also the mirror image of tiles below the diagonal.
template <class Core, class T, bool kAdds, bool kMirrors> class Blend {
 public:
  struct Params {
    typename Core::Target to, mirrored;
    const T* add = nullptr;
    int64_t stride = 0, batch_stride = 0;  // of add
    uint32_t rows = 0, columns = 0;
    float alpha = 1, beta = 0;
  };
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ Blend(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  __device__ __forceinline__ void operator()(float (&d)[kTile.n / 2], const gemm::WarpAt& at) {
    uint32_t added[2][4][4];
    if (kAdds)
#pragma unroll
      for (int panel = 0; panel < 2; ++panel)
        gemm::load_panel(p_.add + at.batch * p_.batch_stride, p_.stride, at.row, at.column + panel * 64, p_.rows,
                         p_.columns, added[panel]);
    const bool below = kMirrors && at.row / gemm::kTileM * gemm::kTileM != at.column;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      uint32_t pairs[16];
      if (kAdds) out_.arrange(added[panel], pairs);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int j = panel * 32 + 2 * i;
        float x = 0, y = 0;
        if (kAdds) ptx::unpack(T{}, pairs[i], x, y);
        pairs[i] = ptx::pack(T{}, p_.alpha * d[j] + p_.beta * x, p_.alpha * d[j + 1] + p_.beta * y);
      }
      out_.write(pairs);
      out_.send(&p_.to, column, at.row, at.batch);
      if (!below) continue;
      out_.write_turned(pairs);
      out_.send_turned(&p_.mirrored, at.row, column, at.batch);
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class C, class T, Major kMajorA, Major kMajorB, class Order, bool kAdds> struct Product {
  using Core = C;
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(newton_schulz_detail::kTile);
  static_assert(gemm::Triangle::fits(kTile), "tiles of a symmetric result are square");
  using A = typename Core::template Operand<T, kMajorA, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, kMajorB, kTile.n, true>;
  using Schedule = Order;
  using Epilogue = Blend<Core, T, kAdds, std::is_same_v<Order, gemm::Triangle>>;
};

// to = alpha a b + beta add, sums over k.
template <class Op>
void launch(const Tensor& a, const Tensor& b, int64_t k, const Tensor& to, double alpha, const Tensor& add, double beta,
            Stream stream) {
  using T = typename Op::Type;
  using Core = typename Op::Core;
  const char* const name = "newton_schulz";
  const auto schedule = Op::Schedule::of({to.size(1), to.size(2), k, to.size(0)}, Op::kTile);
  typename Op::Epilogue::Params out{.to = Core::template padded_target<T>(name, to),
                                    .rows = uint32_t(to.size(1)),
                                    .columns = uint32_t(to.size(2)),
                                    .alpha = float(alpha),
                                    .beta = float(beta)};
  if (std::is_same_v<typename Op::Schedule, gemm::Triangle>) out.mirrored = Core::template turned_target<T>(name, to);
  if (add) out.add = add.ptr<T>(), out.stride = add.stride[1], out.batch_stride = add.stride[0];
  Core::template launch<Op>(name,
                            {.a = Op::A::template params<Op::kTile.cluster>(name, a),
                             .b = Op::B::template params<Op::kTile.cluster>(name, b),
                             .schedule = schedule,
                             .epilogue = out},
                            to.device.index, stream, schedule.tiles);
}

// kWide: the matrix has no more rows than columns.
template <class Core, class T, bool kWide> void iteration(const IterationBank& n, Stream stream) {
  using gemm::Grid;
  using gemm::Triangle;
  constexpr Major kLong = kWide ? Major::k : Major::mn;  // the square sums along the longer side
  const int64_t rows = n.x.size(1), cols = n.x.size(2);
  launch<Product<Core, T, kLong, kLong, Triangle, false>>(n.x, n.x, kWide ? cols : rows, n.square, 1, {}, 0, stream);
  const int64_t side = kWide ? rows : cols;
  launch<Product<Core, T, Major::k, Major::k, Triangle, true>>(n.square, n.square, side, n.polynomial, n.c, n.square,
                                                               n.b, stream);
  if constexpr (kWide)
    launch<Product<Core, T, Major::k, Major::mn, Grid, true>>(n.polynomial, n.x, side, n.other, 1, n.x, n.a, stream);
  else
    launch<Product<Core, T, Major::k, Major::k, Grid, true>>(n.x, n.polynomial, side, n.other, 1, n.x, n.a, stream);
}

}  // namespace ingot::cuda::newton_schulz_detail

namespace ingot::cuda {

template <class Core, class T> void launch_iteration(const IterationBank& n, Stream stream) {
  if (n.x.size(1) <= n.x.size(2)) return newton_schulz_detail::iteration<Core, T, true>(n, stream);
  newton_schulz_detail::iteration<Core, T, false>(n, stream);
}

}  // namespace ingot::cuda
