#pragma once
// General compressors for the integers of a model: brotli at quality 11, and lzma (an .xz stream) at preset 6. Each
// exists if its library was found at build time. Bytes are shuffled first, bytes at even places before bytes at odd
// places, so that equal halves of 16-bit numbers are adjacent.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

enum class ByteCoder : uint8_t { brotli = 1, lzma = 2 };
const char* name_of(ByteCoder c);
bool has_byte_coder(ByteCoder c);

// Errors: unsupported, if the library was missing at build time; bad_data with `name`, if bytes are missing or left
// over, are no stream of the coder, or decode to another number of bytes than `size`. Memory is taken for `size` bytes
// and for the coder itself.
std::string encode_bytes(ByteCoder c, std::string_view bytes);
std::string decode_bytes(ByteCoder c, std::string_view coded, int64_t size, const std::string& name);

}  // namespace ingot
