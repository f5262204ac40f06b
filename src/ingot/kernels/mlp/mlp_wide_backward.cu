// The wide backward form: what it takes, how the work is cut, its two launches.
#include <algorithm>
#include <iterator>

#include "ingot/kernels/mlp/mlp_wide_backward.h"

namespace ingot::cuda {
namespace wide_backward {
namespace {

// Where the sums' parts and counters lie in the workspace, behind every layer's dz.
struct Place {
  int splits = 1;
  int64_t part = 0, bias_part = 0, counters = 0, bytes = 0;
};
// The rows are cut by their number, the depth and the GPU's size alone, so that frozen layers change no other's sums.
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
  at.counters = mlp_take_room(at.bytes, int64_t(layers) * kPair * int64_t(sizeof(uint32_t)));
  return at;
}

Chain make_chain(const MlpBackward& m, const Place& place, const SlopeFormula& slope) {
  Chain a{.layers = int(m.layers.size()), .lowest = mlp_lowest_product(m), .activate_last = m.activate_last};
  std::copy(std::begin(slope.number), std::end(slope.number), a.number);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    a.layer[l] = {.v = layer.w.data,
                  .g = layer.g ? layer.g.data : nullptr,
                  .n = int(layer.w.rows()),
                  .k = int(layer.w.cols()),
                  .keeps_dz = mlp_keeps_dz(m, l)};
    a.has_gain = a.has_gain || layer.g;
  }
  if (a.lowest < a.layers || a.activate_last) a.units = int((m.x.rows() + kUnitRows - 1) / kUnitRows);
  a.counters = reinterpret_cast<uint32_t*>(static_cast<char*>(m.workspace.data) + place.counters);
  a.counter_count = a.layers * kPair;
  return a;
}

Sums make_sums(const MlpBackward& m, const Place& place) {
  char* const base = static_cast<char*>(m.workspace.data);
  Sums a{.chunks = int((m.x.rows() + kChunk - 1) / kChunk),
         .splits = place.splits,
         .part = reinterpret_cast<float*>(base + place.part),
         .bias_part = reinterpret_cast<float*>(base + place.bias_part),
         .counters = reinterpret_cast<uint32_t*>(base + place.counters)};
  for (size_t l = 0; l < m.layers.size(); ++l) a.layer[l] = mlp_sum_layer(m, l);
  return a;
}

}  // namespace
}  // namespace wide_backward

using namespace wide_backward;

bool mlp_wide_backward_takes(const MlpBackward& m) {
  return mlp_backward_is_fast(m, kWidth) && mlp_backward_has_values(m) &&
         (mlp_backward_values(m) == 0 || slope_of(m.act));
}

void mlp_wide_backward(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  const Place place = place_sums(m);
  const SlopeFormula slope = slope_of(m.act).value_or(SlopeFormula{});  // without values none is asked for
  const Chain chain = make_chain(m, place, slope);
  const int device = m.x.device.index;
  const bool is_f16 = m.x.dtype == DType::f16;
  const MlpChainMaps maps = mlp_chain_maps(m, mlp_panel_box(kGroupRows), mlp_panel_box(int(kStageRows)));
  const ChainLaunch at{.slope = slope.kind,
                       .clusters = std::clamp(chain.units, 1, std::max(sm_count(device) / kPair, 1)),
                       .device = device};
  is_f16 ? launch_chain<f16>(maps, chain, at, stream) : launch_chain<bf16>(maps, chain, at, stream);
  if (std::none_of(m.grads.begin(), m.grads.end(), mlp_trained)) return;
  const MlpSumMaps sum_maps = mlp_sum_maps(m, mlp_panel_box(kChunk), mlp_panel_box(kChunk));
  const Sums sums = make_sums(m, place);
  const SumLaunch of_sums{.layers = int(m.layers.size()), .device = device};
  is_f16 ? launch_sums<f16>(sum_maps, sums, of_sums, stream) : launch_sums<bf16>(sum_maps, sums, of_sums, stream);
}

int64_t mlp_wide_backward_workspace_bytes(const MlpBackward& m) { return place_sums(m).bytes; }

}  // namespace ingot::cuda
