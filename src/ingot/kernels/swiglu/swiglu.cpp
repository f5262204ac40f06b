#include "ingot/kernels/swiglu/swiglu.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/swiglu/swiglu.simd.h"
#include "ingot/kernels/swiglu/workspace.h"

INGOT_SIMD_DECLARE(void swiglu_gate_span(int64_t n, const float* gate, const float* up, float* h,
                                         const detail::GateConstants& k);
                   void swiglu_gate_backward_span(int64_t n, const float* gate, const float* up, const float* dh,
                                                  float* dgate, float* dup, const detail::GateConstants& k);)

namespace ingot {
namespace {

constexpr int64_t kGrain = 16384;  // elements per task
constexpr int64_t kSpan = 256;     // elements converted at a time

// --- a single element, in the type of the sums
template <class T> struct Limits {
  T limit, alpha, up_offset, cubic;
  explicit Limits(const GateOptions& o)
      : limit(o.limit > 0 ? T(o.limit) : std::numeric_limits<T>::infinity()),
        alpha(T(o.alpha)),
        up_offset(T(o.up_offset)),
        cubic(T(o.cubic)) {}
  T gate(T g) const { return g > limit ? limit : g; }
  // The argument of the sigmoid, and its slope. An infinite g must not be multiplied by cubic = 0.
  T argument(T g) const { return cubic == 0 ? alpha * g : g * (alpha + cubic * g * g); }
  T argument_slope(T g) const { return cubic == 0 ? alpha : alpha + 3 * cubic * g * g; }
  T up(T u) const { return (u > limit ? limit : u < -limit ? -limit : u) + up_offset; }
};
template <class T> void forward_span(int64_t n, const T* gate, const T* up, T* h, const GateOptions& o) {
  if constexpr (std::is_same_v<T, float>) {
    const Limits<T> k(o);
    INGOT_SIMD_CALL(swiglu_gate_span, n, gate, up, h, {k.limit, k.alpha, k.up_offset, k.cubic});
  } else {
    const Limits<T> k(o);
    for (int64_t i = 0; i < n; ++i) {
      const T g = k.gate(gate[i]);
      h[i] = detail::product_or_zero(g, detail::logistic(k.argument(g))) * k.up(up[i]);
    }
  }
}
template <class T>
void backward_span(int64_t n, const T* gate, const T* up, const T* dh, T* dgate, T* dup, const GateOptions& o) {
  if constexpr (std::is_same_v<T, float>) {
    const Limits<T> k(o);
    INGOT_SIMD_CALL(swiglu_gate_backward_span, n, gate, up, dh, dgate, dup, {k.limit, k.alpha, k.up_offset, k.cubic});
  } else {
    const Limits<T> k(o);
    for (int64_t i = 0; i < n; ++i) {
      const T g = k.gate(gate[i]), u = k.up(up[i]), d = dh[i], z = k.argument(g);
      const T slope = detail::logistic(z) + detail::product_or_zero(g * k.argument_slope(g), detail::logistic_slope(z));
      const bool gate_moves = !(gate[i] > k.limit), up_moves = !(up[i] > k.limit || up[i] < -k.limit);
      dgate[i] = gate_moves ? d * u * slope : T(0);
      dup[i] = up_moves ? d * detail::product_or_zero(g, detail::logistic(z)) : T(0);
    }
  }
}

// --- rows: conversion and interleaving through short buffers
template <class T> T* row_of(const Tensor& t, int64_t r) { return t.ptr<T>() + r * t.row_stride(); }

template <class T> struct Columns {  // element j of a row is at[j * step]
  T* at;
  int64_t step;
};
template <class T> struct Pair { Columns<T> gate, up; };
template <class T> Pair<T> pair_of(const Tensor& gate, const Tensor& up, bool interleaved, int64_t r) {
  T* g = row_of<T>(gate, r);
  if (interleaved) return {{g, 2}, {g + 1, 2}};
  return {{g, 1}, {row_of<T>(up, r), 1}};
}
template <class W, class T> void gather(Columns<T> c, int64_t begin, int64_t n, W* to) {
  for (int64_t j = 0; j < n; ++j) to[j] = W(c.at[(begin + j) * c.step]);
}
template <class W, class T> void scatter(const W* from, Columns<T> c, int64_t begin, int64_t n) {
  for (int64_t j = 0; j < n; ++j) c.at[(begin + j) * c.step] = T(from[j]);
}

template <class T> void gate_row(const SwigluGate& s, int64_t r) {
  using W = accum_t<T>;
  const Pair<T> in = pair_of<T>(s.gate, s.up, s.options.interleaved, r);
  T* h = row_of<T>(s.h, r);
  const int64_t n = s.h.cols();
  if constexpr (std::is_same_v<T, W>)
    if (!s.options.interleaved) return forward_span<T>(n, in.gate.at, in.up.at, h, s.options);
  W gate[kSpan], up[kSpan];
  for (int64_t j = 0; j < n; j += kSpan) {
    const int64_t m = std::min(kSpan, n - j);
    gather(in.gate, j, m, gate);
    gather(in.up, j, m, up);
    forward_span<W>(m, gate, up, gate, s.options);
    scatter(gate, Columns<T>{h, 1}, j, m);
  }
}
template <class T> void gate_backward_row(const SwigluGateBackward& s, int64_t r) {
  using W = accum_t<T>;
  const Pair<T> in = pair_of<T>(s.gate, s.up, s.options.interleaved, r);
  const Pair<T> out = pair_of<T>(s.dgate, s.dup, s.options.interleaved, r);
  T* dh = row_of<T>(s.dh, r);
  const int64_t n = s.dh.cols();
  if constexpr (std::is_same_v<T, W>)
    if (!s.options.interleaved && !s.h)
      return backward_span<T>(n, in.gate.at, in.up.at, dh, out.gate.at, out.up.at, s.options);
  W gate[kSpan], up[kSpan], d[kSpan], h[kSpan];
  for (int64_t j = 0; j < n; j += kSpan) {
    const int64_t m = std::min(kSpan, n - j);
    gather(in.gate, j, m, gate);
    gather(in.up, j, m, up);
    gather(Columns<T>{dh, 1}, j, m, d);
    if (s.h) forward_span<W>(m, gate, up, h, s.options);
    backward_span<W>(m, gate, up, d, gate, up, s.options);
    scatter(gate, out.gate, j, m);
    scatter(up, out.up, j, m);
    if (s.h) scatter(h, Columns<T>{row_of<T>(s.h, r), 1}, j, m);
  }
}

// --- checks
void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.rank() >= 1 && t.rows() == rows && t.cols() == cols, op, ": ", name, ": found ", t.shape, ", expected ",
              rows, " rows of ", cols);
  INGOT_CHECK(t.rows_uniform(), op, ": ", name, ": found strides that one row stride cannot express, shape ", t.shape);
}
void check_pair(const char* op, const char* gate_name, const Tensor& gate, const char* up_name, const Tensor& up,
                const Tensor& h, bool interleaved) {
  const int64_t rows = h.rows(), cols = h.cols();
  check_matrix(op, gate_name, gate, rows, interleaved ? 2 * cols : cols, h);
  if (!interleaved) check_matrix(op, up_name, up, rows, cols, h);
  if (interleaved)
    INGOT_CHECK(!up, op, ": ", up_name, ": found ", up.shape, ", expected none beside interleaved columns");
}
void check_options(const char* op, const GateOptions& o) {
  INGOT_CHECK(o.limit >= 0, op, ": limit: found ", o.limit, ", expected 0 (no clamp) or more");
  INGOT_CHECK(o.cubic >= 0, op, ": cubic: found ", o.cubic, ", expected 0 or more");
}
void check_workspace(const char* op, const Tensor& t, int64_t bytes, Device device) {
  INGOT_CHECK(bytes == 0 || t.device == device, op, ": workspace: found it on ", t.device, ", expected ", device);
  INGOT_CHECK(bytes == 0 || (t.dtype == DType::u8 && t.contiguous() && t.numel() >= bytes), op, ": workspace: found ",
              t.numel(), " elements of ", t.dtype, ", expected at least ", bytes, " contiguous bytes");
}
void check_pieces(const char* op, const Swiglu& s) {
  const int64_t rows = s.x.rows(), channels = s.x.cols(), hidden = s.w_gate.rows();
  INGOT_CHECK(!s.options.interleaved, op, ": found interleaved columns, expected two weight matrices");
  check_options(op, s.options);
  check_matrix(op, "x", s.x, rows, channels, s.x);
  check_matrix(op, "w_gate", s.w_gate, hidden, channels, s.x);
  check_matrix(op, "w_up", s.w_up, hidden, channels, s.x);
  check_matrix(op, "w_down", s.w_down, s.w_down.rows(), hidden, s.x);
  check_matrix(op, "gate", s.gate, rows, hidden, s.x);
  check_matrix(op, "up", s.up, rows, hidden, s.x);
  check_matrix(op, "y", s.y, rows, s.w_down.rows(), s.x);
  check_workspace(op, s.workspace, swiglu_workspace_bytes(rows, hidden, s.x.dtype, s.x.device), s.x.device);
}

}  // namespace

