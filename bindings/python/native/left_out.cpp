// In a build of some rooms (INGOT_ROOMS), the functions of the missing rooms for handwritten calls: each refuses by the
// room's name. Declared ops (declare.h) need nothing here.
#include "ingot/core/check.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot {
namespace {
[[noreturn, maybe_unused]] void left_out(const char* room) {
  fail(ErrorCode::unsupported, room, ": found a build without it, expected one whose INGOT_ROOMS names it or is empty");
}
}  // namespace

#ifdef INGOT_WITHOUT_LINEAR
void linear(const Linear&, Stream) { left_out("linear"); }
void linear_backward(const LinearBackward&, Stream) { left_out("linear"); }
int64_t linear_workspace_bytes(Device) { left_out("linear"); }
#endif

#ifdef INGOT_WITHOUT_MLP
void mlp(const Mlp&, Stream) { left_out("mlp"); }
void mlp_backward(const MlpBackward&, Stream) { left_out("mlp"); }
int64_t mlp_saved_elements(int64_t, const std::vector<MlpLayer>&, bool) { left_out("mlp"); }
int64_t mlp_workspace_bytes(const Mlp&) { left_out("mlp"); }
int64_t mlp_backward_workspace_bytes(const MlpBackward&) { left_out("mlp"); }
#endif

#ifdef INGOT_WITHOUT_RMSNORM
void rmsnorm(const RmsNorm&, Stream) { left_out("rmsnorm"); }
void rmsnorm_backward(const RmsNormBackward&, Stream) { left_out("rmsnorm"); }
int64_t rmsnorm_backward_workspace_bytes(int64_t, int64_t, DType, Device) { left_out("rmsnorm"); }
#endif

#ifdef INGOT_WITHOUT_ROPE
RopeFrequencies rope_frequencies(int64_t, double, const RopeScaling&) { left_out("rope"); }
void rope_table(const RopeFrequencies&, const Tensor&, const Tensor&) { left_out("rope"); }
#endif

#ifdef INGOT_WITHOUT_SWIGLU
void swiglu_gate(const SwigluGate&, Stream) { left_out("swiglu"); }
void swiglu_gate_backward(const SwigluGateBackward&, Stream) { left_out("swiglu"); }
void gated_linear(const GatedLinear&, Stream) { left_out("swiglu"); }
void gated_linear_backward(const GatedLinearBackward&, Stream) { left_out("swiglu"); }
int64_t gated_linear_workspace_bytes(const GatedLinear&) { left_out("swiglu"); }
int64_t gated_linear_backward_workspace_bytes(const GatedLinearBackward&) { left_out("swiglu"); }
#endif

}  // namespace ingot
