#pragma once
// Queries of the operands for the forms of every device. M is Mlp or MlpBackward.
#include <algorithm>

#include "ingot/kernels/mlp/mlp.h"

namespace ingot {

template <class M> int64_t mlp_widest(const M& m) {  // of the input and all layers
  int64_t width = m.x.cols();
  for (const MlpLayer& layer : m.layers) width = std::max(width, layer.w.rows());
  return width;
}
template <class M> bool mlp_activated(const M& m, size_t l) { return m.activate_last || l + 1 < m.layers.size(); }

inline bool mlp_trained(const MlpLayer& grad) { return grad.w || grad.b || grad.g; }
// The lowest layer whose dz is needed: no lower layer has a wanted gradient.
inline size_t mlp_first_layer(const MlpBackward& m) {
  size_t first = 0;
  if (!m.dx)
    while (first < m.grads.size() && !mlp_trained(m.grads[first])) ++first;
  return first;
}

// Views a tensor of any rank as rows and columns.
inline Tensor mlp_matrix(const Tensor& t) {
  Tensor view(t.data, t.dtype, {t.rows(), t.cols()}, t.device);
  view.stride[0] = t.row_stride();
  return view;
}

}  // namespace ingot
