#pragma once
// The wide form's kernels on the host's side.
#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// Of networks whose last layer is linear: nothing is kept, or values of their type. Of those of which backward wants no
// more than that, the last layer activated and kept as y. Each with weight norm and without. And one for all else.
enum class MlpWideKernel { inference, keeps, values, rare };
// T: f16 or bf16.
template <class T, MlpWideKernel kKernel> void launch_mlp_wide(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
