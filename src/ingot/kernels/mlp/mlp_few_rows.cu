#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda {

// 6 layers of 128 x 128 fit the registers, as do 8 of 64 x 64.
bool mlp_few_rows_takes(const Mlp& m) { return mlp_fast_type(m) && m.layers.size() <= (mlp_widest(m) <= 64 ? 8 : 6); }
void mlp_few_rows(const Mlp& m, Stream stream) {
  m.x.dtype == DType::f16 ? launch_mlp_few_rows<f16>(m, stream) : launch_mlp_few_rows<bf16>(m, stream);
}

}  // namespace ingot::cuda
