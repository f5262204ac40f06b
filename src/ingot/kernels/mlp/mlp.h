#pragma once
// Whole multi-layer perceptrons:  h_0 = x,  h_{l+1} = f(h_l W_l^T + b_l),  the last layer linear unless
// `activate_last`. Backward, from dz_last = dy (* f'), downwards:
//   dW_l += dz_l^T h_l      db_l += sum_t dz_l      dz_{l-1} = (dz_l W_l) * f'(z_{l-1})      dx = dz_0 W_0
// Weight norm: W[n,:] = g[n] v[n,:] r[n],  r[n] = 1 / sqrt(|v[n,:]|^2 + 1e-12), and with u = v[n,:] r[n]
//   dg[n] += dW[n,:] . u      dv[n,:] += g[n] r[n] (dW[n,:] - u (dW[n,:] . u))
//
// x, y, dy, dx are row-major with any row stride. CPU: f64 and f32. GPU: f16, bf16 and f32, up to 8 layers, widths in
// multiples of 8 up to 512, weights and gradients contiguous, tensors and their rows at multiples of 16 bytes.
#include <vector>

#include "ingot/core/tensor.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

// With `g` the layer is weight-normalised: W[n,:] = g[n] w[n,:] / sqrt(|w[n,:]|^2 + 1e-12), and `w` holds the
// directions v.
struct MlpLayer {
  Tensor w, b;  // (N, K), (N) or left out
  Tensor g;     // (N) or left out
};
struct Mlp {
  Tensor x, y;                   // (T, K0), (T, N_last)
  std::vector<MlpLayer> layers;  // at least one layer; widths chain
  Act act = Act::identity;
  bool activate_last = false;
  Tensor saved;      // mlp_saved_elements(...) elements of x's dtype or f32, for backward; left out: inference
  Tensor workspace;  // u8, mlp_workspace_bytes(...); left out where these are 0
  Products products = Products::fp32;
};
void mlp(const Mlp& m, Stream stream);

// Gradients add to f32 (f64 for f64) `grads`. With `saved` left out, the forward values are formed again from x,
// in the workspace by some forms. Of a weight-normalised layer grads.w is dv and grads.g is dg.
struct MlpBackward {
  Tensor dy, x, dx;  // dx left out: frozen input
  std::vector<MlpLayer> layers;
  std::vector<MlpLayer> grads;  // as layers, accumulated; an empty tensor is a frozen parameter
  Act act = Act::identity;
  bool activate_last = false;
  Tensor saved, workspace;
  Products products = Products::fp32;
};
void mlp_backward(const MlpBackward& m, Stream stream);

// Sizes of the caller's memory. These functions read shapes, types, devices and options only, never the data, so
// tensors with null pointers serve as arguments.
int64_t mlp_saved_elements(int64_t rows, const std::vector<MlpLayer>& layers, bool activate_last);
int64_t mlp_workspace_bytes(const Mlp& m);
int64_t mlp_backward_workspace_bytes(const MlpBackward& m);

// The bytes to move and the products to compute, each operand once; recomputation counts as work.
int64_t bytes(const Mlp& m);
int64_t flops(const Mlp& m);
int64_t bytes(const MlpBackward& m);
int64_t flops(const MlpBackward& m);

}  // namespace ingot
