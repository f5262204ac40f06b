#pragma once
// The epilogue of the product that writes a chunk of logits: the code that both forms of a chunk share (capped.h,
// exponentials.h). For each row and tile a form stores 16-bit numbers, from which the gradient follows, and a part of
// the row's sum; the logit at the row's target is stored in fp32.
#include "ingot/core/tensor.h"
#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/cross_entropy/softcap.cuh"

namespace ingot::cuda::logit_tile {

constexpr gemm::Tile kTile = gemm::kPairs128;
constexpr int kSums = kTile.n / 2;  // sums of a thread in 64 rows of a tile: a quarter of each of two rows

template <class Core, class Part> struct Params {
  typename Core::Target kept;
  Part* parts = nullptr;  // (rows, tiles)
  float* at_target = nullptr;
  const int32_t* targets = nullptr;
  uint32_t rows = 0, columns = 0, tiles = 0;
  float softcap = 0;
  bool keeps = false;
};

// The base of an epilogue. T: the 16-bit type that is kept; Part: a row's part of the sum, from one tile.
template <class Core, class T, class Part> class LogitTile {
 public:
  using Params = logit_tile::Params<Core, Part>;
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ LogitTile(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}
  __device__ __forceinline__ void end() { out_.end(); }

 protected:
  __device__ __forceinline__ uint32_t target_of(uint32_t row) const {
    return row < p_.rows ? uint32_t(p_.targets[row]) : ~0u;
  }
  __device__ __forceinline__ void keep(const float (&d)[kSums], const gemm::WarpAt& at) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = ptx::pack(T{}, d[panel * 32 + 2 * i], d[panel * 32 + 2 * i + 1]);
      out_.write(pairs);
      out_.send(&p_.kept, column, at.row, 0);
    }
  }
  // Stores finish(number at the row's target) from the thread that holds this number, if the tile contains the target.
  // `at`: the target minus the tile's first column.
  template <class Finish>
  __device__ __forceinline__ void leave_target(const float (&d)[kSums], int half, uint32_t row, uint32_t at,
                                               const Finish& finish) const {
    const uint32_t mine = threadIdx.x % 4;
    if (at >= uint32_t(kTile.n) || at % 8 / 2 != mine || row >= p_.rows) return;
    float found = 0;
#pragma unroll
    for (uint32_t i = 0; i < kSums / 2; ++i)
      if (i / 2 * 8 + i % 2 == at - 2 * mine) found = d[i / 2 * 4 + 2 * half + i % 2];
    p_.at_target[row] = finish(found);
  }
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class Core, class T, class Epilogue_> struct Product {
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(logit_tile::kTile);
  using A = typename Core::template Operand<T, ptx::Major::k, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, ptx::Major::k, kTile.n, true>;
  using Schedule = gemm::Grid;
  using Epilogue = Epilogue_;
};

// x (T, C), w (V, C), targets (T). Writes kept (T, V), unless it is left out, parts (T, tiles of V) and at_target (T).
template <class Core, class T, class Epilogue>
void launch(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap, const Tensor& kept,
            const Tensor& parts, const Tensor& at_target, Stream stream) {
  using Op = Product<Core, T, Epilogue>;
  using Part = std::remove_pointer_t<decltype(Epilogue::Params::parts)>;
  const char* const name = "linear_cross_entropy";
  const gemm::Grid schedule = gemm::Grid::of({x.rows(), w.rows(), x.cols()}, Op::kTile);
  typename Epilogue::Params to{.parts = static_cast<Part*>(parts.data),
                               .at_target = at_target.ptr<float>(),
                               .targets = targets.ptr<int32_t>(),
                               .rows = uint32_t(x.rows()),
                               .columns = uint32_t(w.rows()),
                               .tiles = uint32_t(parts.size(1)),
                               .softcap = float(softcap),
                               .keeps = bool(kept)};
  if (kept) to.kept = Core::template target<T>(name, kept);
  Core::template launch<Op>(name,
                            {.a = Op::A::template params<Op::kTile.cluster>(name, x),
                             .b = Op::B::template params<Op::kTile.cluster>(name, w),
                             .schedule = schedule,
                             .epilogue = to},
                            x.device.index, stream, schedule.tiles);
}

}  // namespace ingot::cuda::logit_tile
