// The backward variant up to 256 wide: the networks it supports, the division of the work, its launches.
#include <algorithm>
#include <iterator>

#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/to_256/backward.h"

namespace ingot::cuda {
namespace to_256_backward {
namespace {

// The places of the sums' parts and the counters in the workspace, behind every layer's dz.
struct Place {
  int splits = 1;
  int64_t part = 0, bias_part = 0, counters = 0, bytes = 0;
};
// The rows are divided by their number, the depth and the GPU's size alone, so freezing a layer does not change the
// sums of the rest.
Place place_sums(const MlpBackward& m) {
  Place at;
  const int layers = int(m.layers.size());
  const int64_t chunks = std::max<int64_t>((m.x.rows() + kChunk - 1) / kChunk, 1);
  const int wanted = int(std::clamp<int64_t>(sm_count(m.x.device.index) / (kPair * layers), 1, chunks));
  const int64_t each = (chunks + wanted - 1) / wanted;
  at.splits = int((chunks + each - 1) / each);
  mlp_take_room(at.bytes, mlp_dz_bytes(m));
  const int64_t parts = int64_t(layers) * at.splits * kPair;
  at.part = mlp_take_room(at.bytes, parts * kPartFloats * int64_t(sizeof(float)));
  at.bias_part = mlp_take_room(at.bytes, parts * kSquare * int64_t(sizeof(float)));
  at.counters = mlp_take_room(at.bytes, (1 + int64_t(layers) * kPair) * int64_t(sizeof(uint64_t)));
  return at;
}

// `layers`: the caller's layers, with weight norm, for the kernel of the sums.
Arguments make_arguments(const MlpBackward& m, const std::vector<MlpLayer>& layers, const Place& place,
                         const SlopeFormula& slope) {
  char* const base = static_cast<char*>(m.workspace.data);
  Arguments a{.layers = int(m.layers.size()),
              .lowest = mlp_lowest_product(m),
              .activate_last = m.activate_last,
              .chunks = int((m.x.rows() + kChunk - 1) / kChunk),
              .splits = place.splits,
              .part = reinterpret_cast<float*>(base + place.part),
              .bias_part = reinterpret_cast<float*>(base + place.bias_part),
              .counter = reinterpret_cast<uint64_t*>(base + place.counters)};
  std::copy(std::begin(slope.number), std::end(slope.number), a.number);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    a.layer[l] = {mlp_sum_layer(layers[l], m.grads[l]), mlp_keeps_dz(m, l)};
  }
  if (a.lowest < a.layers || a.activate_last) a.units = int((m.x.rows() + kUnitRows - 1) / kUnitRows);
  return a;
}

Maps make_maps(const MlpBackward& m, const Tensor& of_slopes) {
  MlpBackward chain = m;
  chain.saved = of_slopes;
  Maps maps{mlp_chain_maps(chain, mlp_panel_box(kGroupRows), mlp_panel_box(int(kStageRows)))};
  static_assert(kGroupRows == kChunk, "the chain and the sums read dz through the same maps");
  for (size_t l = 0; l < m.layers.size(); ++l)
    maps.input[l] = gpu::tensor_map("mlp_backward: input", l == 0 ? mlp_matrix(m.x) : mlp_layer_part(m, m.saved, l - 1),
                                    mlp_panel_box(kChunk));
  return maps;
}

// `of_slopes`: the arguments of the formula for slopes, in the layout of `saved`.
void run(const MlpBackward& m, const std::vector<MlpLayer>& layers, const Tensor& of_slopes, const SlopeFormula& slope,
         Stream stream) {
  const Arguments a = make_arguments(m, layers, place_sums(m), slope);
  const int device = m.x.device.index, most = std::max(sm_count(device) / kPair, 1);
  LaunchAt at{{.slope = slope.kind, .clusters = std::clamp(a.units, 1, most), .device = device}};
  at.has_sums = std::any_of(m.grads.begin(), m.grads.end(), mlp_trained);
  const Maps maps = make_maps(m, of_slopes);
  m.x.dtype == DType::f16 ? launch<f16>(maps, a, at, stream) : launch<bf16>(maps, a, at, stream);
}

}  // namespace
}  // namespace to_256_backward

using namespace to_256_backward;

bool mlp_backward_to_256_takes(const MlpBackward& m) { return mlp_backward_has_shape(m, kWidth); }

void mlp_backward_to_256(const MlpBackward& given, Stream stream) {
  if (given.x.rows() == 0 || mlp_first_layer(given) == given.layers.size()) return;
  const MlpBackward m = mlp_backward_form_weights(given, stream);
  const auto slope = mlp_backward_values(m) == 0 ? SlopeFormula{} : slope_of(m.act);
  if (!slope) {
    const MlpFormedSlopes formed = mlp_backward_form_slopes(m, stream);
    return run(formed.m, given.layers, formed.slopes, {Slope::quadratic, {0, 1, 0}}, stream);  // the formula is the
                                                                                               // identity: memory holds
                                                                                               // the slopes themselves
  }
  if (mlp_backward_has_values(m)) return run(m, given.layers, m.saved, *slope, stream);
  const MlpBackward then = mlp_backward_form_values(m, stream);
  run(then, given.layers, then.saved, *slope, stream);
}

int64_t mlp_backward_to_256_workspace_bytes(const MlpBackward& m) {
  const bool values = !mlp_backward_has_values(m), slopes = mlp_backward_values(m) > 0 && !slope_of(m.act);
  return mlp_formed_weights_bytes(m.layers) + (slopes ? 2 : values) * mlp_backward_values_bytes(m) +
         place_sums(m).bytes;
}

}  // namespace ingot::cuda
