#pragma once
// The wide form's kernels on the host's side.
#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// Of networks whose last layer is linear: nothing is kept, or values, or arguments, of their type. Of those of which
// backward wants no more than that, the last layer activated and kept as y. Each with weight norm and without. And one
// for all else.
enum class MlpWideKernel { inference, keeps, values, rare };
// T: f16 or bf16.
template <class T, MlpWideKernel kKernel> void launch_mlp_wide(const Mlp& m, Stream stream);

// What a backward pass needs of a network of which nothing was kept, where slopes do not follow from values: all layers
// activated, their values in m.saved and the last one's in m.y, and their slopes beside them, all in x's type, in one
// launch. Of any widths to 256.
void mlp_wide_slopes(const Mlp& m, const Tensor& slopes, Stream stream);
template <class T> void launch_mlp_wide_slopes(const Mlp& m, const Tensor& slopes, Stream stream);

}  // namespace ingot::cuda
