#include "ingot/kernels/activation/activation.h"

#include <algorithm>
#include <sstream>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"

INGOT_SIMD_DECLARE(void activate_span(VectorAct act, int64_t n, const float* x, float* y);
                   void activate_backward_span(VectorAct act, int64_t n, const float* dy, const float* x, float* dx);
                   void activate_both_span(VectorAct act, int64_t n, const float* dy, const float* x, float* dx,
                                           float* y);)

namespace ingot {

Act activation_named(std::string_view name) {
  int i = 0, found = -1;
  std::ostringstream known;
  for_each_activation([&](auto f) {
    known << (i ? ", " : "") << f.name;
    if (f.name == name) found = i;
    ++i;
  });
  INGOT_CHECK(found >= 0, "activation: found '", name, "', expected one of ", known.str());
  return Act(found);
}

std::string_view name_of(Act act) {
  std::string_view name;
  with_activation(act, [&](auto f) { name = f.name; });
  return name;
}

bool slope_follows_from_value(Act act) {
  bool follows = false;
  with_activation(act, [&](auto f) { follows = has_slope_from_value<decltype(f)>; });
  return follows;
}
bool slope_follows_from_value_and_sign(Act act) {
  bool follows = false;
  with_activation(act, [&](auto f) { follows = has_slope_from_value_and_sign<decltype(f)>; });
  return follows;
}
float number_of(Act act) {
  float number = 0;
  with_activation(act, [&](auto f) { number = number_of(f); });
  return number;
}
VectorAct vector_form_of(Act act) {
  VectorAct form = VectorAct::none;
  with_activation(act, [&](auto f) { form = vector_form<decltype(f)>(); });
  return form;
}

namespace {

// elements per task: a few microseconds of work, with three operands that fit into L2
constexpr int64_t kGrain = 16384;

void check_operand(const Tensor& t, const Tensor& like, const char* what) {
  INGOT_CHECK(t.shape == like.shape, what, ": found shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.rows_uniform() || t.numel() == 0, what, ": found strides that one row stride cannot express, shape ",
              t.shape);
}

// Calls run(offset of each operand, n) over spans of elements contiguous in every operand.
template <class Run> void for_each_span(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, Run&& run) {
  if (a.numel() == 0) return;
  if (a.contiguous() && b.contiguous() && c.contiguous() && d.contiguous()) {
    parallel_for(a.numel(), kGrain, [&](int64_t begin, int64_t end) { run(begin, begin, begin, begin, end - begin); });
    return;
  }
  parallel_for(a.rows(), std::max<int64_t>(1, kGrain / a.cols()), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      run(t * a.row_stride(), t * b.row_stride(), t * c.row_stride(), t * d.row_stride(), a.cols());
  });
}

}  // namespace

