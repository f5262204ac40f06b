#pragma once
// Constants shared by the few-rows variants of forward and backward.
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda::to_128_few_rows {

constexpr int kPanel = kMlpPanel;

// Up to this number of rows a block of the forward variant takes 16 rows, and every block has an SM.
constexpr int64_t kFewest = 2048;

}  // namespace ingot::cuda::to_128_few_rows
