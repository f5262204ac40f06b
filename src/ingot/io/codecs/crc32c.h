#pragma once
// CRC-32C (Castagnoli, RFC 3720): polynomial 0x1EDC6F41, reflected, of all ones at the start and the end.
#include <cstdint>
#include <string_view>

namespace ingot {

uint32_t crc32c(std::string_view bytes);

}  // namespace ingot
