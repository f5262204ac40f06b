#include "ingot/kernels/rmsnorm/rmsnorm_large.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_rows.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_walk.cuh"

namespace ingot::cuda {

template auto pick_rmsnorm<float>(DType, const RmsNormConfig&, bool) -> void (*)(RmsNormParams);
template auto pick_rmsnorm_large<float>(DType, const RmsNormConfig&, bool) -> void (*)(LargeParams);
auto pick_rmsnorm_walk() -> void (*)(LargeParams) { return rmsnorm_walk; }

}  // namespace ingot::cuda
