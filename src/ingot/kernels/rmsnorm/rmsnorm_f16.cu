#include "ingot/kernels/rmsnorm/rmsnorm_reread.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_rows.cuh"

namespace ingot::cuda {

template auto pick_rmsnorm<f16>(DType, const RmsNormConfig&, bool) -> void (*)(RmsNormParams);
template auto pick_rmsnorm_reread<f16>(DType, bool) -> void (*)(RereadParams);

}  // namespace ingot::cuda
