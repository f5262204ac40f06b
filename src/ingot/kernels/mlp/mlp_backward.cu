#include "ingot/kernels/mlp/mlp_backward.h"

namespace ingot::cuda {

bool mlp_backward_is_fast(const MlpBackward& m) {
  if (m.layers.empty() || m.layers.size() > size_t(kMlpMaxLayers) || !mlp_fast_type(m)) return false;
  if (m.x.rows() > int64_t(1) << 30 || m.x.cols() % 8 != 0) return false;  // tensor copies: 31 bits, whole 16 bytes
  for (const MlpLayer& layer : m.layers)
    if (layer.w.rows() % 8 != 0) return false;
  return mlp_backward_values(m) == 0 || slope_follows_from_value(m.act);
}

int mlp_backward_values(const MlpBackward& m) { return int(m.layers.size()) - (m.activate_last ? 0 : 1); }
bool mlp_backward_forms_values(const MlpBackward& m) {
  return mlp_backward_values(m) > 0 && !(m.saved && m.saved.dtype == m.x.dtype);
}

Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l) {
  int64_t offset = 0;
  for (size_t i = 0; i < l; ++i) offset += m.x.rows() * m.layers[i].w.rows();
  return Tensor(static_cast<char*>(all.data) + offset * size_of(m.x.dtype), m.x.dtype,
                {m.x.rows(), m.layers[l].w.rows()}, m.x.device);
}

}  // namespace ingot::cuda
