#pragma once
// Low-rank adapters of packed documents: segment s of the batch uses the pair's s-th matrices.
//   y[s] += (x[s] A_s^T) B_s^T
//   h = x A^T:  dB += dy^T h,  dh = dy B,  dA += dh^T x,  dx += dh A
#include "ingot/models/gpt/call.h"

namespace ingot::detail {

struct AdapterCall {
  const AdapterPair* pair = nullptr;  // null or empty: the call has no effect
  const AdapterPair* grad = nullptr;  // backward: accumulated; null or empty: frozen
  std::span<const int32_t> cu;        // (S + 1), in host memory
  Tensor low, low_grad;               // (T, >= R)
  bool write_grad = false;            // the gradient is written instead of added
  bool low_kept = false;              // backward: `low` still contains the result of adapter_forward
  bool rides = false;                 // adapted_linear multiplies with A, forward and backward
  Tensor folded;                      // scratch memory for separate weights of each document, or left out
  Tensor kept;                        // adapted_linear_backward: a copy of adapted_linear's matrices in `folded`
  Products products = Products::fp32;
  Tensor workspace;  // workspace of the products
  Stream stream;
};
// Adds to y and dx, or writes y and dx if requested. Returns false, without writing, if there is no adapter. dx may be
// left out if it is not needed.
bool adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y, bool add);
bool adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx, bool add);

// y[s] = x[s] (W + B_s A_s)^T, w (N, K), for adapters with adjacent rows of W and columns of y and otherwise equal
// arguments. Where `folded` has room, documents are long enough and W is frozen, W + B_s A_s is computed and rounded
// like weights. This takes one product per document in place of three per adapter, and for gradients G = dy^T x and two
// small products per adapter:
//   dB += G A^T,  dA += B^T G
// `rider`: an adapter of the same x with a different output, whose A is stored below each W + B A. y then has R more
// columns (the rider's low), and dy has the rider's low_grad there, so that x is read and dx written once. The rider's
// gradients must be written, not added to.
void adapted_linear(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& y,
                    const AdapterPair* rider = nullptr);
void adapted_linear_backward(std::span<const AdapterCall> adapters, const Tensor& x, const Tensor& w, const Tensor& dw,
                             const Tensor& dy, const Tensor& dx, bool accumulate_dx,
                             const AdapterCall* rider = nullptr);
// c[s] = op(a[s]) op(b[s]) + beta c[s] for the segments of a run, by the products of `call`; with `add`, which all
// segments share, + beta add.
void multiply_segments(const AdapterCall& call, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                       const Tensor& c, double beta, const Tensor& add = {});
// Whether W + B A is computed for these adapters: every document is long enough, and `folded` has room for W's rows and
// `more_rows` further rows of each document.
bool adapters_fold(const AdapterCall& c, const Tensor& w, int64_t more_rows = 0);

}  // namespace ingot::detail
