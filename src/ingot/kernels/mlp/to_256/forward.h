#pragma once
// The forward kernels up to 256 wide on the host's side.
#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

// The instances. For networks whose last layer is linear: nothing is kept, or values, or arguments, in their type. For
// networks whose backward pass needs no more: the last layer activated and kept as y. A further instance for all
// remaining cases.
enum class MlpTo256Kernel { inference, keeps, values, general };
// T: f16 or bf16.
template <class T, MlpTo256Kernel kKernel> void launch_mlp_to_256(const Mlp& m, Stream stream);

template <class T> void launch_mlp_to_256_slopes(const Mlp& m, const Tensor& slopes, Stream stream);

}  // namespace ingot::cuda
