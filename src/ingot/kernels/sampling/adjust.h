#pragma once
// What bends a row of logits before a draw:
//   adjusted[v] = logits[v] + the biases of id v, one after the other; -infinity where `allowed` lacks v
#include "ingot/core/tensor.h"

namespace ingot {

struct AdjustLogits {
  Tensor logits, adjusted;  // (V) f32, on the CPU f64 too; may be the same
  Tensor bias_ids, biases;  // (n) i32, rising, and (n) f32; ids from V on are left out. Or neither
  Tensor allowed;           // ((V + 31) / 32) u32: bit v % 32 of word v / 32, id v may be drawn. Or none: all may
};
void adjust_logits(const AdjustLogits& a, Stream stream);

}  // namespace ingot
