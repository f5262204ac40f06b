#pragma once
// The many-rows form's kernels for what is most common, on the host's side.
#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// T: f16 or bf16. Wider than a panel, two layers or more, the last one linear, weight norm on all layers and no bias or
// on none.
template <class T, bool kSave> void launch_mlp_sm90_plain(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
