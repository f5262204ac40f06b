#pragma once
// Floating-point operations that a model's definition requires, a multiply-add counted as two: those of matrices and of
// attention's two products, nothing else, and nothing twice (recomputation does not count).
#include <cstdint>
#include <vector>

#include "ingot/models/gpt/config/config.h"

namespace ingot {

struct GptFlops {
  double per_token = 0;  // matrices of all layer calls, and the head
  double per_pair =
      0;  // one pair of a token and a token to which it attends (itself or an earlier one), in all layer calls
};
// Forward; a training pass, forward and backward, takes three times as many.
GptFlops forward_flops(const GptConfig& config, bool looping);

// Pairs of the segments [cu_seqlens[i], cu_seqlens[i + 1]): causal, and within the window where there is one.
double attended_pairs(const std::vector<int32_t>& cu_seqlens, int64_t window);

}  // namespace ingot
