#pragma once
// Presets are the JSON files of presets/, compiled in, so the binary needs no files:
//   {"model": {...}, "train": {...}}
#include <string>
#include <vector>

namespace ingot {
std::vector<std::string> preset_names();
const std::string& preset_text(const std::string& name);  // throws for an unknown name, and lists the known ones
}  // namespace ingot
