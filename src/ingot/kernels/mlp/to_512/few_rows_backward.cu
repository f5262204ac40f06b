// The backward variant up to 512 wide for few rows: the networks it supports, its launches.
#include <algorithm>
#include <iterator>

#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/to_512/few_rows_backward.h"
#include "ingot/kernels/mlp/to_512/forward.h"

namespace ingot::cuda {
namespace to_512_few_rows_backward {
namespace {

Chain make_chain(const MlpBackward& m, const SlopeFormula& slope) {
  Chain a{.layers = int(m.layers.size()), .lowest = mlp_lowest_product(m), .activate_last = m.activate_last};
  std::copy(std::begin(slope.number), std::end(slope.number), a.number);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const Tensor& w = m.layers[l].w;
    a.layer[l] = {.n = int(w.rows()), .k = int(w.cols()), .keeps_dz = mlp_keeps_dz(m, l)};
  }
  return a;
}

Sums make_sums(const MlpBackward& m) {
  const auto blocks = [](int64_t width, int64_t each) { return int((width + each - 1) / each); };
  Sums a{.layers = int(m.layers.size()), .chunks = blocks(m.x.rows(), kChunk)};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const Tensor& w = m.layers[l].w;
    a.layer[l] = mlp_sum_layer(m.layers[l], m.grads[l]);
    const int of_layer = blocks(w.rows(), kSumRows) * blocks(w.cols(), kSumColumns);
    a.first_block[l + 1] = a.first_block[l] + (mlp_trained(m.grads[l]) ? of_layer : 0);
  }
  return a;
}

// `of_slopes`: the arguments of the formula for slopes.
template <class T>
void launch(const MlpBackward& m, const Tensor& of_slopes, const SlopeFormula& slope, Stream stream) {
  const gpu::TmaBox panel = mlp_panel_box(kMlpPanel);
  const int device = m.x.device.index;
  const Chain chain = make_chain(m, slope);
  MlpBackward of_chain = m;
  of_chain.saved = of_slopes;
  if (chain.lowest < chain.layers || chain.activate_last)
    launch_chain<T>(mlp_chain_maps(of_chain, panel, panel), chain,
                    {.slope = slope.kind,
                     .tiles = int((m.x.rows() + kMlpPanel - 1) / kMlpPanel),
                     .cluster = mlp_to_512_cluster(m.x.rows(), sm_count(device)),
                     .device = device},
                    stream);
  const Sums sums = make_sums(m);
  if (sums.first_block[sums.layers] > 0) launch_sums<T>(mlp_sum_maps(m, panel, panel), sums, device, stream);
}

}  // namespace
}  // namespace to_512_few_rows_backward

using namespace to_512_few_rows_backward;

// Missing values, or values kept in fp32, are computed first; so are slopes not determined by values, from the kept
// arguments.
bool mlp_backward_to_512_few_rows_takes(const MlpBackward& m) {
  return mlp_backward_has_shape(m, kMlpTo512) && (!mlp_backward_forms_slopes(m) || m.saved) && !mlp_has_norms(m.layers);
}
void mlp_backward_to_512_few_rows(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  const MlpFormed formed = mlp_backward_form(m, stream);
  m.x.dtype == DType::f16 ? launch<f16>(formed.m, formed.of_slopes, formed.slope, stream)
                          : launch<bf16>(formed.m, formed.of_slopes, formed.slope, stream);
}
int64_t mlp_backward_to_512_few_rows_workspace_bytes(const MlpBackward& m) {
  return std::max<int64_t>(mlp_backward_formed_bytes(m) + mlp_dz_bytes(m), 1);
}

}  // namespace ingot::cuda
