#pragma once
// The activations that have a vector form (activation.simd.h). Plain, so that vector code may include it.
namespace ingot {
enum class VectorAct : int {
  none = -1,
  identity,
  relu,
  leaky_relu,
  leaky_relu_squared,
  relu_squared,
  silu,
  gelu,
  gelu_tanh,
  quick_gelu,
  tanh,
  sigmoid,
  softplus
};
}  // namespace ingot
