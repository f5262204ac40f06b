#pragma once
// Unicode's normalization form C (UAX 15): characters are decomposed canonically, marks are put in order, and pairs are
// composed again.
#include <cstdint>
#include <string>
#include <string_view>

namespace ingot {

// `text` must be UTF-8. Text that is already in the normal form is copied.
std::string to_nfc(std::string_view text);

}  // namespace ingot
