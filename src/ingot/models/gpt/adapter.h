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
  Tensor low, low_grad;               // scratch (T, >= R)
  Products products = Products::fp32;
  Tensor workspace;  // of the products
  Stream stream;
};
void adapter_forward(const AdapterCall& c, const Tensor& x, const Tensor& y);
void adapter_backward(const AdapterCall& c, const Tensor& x, const Tensor& dy, const Tensor& dx);

}  // namespace ingot::detail
