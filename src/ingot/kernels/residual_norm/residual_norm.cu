// The launches of residual_norm.h on a GPU. A warp processes a row at a time, with the whole row in registers: each
// operand is read once for all steps.
#include <algorithm>
#include <initializer_list>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/residual_norm/backward.cuh"
#include "ingot/kernels/residual_norm/forward.cuh"
#include "ingot/kernels/residual_norm/residual_norm.h"

namespace ingot::cuda {
namespace {

using namespace residual_norm_kernels;

bool fits(const Tensor& like, std::initializer_list<Tensor> matrices) {
  if (like.dtype != DType::bf16 && like.dtype != DType::f16) return false;
  if (like.cols() % kVector != 0 || like.cols() == 0 || like.cols() > 32 * kVector * kMostVectors) return false;
  for (const Tensor& t : matrices)
    if (t && !tile::rows_start_aligned(t, 16)) return false;
  return true;
}
int64_t blocks_for(int64_t rows) { return std::min((rows + kWarps - 1) / kWarps, kBlocks); }

// Calls go.operator()<T, V>() with the type and the number of vectors per lane.
template <class Go> void with_form(const Tensor& like, Go&& go) {
  const int64_t vectors = (like.cols() + 32 * kVector - 1) / (32 * kVector);
  const auto typed = [&]<class T>(T) {
    if (vectors == 1) return go.template operator()<T, 1>();
    if (vectors == 2) return go.template operator()<T, 2>();
    go.template operator()<T, kMostVectors>();
  };
  if (like.dtype == DType::bf16) return typed(bf16{});
  typed(f16{});
}

}  // namespace

bool residual_norm(const ResidualNorm& r, Stream stream) {
  if (r.w || (r.branch && r.x0) || !fits(r.x, {r.x, r.branch, r.sum, r.x0, r.mixed, r.y})) return false;
  const int64_t rows = r.x.rows();
  if (rows == 0) return true;
  with_form(r.x, [&]<class T, int V>() {
    const ForwardParams<T> p{.x = r.x,
                             .branch = r.branch,
                             .sum = r.sum,
                             .x0 = r.x0,
                             .mixed = r.mixed,
                             .y = r.y,
                             .scale = r.scale,
                             .a = r.a,
                             .b = r.b,
                             .rstd = r.rstd ? r.rstd.ptr<float>() : nullptr,
                             .rows = rows,
                             .cols = int(r.x.cols()),
                             .eps = float(r.eps),
                             .norm_scale = float(r.norm_scale)};
    const auto launch = [&](auto kernel) {
      gpu::launch("residual_norm", kernel, {.grid = blocks_for(rows), .block = kThreads, .device = r.x.device.index},
                  stream, p);
    };
    if (r.branch) return launch(residual_norm_forward<T, V, true, false>);
    if (r.x0) return launch(residual_norm_forward<T, V, false, true>);
    launch(residual_norm_forward<T, V, false, false>);
  });
  return true;
}

bool residual_norm_backward(const ResidualNormBackward& r, Stream stream) {
  const char* op = "residual_norm_backward";
  if (r.w || !r.rstd || (!r.dsum && !r.more) || (r.branch && r.a) ||
      !fits(r.dy, {r.dy, r.m, r.dsum, r.x, r.x0, r.dx0, r.dx, r.more, r.branch, r.dbranch}))
    return false;
  const int64_t rows = r.dy.rows(), cols = r.dy.cols();
  if (rows == 0) return true;
  const bool frozen = r.x0 ? false : !r.dscale;
  const int sums = r.x0 ? 2 : r.branch && !frozen ? 1 : 0;
  const int64_t need = sums > 0 ? residual_workspace_bytes(rows, cols, r.dy.device) : 0;
  INGOT_CHECK_GE(r.workspace ? r.workspace.bytes() : 0, need, op, ": bytes of workspace");
  const int64_t blocks = blocks_for(rows);
  static_assert(kBlocks <= residual::kMostRowBlocks);
  residual::Walk walk{.rows = rows, .cols = cols, .row_blocks = int(blocks)};
  if (sums > 0) {
    walk.total = static_cast<double*>(r.workspace.data);
    walk.partial = reinterpret_cast<float*>(walk.total + residual::kMostSums * cols);
  }
  const int device = r.dy.device.index;
  with_form(r.dy, [&]<class T, int V>() {
    const BackwardParams<T> p{.dy = r.dy,
                              .m = r.m,
                              .dsum = r.dsum,
                              .x = r.x,
                              .x0 = r.x0,
                              .dx0 = r.dx0,
                              .dx = r.dx,
                              .more = r.more,
                              .branch = r.branch,
                              .dbranch = r.dbranch,
                              .scale = r.scale,
                              .a = r.a,
                              .b = r.b,
                              .dscale = r.dscale,
                              .da = r.da,
                              .db = r.db,
                              .rstd = r.rstd.ptr<float>(),
                              .rows = rows,
                              .cols = int(cols),
                              .norm_scale = float(r.norm_scale),
                              .walk = walk};
    const auto run = [&]<bool kFactor, bool kBranch, bool kFrozen>() {
      const auto launch = [&](auto kernel) {
        gpu::launch(op, kernel, {.grid = blocks, .block = kThreads, .device = device}, stream, p);
      };
      if constexpr (kBranch)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::none>);
      else if (!r.more)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::none>);
      else if (r.dsum)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::beside>);
      else
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::alone>);
      using Sums = AddSums<kFactor, kBranch>;
      if constexpr (!kFrozen && Sums::kSums > 0)
        gpu::launch(op, residual::add_partials<Sums>,
                    {.grid = (cols + 31) / 32, .block = residual::kPartialThreads, .device = device}, stream,
                    Sums{.da = r.da, .db = r.db, .dscale = r.dscale}, walk);
    };
    if (r.x0) return run.template operator()<true, false, false>();
    if (r.branch && frozen) return run.template operator()<false, true, true>();
    if (r.branch) return run.template operator()<false, true, false>();
    if (r.a) return run.template operator()<true, false, true>();
    run.template operator()<false, false, true>();
  });
  return true;
}

}  // namespace ingot::cuda
