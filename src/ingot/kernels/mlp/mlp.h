#pragma once
// Whole multi-layer perceptrons:  h_0 = x,  h_{l+1} = f(h_l W_l^T + b_l),  the last layer linear unless
// `activate_last`.
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
  std::vector<MlpLayer> layers;  // at least one; widths chain
  Act act = Act::identity;
  bool activate_last = false;
  Tensor saved;      // mlp_saved_elements(...) elements of x's dtype or f32, for backward; left out: inference
  Tensor workspace;  // u8, mlp_workspace_bytes(...)
  Products products = Products::fp32;
};
void mlp(const Mlp& m, Stream stream);

// Gradients add to f32 (f64 for f64) `grads`. With `saved` left out, the forward values are formed again from x.
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
int64_t mlp_saved_elements(int64_t rows, const std::vector<MlpLayer>& layers, bool activate_last);
int64_t mlp_workspace_bytes(int64_t rows, const std::vector<MlpLayer>& layers, DType dtype, Device device);

}  // namespace ingot
