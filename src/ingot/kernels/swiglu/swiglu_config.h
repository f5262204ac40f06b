#pragma once
// How the CUDA gate distributes its elements over threads. Pure functions of sizes, so that the choice is tested
// without a GPU.
#include <cstdint>

#include "ingot/core/tensor.h"
#include "ingot/gpu/l2.h"

namespace ingot {
struct SwigluGate;
struct SwigluGateBackward;
}  // namespace ingot

namespace ingot::cuda {

struct SwigluGateConfig {
  bool vectors = true;       // 16 bytes of gate at a time; false: element by element, any alignment and length
  int units_per_thread = 1;  // vectors or elements: 1, 2 or 4
  int threads = 256;         // per block
  bool operator==(const SwigluGateConfig&) const = default;
};

constexpr int kSwigluMaxThreads = 512;

struct SwigluGateShape {
  int64_t rows = 0, cols = 0;  // of h
  DType dtype = DType::bf16;
  bool aligned = true;  // every operand's rows start where a whole vector can be read or written
  bool interleaved = false;
  bool backward = false;
};

// Whether L2 holds none of the written data at the next read.
constexpr bool swiglu_gate_is_large(const SwigluGateShape& s, const gpu::Limits& limits) {
  return s.rows * s.cols * size_of(s.dtype) * (s.backward ? 2 : 1) > gpu::beyond_l2_bytes(limits);
}

constexpr bool swiglu_gate_takes_vectors(const SwigluGateShape& s) {
  return s.aligned && (s.interleaved ? 2 * s.cols : s.cols) % (16 / size_of(s.dtype)) == 0;
}

constexpr SwigluGateConfig pick_swiglu_gate_config(const SwigluGateShape& s, const gpu::Limits& limits) {
  const int64_t columns = s.interleaved ? 2 * s.cols : s.cols, per_vec = 16 / size_of(s.dtype);
  SwigluGateConfig c;
  c.vectors = swiglu_gate_takes_vectors(s);
  const int64_t units = c.vectors ? s.rows * columns / per_vec : s.rows * s.cols;
  // Several units per thread where units are small, once all threads have work.
  if ((s.interleaved || !c.vectors) && units >= int64_t(limits.sms) * 2048 * 4)
    c.units_per_thread = s.interleaved && !s.backward ? 4 : 2, c.threads = 128;
  else if (swiglu_gate_is_large(s, limits))
    s.backward ? c.threads = 128 : c.units_per_thread = 2;
  return c;
}

// A pass with a given configuration, for benchmarks and tests. The configuration must fit the operands.
struct SwigluGateTuning {
  SwigluGateConfig config;
  bool overlap = true;  // programmatic dependent launch
  int large = -1;       // hints to L2 to keep the inputs and to drop the outputs: 1 yes, 0 no, -1 by size
  int early = -1;       // lets the next kernel start at once: 1 yes, 0 no, -1 by size
};
void swiglu_gate_with(const SwigluGate& s, const SwigluGateTuning& tuning, Stream stream);
void swiglu_gate_backward_with(const SwigluGateBackward& s, const SwigluGateTuning& tuning, Stream stream);
SwigluGateTuning default_swiglu_gate_tuning(const SwigluGate& s);
SwigluGateTuning default_swiglu_gate_tuning(const SwigluGateBackward& s);

}  // namespace ingot::cuda
