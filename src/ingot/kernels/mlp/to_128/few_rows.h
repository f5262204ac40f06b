#pragma once
// What the few-rows forms, forward and backward, agree on.
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda::to_128_few_rows {

constexpr int kPanel = kMlpPanel;

constexpr int64_t kFewest = 2048;  // up to here a block of the forward form takes 16 rows: there is an SM for each

}  // namespace ingot::cuda::to_128_few_rows
