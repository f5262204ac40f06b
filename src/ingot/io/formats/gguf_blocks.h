#pragma once
// The numbers of ggml's block formats: per 32 or 256 numbers a scale in f16, some with an offset, and small integers.
#include <cstdint>
#include <string>

namespace ingot {

// Whether dequantize_gguf() reads the type: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
bool can_dequantize_gguf(const std::string& dtype);

// `numbers` of a row from its first block on, a multiple of what a block holds. The same bits as the Python package
// gguf computes.
void dequantize_gguf(const std::string& dtype, const uint8_t* blocks, int64_t numbers, float* out);

}  // namespace ingot
