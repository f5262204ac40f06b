#pragma once
// A mixture of experts: the router chooses k experts for each token.
//   experts[t,:] = the k largest of logits[t,:], largest first, the lower number first among equals
//   weights[t,:] = softmax(those k logits), or not renormalised: softmax(all E logits) of those k
//   y[t] = sum_i weights[t,i] * expert(experts[t,i], x[t])
//   expert(e, x) = gate(x Wgu_e^T + bgu_e) Wd_e^T + bd_e        gate: kernels/swiglu, gate and up interleaved
// Letters: T tokens, E experts, k experts per token, C width, H hidden width of an expert.
#include "ingot/kernels/quant/quant.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot {

struct Route {
  Tensor logits;   // (T, E) f32 or f64
  Tensor experts;  // (T, k) i32
  Tensor weights;  // (T, k) as logits
  bool renormalise = true;
};
void route(const Route& r, Stream stream);

// With e4m3_inputs the inputs of both products are rounded first (kernels/quant/e4m3_blocks.h).
struct Experts {
  Tensor x;                 // (T, C) f32 or f64
  Tensor experts, weights;  // (T, k) i32, k different ones in [0, E), and (T, k)
  WeightMatrix gate_up;     // (E, 2H, C): rows 2j and 2j + 1 are gate and up of channel j
  Tensor b_gate_up;         // (E, 2H) or left out
  WeightMatrix down;        // (E, C, H)
  Tensor b_down;            // (E, C) or left out
  Tensor y;                 // (T, C), written; may not alias x
  Tensor workspace;         // u8, experts_workspace_bytes(...)
  GateOptions options;      // interleaved is ignored: gate and up always are
  bool e4m3_inputs = false;
};
// Tokens of the same expert are multiplied together. Results are added in the order of `experts`, so that a token's sum
// does not depend on the tokens beside it, except for the rounding of products of 8 rows and fewer (kernels/quant).
void experts(const Experts& a, Stream stream);
int64_t experts_workspace_bytes(int64_t tokens, int64_t per_token, int64_t experts, int64_t width, int64_t hidden,
                                DType dtype, Device device);

}  // namespace ingot
