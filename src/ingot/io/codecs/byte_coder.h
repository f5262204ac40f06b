#pragma once
// Bytes by the general compressors that parameter-golf's models are written with, each there where its library was when
// this was built: brotli at quality 11, lzma (an .xz stream) at preset 6. Bytes are shuffled first: all those at even
// places, then the others, so that the halves of 16-bit numbers stand together.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

enum class ByteCoder : uint8_t { brotli = 1, lzma = 2 };
const char* name_of(ByteCoder c);
bool has_byte_coder(ByteCoder c);

// Errors: unsupported, where the library was not there at the build; bad_data, naming `name`, where bytes were cut, are
// left over, are no stream of the coder or stand for another number of bytes than `size`. No more memory is taken than
// for `size`, beside what the coder needs itself.
std::string encode_bytes(ByteCoder c, std::string_view bytes);
std::string decode_bytes(ByteCoder c, std::string_view coded, int64_t size, const std::string& name);

}  // namespace ingot
