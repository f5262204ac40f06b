#pragma once
// The two fast backward forms on the host's side: what both take, and where they find it.
#include <cstdint>

#include "ingot/kernels/mlp/mlp_cuda.h"

namespace ingot::cuda {

// Whether the type, depth, widths, rows and activation are such that both forms work on them.
bool mlp_backward_is_fast(const MlpBackward& m);
// Layers whose values the slopes need.
int mlp_backward_values(const MlpBackward& m);

// Layer l's part of what lies layer after layer, (rows, n) each, in x's type.
Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l);

// Both forms read values in x's type. Where others were kept, or none, one launch forms them, of all rows, at the start
// of the workspace: the forward pass, or one that rounds fp32 values. What comes back has them, and the rest of the
// workspace.
bool mlp_backward_has_values(const MlpBackward& m);
int64_t mlp_backward_values_bytes(const MlpBackward& m);
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream);

}  // namespace ingot::cuda