namespace cpu {

void swiglu_gate(const SwigluGate& s, Stream) {
  with_float_type(s.h.dtype, "swiglu_gate", [&](auto type) {
    parallel_for(s.h.rows(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, s.h.cols())),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r) gate_row<decltype(type)>(s, r);
                 });
  });
}
void swiglu_gate_backward(const SwigluGateBackward& s, Stream) {
  with_float_type(s.dh.dtype, "swiglu_gate_backward", [&](auto type) {
    parallel_for(s.dh.rows(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, s.dh.cols())),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r) gate_backward_row<decltype(type)>(s, r);
                 });
  });
}

}  // namespace cpu

namespace cuda {
void swiglu_gate(const SwigluGate& s, Stream stream);
void swiglu_gate_backward(const SwigluGateBackward& s, Stream stream);
}  // namespace cuda

void swiglu_gate(const SwigluGate& s, Stream stream) {
  check_options("swiglu_gate", s.options);
  check_matrix("swiglu_gate", "h", s.h, s.h.rows(), s.h.cols(), s.h);
  check_pair("swiglu_gate", "gate", s.gate, "up", s.up, s.h, s.options.interleaved);
  INGOT_DISPATCH(SWIGLU, s.h.device, swiglu_gate, s, stream);
}
void swiglu_gate_backward(const SwigluGateBackward& s, Stream stream) {
  check_options("swiglu_gate_backward", s.options);
  check_matrix("swiglu_gate_backward", "dh", s.dh, s.dh.rows(), s.dh.cols(), s.dh);
  check_pair("swiglu_gate_backward", "gate", s.gate, "up", s.up, s.dh, s.options.interleaved);
  check_pair("swiglu_gate_backward", "dgate", s.dgate, "dup", s.dup, s.dh, s.options.interleaved);
  if (s.h) check_matrix("swiglu_gate_backward", "h", s.h, s.dh.rows(), s.dh.cols(), s.dh);
  INGOT_DISPATCH(SWIGLU, s.dh.device, swiglu_gate_backward, s, stream);
}

