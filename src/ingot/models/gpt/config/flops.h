#pragma once
// Floating-point operations of a model's definition, a multiply-add counted as two: only matrix products and
// attention's two products, each once (recomputation does not count).
#include <cstdint>
#include <vector>

#include "ingot/models/gpt/config/config.h"

namespace ingot {

struct GptFlops {
  double per_token = 0;  // matrices of all layer calls, and the head
  double per_pair = 0;   // a pair of a token and an attended token (itself or an earlier token), in all layer calls
};
// The operations of a forward pass. A forward and a backward pass together take three times as many.
GptFlops forward_flops(const GptConfig& config, bool looping);

// Pairs of the segments [cu_seqlens[i], cu_seqlens[i + 1]): causal, and within the window, if any.
double attended_pairs(const std::vector<int32_t>& cu_seqlens, int64_t window);

}  // namespace ingot
