#pragma once
// Hopper's forward forms on the host's side: operands as the kernels take them, and the launchers of the form for many
// rows, one per type (mlp_sm90_f16.cu, ...), so that no file takes long to compile.
#include <cstdint>

#include "ingot/kernels/mlp/mlp_cuda.h"

namespace ingot::cuda {

constexpr int kMlpSm90Layers = 5;  // of 128 x 128 that fit the shared memory beside the rows under way

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
  MlpLayerParams layer[kMlpMaxLayers];
};

MlpForwardParams mlp_forward_params(const Mlp& m);

constexpr int64_t kMlpSm90FewRows = 4096 * 64;
// Of three and four warpgroups a block, where both fit.
bool mlp_sm90_three_suffice(const MlpForwardParams& p);

// T: f16 or bf16.
template <class T, int kWidth, bool kSave> void launch_mlp_sm90(const Mlp& m, Stream stream);
template <class T, bool kSave> void launch_mlp_sm90_deep(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
