#pragma once
#include <utility>

#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/muon/newton_schulz.h"

namespace ingot::cuda::newton_schulz_detail {

using ptx::Major;

constexpr gemm::Tile kTile = gemm::kTurns128;

// What an epilogue writes:
//     sums               the sums
//     blend              alpha sums + beta add, with a given matrix
//     blend_and_factor   the blend, and to a second matrix the factor: by blend + diagonal I
enum class Result { sums, blend, blend_and_factor };

// For a symmetric result the mirror image of tiles below the diagonal is written, too.
template <class Core, class T, Result kResult, bool kMirrors> class Blend {
 public:
  static constexpr bool kAdds = kResult != Result::sums;
  static constexpr int kResults = kResult == Result::blend_and_factor ? 2 : 1;
  struct Params {
    typename Core::Target to[kResults], mirrored[kResults];
    const T* add = nullptr;
    int64_t stride = 0, batch_stride = 0;  // of add
    uint32_t rows = 0, columns = 0;
    float alpha = 1, beta = 0, by = 1, diagonal = 0;
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
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      uint32_t pairs[16], factor[16];
      if (kAdds) out_.arrange(added[panel], pairs);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int j = panel * 32 + 2 * i;
        float x = 0, y = 0;
        if (kAdds) ptx::unpack(T{}, pairs[i], x, y);
        x = p_.alpha * d[j] + p_.beta * x, y = p_.alpha * d[j + 1] + p_.beta * y;
        pairs[i] = ptx::pack(T{}, x, y);
        if (kResults == 2)
          factor[i] = ptx::pack(T{}, p_.by * x + identity(at, column, i, 0), p_.by * y + identity(at, column, i, 1));
      }
      send(pairs, 0, at, column);
      if (kResults == 2) send(factor, kResults - 1, at, column);
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  // p.diagonal on the diagonal, for element `second` of pair i of a fragment's 64 columns.
  __device__ __forceinline__ float identity(const gemm::WarpAt& at, uint32_t column, int i, uint32_t second) const {
    const uint32_t lane = threadIdx.x % 32;
    const bool on = at.row + lane / 4 + i % 2 * 8 == column + i / 2 * 8 + lane % 4 * 2 + second;
    return on ? p_.diagonal : 0;
  }
  __device__ __forceinline__ void send(const uint32_t (&pairs)[16], int result, const gemm::WarpAt& at,
                                       uint32_t column) {
    out_.write(pairs);
    out_.send(&p_.to[result], column, at.row, at.batch);
    if (!kMirrors || at.row / gemm::kTileM * gemm::kTileM == at.column) return;
    out_.write_turned(pairs);
    out_.send_turned(&p_.mirrored[result], at.row, column, at.batch);
  }

  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class C, class T, Major kMajorA, Major kMajorB, class Order, Result kResult> struct Product {
  using Core = C;
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(newton_schulz_detail::kTile);
  static_assert(gemm::Triangle::fits(kTile), "tiles of a symmetric result are square");
  static constexpr bool kPairsTiles = false;  // most of the portable core's tiles are those of a triangle
  using A = typename Core::template Operand<T, kMajorA, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, kMajorB, kTile.n, true>;
  using Schedule = Order;
  using Epilogue = Blend<Core, T, kResult, std::is_same_v<Order, gemm::Triangle>>;
};

// to = alpha a b + beta add, sums over k; factor = by to + diagonal I.
struct Blended {
  Tensor to;
  double alpha = 1;
  Tensor add;
  double beta = 0;
  Tensor factor;
  double by = 1, diagonal = 0;
};
template <class Op> void launch(const Tensor& a, const Tensor& b, int64_t k, const Blended& r, Stream stream) {
  using T = typename Op::Type;
  using Core = typename Op::Core;
  const char* const name = "newton_schulz";
  const auto schedule = Op::Schedule::of({r.to.size(1), r.to.size(2), k, r.to.size(0)}, Op::kTile);
  typename Op::Epilogue::Params out{.rows = uint32_t(r.to.size(1)),
                                    .columns = uint32_t(r.to.size(2)),
                                    .alpha = float(r.alpha),
                                    .beta = float(r.beta),
                                    .by = float(r.by),
                                    .diagonal = float(r.diagonal)};
  for (int i = 0; i < Op::Epilogue::kResults; ++i) {
    const Tensor& to = i == 0 ? r.to : r.factor;
    out.to[i] = Core::template padded_target<T>(name, to);
    if (std::is_same_v<typename Op::Schedule, gemm::Triangle>)
      out.mirrored[i] = Core::template turned_target<T>(name, to);
  }
  if (r.add) out.add = r.add.template ptr<T>(), out.stride = r.add.stride[1], out.batch_stride = r.add.stride[0];
  Core::template launch<Op>(name,
                            {.a = Op::A::template params<Op::kTile.cluster>(name, a),
                             .b = Op::B::template params<Op::kTile.cluster>(name, b),
                             .schedule = schedule,
                             .epilogue = out},
                            r.to.device.index, stream, schedule.tiles);
}

// The products of a bank. X, A and their products with polynomials are `scale` times as large as named.
template <class Core> struct BankProducts {
  using T = f16;
  using Grid = gemm::Grid;
  using Triangle = gemm::Triangle;
  double scale;
  Coefficients co;
  Stream stream;

  static bool wide(const Tensor& x) { return x.size(1) <= x.size(2); }

  // a = X X^T, or X^T X of a tall X: sums along the longer side
  void square(const Tensor& x, const Tensor& a) const {
    const Blended to{.to = a, .alpha = 1 / scale};
    if (wide(x))
      return launch<Product<Core, T, Major::k, Major::k, Triangle, Result::sums>>(x, x, x.size(2), to, stream);
    launch<Product<Core, T, Major::mn, Major::mn, Triangle, Result::sums>>(x, x, x.size(1), to, stream);
  }
  // q = b A + c A A
  void polynomial(const Tensor& a, const Tensor& q) const {
    symmetric<Result::blend>(a, a, {.to = q, .alpha = co.c / scale, .add = a, .beta = co.b});
  }
  // and p = a I + b A + c A A, not scaled
  void polynomial(const Tensor& a, const Tensor& q, const Tensor& p) const {
    symmetric<Result::blend_and_factor>(
        a, a, {.to = q, .alpha = co.c / scale, .add = a, .beta = co.b, .factor = p, .by = 1 / scale, .diagonal = co.a});
  }
  // to = (a I + q) y, for square matrices. a I is not added to q beforehand, because the small numbers on q's diagonal
  // would lose bits in that sum.
  void apply(const Tensor& q, const Tensor& y, const Tensor& to) const {
    symmetric<Result::blend>(q, y, {.to = to, .alpha = 1 / scale, .add = y, .beta = co.a});
  }
  // to = (a I + q) X
  void apply_step(const Tensor& q, const Tensor& x, const Tensor& to) const {
    on_matrix<Result::blend>(q, x, {.to = to, .alpha = 1 / scale, .add = x, .beta = co.a});
  }
  // to = p X
  void apply_factor(const Tensor& p, const Tensor& x, const Tensor& to) const {
    on_matrix<Result::sums>(p, x, {.to = to});
  }

 private:
  // The right factor is read by rows. Reading it by columns would give the same result if the rounded square were
  // symmetric. Inside the tiles on the diagonal it is not symmetric, and the steps would enlarge the difference between
  // y and its transpose from 0.1 % to 5 %.
  template <Result kResult> void symmetric(const Tensor& left, const Tensor& right, const Blended& to) const {
    launch<Product<Core, T, Major::k, Major::mn, Triangle, kResult>>(left, right, left.size(1), to, stream);
  }
  template <Result kResult> void on_matrix(const Tensor& square, const Tensor& x, const Blended& to) const {
    if (wide(x))
      return launch<Product<Core, T, Major::k, Major::mn, Grid, kResult>>(square, x, square.size(1), to, stream);
    launch<Product<Core, T, Major::k, Major::k, Grid, kResult>>(x, square, square.size(1), to, stream);
  }
};

// A part of the steps on the square, from x to y.
template <class Core>
void iterate_on_square(const BankProducts<Core>& products, const IterationBank& n, const Tensor& x, const Tensor& y,
                       int steps) {
  auto [a, q, half, p, spare] = n.square;
  products.square(x, a);
  for (int step = 0; step < steps; ++step) {
    if (step == 0) {
      products.polynomial(a, q, p);
    } else {
      products.polynomial(a, q);
      products.apply(q, p, spare);
      std::swap(p, spare);
    }
    if (step + 1 < steps) {
      products.apply(q, a, half);
      products.apply(q, half, a);
    }
  }
  products.apply_factor(p, x, y);
}

}  // namespace ingot::cuda::newton_schulz_detail

namespace ingot::cuda {

template <class Core> Tensor launch_iteration(const IterationBank& n, const Coefficients& co, Stream stream) {
  // P's roundings in f16 are 2^-12 of this growth, which is no more than the roundings to bf16 that the result has in
  // any case.
  constexpr double kMostGrowth = 64;
  const newton_schulz_detail::BankProducts<Core> products{n.scale, co, stream};
  Tensor x = n.x, other = n.other;
  if (iterates_on_square(x.size(1), x.size(2))) {
    for (int steps : parts_on_square(co, kMostGrowth)) {
      newton_schulz_detail::iterate_on_square(products, n, x, other, steps);
      std::swap(x, other);
    }
    return x;
  }
  for (int step = 0; step < co.steps; ++step, std::swap(x, other)) {
    products.square(x, n.square[0]);
    products.polynomial(n.square[0], n.square[1]);
    products.apply_step(n.square[1], x, other);
  }
  return x;
}

}  // namespace ingot::cuda
