#pragma once
// The arguments of the calls of gated units from Python, for declared.cpp. Gate and up are two tensors, or packed in
// one whose parts `complete` finds from the order.
#include "declare.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot::python {

// The order of gate and up in a (T, 2H) tensor; kSeparate: two tensors.
enum Order : int { kGateFirst = 0, kGateSecond = 1, kInterleaved = 2, kSeparate = 3 };

inline void check_order(const char* op, int order) {
  INGOT_CHECK(order >= kGateFirst && order <= kSeparate, op, ": order: found ", order, ", expected 0 to 3");
}
// Splits the packed tensor `gate` of a gate along `dim` in two halves.
inline void split_halves(const char* op, const char* name, Tensor& gate, Tensor& up, int order, int dim) {
  const Tensor packed = gate;
  const int64_t both = packed.size(dim);
  INGOT_CHECK(both % 2 == 0, op, ": ", name, ": found ", both,
              packed.rank() == 1 ? " elements"
              : dim == 1         ? " columns"
                                 : " rows",
              ", expected an even number");
  gate = packed.slice(dim, 0, both / 2), up = packed.slice(dim, both / 2, both);
  if (order == kGateSecond) std::swap(gate, up);
}
// Gate and up of the columns of a packed tensor. The kernels themselves read interleaved columns.
inline void split_columns(const char* op, const char* name, Tensor& gate, Tensor& up, int order) {
  if (!gate || order == kSeparate) return;
  up = {};
  if (order != kInterleaved) split_halves(op, name, gate, up, order, 1);
}
// The rows of packed weights that belong to gate and up: halves, or even and odd rows; of (C, 2H), halves of the
// columns.
inline void split_weights(const char* op, const char* name, Tensor& gate, Tensor& up, int order, bool columns) {
  if (!gate || order == kSeparate) return;
  if (order != kInterleaved) return split_halves(op, name, gate, up, order, columns ? 1 : 0);
  INGOT_CHECK(!columns, op, ": order: found interleaved columns of ", name, ", expected halves");
  const Tensor packed = gate;
  const int64_t both = packed.size(0);
  INGOT_CHECK(both % 2 == 0, op, ": ", name, ": found ", both, " rows, expected an even number");
  gate = Tensor(packed.data, packed.dtype, {both / 2, packed.cols()}, packed.device);
  gate.stride[0] = 2 * packed.row_stride();
  up = gate;
  up.data = static_cast<char*>(packed.data) + packed.row_stride() * size_of(packed.dtype);
}
inline void split_bias(const char* op, const char* name, Tensor& gate, Tensor& up, int order) {
  if (!gate || order == kSeparate) return;
  INGOT_CHECK(order != kInterleaved, op, ": ", name, ": found interleaved biases, expected the halves of gate and up");
  split_halves(op, name, gate, up, order, 0);
}
// The order of the halves kept for the backward pass, or of their gradients: that of the halves of the weights.
inline int kept_order(int order) { return order == kGateSecond ? kGateSecond : kGateFirst; }

// `gate` is packed, or the gate beside `up`.
struct GateCall : SwigluGate, GateOptions {
  int order = 0;
};
inline bool complete(const char* op, GateCall& a) {
  check_order(op, a.order);
  a.interleaved = a.order == kInterleaved;
  a.options = a;
  split_columns(op, "packed", a.gate, a.up, a.order);
  return true;
}
struct GateBackwardCall : SwigluGateBackward, GateOptions {
  int order = 0;
};
inline bool complete(const char* op, GateBackwardCall& a) {
  check_order(op, a.order);
  floats(op, "packed", a.gate);
  a.interleaved = a.order == kInterleaved;
  a.options = a;
  split_columns(op, "packed", a.gate, a.up, a.order);
  split_columns(op, "dpacked", a.dgate, a.dup, a.order);
  return true;
}

// w_gate, b_gate: packed, or those of the gate beside w_up and b_up. gate: gate and up, kept as the halves of a tensor.
struct GatedLinearCall : GatedLinear, GateOptions {
  int order = 0;
};
inline bool complete(const char* op, GatedLinearCall& a) {
  check_order(op, a.order);
  a.options = a;
  split_weights(op, "w", a.w_gate, a.w_up, a.order, a.transposed);
  split_bias(op, "bias", a.b_gate, a.b_up, a.order);
  split_columns(op, "kept", a.gate, a.up, kept_order(a.order));
  return true;
}
// gate: the gradients of gate and up. The gradients of weights and biases are packed as these are.
struct GatedLinearBackwardCall : GatedLinearBackward {
  int order = 0;
};
inline bool complete(const char* op, GatedLinearBackwardCall& a) {
  check_order(op, a.order);
  a.overwrite = true;
  split_weights(op, "w", a.w_gate, a.w_up, a.order, a.transposed);
  split_weights(op, "dw", a.dw_gate, a.dw_up, a.order, a.transposed);
  split_bias(op, "db", a.db_gate, a.db_up, a.order);
  split_columns(op, "dkept", a.gate, a.up, kept_order(a.order));
  return true;
}

}  // namespace ingot::python
