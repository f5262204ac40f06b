#include <algorithm>
#include <cstdint>

#include "ingot/kernels/mlp/mlp_wide.h"

namespace ingot::cuda {

namespace {

bool is_rare(const Mlp& m) {
  const auto normed = [](const MlpLayer& layer) { return bool(layer.g); };
  return m.saved || m.activate_last || std::any_of(m.layers.begin(), m.layers.end(), normed);
}
template <class T> void launch(const Mlp& m, Stream stream) {
  is_rare(m) ? launch_mlp_wide<T, true>(m, stream) : launch_mlp_wide<T, false>(m, stream);
}

}  // namespace

// The copy engine counts rows in 31 bits.
bool mlp_wide_takes(const Mlp& m) {
  const int64_t width = mlp_widest(m);
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && width > kMlpFastWidth && width <= kMlpWideWidth &&
         m.layers.size() <= kMlpMaxLayers && m.x.rows() <= INT32_MAX;
}
void mlp_wide(const Mlp& m, Stream stream) {
  m.x.dtype == DType::f16 ? launch<f16>(m, stream) : launch<bf16>(m, stream);
}

}  // namespace ingot::cuda
