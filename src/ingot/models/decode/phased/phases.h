#pragma once
// The launches of a step that depend on the format of a matrix (instantiated by room.cmake).
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

template <WeightFormat F> struct Phases {
  // Launches the kernel for 1 column, for up to 8 or for up to 16 columns.
  static void norm_product(const NormProduct& p, uint32_t columns, Stream stream);
  static void residual_product(const ResidualProduct& p, Stream stream);
  static void small_batch(const SmallBatchProduct& p, Stream stream);
  // Without vectors in `normed` and without `sums`, a single token is computed by the kernels for one token, which
  // ignore `routed`.
  static void gate_up(const GateUp& p, const Normed& normed, const Routed& routed, Stream stream);
  static void gate_up(const GeneralGateUp& p, const Normed& normed, const Routed& routed, Stream stream);
  static void down(const Down& p, const ChoiceSums& sums, Stream stream);
};

// Calls `call` with the launches of this format.
template <class Call> void with_phases(WeightFormat f, Call&& call) {
  if (f == WeightFormat::bf16) return call(Phases<WeightFormat::bf16>{});
  if (f == WeightFormat::fp8) return call(Phases<WeightFormat::fp8>{});
  call(Phases<WeightFormat::mxfp4>{});
}

}  // namespace ingot::decode
