#pragma once
// What the backward forms for Hopper share on the host's side: what they take, and where their kernels find it.
#include <cuda.h>

#include <cstdint>
#include <optional>

#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda {

// Whether type, depth, widths and rows are such that these forms work on them; they differ in the width. And whether
// slopes follow from values, too.
bool mlp_backward_has_shape(const MlpBackward& m, int widest);
bool mlp_backward_has_shape_and_slopes(const MlpBackward& m, int widest);
// Layers whose values the slopes need.
int mlp_backward_values(const MlpBackward& m);

// Layer l's part of what lies layer after layer, (rows, n) each, in x's type.
Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l);

// All read values in x's type. Where others were kept, or none, one launch forms them, of all rows, at the start of the
// workspace: the forward pass, or one that rounds fp32 values. What comes back has them, and the rest of the workspace.
bool mlp_backward_has_values(const MlpBackward& m);
int64_t mlp_backward_values_bytes(const MlpBackward& m);
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream);
// Where slopes do not follow from values, one launch forms both in x's type, of the activation's arguments that were
// kept, or else of x, at the start of the workspace, mlp_backward_values_bytes() each. Slopes lie as values do. Of x:
// layers to 256 wide.
struct MlpFormedSlopes {
  MlpBackward m;  // with the values, and the rest of the workspace
  Tensor slopes;
};
MlpFormedSlopes mlp_backward_form_slopes(const MlpBackward& m, Stream stream);

// What the launches of a chain and of sums read: values in x's type, and what slopes follow from by the formula. All of
// it is formed first where it was not kept, slopes of kept arguments alone.
bool mlp_backward_forms_slopes(const MlpBackward& m);  // those that do not follow from values
struct MlpFormed {
  MlpBackward m;
  Tensor of_slopes;
  SlopeFormula slope;
};
MlpFormed mlp_backward_form(const MlpBackward& m, Stream stream);
int64_t mlp_backward_formed_bytes(const MlpBackward& m);

// Of weight-normalised layers W in place of v and no gain, as the chain of gradients multiplies it, formed at the start
// of the workspace by one launch; and the rest of the workspace.
MlpBackward mlp_backward_form_weights(const MlpBackward& m, Stream stream);

using Slope = SlopeKind;
// Nothing of an activation without a formula of its slope; the forms that ask then leave it to the portable one.
std::optional<SlopeFormula> slope_of(Act act);

// --- forms of two launches: the chain of gradients, which leaves dz of the layers below the top in the workspace,
// layer after layer, and then sums over all rows

// The chain multiplies with W of the top layer down to this one's.
int mlp_lowest_product(const MlpBackward& m);
// Whether dz of layer l goes to the workspace. Of the top layer there is dy, unless that layer is activated.
bool mlp_keeps_dz(const MlpBackward& m, size_t l);
int64_t mlp_dz_bytes(const MlpBackward& m);  // room for every layer's that may go there

// Room for `bytes` behind what a workspace has so far, at a multiple of 128: where it begins.
inline int64_t mlp_take_room(int64_t& workspace, int64_t bytes) {
  const int64_t begin = workspace;
  workspace += (bytes + 127) / 128 * 128;
  return begin;
}
// A panel of so many rows, as the copies of the forms to 256 and to 512 bring it.
inline gpu::TmaBox mlp_panel_box(int rows) { return {.rows = rows, .cols = kMlpPanel, .swizzle = tile::Swizzle::b128}; }

struct MlpChainMaps {
  CUtensorMap dy, dx;
  CUtensorMap w[kMlpMaxLayers];
  CUtensorMap h[kMlpMaxLayers];   // what layer l saved
  CUtensorMap dz[kMlpMaxLayers];  // to the workspace
};
MlpChainMaps mlp_chain_maps(const MlpBackward& m, const gpu::TmaBox& rows, const gpu::TmaBox& weights);

struct MlpSumMaps {
  CUtensorMap dz[kMlpMaxLayers], h[kMlpMaxLayers];  // of layer l: h is what it multiplies
};
MlpSumMaps mlp_sum_maps(const MlpBackward& m, const gpu::TmaBox& dz, const gpu::TmaBox& h);

// A layer as its sums see it.
struct MlpSumLayer {
  const void *v = nullptr, *g = nullptr;  // (n, k) and (n): of a weight-normalised layer, of which dw is dv
  float *dw = nullptr, *db = nullptr, *dg = nullptr;
  int n = 0, k = 0;
};
MlpSumLayer mlp_sum_layer(const MlpLayer& layer, const MlpLayer& grad);

namespace mlp_parts {

constexpr int kPair = 2;  // blocks of a cluster, where two share what they read
struct ChainLaunch {      // of the chain of gradients by such pairs
  Slope slope = Slope::step;
  int clusters = 0, device = 0;
};

}  // namespace mlp_parts
}  // namespace ingot::cuda
