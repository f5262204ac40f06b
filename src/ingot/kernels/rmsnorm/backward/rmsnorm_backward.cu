#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/backward/rmsnorm_backward.cuh"
#include "ingot/kernels/rmsnorm/backward/weight_gradient_sum.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm.h"

namespace ingot::cuda {
namespace {

constexpr int64_t kMaxRows = 0xffffffff;
constexpr const char* kOp = "rmsnorm_backward";

// With 32 registers per thread, a warp of the second kernel fits on each scheduler beside all threads of an SM.
template <class Work>
constexpr int kRegisters = backward_threads(int(sizeof(typename Work::X)), int(sizeof(typename Work::Y)),
                                            Work::kColumns, Work::kRows, Work::kRare) == 768
                               ? 80
                               : 120;

template <class Work>
__global__ void __maxnreg__(kRegisters<Work>) backward_rows_kernel(const __grid_constant__ BackwardParams p) {
  auto& memory = tile::shared<typename tile::RoundSums<Work::kSums>::Memory>();
  ptx::let_next_kernel_start();
  backward_rows<Work>(p, memory, tile::dynamic_shared<uint4>());
}

struct ElementsMemory {
  tile::GroupSumMemory<2, kBackwardElementThreads> turn[2];
};
template <class X, class Y>
__global__ void __launch_bounds__(kBackwardElementThreads)
    backward_elements_kernel(const __grid_constant__ BackwardParams p) {
  auto& memory = tile::shared<ElementsMemory>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  backward_elements<X, Y>(p, memory.turn);
}

struct PartialSumMemory {
  float group[kPartialSumGroups][kPartialSumColumns];
};
__global__ void __launch_bounds__(kPartialSumThreads, 16) partial_sum_kernel(const __grid_constant__ PartialSum p) {
  auto& memory = tile::shared<PartialSumMemory>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  sum_partials(p, memory.group);
}

// --- host

using Kernel = void (*)(BackwardParams);

template <class X, class Y, int kColumns, int kRows> Kernel rows_kernel(bool rare) {
  if constexpr (std::is_same_v<X, Y>)
    if (!rare) return backward_rows_kernel<BackwardWork<X, Y, kColumns, kRows, false>>;
  return backward_rows_kernel<BackwardWork<X, Y, kColumns, kRows, true>>;
}

// Mixed types use the kernel with all rare options.
template <class X, class Y> Kernel pick_kernel(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s) {
  if (!c.vectors) return backward_elements_kernel<X, Y>;
  const bool rare = backward_is_rare(s);
  const int kind = c.columns * 10 + c.rows_at_once;
  if (kind == 161) return rows_kernel<X, Y, 16, 1>(rare);
  if constexpr (std::is_same_v<X, Y>) {
    if (kind == 82) return rows_kernel<X, X, 8, 2>(rare);
    if constexpr (sizeof(X) == 2)
      if (kind == 162 && !rare) return backward_rows_kernel<BackwardWork<X, X, 16, 2, false>>;
  }
  fail(ErrorCode::unsupported, kOp, ": found ", c.columns, " columns of ", c.rows_at_once,
       " rows a thread, expected 16 x 1 or, where types are not mixed, 8 x 2 or, in 16 bits, 16 x 2");
}

// The operands s, dy, the addend of ds, and dx.
RowMaps<4> rows_of(const RmsNormBackward& a) {
  const Tensor dsum = a.dx ? a.dsum : Tensor();
  return merge_rows<4>(kOp, {a.s, a.dy, dsum ? dsum : a.dx && a.accumulate_dx ? a.dx : Tensor(), a.dx});
}

RmsNormBackwardShape shape_of(const RmsNormBackward& a) {
  const int64_t per_vec = 16 / size_of(a.s.dtype);
  const bool aligned = rows_aligned(a.dy, per_vec) && rows_aligned(a.s, per_vec) && rows_aligned(a.dsum, per_vec) &&
                       rows_aligned(a.dx, per_vec) && rows_aligned(a.w, per_vec);
  return {.rows = a.s.rows(),
          .cols = a.s.cols(),
          .s = a.s.dtype,
          .dy = a.dy.dtype,
          .aligned = aligned,
          .rare = !a.dx || !a.rstd || a.dsum || a.accumulate_dx || rows_of(a).inner != 0};
}

void check_types(const RmsNormBackward& a) {
  if (a.w) with_cuda_float_type(kOp, a.w.dtype, [](auto) { return 0; });
  INGOT_CHECK(!a.dx || a.dx.dtype == a.s.dtype, kOp, ": found dx ", a.dx.dtype, ", expected s's ", a.s.dtype,
              " on a GPU");
  INGOT_CHECK(!a.dsum || a.dsum.dtype == a.s.dtype, kOp, ": found dsum ", a.dsum.dtype, ", expected s's ", a.s.dtype,
              " on a GPU");
  INGOT_CHECK(!a.rstd || a.rstd.dtype == DType::f32, kOp, ": found rstd ", a.rstd.dtype, ", expected f32");
  INGOT_CHECK(!a.dw || a.dw.dtype == DType::f32, kOp, ": found dw ", a.dw.dtype, ", expected f32");
  INGOT_CHECK(!a.dw || reinterpret_cast<uintptr_t>(a.workspace.data) % 16 == 0, kOp, ": found workspace at ",
              a.workspace.data, ", expected a multiple of 16");
  if (a.s.rows() > kMaxRows)
    fail(ErrorCode::unsupported, kOp, ": found ", a.s.rows(), " rows, expected at most ", kMaxRows, " on a GPU");
}

void check_config(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s) {
  if (!c.vectors) return;
  const int most = backward_threads(c, s), groups = c.threads / c.group;
  INGOT_CHECK(c.threads <= most && c.threads % 32 == 0 && c.threads % c.group == 0 &&
                  (c.group % 32 == 0 || round_up_pow2(c.group) == c.group) && (c.group <= 32 || groups <= 15) &&
                  (c.cluster == 1 || (groups == 1 && c.group >= 32)),
              kOp, ": found groups of ", c.group, " in blocks of ", c.threads, " and clusters of ", c.cluster,
              ", expected at most ", most, " threads, whole groups, and clusters only with one row per block");
  INGOT_CHECK(int64_t(c.group) * c.columns * c.cluster >= s.cols, kOp, ": found room for ",
              c.group * c.columns * c.cluster, " columns, expected ", s.cols);
}

BackwardParams params(const RmsNormBackward& a, const RmsNormBackwardTuning& tuning) {
  const Tensor dx = a.dx, dsum = a.dx ? a.dsum : Tensor();
  const Tensor more = dsum ? dsum : a.dx && a.accumulate_dx ? a.dx : Tensor();
  const RowMaps<4> rows = rows_of(a);
  return {.dy = a.dy.data,
          .s = a.s.data,
          .w = a.w ? a.w.data : nullptr,
          .more = more ? more.data : nullptr,
          .dx = dx ? dx.data : nullptr,
          .rstd = a.rstd ? static_cast<const float*>(a.rstd.data) : nullptr,
          .partial = a.dw ? static_cast<float*>(a.workspace.data) : nullptr,
          .dy_rows = rows.of[1],
          .s_rows = rows.of[0],
          .more_rows = rows.of[2],
          .dx_rows = rows.of[3],
          .rows = a.s.rows(),
          .cols = a.s.cols(),
          .partial_stride = partial_stride(a.s.cols()),
          .inner = uint32_t(rows.inner),
          .vecs = uint32_t(a.s.cols() * size_of(a.s.dtype) / 16),
          .group = uint32_t(tuning.config.group),
          .cluster = uint32_t(tuning.config.cluster),
          .stages = uint32_t(tuning.config.stages),
          .eps = float(a.eps),
          .scale = float(a.scale),
          .w_offset = a.unit_offset ? 1.f : 0.f,
          .inverse_cols = float(1.0 / double(a.s.cols())),
          .w_dtype = a.w ? a.w.dtype : DType::f32,
          .accumulate = bool(dsum) && a.accumulate_dx,
          .prefetch = tuning.prefetch};
}

}  // namespace

RmsNormBackwardTuning default_rmsnorm_backward_tuning(const RmsNormBackward& a) {
  return {.config = pick_rmsnorm_backward_config(shape_of(a), rmsnorm_limits(a.s.device.index))};
}

void rmsnorm_backward(const RmsNormBackward& a, Stream stream) {
  rmsnorm_backward_with(a, default_rmsnorm_backward_tuning(a), stream);
}

void rmsnorm_backward_with(const RmsNormBackward& a, const RmsNormBackwardTuning& tuning, Stream stream) {
  const RmsNormBackwardConfig& c = tuning.config;
  const Kernel kernel = with_cuda_float_type(kOp, a.s.dtype, [&](auto s) {
    return with_cuda_float_type(kOp, a.dy.dtype,
                                [&](auto dy) { return pick_kernel<decltype(s), decltype(dy)>(c, shape_of(a)); });
  });
  check_types(a);
  if (a.s.numel() == 0 || (!a.dx && !a.dw)) return;
  const BackwardParams p = params(a, tuning);
  check_config(c, shape_of(a));
  const gpu::Limits limits = rmsnorm_limits(a.s.device.index);
  const bool overlap = tuning.overlap && limits.hopper;
  gpu::launch(kOp, kernel,
              {.grid = int64_t(c.blocks) * c.cluster,
               .block = c.threads,
               .smem = backward_smem(c, shape_of(a), limits),
               .cluster = c.cluster,
               .overlap = overlap,
               .device = a.s.device.index},
              stream, p);
  if (!a.dw) return;
  gpu::launch("rmsnorm_backward's sum of dw", partial_sum_kernel,
              {.grid = (p.cols + kPartialSumColumns - 1) / kPartialSumColumns,
               .block = kPartialSumThreads,
               .overlap = overlap,
               .device = a.s.device.index},
              stream,
              PartialSum{.partial = p.partial,
                         .dw = static_cast<float*>(a.dw.data),
                         .cols = p.cols,
                         .count = uint32_t(c.blocks),
                         .scale = p.scale,
                         .stride = p.partial_stride});
}

int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device) {
  return most_partial_rows(rows, cols, dtype, rmsnorm_limits(device.index)) * partial_stride(cols) * 4;
}

}  // namespace ingot::cuda
