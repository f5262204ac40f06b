#pragma once
// The form in which the product writes a chunk of logits: not c = cap(x W^T), but for each row and each tile of
// kExponentialColumns columns
//   high = max c     sum = sum exp(c - high) in fp32     e = exp(c - high) in 16 bits
// and c at the row's target in fp32. A logit is rounded once, as the probability for the gradient, and takes half of
// the bytes of an fp32 logit in memory.
#include "ingot/kernels/cross_entropy/cross_entropy.h"

namespace ingot::cuda {

constexpr int64_t kExponentialColumns = 128;

struct Exponentials {
  Tensor e;          // (T, V) bf16 or f16, V in whole eights, rows of whole 16 bytes; none where no gradient is wanted
  Tensor parts;      // (T, tiles of V, 2) f32: high and sum
  Tensor at_target;  // (T) f32; not written where the target is none of the columns
  int64_t vocab = 0;
};

// x (T, C) and w (V, C) of T: bf16 or f16. Core: gemm::HopperCore, PortableCore.
template <class Core, class T>
void launch_exponentials(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap,
                         const Exponentials& out, Stream stream);
// The computation of cross_entropy, from exponentials: a.logits is not used, and a.dlogits is in.e. Smoothing is not
// supported, because it needs the sum of the logits.
void cross_entropy_of(const Exponentials& in, const CrossEntropy& a, Stream stream);

}  // namespace ingot::cuda
