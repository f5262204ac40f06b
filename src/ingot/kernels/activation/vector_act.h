#pragma once
// The names of the activations that have a form over vectors in activation.simd.h. A plain header, so that vector code
// may include it.
#define INGOT_VECTOR_ACTS(ACT) \
  ACT(identity)                \
  ACT(relu)                    \
  ACT(leaky_relu)              \
  ACT(leaky_relu_squared)      \
  ACT(relu_squared)            \
  ACT(silu)                    \
  ACT(gelu)                    \
  ACT(gelu_tanh)               \
  ACT(quick_gelu)              \
  ACT(tanh)                    \
  ACT(sigmoid)                 \
  ACT(softplus)

namespace ingot {
#define INGOT_NUMBER(act) act,
enum class VectorAct : int { none = -1, INGOT_VECTOR_ACTS(INGOT_NUMBER) };
#undef INGOT_NUMBER
#define INGOT_NAME(act) #act,
inline constexpr const char* kVectorActNames[] = {INGOT_VECTOR_ACTS(INGOT_NAME)};
#undef INGOT_NAME
}  // namespace ingot
