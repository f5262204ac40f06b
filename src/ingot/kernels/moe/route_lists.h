#pragma once
// The chosen experts of a few tokens, as a list for kernels.
//    slot i: expert[i]; weight[i][t] of token t, 0 if the token did not choose the expert;
//            row[i][t] = t k + the expert's place in the choice of token t, or -1
#include <cstdint>

namespace ingot::routing {

constexpr uint32_t kTokens = 16;  // at most

// In global memory; n: the largest number of slots, the lesser of E and T k.
struct Lists {
  uint32_t* count;
  int32_t* expert;  // (n): of one token in the order of its choices, of several in ascending order
  float* weight;    // (n, 16)
  int32_t* row;     // (n, 16)
};

}  // namespace ingot::routing
