#pragma once
// y = f(x W^T + b)       pre = x W^T + b
// dx = (dy W) * f'(pre_x)      dW += dy^T x      db += sum_t dy
// Every matrix is row-major with any row stride; outputs overlap no input. On the CPU, f32 and f64 products use packed
// micro-kernels, tested against matmul_plain; `products = bf16` rounds both operands of an f32 product to bf16 and sums
// in fp32 (f64 products ignore this option). A single row is summed in a different order than many rows: equal up to
// rounding. On a GPU: f32, bf16 and f16. Of 16-bit operands sums are fp32, and dw, db and matmul's c may be f32.
// Products run on our kernels (gpu/gemm) or on cuBLASLt (gpu/cublaslt.h), whichever is faster for the size; f32, and
// rows that do not begin at multiples of 16 bytes, need the latter. `workspace` is room for cuBLASLt,
// linear_workspace_bytes(device); without it products with few rows may be slower. The activations of a wide network's
// middle (the squared ReLUs, gelu) and their slopes are computed in the products of our kernels at the sizes where this
// is faster than a pass of their own.
//
// For f(x) = max(x, x / 2)^2 and max(x, 0)^2 the slope follows from the value and the sign of x alone (slope 2 sqrt(y)
// or -sqrt(y)). A forward pass that keeps `signs`, one bit per element, therefore need not keep pre. Not in f16, whose
// squares underflow below 2^-12.
#include "ingot/core/tensor.h"
#include "ingot/kernels/activation/activation.h"

namespace ingot {

// The type that f32 operands may be rounded to. tf32 (10 bits of mantissa, for the tensor cores) is fp32 on a CPU.
enum class Products { fp32, bf16, tf32 };

struct Linear {
  Tensor x, w, b;  // (T, K), (N, K), (N) or left out
  Tensor y;        // (T, N)
  Tensor pre;      // (T, N): receives the value before the activation, or left out
  Tensor signs;    // u8, linear_sign_bytes(T, N, device): receives the sign of that value, or left out
  Act act = Act::identity;
  double alpha = 1;         // y = f(alpha * x W^T + b)
  bool accumulate = false;  // y += x W^T; needs the identity and no bias
  Products products = Products::fp32;
  Tensor w_packed;   // the result of linear_pack(w) for these products, or left out
  Tensor workspace;  // u8, or left out
};
void linear(const Linear& a, Stream stream);

// Packs w once for products with several x. On a CPU; the same sums in the same order.
struct LinearPack {
  Tensor w, packed;  // (N, K); u8, linear_packed_bytes(w, products)
  Products products = Products::fp32;
};
void linear_pack(const LinearPack& a);
int64_t linear_packed_bytes(const Tensor& w, Products products);  // a function of w's shape and type

struct LinearBackward {
  Tensor dy, x, w;  // (T, N), (T, K), (N, K); x only for dw, w only for dx
  Tensor dx;        // (T, K) or left out
  Tensor dw, db;    // (N, K), (N) accumulated, or left out
  Tensor pre;       // (T, K): given if x = f(pre): dx is then multiplied by f'(pre)
  Tensor signs;     // in place of pre: the signs that linear kept; x is then read too
  Act act = Act::identity;
  bool accumulate_dx = false;
  Products products = Products::fp32;
  bool form_x = false;  // x = f(pre) is computed first instead of read, so a caller needs to keep only pre
  Tensor workspace;     // u8, or left out
};
void linear_backward(const LinearBackward& a, Stream stream);

// c = alpha * op(a) op(b) + beta * c       op is the transpose if requested; c (M, N), all row-major with any row
// stride
struct MatMul {
  Tensor a, b, c;
  bool transpose_a = false, transpose_b = false;
  double alpha = 1, beta = 0;
  Products products = Products::fp32;
  Tensor add;  // read in place of c: c = alpha * op(a) op(b) + beta * add, or left out; may be c, a or b
  // The result is symmetric by construction: half of the result is computed and mirrored. (A GPU computes the whole
  // result.)
  bool symmetric = false;
  Tensor workspace;  // u8, or left out
  Tensor bias;       // (N), added to each row, or left out
};
void matmul(const MatMul& m, Stream stream);
// For each i: c[i] = alpha * op(a[i]) op(b[i]) + beta * c[i] of rank 3, with any strides but the last; `add` is a
// single matrix for all i; without bias and symmetric. On the CPU each product has matmul's bits; a GPU with cuBLASLt
// computes one batched product.
void matmul_each(const MatMul& m, Stream stream);
// matmul() by a plain loop on the CPU: the oracle. Ignores `products` and `symmetric`.
void matmul_plain(const MatMul& m);

int64_t linear_workspace_bytes(Device device);  // 0 on a CPU
int64_t linear_sign_bytes(int64_t rows, int64_t cols, Device device);
int64_t bytes(const Linear& a);
int64_t flops(const Linear& a);

}  // namespace ingot
