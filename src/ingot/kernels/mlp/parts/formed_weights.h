#pragma once
// W of weight-normalised layers, formed once by a small separate launch, for the forms in which every block reads all
// of W: computed in fp32, rounded to the network's type.
#include <cstdint>
#include <vector>

#include "ingot/kernels/mlp/mlp.h"

namespace ingot::cuda {

bool mlp_has_norms(const std::vector<MlpLayer>& layers);
// Bytes for W of the weight-normalised layers.
int64_t mlp_formed_weights_bytes(const std::vector<MlpLayer>& layers);
// The layers with W in place of v and without a gain; W is formed at `to`, in the bytes above.
std::vector<MlpLayer> mlp_form_weights(const std::vector<MlpLayer>& layers, void* to, Stream stream);
// The same if there is a weight norm; W goes to the workspace.
Mlp mlp_with_formed_weights(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
