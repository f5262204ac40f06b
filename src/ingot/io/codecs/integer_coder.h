#pragma once
// Small signed integers, such as a quantised matrix, in as few bytes as their frequencies allow: an adaptive binary
// range coder. The bits of an integer are coded from the highest to the lowest, each with an adaptive probability
// conditional on the higher bits.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

// Symbols from 0 to 2^bits - 1, bits from 1 to 8. decode_symbols removes the coded bytes from the front of `bytes`.
std::string encode_symbols(std::span<const uint8_t> symbols, int bits);
std::vector<uint8_t> decode_symbols(std::string_view& bytes, int64_t count, int bits, const std::string& name);

// Every value is from -qmax to qmax = 2^(bits-1) - 1, bits from 2 to 8.
std::string encode_integers(std::span<const int8_t> values, int bits);
// `name` is for errors (bad_data): missing bytes, surplus bytes, or an integer out of range. Further changes of the
// bytes give different integers, so the bytes should be stored with a checksum. Even with a wrong `count`, memory is
// bounded by the capacity of `bytes`.
std::vector<int8_t> decode_integers(std::string_view bytes, int64_t count, int bits, const std::string& name);

}  // namespace ingot
