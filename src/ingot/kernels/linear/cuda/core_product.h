#pragma once
// Products by the core (gpu/gemm), for matmul() and its callers.
#include "ingot/kernels/linear/linear.h"

namespace ingot::cuda {

// c = alpha op(a) op(b) + beta add + bias, as cuBLASLt computes. Matrices have rank 2.
struct PlainProduct {
  Tensor a, b, c;
  bool transpose_a = false, transpose_b = false;
  float alpha = 1, beta = 0;
  Tensor add, bias;  // add is given where beta is not 0
};
// Whether the product is added to c itself: c += alpha op(a) op(b). Hopper's epilogue then reads nothing, because the
// copy engine adds to memory.
inline bool core_adds(const PlainProduct& p) {
  return p.beta == 1 && p.add.data == p.c.data && p.add.row_stride() == p.c.row_stride() && !p.bias;
}
// Whether the epilogue must read a bias, or an addend other than c itself.
inline bool core_combines(const PlainProduct& p) { return p.bias || (p.beta != 0 && !core_adds(p)); }
// Why a product does not suit the core, or nullptr where it does: operands must be 16-bit; rows of operands and results
// must begin at multiples of 16 bytes; rows of results must be whole multiples of 16 bytes. For results that are not
// fused with an activation, the portable form of the core has no such requirements.
const char* core_refuses(const PlainProduct& p);
void core_product(const PlainProduct& p, int64_t sms, Stream stream);

// Core: gemm::HopperCore, PortableCore. T: bf16, f16.
template <class Core, class T> void launch_core_product(const PlainProduct& p, int form, Stream stream);

}  // namespace ingot::cuda
