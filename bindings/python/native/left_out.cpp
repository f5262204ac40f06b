// What a build of some rooms (INGOT_ROOMS) answers for the others: every function of theirs that the module calls
// refuses by name.
#include "ingot/core/check.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/muon/muon.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot {
namespace {
[[noreturn, maybe_unused]] void left_out(const char* room) {
  fail(ErrorCode::unsupported, room, ": found a build without it, expected one whose INGOT_ROOMS names it or is empty");
}
}  // namespace

#ifdef INGOT_WITHOUT_ACTIVATION
void activate(const Activate&, Stream) { left_out("activation"); }
void activate_backward(const ActivateBackward&, Stream) { left_out("activation"); }
#endif

#ifdef INGOT_WITHOUT_ATTENTION
void attention(const Attention&, Stream) { left_out("attention"); }
void attention_backward(const AttentionBackward&, Stream) { left_out("attention"); }
int64_t attention_backward_workspace_bytes(const AttentionBackward&) { left_out("attention"); }
#endif

#ifdef INGOT_WITHOUT_CROSS_ENTROPY
void linear_cross_entropy(const LinearCrossEntropy&, Stream) { left_out("cross_entropy"); }
int64_t linear_cross_entropy_workspace_bytes(int64_t, int64_t, int64_t, DType, Products, Device) {
  left_out("cross_entropy");
}
#endif

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

#ifdef INGOT_WITHOUT_MUON
void muon(const Muon&, Stream) { left_out("muon"); }
int64_t muon_workspace_bytes(int64_t, int64_t, int64_t, DType, Device) { left_out("muon"); }
#endif

#ifdef INGOT_WITHOUT_RMSNORM
void rmsnorm(const RmsNorm&, Stream) { left_out("rmsnorm"); }
void rmsnorm_backward(const RmsNormBackward&, Stream) { left_out("rmsnorm"); }
int64_t rmsnorm_backward_workspace_bytes(int64_t, int64_t, DType, Device) { left_out("rmsnorm"); }
#endif

#ifdef INGOT_WITHOUT_ROPE
RopeFrequencies rope_frequencies(int64_t, double, const RopeScaling&) { left_out("rope"); }
void rope_table(const RopeFrequencies&, const Tensor&, const Tensor&) { left_out("rope"); }
void rope(const Rope&, Stream) { left_out("rope"); }
void qk_norm_rope(const QkNormRope&, Stream) { left_out("rope"); }
void qk_norm_rope_backward(const QkNormRopeBackward&, Stream) { left_out("rope"); }
int64_t qk_norm_rope_backward_workspace_bytes(int64_t, int64_t, Device) { left_out("rope"); }
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
