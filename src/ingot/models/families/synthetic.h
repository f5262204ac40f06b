#pragma once
// The shapes of published models of the families, for measurements with random weights.
#include <string>
#include <vector>

#include "ingot/models/spec.h"

namespace ingot {

// The names that synthetic_family() takes, such as "llama-3.2-1b".
const std::vector<std::string>& synthetic_family_names();
// The published sizes, norms, rotation and tied or untied head of a model; without end tokens. Error{usage} for an
// unknown name.
DecoderSpec synthetic_family(const std::string& name);

}  // namespace ingot
