#pragma once
// The plainest user of the core: operands in either order, sums written unchanged or with a bias and a scaled addend.
// One translation unit per type and form of the core instantiates the kernels, and includes the form before this file.
#include <iterator>

#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/linear/cuda/core_product.h"
#include "ingot/kernels/linear/cuda/linear_config.h"

namespace ingot::cuda::core_product_detail {

using gemm::Tile;
using ptx::Major;

// alpha * sums + beta * add + bias.
template <class Core, class T> struct Combine {
  struct Params {
    float alpha = 1, beta = 0;
    const T *add = nullptr, *bias = nullptr;
    int64_t add_stride = 0;
    uint32_t rows = 0, columns = 0;
  };
  static __device__ __forceinline__ float2 value(const Params& p, uint32_t row, uint32_t column, float2 sums) {
    float2 y = {p.alpha * sums.x, p.alpha * sums.y};
    if (column >= p.columns || row >= p.rows) return y;
    const uint32_t next = Core::kWholeRows || column + 1 < p.columns ? 1 : 0;  // the row's last column has no next one
    if (p.bias != nullptr) y.x += tile::to_float(p.bias[column]), y.y += tile::to_float(p.bias[column + next]);
    if (p.add != nullptr) {
      const T* const add = p.add + int64_t(row) * p.add_stride + column;
      y.x += p.beta * tile::to_float(add[0]), y.y += p.beta * tile::to_float(add[next]);
    }
    return y;
  }
};

// alpha * sums: nearly all products need no more, and tiles of 192 columns have no registers for more. In the portable
// core Combine takes 4,600 instructions per tile and thread, which are fetched anew for each tile.
struct Times {
  struct Params {
    float alpha = 1;
  };
  static __device__ __forceinline__ float2 value(const Params& p, uint32_t, uint32_t, float2 sums) {
    return {p.alpha * sums.x, p.alpha * sums.y};
  }
};

template <class Core, class T, class Out, CoreForm kForm, Major kMajorA, Major kMajorB> struct Product {
  using Type = T;
  static constexpr Tile kTile = Core::tile(kForm.tile);
  static constexpr bool kCombines = kForm.combines;
  static constexpr bool kPairsTiles = !kCombines;  // the portable core's blocks of two tiles
  using Finish = std::conditional_t<kCombines, Combine<Core, Out>, Times>;
  using A = typename Core::template Operand<T, kMajorA, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, kMajorB, kTile.n, true>;
  using Schedule = gemm::Grid;
  using Epilogue = gemm::Store<Out, Finish, 1, 2, Core>;
};

template <class Op, class Out> typename Op::Finish::Params finish_of(const PlainProduct& p) {
  if constexpr (!Op::kCombines) {
    return {p.alpha};
  } else {
    const bool reads = p.beta != 0 && !core_adds(p);
    return {.alpha = p.alpha,
            .beta = p.beta,
            .add = reads ? p.add.ptr<Out>() : nullptr,
            .bias = p.bias ? p.bias.ptr<Out>() : nullptr,
            .add_stride = reads ? p.add.row_stride() : 0,
            .rows = uint32_t(p.c.rows()),
            .columns = uint32_t(p.c.cols())};
  }
}

template <class Core, class T, class Out, CoreForm kForm, Major kMajorA, Major kMajorB>
void launch(const PlainProduct& p, Stream stream) {
  using Op = Product<Core, T, Out, kForm, kMajorA, kMajorB>;
  constexpr Tile kTile = Op::kTile;
  const gemm::Problem size{p.c.rows(), p.c.cols(), p.transpose_a ? p.a.rows() : p.a.cols()};
  const gemm::Grid schedule = gemm::Grid::of(size, kTile);
  Core::template launch<Op>("matmul",
                            {.a = Op::A::template params<kTile.cluster>("matmul: a", p.a),
                             .b = Op::B::template params<kTile.cluster>("matmul: b", p.b),
                             .schedule = schedule,
                             .epilogue = Op::Epilogue::params("matmul: c", p.c, core_adds(p), finish_of<Op, Out>(p))},
                            p.c.device.index, stream, schedule.tiles);
}

template <class Core, class T, class Out, CoreForm kForm> void launch_majors(const PlainProduct& p, Stream stream) {
  if (p.transpose_a && p.transpose_b) return launch<Core, T, Out, kForm, Major::mn, Major::k>(p, stream);
  if (p.transpose_a) return launch<Core, T, Out, kForm, Major::mn, Major::mn>(p, stream);
  if (p.transpose_b) return launch<Core, T, Out, kForm, Major::k, Major::k>(p, stream);
  launch<Core, T, Out, kForm, Major::k, Major::mn>(p, stream);
}
template <class Core, class T, CoreForm kForm> void launch_form(const PlainProduct& p, Stream stream) {
  if (p.c.dtype == DType::f32) return launch_majors<Core, T, float, kForm>(p, stream);
  launch_majors<Core, T, T, kForm>(p, stream);
}

}  // namespace ingot::cuda::core_product_detail

namespace ingot::cuda {

template <class Core, class T>
void launch_core_product(const PlainProduct& p, [[maybe_unused]] int form, Stream stream) {
  using namespace core_product_detail;
  static_assert(std::size(kCoreForms) == 3, "one call for each form");
  if constexpr (Core::kAllTiles)
    if (form == 1) return launch_form<Core, T, kCoreForms[1]>(p, stream);
  if (form == 2) return launch_form<Core, T, kCoreForms[2]>(p, stream);
  launch_form<Core, T, kCoreForms[0]>(p, stream);
}

}  // namespace ingot::cuda
