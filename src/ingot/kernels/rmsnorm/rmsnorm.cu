#include <bit>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/rmsnorm/forward/rmsnorm_forward.h"
#include "ingot/kernels/rmsnorm/forward/rmsnorm_walk.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

namespace ingot::cuda {
namespace {

constexpr int64_t kMaxRows = 0xffffffff;
constexpr int kMaxResident = 2048;  // the most threads of an SM

RmsNormShape shape_of(const RmsNorm& a) {
  const int64_t per_vec = 16 / size_of(a.x.dtype);
  const bool aligned = rows_aligned(a.x, per_vec) && rows_aligned(a.residual, per_vec) &&
                       rows_aligned(a.sum, per_vec) && rows_aligned(a.y, per_vec) && rows_aligned(a.w, per_vec);
  const bool one_type = a.y.dtype == a.x.dtype && (!a.w || a.w.dtype == a.x.dtype || a.w.dtype == DType::f32);
  return {.rows = a.x.rows(),
          .cols = a.x.cols(),
          .dtype = a.x.dtype,
          .aligned = aligned,
          .residual = bool(a.residual),
          .plain = one_type && merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y}).inner == 0};
}

void check_config(const RmsNormConfig& c, int64_t vecs) {
  if (!c.vectors) return;
  const bool pow2 = round_up_pow2(c.group) == c.group, large = c.kept || c.reread;
  INGOT_CHECK(c.group <= c.threads && (pow2 || (large && c.group == c.threads)) &&
                  (c.cluster == 1 || (c.group == c.threads && c.rows_per_group == 1)),
              "rmsnorm: found a group of ", c.group, " in blocks of ", c.threads, " and clusters of ", c.cluster,
              ", expected it to fit, and clusters only with one row per block");
  INGOT_CHECK(!large || c.group == c.threads || (pow2 && c.group <= 32), "rmsnorm: found groups of ", c.group,
              " in blocks of ", c.threads, ", expected lanes of a warp or the whole block");
  INGOT_CHECK(int64_t(c.group) * c.vecs_per_thread * c.cluster >= vecs, "rmsnorm: found room for ",
              c.group * c.vecs_per_thread * c.cluster, " vectors, expected ", vecs);
}

// For tensors larger than L2.
void check_large_config(const RmsNorm& a, const RmsNormConfig& c, const gpu::Limits& limits) {
  if (!c.kept && !c.reread && !c.walk) return;
  const int most = c.reread && a.residual ? kRmsNormMaxThreads : c.walk ? kWalkThreads : kKeptThreads;
  const int vecs = c.reread && a.residual ? 2 : 4;
  const bool pair = c.kept && c.vecs_per_thread == 1 && c.rows_per_group == kRowPair && c.group <= 32;
  INGOT_CHECK(c.kept + c.reread + c.walk == 1 && (c.reread || !a.residual) && shape_of(a).plain &&
                  (!c.walk || a.x.dtype == DType::f32),
              "rmsnorm: found ", a.x.dtype, a.residual ? " with" : " without",
              " a residual, expected one form for tensors larger than L2, operands of one type and stride, a residual "
              "only where rows are read twice, and f32 where blocks walk");
  INGOT_CHECK(
      (pair || ((c.vecs_per_thread == vecs || (c.kept && (c.vecs_per_thread == 2 || c.vecs_per_thread == 3))) &&
                c.rows_per_group == 1)) &&
          (c.walk ? c.threads == most : c.threads <= most && c.cluster == 1) &&
          (!c.reread || a.residual || c.group == c.threads),
      "rmsnorm: found ", c.vecs_per_thread, " vectors of ", c.rows_per_group, " rows a thread in clusters of ",
      c.cluster, " of ", c.threads, " threads, expected ", vecs,
      " x 1 (or 2 x 1, 3 x 1 or 1 x 2 where rows are kept) in ", most,
      " threads, clusters only where blocks walk, and a block to a row where it is read twice without a residual");
  // This also holds for clusters of a single block: after its first writes to shared memory the kernel uses a cluster
  // barrier, which code for other GPUs does not contain.
  if (c.walk && !limits.hopper)
    fail(ErrorCode::unsupported, "rmsnorm: found blocks that walk over rows on a GPU of compute capability ",
         limits.capability / 10, ".", limits.capability % 10, ", expected one of 9.0, which has clusters");
}

// More rows than a grid may have blocks are divided among several launches.
template <class P>
void launch_rows(void (*kernel)(P), P p, const RmsNormConfig& c, bool overlap, int device, Stream stream) {
  const int64_t per_block = c.rows_per_block(), most = (int64_t(1) << 30) / c.cluster * per_block;
  for (; p.first_row < p.rows; p.first_row += most) {
    const int64_t now = std::min(most, p.rows - p.first_row);
    gpu::launch("rmsnorm", kernel,
                {.grid = (now + per_block - 1) / per_block * c.cluster,
                 .block = c.threads,
                 .cluster = c.cluster,
                 .overlap = overlap,
                 .device = device},
                stream, p);
  }
}

// The parameters that all variants have in common.
template <class P> P params_of(const RmsNorm& a, const RmsNormConfig& c) {
  P p{};
  p.x = a.x.data;
  p.residual = a.residual ? a.residual.data : nullptr;
  p.w = a.w ? a.w.data : nullptr;
  p.sum = a.sum ? a.sum.data : nullptr;
  p.y = a.y.data;
  p.rstd = a.rstd ? static_cast<float*>(a.rstd.data) : nullptr;
  p.rows = a.x.rows();
  p.vecs = uint32_t(a.x.cols() * size_of(a.x.dtype) / 16);
  p.group = uint32_t(c.group);
  p.eps = float(a.eps);
  p.scale = float(a.scale);
  p.w_offset = a.unit_offset ? 1.f : 0.f;
  return p;
}

