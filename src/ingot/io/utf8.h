#pragma once
// Strict UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
#include <cstdint>
#include <string_view>

namespace ingot {

// The byte offset of the first sequence that is not UTF-8, or -1.
int64_t find_invalid_utf8(std::string_view bytes);

}  // namespace ingot
