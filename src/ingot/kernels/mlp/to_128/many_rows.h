#pragma once
// The forward variant for many rows on the host's side.
#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

constexpr int64_t kMlpFewTileRows = 4096 * 64;
// Chooses between three and four warpgroups per block, where both fit.
bool mlp_three_warpgroups_suffice(const MlpForwardParams& p);

// T: f16 or bf16.
template <class T, int kWidth, bool kSave> void launch_mlp_to_128(const Mlp& m, Stream stream);
template <class T, bool kSave> void launch_mlp_to_128_streamed(const Mlp& m, Stream stream);

// T: f16 or bf16. Networks wider than a panel, of two layers or more, with a linear last layer, and either with weight
// norm on all layers and no bias, or without weight norm.
template <class T, bool kSave> void launch_mlp_to_128_linear_output(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
