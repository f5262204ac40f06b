#pragma once
// Host code of Hopper's forward forms: operands in the form of the kernels' parameters.
#include <cstdint>

#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda {

constexpr int kMlpResidentLayers = 5;  // layers of 128 x 128 fitting into shared memory beside the current rows

struct MlpLayerParams {
  const void *w, *b, *g;  // w (n, k) contiguous; b and g (n) or null; all of the network's type
  void* saved;            // (rows, n); null for a layer without activation, and in inference
  uint32_t n, k;
};
struct MlpForwardParams {
  const void* x;
  void* y;
  int64_t x_stride_bytes, y_stride_bytes, rows;
  int layers;
  bool has_bias, has_gain, activate_last, saves, saved_f32;
  float number;  // the formula's parameter, if any (activation.h)
  MlpLayerParams layer[kMlpMaxLayers];
};

MlpForwardParams mlp_forward_params(const Mlp& m);

}  // namespace ingot::cuda
