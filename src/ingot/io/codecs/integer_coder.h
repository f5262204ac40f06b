#pragma once
// Small signed integers, such as a quantised matrix, in as few bytes as their frequencies allow: an adaptive binary
// range coder. An integer's bits, the highest first, are each coded with a probability of their own per bits before it,
// which counts what came.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

// Symbols from 0 to 2^bits - 1, bits from 1 to 8. decode_symbols takes what was coded from the front of `bytes`.
std::string encode_symbols(std::span<const uint8_t> symbols, int bits);
std::vector<uint8_t> decode_symbols(std::string_view& bytes, int64_t count, int bits, const std::string& name);

// Every value is from -qmax to qmax = 2^(bits-1) - 1, bits from 2 to 8.
std::string encode_integers(std::span<const int8_t> values, int bits);
// `name` is for errors (bad_data): bytes that end early, are left over or hold no such integer. Other changes of the
// bytes give other integers; whoever stores them keeps a checksum. A wrong `count` costs no more memory than `bytes`
// can hold.
std::vector<int8_t> decode_integers(std::string_view bytes, int64_t count, int bits, const std::string& name);

}  // namespace ingot
