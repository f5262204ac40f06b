#pragma once
// Host code shared by the backward forms for Hopper: the problems they support, and the places of the kernels'
// operands.
#include <cuda.h>

#include <cstdint>
#include <optional>

#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda {

// Whether these forms take the type, depth, widths and rows; the forms differ in the width. The second function also
// requires slopes from values.
bool mlp_backward_has_shape(const MlpBackward& m, int widest);
bool mlp_backward_has_shape_and_slopes(const MlpBackward& m, int widest);
// The number of layers whose values the slopes need.
int mlp_backward_values(const MlpBackward& m);

// Layer l's part of a buffer with (rows, n) for each layer in order, in x's type.
Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l);

// All forms read values in x's type. If no values were kept, or values of a different type, a launch forms the values
// of all rows at the start of the workspace: by the forward pass, or by rounding fp32 values. The result has these
// values, and the rest of the workspace.
bool mlp_backward_has_values(const MlpBackward& m);
int64_t mlp_backward_values_bytes(const MlpBackward& m);
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream);
// If slopes do not follow from values, a launch forms both in x's type at the start of the workspace,
// mlp_backward_values_bytes() each: from the kept arguments of the activations, or else from x. Slopes have the layout
// of values. From x only for layers to 256 wide.
struct MlpFormedSlopes {
  MlpBackward m;  // with the values, and the rest of the workspace
  Tensor slopes;
};
MlpFormedSlopes mlp_backward_form_slopes(const MlpBackward& m, Stream stream);

// The inputs of the launches of a chain and of sums: values in x's type, and the data from which the formula computes
// slopes. Missing data is formed first: values and slopes where the slopes do not follow from values, else the values
// alone.
bool mlp_backward_forms_slopes(const MlpBackward& m);  // slopes that values do not determine
struct MlpFormed {
  MlpBackward m;
  Tensor of_slopes;
  SlopeFormula slope;
};
MlpFormed mlp_backward_form(const MlpBackward& m, Stream stream);
int64_t mlp_backward_formed_bytes(const MlpBackward& m);

// The layers with W in place of v and without a gain for weight-normalised layers, as the chain of gradients multiplies
// W. A launch forms W at the start of the workspace; the result has the rest of the workspace.
MlpBackward mlp_backward_form_weights(const MlpBackward& m, Stream stream);

using Slope = SlopeKind;
// Empty for an activation whose slope does not follow from its value; the calling forms then compute the slopes in
// advance (mlp_backward_form_slopes()).
std::optional<SlopeFormula> slope_of(Act act);

// --- forms of two launches: the chain of gradients writes dz of the layers below the top in the workspace, layer after
// layer, and then sums over all rows

// The chain multiplies by W from the top layer down to this layer.
int mlp_lowest_product(const MlpBackward& m);
// Whether dz of layer l goes to the workspace. The top layer's dz is dy, unless the layer is activated.
bool mlp_keeps_dz(const MlpBackward& m, size_t l);
int64_t mlp_dz_bytes(const MlpBackward& m);  // room for the dz of every layer

// Takes `bytes` at the end of a workspace, at a multiple of 128; returns the beginning.
inline int64_t mlp_take_room(int64_t& workspace, int64_t bytes) {
  const int64_t begin = workspace;
  workspace += (bytes + 127) / 128 * 128;
  return begin;
}
// A panel with the given number of rows, the unit of copies of the forms to 256 and to 512.
inline gpu::TmaBox mlp_panel_box(int rows) { return {.rows = rows, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128}; }

struct MlpChainMaps {
  CUtensorMap dy, dx;
  CUtensorMap w[kMlpMaxLayers];
  CUtensorMap h[kMlpMaxLayers];   // the saved values of layer l
  CUtensorMap dz[kMlpMaxLayers];  // to the workspace
};
MlpChainMaps mlp_chain_maps(const MlpBackward& m, const gpu::TmaBox& rows, const gpu::TmaBox& weights);

struct MlpSumMaps {
  CUtensorMap dz[kMlpMaxLayers], h[kMlpMaxLayers];  // of layer l; h is the layer's input
};
MlpSumMaps mlp_sum_maps(const MlpBackward& m, const gpu::TmaBox& dz, const gpu::TmaBox& h);

// A layer's operands for its sums.
struct MlpSumLayer {
  const void *v = nullptr, *g = nullptr;  // (n, k) and (n) of a weight-normalised layer, whose dw is dv
  float *dw = nullptr, *db = nullptr, *dg = nullptr;
  int n = 0, k = 0;
};
MlpSumLayer mlp_sum_layer(const MlpLayer& layer, const MlpLayer& grad);

namespace mlp_parts {

constexpr int kPair = 2;  // blocks of a cluster, if two blocks share their reads
struct ChainLaunch {      // of the chain of gradients by these pairs
  Slope slope = Slope::step;
  int clusters = 0, device = 0;
};

}  // namespace mlp_parts
}  // namespace ingot::cuda
