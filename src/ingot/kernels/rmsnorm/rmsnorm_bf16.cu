#include "ingot/kernels/rmsnorm/rmsnorm_large.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_rows.cuh"

namespace ingot::cuda {

template auto pick_rmsnorm<bf16>(DType, const RmsNormConfig&, bool) -> void (*)(RmsNormParams);
template auto pick_rmsnorm_large<bf16>(DType, const RmsNormConfig&, bool) -> void (*)(LargeParams);

}  // namespace ingot::cuda
