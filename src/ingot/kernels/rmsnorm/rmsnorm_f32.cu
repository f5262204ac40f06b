#include "ingot/kernels/rmsnorm/rmsnorm_reread.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_rows.cuh"

namespace ingot::cuda {

template auto pick_rmsnorm<float>(DType, const RmsNormConfig&, bool) -> void (*)(RmsNormParams);
template auto pick_rmsnorm_reread<float>(DType, bool) -> void (*)(RereadParams);

}  // namespace ingot::cuda