// The gated MLP is a gated linear layer and a linear layer, on any device.
void swiglu(const Swiglu& s, Stream stream) {
  check_pieces("swiglu", s);
  const int64_t rows = s.x.rows(), hidden = s.w_gate.rows();
  const Tensor h = detail::half_of(s.workspace, 0, rows, hidden, s.x.dtype);
  const Tensor room = detail::product_room(s.workspace, 2 * detail::half_bytes(rows, hidden, s.x.dtype));
  gated_linear({.x = s.x,
                .w_gate = s.w_gate,
                .w_up = s.w_up,
                .b_gate = s.b_gate,
                .b_up = s.b_up,
                .h = h,
                .gate = s.gate,
                .up = s.up,
                .workspace = room,
                .options = s.options,
                .products = s.products},
               stream);
  linear({.x = h, .w = s.w_down, .b = s.b_down, .y = s.y, .products = s.products, .workspace = room}, stream);
}

void swiglu_backward(const SwigluBackward& s, Stream stream) {
  check_pieces("swiglu_backward", {.x = s.x,
                                   .w_gate = s.w_gate,
                                   .w_up = s.w_up,
                                   .w_down = s.w_down,
                                   .y = s.dy,
                                   .gate = s.gate,
                                   .up = s.up,
                                   .workspace = s.workspace,
                                   .options = s.options});
  const int64_t rows = s.x.rows(), hidden = s.w_gate.rows();
  const Tensor first = detail::half_of(s.workspace, 0, rows, hidden, s.x.dtype);
  const Tensor second = detail::half_of(s.workspace, 1, rows, hidden, s.x.dtype);
  const Tensor room = detail::product_room(s.workspace, 2 * detail::half_bytes(rows, hidden, s.x.dtype));
  if (s.dw_down || s.db_down) {
    if (s.dw_down) swiglu_gate({.gate = s.gate, .up = s.up, .h = first, .options = s.options}, stream);
    linear_backward(
        {.dy = s.dy, .x = first, .dw = s.dw_down, .db = s.db_down, .products = s.products, .workspace = room}, stream);
  }
  linear_backward({.dy = s.dy, .w = s.w_down, .dx = second, .products = s.products, .workspace = room}, stream);
  // h is no longer needed, so dgate is written to its memory; dup replaces dh element by element.
  swiglu_gate_backward({.gate = s.gate, .up = s.up, .dh = second, .dgate = first, .dup = second, .options = s.options},
                       stream);
  gated_linear_backward({.x = s.x,
                         .w_gate = s.w_gate,
                         .w_up = s.w_up,
                         .gate = first,
                         .up = second,
                         .dx = s.dx,
                         .dw_gate = s.dw_gate,
                         .dw_up = s.dw_up,
                         .db_gate = s.db_gate,
                         .db_up = s.db_up,
                         .workspace = room,
                         .options = s.options,
                         .products = s.products},
                        stream);
}

int64_t swiglu_workspace_bytes(int64_t rows, int64_t hidden, DType dtype, Device device) {
  return detail::with_product_room(2 * detail::half_bytes(rows, hidden, dtype), device);
}

}  // namespace ingot
