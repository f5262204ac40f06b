#include <cstdint>

#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

namespace {

// Whether the network fits the shared memory of an SM; otherwise its weights pass through it.
bool is_resident(const Mlp& m) { return mlp_panels(m) == 1 || m.layers.size() <= kMlpSm90Layers; }
template <class T, bool kSave> void launch(const Mlp& m, Stream stream) {
  if (!is_resident(m)) return launch_mlp_sm90_deep<T, kSave>(m, stream);
  mlp_panels(m) == 1 ? launch_mlp_sm90<T, 64, kSave>(m, stream) : launch_mlp_sm90<T, 128, kSave>(m, stream);
}

}  // namespace

// Three start sooner, and keep up as long as each has few tiles and little to do for them. To norm weights, four.
bool mlp_sm90_three_suffice(const MlpForwardParams& p) {
  constexpr int64_t kFewWithBias = 32768;
  return p.rows <= (p.has_bias ? kFewWithBias : kMlpSm90FewRows) && !p.has_gain;
}

// The copy engine counts rows in 31 bits.
bool mlp_sm90_takes(const Mlp& m) {
  return mlp_fast_type(m) && m.layers.size() <= kMlpMaxLayers && m.x.rows() <= INT32_MAX;
}
void mlp_sm90(const Mlp& m, Stream stream) {
  if (m.x.dtype == DType::f16)
    m.saved ? launch<f16, true>(m, stream) : launch<f16, false>(m, stream);
  else
    m.saved ? launch<bf16, true>(m, stream) : launch<bf16, false>(m, stream);
}

}  // namespace ingot::cuda
