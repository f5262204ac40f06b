// The backward variant up to 512 wide: the networks it supports, the division of the work, its launches.
#include <algorithm>
#include <iterator>

#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/to_512/backward.h"

namespace ingot::cuda {
namespace to_512_backward {
namespace {

// The places of the sums' parts and the counters in the workspace, behind every layer's dz.
struct Place {
  int teams = 1;
  int64_t part = 0, bias_part = 0, counter = 0, bytes = 0;
};

int64_t chunks_of(const MlpBackward& m) { return std::max<int64_t>((m.x.rows() + kChunk - 1) / kChunk, 1); }
// Calls use(cut) with the narrowest halves that suffice.
template <class Use> auto with_cut(const MlpBackward& m, Use&& use) {
  const int64_t widest = mlp_widest(m);
  if (widest <= 2 * Cut<192>::kHalf) return use(Cut<192>{});
  return widest <= 2 * Cut<224>::kHalf ? use(Cut<224>{}) : use(Cut<256>{});
}
template <class Cut> int64_t tiles_of(const MlpLayer& layer) {
  return int64_t(Cut::squares_of(int(layer.w.rows()))) * Cut::halves_of(int(layer.w.cols()));
}
// The cost of all layers' rows; the unit is a pair's sums over a chunk of rows.
template <class Cut> int64_t cost_of(const MlpBackward& m) {
  int64_t tiles = 0;
  for (const MlpLayer& layer : m.layers) tiles += tiles_of<Cut>(layer);
  return tiles * chunks_of(m);
}
// A team has at least one chunk of rows. The rows are divided by sizes and the GPU alone, so freezing a layer does not
// change the sums of the rest.
template <class Cut> Place place_sums(const MlpBackward& m) {
  Place at;
  const int most = std::clamp(sm_count(m.x.device.index) / (Cut::kTeam * kPair), 1, kMaxTeams);
  at.teams = int(std::clamp<int64_t>(cost_of<Cut>(m) / Cut::kTeam, 1, most));
  mlp_take_room(at.bytes, mlp_dz_bytes(m));
  const int64_t parts = int64_t(at.teams + int(m.layers.size()) - 1) * Cut::kTeam * kPair;
  at.part = mlp_take_room(at.bytes, parts * Cut::kPartFloats * int64_t(sizeof(float)));
  at.bias_part = mlp_take_room(at.bytes, parts * Cut::kSquare * int64_t(sizeof(float)));
  at.counter = mlp_take_room(at.bytes, int64_t(sizeof(uint32_t)));
  return at;
}

Chain make_chain(const MlpBackward& m, const Place& place, const SlopeFormula& slope, int clusters) {
  Chain a{.layers = int(m.layers.size()), .lowest = mlp_lowest_product(m), .activate_last = m.activate_last};
  std::copy(std::begin(slope.number), std::end(slope.number), a.number);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const Tensor& w = m.layers[l].w;
    a.layer[l] = {.n = int(w.rows()), .k = int(w.cols()), .keeps_dz = mlp_keeps_dz(m, l)};
  }
  const auto units = [&](int groups) {
    const int rows = kPair * groups * kGroupRows;
    return int((m.x.rows() + rows - 1) / rows);
  };
  a.groups = units(1) <= clusters ? 1 : kGroups;  // few rows are distributed over all SMs
  if (a.lowest < a.layers || a.activate_last) a.units = units(a.groups);
  a.counter = reinterpret_cast<uint32_t*>(static_cast<char*>(m.workspace.data) + place.counter);
  return a;
}

// `layers`: the caller's layers, with weight norm.
template <class Cut> Sums make_sums(const MlpBackward& m, const std::vector<MlpLayer>& layers, const Place& place) {
  char* const base = static_cast<char*>(m.workspace.data);
  Sums a{.layers = int(m.layers.size()),
         .teams = place.teams,
         .chunks = int(chunks_of(m)),
         .part = reinterpret_cast<float*>(base + place.part),
         .bias_part = reinterpret_cast<float*>(base + place.bias_part),
         .counter = reinterpret_cast<uint32_t*>(base + place.counter)};
  int64_t before = 0;  // the cost of the layers before
  for (size_t l = 0; l < m.layers.size(); ++l) {
    a.layer[l] = mlp_sum_layer(layers[l], m.grads[l]);
    const int64_t tiles = tiles_of<Cut>(m.layers[l]);
    for (int team = 0; team <= a.teams; ++team)
      a.cut[team][l] = int(std::clamp<int64_t>((cost_of<Cut>(m) * team / a.teams - before) / tiles, 0, a.chunks));
    before += tiles * a.chunks;
  }
  return a;
}

template <class T, class Cut> void launch(const MlpFormed& formed, const std::vector<MlpLayer>& layers, Stream stream) {
  const MlpBackward& m = formed.m;
  const Place place = place_sums<Cut>(m);
  const int device = m.x.device.index, clusters = std::max(sm_count(device) / kPair, 1);
  const bool has_sums = std::any_of(m.grads.begin(), m.grads.end(), mlp_trained);
  const Chain chain = make_chain(m, place, formed.slope, clusters);
  MlpBackward of_chain = m;
  of_chain.saved = formed.of_slopes;
  const ChainLaunch at{.slope = formed.slope.kind, .clusters = std::clamp(chain.units, 1, clusters), .device = device};
  launch_chain<T, Cut::kHalf>(
      mlp_chain_maps(of_chain, mlp_panel_box(kGroupRows), mlp_panel_box(Cut::fetched_rows(kSlotRows))), chain, at,
      stream);
  if (has_sums)
    launch_sums<T, Cut::kHalf>(mlp_sum_maps(m, mlp_panel_box(kChunk), mlp_panel_box(Cut::fetched_rows(kChunk))),
                               make_sums<Cut>(m, layers, place), device, stream);
}

}  // namespace
}  // namespace to_512_backward

using namespace to_512_backward;

// Slopes not determined by values are computed from the kept arguments.
bool mlp_backward_to_512_takes(const MlpBackward& m) {
  return mlp_backward_has_shape(m, kWidth) && (!mlp_backward_forms_slopes(m) || m.saved);
}

void mlp_backward_to_512(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  const MlpFormed formed = mlp_backward_form(mlp_backward_form_weights(m, stream), stream);
  with_cut(m, [&](auto cut) {
    using Cut = decltype(cut);
    m.x.dtype == DType::f16 ? launch<f16, Cut>(formed, m.layers, stream) : launch<bf16, Cut>(formed, m.layers, stream);
  });
}

int64_t mlp_backward_to_512_workspace_bytes(const MlpBackward& m) {
  return mlp_formed_weights_bytes(m.layers) + mlp_backward_formed_bytes(m) +
         with_cut(m, [&](auto cut) { return place_sums<decltype(cut)>(m).bytes; });
}

}  // namespace ingot::cuda
