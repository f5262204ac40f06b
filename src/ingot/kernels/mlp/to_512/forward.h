#pragma once
// The forward kernels to 512 on the host's side.
#include "ingot/kernels/mlp/parts/forward_params.h"

namespace ingot::cuda {

// T: f16 or bf16. kPass: what mlp_to_512_pass gives. kSaves: values are saved, or the last layer is activated.
template <class T, int kPass, bool kSaves> void launch_mlp_to_512(const Mlp& m, Stream stream);
template <class T> void launch_mlp_to_512_few_rows(const Mlp& m, int cluster, Stream stream);

// How many columns of a layer are summed at a time, in one pass or two: the fewest of 160, 192, 224 and 256.
int mlp_to_512_pass(int64_t widest);

// How many blocks of a GPU of so many SMs take 64 rows together: 8, 4 or 2, all of them at once if there are few rows.
int mlp_to_512_cluster(int64_t rows, int sms);

}  // namespace ingot::cuda
