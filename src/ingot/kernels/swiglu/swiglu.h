#pragma once
// The gated unit h = g(gate) * up, the two products that feed it, and the gated MLP around it.
//   plain:   h = silu(gate) * up
//   clamped (GPT-OSS): gate' = min(gate, limit), up' = clamp(up, -limit, limit),
//                      h = gate' sigmoid(alpha gate') * (up' + 1)
//   gelu_gate():       h = gelu_tanh(gate) * up, with gelu_tanh(gate) = gate sigmoid(alpha gate + cubic gate^3)
#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

struct GateOptions {
  double limit = 0;      // 0: no clamp
  double alpha = 1;      // sigmoid(alpha * gate)
  double up_offset = 0;  // added to up: 1 for GPT-OSS style
  // One (T, 2H) input with gate and up in even and odd columns; else two (T, H) halves or tensors.
  bool interleaved = false;
  double cubic = 0;  // sigmoid(alpha * gate + cubic * gate^3)
};
inline GateOptions gelu_gate() { return {.alpha = 1.5957691216057307, .cubic = 1.5957691216057307 * 0.044715}; }
struct SwigluGate {
  Tensor gate, up, h;
  GateOptions options;
};  // (T, H) each; h may alias gate or up (on a GPU not where their columns are interleaved)
void swiglu_gate(const SwigluGate& s, Stream stream);
// dgate and dup may alias dh, gate and up. h (T, H), or left out: computed again for the gradient of the weights behind
// the gate; h may alias dh.
struct SwigluGateBackward {
  Tensor gate, up, dh, dgate, dup;
  GateOptions options;
  Tensor h;
};
void swiglu_gate_backward(const SwigluGateBackward& s, Stream stream);

// h = g(x Wg^T + bg) * (x Wu^T + bu). On a GPU a single kernel (gpu/gemm) for 16-bit types, at the sizes where it is
// faster than two products and the gate; it writes gate and up to memory only where the caller keeps them.
// The weights are any two views whose rows have a common stride: the halves of a packed (2H, C), its even and odd rows,
// or two tensors; or, transposed, (C, H) each: halves of the columns of (C, 2H).
struct GatedLinear {
  Tensor x, w_gate, w_up;  // (T, C), (H, C) each
  Tensor b_gate, b_up;     // (H) each, or left out
  Tensor h;                // (T, H), or left out where only gate and up are wanted
  Tensor gate, up;         // (T, H): kept for the backward pass; both or neither
  Tensor workspace;        // u8, gated_linear_workspace_bytes(...): 0 on a CPU where gate and up are kept
  GateOptions options;
  bool transposed = false;
  Products products = Products::fp32;
};
void gated_linear(const GatedLinear& g, Stream stream);
int64_t gated_linear_workspace_bytes(const GatedLinear& g);  // given all further members
int64_t bytes(const GatedLinear& g);
int64_t flops(const GatedLinear& g);

// dgate, dup from dh and the gate; dx = dgate Wg + dup Wu; dWg += dgate^T x, dWu += dup^T x; db += sums over rows. At
// sizes where gpu/gemm is used, dx is a single kernel, and so are both dW together. With 16-bit operands dW and db may
// be f32.
//
// Without a workspace for dgate and dup: let swiglu_gate_backward overwrite gate and up with their gradients, and leave
// dh out. Where gate and up are the halves of a (T, 2H) tensor, in the order in which the weights are halves of one
// matrix, dx is a single product on every device; so are both dW where the two dW are halves in the same way.
struct GatedLinearBackward {
  Tensor dh;                              // left out: gate and up already hold dgate and dup
  Tensor x, w_gate, w_up;                 // x for dW and where gate and up are left out
  Tensor gate, up;                        // as stored; computed again where left out, from b_gate and b_up
  Tensor b_gate, b_up;                    //
  Tensor dx;                              // (T, C) written, or left out
  Tensor dw_gate, dw_up, db_gate, db_up;  // left out where the weights are frozen
  Tensor workspace;                       // u8, gated_linear_backward_workspace_bytes(...)
  GateOptions options;
  bool transposed = false;
  bool overwrite = false;  // dW and db are written instead of accumulated
  Products products = Products::fp32;
};
void gated_linear_backward(const GatedLinearBackward& g, Stream stream);
int64_t gated_linear_backward_workspace_bytes(const GatedLinearBackward& g);  // given all further members

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
