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

// Both forms read values in x's type. Where others were kept, or none, these call the form for some rows at a time,
// whose values are formed before, in the workspace: by the forward pass, or from the fp32 values by rounding.
struct MlpBackwardForm {
  void (*run)(const MlpBackward& m, Stream stream);
  int64_t (*workspace_bytes)(const MlpBackward& m);
};
void mlp_backward_with_values(const MlpBackward& m, const MlpBackwardForm& form, Stream stream);
int64_t mlp_backward_workspace_bytes_with_values(const MlpBackward& m, const MlpBackwardForm& form);

}  // namespace ingot::cuda
