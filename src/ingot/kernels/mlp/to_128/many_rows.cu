#include <algorithm>
#include <cstdint>

#include "ingot/kernels/mlp/to_128/many_rows.h"

namespace ingot::cuda {

namespace {

// Whether the network fits the shared memory of an SM; otherwise its weights stream through shared memory.
bool is_resident(const Mlp& m) { return mlp_panels(m) == 1 || m.layers.size() <= kMlpResidentLayers; }
// The networks of to_128/many_rows_linear_output.cuh. With a bias and this many rows the kernels of many_rows.cuh are 1
// to 4 % faster, because these load the bias first.
bool has_linear_output(const Mlp& m) {
  constexpr int64_t kLeast = 2048, kMost = 131072;
  const auto count = [&](auto has) { return size_t(std::count_if(m.layers.begin(), m.layers.end(), has)); };
  const size_t normed = count([](const MlpLayer& layer) { return bool(layer.g); });
  const size_t biased = count([](const MlpLayer& layer) { return bool(layer.b); });
  if (m.activate_last || m.layers.size() == 1) return false;
  if (normed > 0) return normed == m.layers.size() && biased == 0;
  return biased == 0 || m.x.rows() <= kLeast || m.x.rows() > kMost;
}
template <class T, bool kSave> void launch(const Mlp& m, Stream stream) {
  if (!is_resident(m)) return launch_mlp_to_128_streamed<T, kSave>(m, stream);
  if (mlp_panels(m) == 1) return launch_mlp_to_128<T, 64, kSave>(m, stream);
  has_linear_output(m) ? launch_mlp_to_128_linear_output<T, kSave>(m, stream)
                       : launch_mlp_to_128<T, 128, kSave>(m, stream);
}

}  // namespace

// Three warpgroups start sooner, and are as fast as long as each has few tiles and little work per tile. Normalising
// weights needs four.
bool mlp_three_warpgroups_suffice(const MlpForwardParams& p) {
  constexpr int64_t kFewWithBias = 32768;
  return p.rows <= (p.has_bias ? kFewWithBias : kMlpFewTileRows) && !p.has_gain;
}

// The copy engine counts rows in 31 bits.
bool mlp_to_128_takes(const Mlp& m) {
  return mlp_is_to_128(m) && m.layers.size() <= kMlpMaxLayers && m.x.rows() <= INT32_MAX;
}
void mlp_to_128(const Mlp& m, Stream stream) {
  if (m.x.dtype == DType::f16)
    m.saved ? launch<f16, true>(m, stream) : launch<f16, false>(m, stream);
  else
    m.saved ? launch<bf16, true>(m, stream) : launch<bf16, false>(m, stream);
}

}  // namespace ingot::cuda
