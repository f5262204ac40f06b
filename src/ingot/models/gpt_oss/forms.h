#pragma once
// Models of which some matrices are stored in fewer bits, to see what that costs.
#include <optional>

#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

// What each component becomes; left out: it stays as it is.
struct GptOssComponents {
  std::optional<WeightFormat> qkv, o, head, router, gate_up, down;
};
// The same numbers as an archive of that form holds. What stays is a view into `w`, which must outlive the result.
GptOssWeights with_components(const GptOssWeights& w, const GptOssComponents& forms);

}  // namespace ingot
