#pragma once
// The launches of a step that depend on how a matrix is stored: one source file per format (decode_*.cu).
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

template <WeightFormat F> struct Phases {
  static void norm_product(const NormProduct& p, Stream stream);
  static void residual_product(const ResidualProduct& p, Stream stream);
  static void several(const SmallBatchProduct& p, Stream stream);  // 2 tokens or more
  // Of one token without columns of `normed` and without `sums`, by the kernels of one token; `routed` is left alone.
  static void gate_up(const GateUp& p, const Normed& normed, const Routed& routed, Stream stream);
  static void down(const Down& p, const ChoiceSums& sums, Stream stream);
};

}  // namespace ingot::decode
