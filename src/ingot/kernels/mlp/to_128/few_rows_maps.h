#pragma once
// The few-rows forward variant on the host's side: tensor maps of its tensors, and its launchers, each in a file of its
// own.
#include <cuda.h>

#include "ingot/kernels/mlp/parts/forward_params.h"
#include "ingot/kernels/mlp/to_128/few_rows.h"

namespace ingot::cuda::to_128_few_rows {

struct Maps {
  CUtensorMap x, y;
  CUtensorMap w[kMlpMaxLayers];
  CUtensorMap saved[kMlpMaxLayers];  // 16 bit; fp32 is stored from registers
};
Maps make_maps(const Mlp& m, const MlpForwardParams& p, int block_rows, int panels);

}  // namespace ingot::cuda::to_128_few_rows

namespace ingot::cuda {

// T: f16 or bf16. kNorm: with weight norm.
template <class T, bool kNorm> void launch_mlp_to_128_few_rows(const Mlp& m, Stream stream);

}  // namespace ingot::cuda
