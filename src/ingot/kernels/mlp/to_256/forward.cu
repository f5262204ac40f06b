#include <cstdint>

#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/to_256/forward.h"

namespace ingot::cuda {

namespace {

// Every layer is activated, and either y is the place of the last layer's values, or no values are kept.
bool is_values(const Mlp& m) {
  if (!m.activate_last) return false;
  if (!m.saved) return m.layers.size() == 1;
  return m.saved.dtype == m.x.dtype && mlp_forward_params(m).layer[m.layers.size() - 1].saved == m.y.data;
}

template <class T> void launch(const Mlp& m, Stream stream) {
  if (is_values(m))
    launch_mlp_to_256<T, MlpTo256Kernel::values>(m, stream);
  else if (m.activate_last || (m.saved && m.saved.dtype != m.x.dtype))
    launch_mlp_to_256<T, MlpTo256Kernel::general>(m, stream);
  else if (m.saved)
    launch_mlp_to_256<T, MlpTo256Kernel::keeps>(m, stream);
  else
    launch_mlp_to_256<T, MlpTo256Kernel::inference>(m, stream);
}

}  // namespace

// The copy engine counts rows in 31 bits.
bool mlp_to_256_takes(const Mlp& m) {
  const int64_t width = mlp_widest(m);
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && width > kMlpTo128 && width <= kMlpTo256 &&
         m.layers.size() <= kMlpMaxLayers && m.x.rows() <= INT32_MAX;
}
void mlp_to_256(const Mlp& given, Stream stream) {
  const Mlp m = mlp_with_formed_weights(given, stream);
  m.x.dtype == DType::f16 ? launch<f16>(m, stream) : launch<bf16>(m, stream);
}

void mlp_to_256_slopes(const Mlp& m, const Tensor& slopes, Stream stream) {
  m.x.dtype == DType::f16 ? launch_mlp_to_256_slopes<f16>(m, slopes, stream)
                          : launch_mlp_to_256_slopes<bf16>(m, slopes, stream);
}

}  // namespace ingot::cuda
