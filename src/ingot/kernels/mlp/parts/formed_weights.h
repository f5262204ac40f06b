#pragma once
// W of weight-normalised layers, formed once by a small launch of its own, for the forms whose blocks all take in all
// of W: in fp32, rounded to the network's type.
#include <cstdint>
#include <vector>

#include "ingot/kernels/mlp/mlp.h"

namespace ingot::cuda {

bool mlp_has_norms(const std::vector<MlpLayer>& layers);
// Room for W of the layers that have a norm.
int64_t mlp_formed_weights_bytes(const std::vector<MlpLayer>& layers);
// The layers with W in place of v and no gain; W lies at `to`, of those bytes.
std::vector<MlpLayer> mlp_form_weights(const std::vector<MlpLayer>& layers, void* to, Stream stream);
// The same where there is a norm: W goes to the workspace.
Mlp mlp_with_formed_weights(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
