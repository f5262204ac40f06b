#pragma once
// The forward kernels up to 512 wide on the host's side.
#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

// T: f16 or bf16. kPass: the value of mlp_to_512_pass(). kSaves: values are saved, or the last layer is activated.
template <class T, int kPass, bool kSaves> void launch_mlp_to_512(const Mlp& m, Stream stream);
template <class T> void launch_mlp_to_512_few_rows(const Mlp& m, int cluster, Stream stream);

// The number of columns of a layer per pass, with one pass or two: the smallest sufficient of 160, 192, 224 and 256.
int mlp_to_512_pass(int64_t widest);

// The number of blocks per 64 rows on a GPU with `sms` SMs: 8 where all blocks together need at most a quarter of the
// SMs, else 4 where all blocks can run at once, else 2.
int mlp_to_512_cluster(int64_t rows, int sms);

}  // namespace ingot::cuda
