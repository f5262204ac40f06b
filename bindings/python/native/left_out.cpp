// In a build of some rooms (INGOT_ROOMS), the functions of the missing rooms for handwritten calls: each refuses by the
// room's name. Declared ops (declare.h) need nothing here.
#include "ingot/core/check.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"

namespace ingot {
namespace {
[[noreturn, maybe_unused]] void left_out(const char* room) {
  fail(ErrorCode::unsupported, room, ": found a build without it, expected one whose INGOT_ROOMS names it or is empty");
}
}  // namespace

#ifdef INGOT_WITHOUT_MLP
void mlp(const Mlp&, Stream) { left_out("mlp"); }
int64_t mlp_saved_elements(int64_t, const std::vector<MlpLayer>&, bool) { left_out("mlp"); }
int64_t mlp_workspace_bytes(const Mlp&) { left_out("mlp"); }
#endif

#ifdef INGOT_WITHOUT_RMSNORM
void rmsnorm(const RmsNorm&, Stream) { left_out("rmsnorm"); }
#endif

#ifdef INGOT_WITHOUT_ROPE
RopeFrequencies rope_frequencies(int64_t, double, const RopeScaling&) { left_out("rope"); }
void rope_table(const RopeFrequencies&, const Tensor&, const Tensor&) { left_out("rope"); }
#endif

}  // namespace ingot
