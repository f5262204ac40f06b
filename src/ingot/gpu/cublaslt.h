#pragma once
// Plain matrix products by NVIDIA's cuBLASLt. The library is opened at run time, so neither its headers nor the library
// are needed for a build. Where INGOT_CUBLASLT is set, only this path is tried. Otherwise version 13 is preferred to
// version 12; of each version a library that the process has already loaded (PyTorch's, or PyPI's nvidia-cublas) is
// preferred to the library that the loader finds (the toolkit's).
#include <cstdint>
#include <string>

#include "ingot/core/tensor.h"

namespace ingot::gpu {

//   d = alpha op(a) op(b) + beta c + bias
// op is the identity or the transpose; d is (M, N). Matrices are row-major, with rows `ld` elements apart; the matrices
// of consecutive products of a batch lie `step` elements apart.
struct LtMatrix {
  const void* data = nullptr;
  int64_t ld = 0, step = 0;
};
struct LtProduct {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  DType type = DType::bf16, out = DType::bf16;  // the types of a and b; of c, d and bias
  bool transpose_a = false, transpose_b = false;
  LtMatrix a, b, c, d;         // c is read where beta is not 0, and may be d
  const void* bias = nullptr;  // (N), or none
  double alpha = 1, beta = 0;
  enum class Round : uint8_t { none, tf32, bf16 } round = Round::none;  // the type for rounding f32 operands
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;  // more allows more algorithms; kLtWorkspaceBytes is enough for all algorithms
};
constexpr int64_t kLtWorkspaceBytes = int64_t(32) << 20;

// Returns false where the library was not found, or has no algorithm for these operands.
bool lt_product(const LtProduct& p, int device, Stream stream);
bool lt_available();
// The library's version as "13.1.0", or the reason why Ingot does not use the library.
std::string lt_version();

}  // namespace ingot::gpu
