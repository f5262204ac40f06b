#pragma once
// The wide form's kernels on the host's side.
#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// T: f16 or bf16. What is rare: values are saved, the last layer is activated, weights are normalised.
template <class T, bool kRare> void launch_mlp_wide(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
