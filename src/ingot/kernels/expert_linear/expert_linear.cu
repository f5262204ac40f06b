// The products of experts on a GPU: tensor cores on Hopper for aligned 16-bit operands (hopper/), else the portable
// kernel.
#include <initializer_list>
#include <limits>

#include "ingot/gpu/device.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/kernels/expert_linear/expert_linear.h"
#include "ingot/kernels/expert_linear/hopper/products.h"
#include "ingot/kernels/expert_linear/portable.cuh"

namespace ingot::cuda {
namespace {

using expert_portable::Operand;
using expert_portable::Product;

void check_sizes(const char* op, std::initializer_list<Tensor> operands) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const Tensor& t : operands)
    for (int i = 0; i < t.rank(); ++i)
      INGOT_CHECK(t.size(i) <= kMost, op, ": found a size of ", t.size(i), ", expected at most ", kMost, " on a GPU");
}

gemm::GroupOffsets offsets_of(const Tensor& offsets, int64_t rows) {
  return {offsets.ptr<int32_t>(), uint32_t(offsets.size(0) - 1), uint32_t(rows)};
}

bool is_aligned(const Tensor& t) {
  return t.numel() > 0 && gemm::is_16_bit(t.dtype) && gemm::rows_are_aligned(t) &&
         (t.rank() < 3 || t.stride[0] * size_of(t.dtype) % 16 == 0);
}

// Whether the kernels of hopper/ take the operands of a product, and its result.
bool on_tensor_cores([[maybe_unused]] const Tensor& a, [[maybe_unused]] const Tensor& b,
                     [[maybe_unused]] const Tensor& c) {
#ifdef INGOT_EMULATE
  return false;
#else
  return gpu::limits(a.device.index).hopper && is_aligned(a) && is_aligned(b) && is_aligned(c) &&
         gemm::rows_are_whole(c);
#endif
}

template <class T> Operand<T> rows_of(const Tensor& t) { return {t.ptr<T>(), t.row_stride(), 1, 0}; }
template <class T> void portable_forward(const ExpertLinear& a, Stream stream) {
  expert_portable::launch<T>("expert_linear",
                             {.a = rows_of<T>(a.x),
                              .b = {a.w.ptr<T>(), a.w.stride[1], 1, a.w.stride[0]},
                              .c = a.y.ptr<T>(),
                              .c_row = a.y.row_stride(),
                              .bias = a.b ? a.b.ptr<T>() : nullptr,
                              .at = offsets_of(a.offsets, a.x.rows()),
                              .m = a.x.rows(),
                              .n = a.y.cols(),
                              .k = a.x.cols()},
                             a.x.device.index, stream);
}
template <class T> void portable_dx(const ExpertLinearBackward& a, Stream stream) {
  expert_portable::launch<T>("expert_linear_backward: dx",
                             {.a = rows_of<T>(a.dy),
                              .b = {a.w.ptr<T>(), 1, a.w.stride[1], a.w.stride[0]},
                              .c = a.dx.ptr<T>(),
                              .c_row = a.dx.row_stride(),
                              .at = offsets_of(a.offsets, a.dy.rows()),
                              .m = a.dy.rows(),
                              .n = a.dx.cols(),
                              .k = a.dy.cols()},
                             a.dy.device.index, stream);
}
template <class T> void portable_dw(const ExpertLinearBackward& a, Stream stream) {
  expert_portable::launch<T>("expert_linear_backward: dw",
                             {.a = {a.dy.ptr<T>(), 1, a.dy.row_stride(), 0},
                              .b = {a.x.ptr<T>(), 1, a.x.row_stride(), 0},
                              .c = a.dw.ptr<T>(),
                              .c_row = a.dw.stride[1],
                              .c_matrix = a.dw.stride[0],
                              .at = offsets_of(a.offsets, a.dy.rows()),
                              .m = a.dw.size(1),
                              .n = a.dw.size(2),
                              .k = a.dy.rows(),
                              .sums_rows = true,
                              .adds = !a.overwrite},
                             a.dy.device.index, stream);
}

}  // namespace

void expert_linear(const ExpertLinear& a, Stream stream) {
  const char* const op = "expert_linear";
  check_sizes(op, {a.x, a.w});
#ifndef INGOT_EMULATE
  if (on_tensor_cores(a.x, a.w, a.y))
    return gemm::with_16_bit_type(a.x.dtype, [&](auto type) { expert_hopper::forward<decltype(type)>(a, stream); });
#endif
  with_gpu_float_type(a.x.dtype, op, [&](auto type) { portable_forward<decltype(type)>(a, stream); });
}

void expert_linear_backward(const ExpertLinearBackward& a, Stream stream) {
  const char* const op = "expert_linear_backward";
  check_sizes(op, {a.dy, a.x, a.w});
  const bool dx_on_tensor_cores = a.dx && on_tensor_cores(a.dy, a.w, a.dx);
  const bool dw_on_tensor_cores = a.dw && on_tensor_cores(a.dy, a.x, a.dw);
#ifndef INGOT_EMULATE
  if (dx_on_tensor_cores || dw_on_tensor_cores)
    gemm::with_16_bit_type(a.dy.dtype, [&](auto type) {
      if (dx_on_tensor_cores) expert_hopper::backward_dx<decltype(type)>(a, stream);
      if (dw_on_tensor_cores) expert_hopper::backward_dw<decltype(type)>(a, stream);
    });
#endif
  with_gpu_float_type(a.dy.dtype, op, [&](auto type) {
    using T = decltype(type);
    if (a.dx && !dx_on_tensor_cores) portable_dx<T>(a, stream);
    if (a.dw && !dw_on_tensor_cores) portable_dw<T>(a, stream);
    if (a.db)
      expert_portable::launch_bias_gradient<T>("expert_linear_backward: db", a.dy, offsets_of(a.offsets, a.dy.rows()),
                                               a.db, !a.overwrite, stream);
  });
}

}  // namespace ingot::cuda
