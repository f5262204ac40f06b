#include "ingot/models/gpt/config/presets.h"

#include <map>

#include "ingot/core/check.h"

namespace ingot {
namespace {
const std::map<std::string, std::string>& presets() {
  static const std::map<std::string, std::string> all = {
#include <ingot_presets.inc>
  };
  return all;
}
}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : presets()) names.push_back(name);
  return names;
}

const std::string& preset_text(const std::string& name) {
  const auto found = presets().find(name);
  if (found != presets().end()) return found->second;
  std::string known;
  for (const std::string& n : preset_names()) known += (known.empty() ? "" : ", ") + n;
  fail(ErrorCode::usage, "preset: found '", name, "', expected one of ", known);
}

}  // namespace ingot
