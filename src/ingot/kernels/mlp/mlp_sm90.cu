#include <cstdint>

#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// The copy engine counts rows in 31 bits; the formula of the exact gelu leaves a wide tile too few registers.
bool mlp_sm90_takes(const Mlp& m) {
  const bool is_narrow = mlp_widest(m) <= 64;
  if (!is_narrow && m.act == act_of<Gelu>) return false;
  const size_t most = is_narrow ? kMlpMaxLayers : kMlpSm90Layers;
  return mlp_fast_type(m) && m.layers.size() <= most && m.x.rows() <= INT32_MAX;
}
void mlp_sm90(const Mlp& m, Stream stream) {
  if (m.x.dtype == DType::f16)
    m.saved ? launch_mlp_sm90<f16, true>(m, stream) : launch_mlp_sm90<f16, false>(m, stream);
  else
    m.saved ? launch_mlp_sm90<bf16, true>(m, stream) : launch_mlp_sm90<bf16, false>(m, stream);
}

}  // namespace ingot::cuda
