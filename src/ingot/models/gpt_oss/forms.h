#pragma once
// Models with some matrices stored in fewer bits, to measure the loss of accuracy.
#include <optional>

#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

// The format of each component after conversion; a component without a format is left as it is.
struct GptOssComponents {
  std::optional<WeightFormat> qkv, o, head, router, gate_up, down;
};
// Converts the components to the given formats; the numbers are the same as in an archive of these formats. Unconverted
// matrices are views into `w`, which must outlive the result.
GptOssWeights with_components(const GptOssWeights& w, const GptOssComponents& forms);

}  // namespace ingot
