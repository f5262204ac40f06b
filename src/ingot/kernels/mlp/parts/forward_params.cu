#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

MlpForwardParams mlp_forward_params(const Mlp& m) {
  MlpForwardParams p = {.x = m.x.data,
                        .y = m.y.data,
                        .x_stride_bytes = m.x.row_stride() * size_of(m.x.dtype),
                        .y_stride_bytes = m.y.row_stride() * size_of(m.y.dtype),
                        .rows = m.x.rows(),
                        .layers = int(m.layers.size()),
                        .activate_last = m.activate_last,
                        .saves = bool(m.saved),
                        .saved_f32 = m.saved && m.saved.dtype == DType::f32,
                        .number = number_of(m.act)};
  char* saved = static_cast<char*>(m.saved.data);
  for (int l = 0; l < p.layers; ++l) {
    const MlpLayer& layer = m.layers[size_t(l)];
    const int64_t n = layer.w.rows();
    const bool keeps = p.saves && mlp_activated(m, size_t(l));
    p.layer[l] = {.w = layer.w.data,
                  .b = layer.b ? layer.b.data : nullptr,
                  .g = layer.g ? layer.g.data : nullptr,
                  .saved = keeps ? saved : nullptr,
                  .n = uint32_t(n),
                  .k = uint32_t(layer.w.cols())};
    if (keeps) saved += p.rows * n * size_of(m.saved.dtype);
    p.has_bias = p.has_bias || layer.b;
    p.has_gain = p.has_gain || layer.g;
  }
  return p;
}

}  // namespace ingot::cuda
