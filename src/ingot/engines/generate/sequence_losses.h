#pragma once
// How well a model foretells a text.
#include <functional>
#include <span>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

// The loss of every token after the first, natural logarithm. Takes a slot of its own.
std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled = {});

}  // namespace ingot
