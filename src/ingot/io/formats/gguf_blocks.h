#pragma once
// Decodes ggml's block formats: a scale in f16 for each 32 or 256 numbers, in some formats an offset, and small
// integers.
#include <cstdint>
#include <string>

namespace ingot {

// Whether dequantize_gguf() supports the type: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
bool can_dequantize_gguf(const std::string& dtype);

// Decodes `numbers` numbers of a row from its first block on; `numbers` is a multiple of the block's size. Gives the
// same bits as the Python package gguf.
void dequantize_gguf(const std::string& dtype, const uint8_t* blocks, int64_t numbers, float* out);

}  // namespace ingot
