#pragma once
// The shapes of published models of the families, for measurements with random weights.
#include <string>
#include <vector>

#include "ingot/models/spec.h"

namespace ingot {

// The names of all shapes that synthetic_family() knows: "llama-3.2-1b" and others.
const std::vector<std::string>& synthetic_family_names();
// The description of the published model of this name: its sizes, norms, rotation, and whether the head is tied to the
// embedding. The description has no end tokens, because random weights give no meaningful end. Error{usage} for an
// unknown name.
DecoderSpec synthetic_family(const std::string& name);

}  // namespace ingot
