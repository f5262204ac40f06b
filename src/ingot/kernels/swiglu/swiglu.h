#pragma once
// The gated unit h = g(gate) * up, and the gated MLP around it.
//   plain:   h = silu(gate) * up
//   clamped (GPT-OSS): gate' = min(gate, limit), up' = clamp(up, -limit, limit),
//                      h = gate' sigmoid(alpha gate') * (up' + 1)
#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

struct GateOptions {
  double limit = 0;      // 0: no clamp
  double alpha = 1;      // sigmoid(alpha * gate)
  double up_offset = 0;  // added to up: 1 for GPT-OSS style
  // One (T, 2H) input with gate and up in even and odd columns; else two (T, H) halves or tensors.
  bool interleaved = false;
};
struct SwigluGate {
  Tensor gate, up, h;
  GateOptions options;
};  // (T, H) each; h may alias gate or up
void swiglu_gate(const SwigluGate& s, Stream stream);
struct SwigluGateBackward {
  Tensor gate, up, dh, dgate, dup;
  GateOptions options;
};  // dgate, dup may alias dh, gate, up
void swiglu_gate_backward(const SwigluGateBackward& s, Stream stream);

// y = (gate(x Wg^T + bg, x Wu^T + bu)) Wd^T + bd
struct Swiglu {
  Tensor x, w_gate, w_up, w_down;  // (T, C), (H, C), (H, C), (N, H)
  Tensor b_gate, b_up, b_down;     // or left out
  Tensor y;                        // (T, N)
  Tensor gate, up;                 // (T, H): kept for the backward pass
  Tensor workspace;                // u8, swiglu_workspace_bytes(...)
  GateOptions options;
  Products products = Products::fp32;
};
void swiglu(const Swiglu& s, Stream stream);
struct SwigluBackward {
  Tensor dy, x, w_gate, w_up, w_down, gate, up;
  Tensor dx;                                                // written, or left out
  Tensor dw_gate, dw_up, dw_down, db_gate, db_up, db_down;  // accumulated, or left out
  Tensor workspace;
  GateOptions options;
  Products products = Products::fp32;
};
void swiglu_backward(const SwigluBackward& s, Stream stream);
int64_t swiglu_workspace_bytes(int64_t rows, int64_t hidden, DType dtype, Device device);

}  // namespace ingot
