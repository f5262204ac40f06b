#pragma once
// Low-rank adapters of packed documents: segment s of the batch uses the pair's s-th matrices.
//   y[s] += (x[s] A_s^T) B_s^T
//   h = x A^T:  dB += dy^T h,  dh = dy B,  dA += dh^T x,  dx += dh A
#include "ingot/models/gpt/call.h"

namespace ingot::detail {

struct AdapterCall {
  const AdapterPair* pair = nullptr;  // null or empty: nothing happens
  const AdapterPair* grad = nullptr;  // backward: accumulated; null or empty: frozen
  std::span<const int32_t> cu;        // (S + 1), in host memory
  Tensor low, low_grad;               // (T, >= R)
  bool write_grad = false;            // in place of adding to it
  bool low_kept = false;              // backward: low is still what adapter_forward left there
  bool rides = false;                 // adapted_linear multiplies with A, forward and backward
  Tensor folded;                      // scratch for documents' own weights, or left out
  Tensor kept;                        // adapted_linear_backward: what adapted_linear left in `folded`, elsewhere
  Products products = Products::fp32;
  Tensor workspace;  // of the products
  Stream stream;
};
// y and dx are added to, or written where asked; false where there is no adapter, and nothing was. Where dx is left out
// nobody reads it.
bool adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y, bool add);
bool adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx, bool add);

// y[s] = x[s] (W + B_s A_s)^T, w (N, K), of adapters whose rows of W and columns of y stand one after the other; they
// share the rest of their calls. With room in `folded`, documents long enough and W frozen, W + B_s A_s is formed and
// rounded as weights are: a product a document in place of three an adapter, and of its gradient G = dy^T x two small
// ones an adapter:
//   dB += G A^T,  dA += B^T G
// `rider`: an adapter of the same x and of another output, whose A stands below each W + B A then: y has R columns
// more, its low, and dy has its low_grad there, so that x is read and dx written once. Its gradients must be written.
void adapted_linear(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& y,
                    const AdapterPair* rider = nullptr);
void adapted_linear_backward(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& dw,
                             const Tensor& dy, const Tensor& dx, bool accumulate_dx,
                             const AdapterCall* rider = nullptr);
// Whether they form W + B A, with room for so many rows more.
bool adapters_fold(const AdapterCall& c, const Tensor& w, int64_t more_rows = 0);

}  // namespace ingot::detail