void launch_large(const RmsNorm& a, const RmsNormConfig& c, const gpu::Limits& limits, bool overlap, bool prefetch,
                  Stream stream) {
  const RowMaps<4> rows = merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y});
  LargeParams p = params_of<LargeParams>(a, c);
  p.x_stride = rows.of[0].outer_stride;
  p.residual_stride = rows.of[1].outer_stride;
  p.sum_stride = rows.of[2].outer_stride;
  p.y_stride = rows.of[3].outer_stride;
  p.group_bits = uint32_t(std::bit_width(unsigned(c.group)) - 1);
  p.cols = float(a.x.cols());
  if (!a.w) p.w_offset = 1;
  p.cluster = uint32_t(c.cluster);
  const bool gaps = p.x_stride != a.x.cols() || (a.residual && p.residual_stride != a.x.cols());
  if (overlap && prefetch && !gaps) {
    const int64_t grid = (p.rows + c.rows_per_block() - 1) / c.rows_per_block();
    p.early = tile::early_reads(p.rows * p.vecs * 16, grid, a.residual ? 2 : 1);
  }
  if (c.walk) {  // two blocks for each SM
    const int64_t clusters = std::min(p.rows, 2 * int64_t(limits.resident(c.cluster)));
    constexpr int64_t kRing = int64_t(kWalkStages) * kWalkThreads * kWalkVecs * 16;
    gpu::launch("rmsnorm", rmsnorm_walk,
                {.grid = clusters * c.cluster,
                 .block = c.threads,
                 .smem = kRing,
                 .cluster = c.cluster,
                 .overlap = overlap,
                 .device = a.x.device.index},
                stream, p);
    return;
  }
  const auto kernel = with_cuda_float_type("rmsnorm", a.x.dtype, [&](auto x) {
    return pick_rmsnorm_large<decltype(x)>(a.w ? a.w.dtype : a.x.dtype, c, bool(a.residual));
  });
  launch_rows(kernel, p, c, overlap, a.x.device.index, stream);
}

}  // namespace

#ifdef INGOT_EMULATE
gpu::Limits rmsnorm_limits(int) {
  gpu::Limits limits = gpu::current_limits();
  limits.sms = 3;  // few, for each block to process several rows
  return limits;
}
#else
gpu::Limits rmsnorm_limits(int device) { return gpu::limits(device); }
#endif

RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a) {
  return {.config = pick_rmsnorm_config(shape_of(a), rmsnorm_limits(a.x.device.index))};
}

void rmsnorm(const RmsNorm& a, Stream stream) { rmsnorm_with(a, default_rmsnorm_tuning(a), stream); }

void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream) {
  const int64_t rows = a.x.rows(), cols = a.x.cols();
  if (a.w) with_cuda_float_type("rmsnorm", a.w.dtype, [](auto) { return 0; });
  INGOT_CHECK(!a.residual || (a.residual.dtype == a.x.dtype && a.sum.dtype == a.x.dtype), "rmsnorm: found residual ",
              a.residual.dtype, " and sum ", a.sum.dtype, ", expected x's ", a.x.dtype, " on a GPU");
  INGOT_CHECK(!a.rstd || a.rstd.dtype == DType::f32, "rmsnorm: found rstd ", a.rstd.dtype, ", expected f32");
  if (rows > kMaxRows)
    fail(ErrorCode::unsupported, "rmsnorm: found ", rows, " rows, expected at most ", kMaxRows, " on a GPU");
  if (rows == 0 || cols == 0) return;
  const RmsNormConfig& c = tuning.config;
  check_config(c, cols * size_of(a.x.dtype) / 16);
  const gpu::Limits limits = rmsnorm_limits(a.x.device.index);
  check_large_config(a, c, limits);
  const bool overlap = tuning.overlap && limits.hopper;

  if (c.kept || c.reread || c.walk) return launch_large(a, c, limits, overlap, tuning.prefetch, stream);

  const RowMaps<4> rows_of = merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y});
  RmsNormParams p = params_of<RmsNormParams>(a, c);
  p.x_rows = rows_of.of[0];
  p.residual_rows = rows_of.of[1];
  p.sum_rows = rows_of.of[2];
  p.y_rows = rows_of.of[3];
  p.cols = cols;
  p.inner = uint32_t(rows_of.inner);
  p.cluster = uint32_t(c.cluster);
  if (overlap && tuning.prefetch && !c.streaming) p.early_blocks = uint32_t(limits.sms * (kMaxResident / c.threads));
  // One block per SM: no other block reads while the block writes. Prefetching more than a quarter of a row, or later
  // rows, is slower.
  if (tuning.prefetch && limits.hopper && c.streaming && c.cluster == 1 && c.group == kRmsNormMaxThreads &&
      p.vecs > 7 * kRmsNormMaxThreads) {
    p.ahead = uint32_t(limits.sms);
    p.ahead_bytes = p.vecs / 4 * 16;
  }
  p.w_dtype = a.w ? a.w.dtype : DType::f32;
  p.streaming = c.streaming;
  const auto kernel = with_cuda_float_type(
      "rmsnorm", a.x.dtype, [&](auto x) { return pick_rmsnorm<decltype(x)>(a.y.dtype, c, bool(a.residual)); });
  launch_rows(kernel, p, c, overlap, a.x.device.index, stream);
}

}  // namespace ingot::cuda
