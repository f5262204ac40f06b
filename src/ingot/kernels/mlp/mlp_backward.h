#pragma once
// The two fast backward forms on the host's side: what both take, and where they find it.
#include <cstdint>

#include "ingot/kernels/mlp/mlp_cuda.h"

namespace ingot::cuda {

// Whether the type, depth, widths, rows and activation are such that both forms work on them.
bool mlp_backward_is_fast(const MlpBackward& m);
// Layers whose values the slopes need; and whether those are formed here, as none are kept in x's type.
int mlp_backward_values(const MlpBackward& m);
bool mlp_backward_forms_values(const MlpBackward& m);

// Layer l's part of what lies layer after layer, (rows, n) each, in x's type.
Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l);

}  // namespace ingot::cuda
