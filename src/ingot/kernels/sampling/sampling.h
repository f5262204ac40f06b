#pragma once
// Draws a token from a row of logits: temperature, then top-k, top-p and min-p, each on what the one before left.
// Greedy at temperature 0. NaN logits are an error of code numeric; rows of -inf too. A GPU draws the CPU's tokens, but
// where a sum of weights lies within its rounding from a boundary, and gives such rows the token -1.
#include "ingot/core/rng.h"
#include "ingot/core/tensor.h"

namespace ingot {

struct SamplingOptions {
  double temperature = 1;  // >= 0
  int64_t top_k = 0;       // 0: all
  double top_p = 1;        // (0, 1]
  double min_p = 0;        // [0, 1): keep tokens at least min_p times as likely as the most likely
};
void check(const SamplingOptions& o);  // throws, naming the option, what was found and what is allowed

struct Sample {
  Tensor logits;  // (B, V) of a floating type, on a GPU not f64; not modified
  Tensor tokens;  // (B) i32
  SamplingOptions options;
  uint64_t seed = 0;
  uint32_t step = 0;  // the draw for row b is Rng(seed, sampling, step).uniform(b)
  Tensor step_there;  // (1) i32 on the logits' device: added to step when the stream comes to it, or left out
};
void sample(const Sample& s, Stream stream);

}  // namespace ingot
