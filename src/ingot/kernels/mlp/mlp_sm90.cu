#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// 6 layers of 128 x 128 fit the shared memory; of 64 x 64 any number does.
bool mlp_sm90_takes(const Mlp& m) { return mlp_fast_type(m) && m.layers.size() <= (mlp_widest(m) <= 64 ? 8 : 6); }
void mlp_sm90(const Mlp& m, Stream stream) {
  if (m.x.dtype == DType::f16)
    m.saved ? launch_mlp_sm90<f16, true>(m, stream) : launch_mlp_sm90<f16, false>(m, stream);
  else
    m.saved ? launch_mlp_sm90<bf16, true>(m, stream) : launch_mlp_sm90<bf16, false>(m, stream);
}

}  // namespace ingot::cuda
