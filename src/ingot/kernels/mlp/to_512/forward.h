#pragma once
// The forward kernels up to 512 wide on the host's side.
#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

// T: f16 or bf16. kPass: what mlp_to_512_pass gives. kSaves: values are saved, or the last layer is activated.
template <class T, int kPass, bool kSaves> void launch_mlp_to_512(const Mlp& m, Stream stream);
template <class T> void launch_mlp_to_512_few_rows(const Mlp& m, int cluster, Stream stream);

// The number of columns of a layer that are summed at a time, in one pass or two: the smallest of 160, 192, 224 and 256
// that suffices.
int mlp_to_512_pass(int64_t widest);

// The number of blocks that take 64 rows together on a GPU with so many SMs: 8, 4 or 2, if there are few enough rows
// that all blocks run at once.
int mlp_to_512_cluster(int64_t rows, int sms);

}  // namespace ingot::cuda