namespace cpu {
namespace {

// The activation is chosen per span, inside the function: compiling the tasks for every pair of activation and type
// would give five times the code. Only spans of a few elements become slower.
template <class F, class T>
constexpr bool has_vector_form = std::is_same_v<T, float>&& vector_form<F>() != VectorAct::none;

template <class T> void value_span(Act act, int64_t n, const T* x, T* y) {
  with_activation(act, [&](auto f) {
    if constexpr (has_vector_form<decltype(f), T>)
      INGOT_SIMD_CALL(activate_span, vector_form<decltype(f)>(), n, x, y);
    else
      for (int64_t i = 0; i < n; ++i) y[i] = f.value(x[i]);
  });
}
template <class T> void slope_span(Act act, int64_t n, const T* dy, const T* x, T* dx) {
  with_activation(act, [&](auto f) {
    if constexpr (has_vector_form<decltype(f), T>)
      INGOT_SIMD_CALL(activate_backward_span, vector_form<decltype(f)>(), n, dy, x, dx);
    else
      for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] * f.slope(x[i]);
  });
}

// Narrow types go through short fp32 buffers to reach the vector forms.
constexpr int64_t kNarrow = 512;
template <class T>
concept Narrow = sizeof(T) == 2;

template <class T> void widen(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}
template <class T> void narrow(const float* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = T(from[i]);
}

template <Narrow T> void value_span(Act act, int64_t n, const T* x, T* y) {
  float wide[kNarrow];
  for (int64_t i = 0; i < n; i += kNarrow) {
    const int64_t m = std::min(kNarrow, n - i);
    widen(x + i, m, wide);
    value_span<float>(act, m, wide, wide);
    narrow(wide, m, y + i);
  }
}
template <Narrow T> void slope_span(Act act, int64_t n, const T* dy, const T* x, T* dx) {
  float wide_x[kNarrow], wide_dy[kNarrow];
  for (int64_t i = 0; i < n; i += kNarrow) {
    const int64_t m = std::min(kNarrow, n - i);
    widen(x + i, m, wide_x);
    widen(dy + i, m, wide_dy);
    slope_span<float>(act, m, wide_dy, wide_x, wide_dy);
    narrow(wide_dy, m, dx + i);
  }
}

template <class T> void both_spans(Act act, int64_t n, const T* dy, const T* x, T* dx, T* y) {
  if constexpr (std::is_same_v<T, float>)
    if (const VectorAct form = vector_form_of(act); form != VectorAct::none)
      return INGOT_SIMD_CALL(activate_both_span, form, n, dy, x, dx, y);
  value_span(act, n, x, y);
  slope_span(act, n, dy, x, dx);
}

}  // namespace

void activate(const Activate& a, Stream) {
  with_float_type(a.x.dtype, "activate", [&](auto scalar) {
    using T = decltype(scalar);
    const T* x = a.x.ptr<T>();
    T* y = a.y.ptr<T>();
    for_each_span(a.x, a.y, a.y, a.y, [&](int64_t at_x, int64_t at_y, int64_t, int64_t, int64_t n) {
      value_span(a.act, n, x + at_x, y + at_y);
    });
  });
}

void activate_backward(const ActivateBackward& a, Stream) {
  with_float_type(a.x.dtype, "activate_backward", [&](auto scalar) {
    using T = decltype(scalar);
    const T *dy = a.dy.ptr<T>(), *x = a.x.ptr<T>();
    T* dx = a.dx.ptr<T>();
    T* y = a.y ? a.y.ptr<T>() : nullptr;
    const Tensor& last = a.y ? a.y : a.dx;
    for_each_span(a.dy, a.x, a.dx, last, [&](int64_t at_dy, int64_t at_x, int64_t at_dx, int64_t at_y, int64_t n) {
      if (y)
        both_spans(a.act, n, dy + at_dy, x + at_x, dx + at_dx, y + at_y);
      else
        slope_span(a.act, n, dy + at_dy, x + at_x, dx + at_dx);
    });
  });
}

}  // namespace cpu

namespace cuda {
void activate(const Activate& a, Stream stream);
void activate_backward(const ActivateBackward& a, Stream stream);
}  // namespace cuda

void activate(const Activate& a, Stream stream) {
  check_operand(a.y, a.x, "activate: y");
  check_operand(a.x, a.x, "activate: x");
  INGOT_DISPATCH(ACTIVATION, a.x.device, activate, a, stream);
}

void activate_backward(const ActivateBackward& a, Stream stream) {
  check_operand(a.x, a.x, "activate_backward: x");
  check_operand(a.dy, a.x, "activate_backward: dy");
  check_operand(a.dx, a.x, "activate_backward: dx");
  if (a.y) check_operand(a.y, a.x, "activate_backward: y");
  if (a.y && a.y.device.kind != Device::cpu) activate({.act = a.act, .x = a.x, .y = a.y}, stream);
  INGOT_DISPATCH(ACTIVATION, a.x.device, activate_backward, a, stream);
}

}  // namespace ingot
