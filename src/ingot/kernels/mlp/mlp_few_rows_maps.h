#pragma once
// The tensors of the few-rows forward form as the copy engine takes them.
#include <cuda.h>

#include "ingot/kernels/mlp/mlp_few_rows.h"
#include "ingot/kernels/mlp/mlp_forward.h"

namespace ingot::cuda::few_rows {

struct Maps {
  CUtensorMap x, y;
  CUtensorMap w[kMlpMaxLayers];
  CUtensorMap saved[kMlpMaxLayers];  // 16 bit; fp32 is stored from registers
};
Maps make_maps(const Mlp& m, const MlpForwardParams& p, int block_rows, int panels);

}  // namespace ingot::cuda::few_rows
