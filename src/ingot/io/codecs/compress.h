#pragma once
// Compressed sizes, for comparing a model's bits per byte with ordinary compressors.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

int64_t gzip_size(std::string_view bytes, int level = 9);

// Runs a program (found on PATH, no shell) with `input` on its stdin, and returns the number of bytes on its stdout.
// Nothing when the program is missing; Error{io} when the program fails.
std::optional<int64_t> tool_output_size(const std::vector<std::string>& command, std::string_view input);

// `xz -9e`; nothing where xz is not installed.
std::optional<int64_t> xz_size(std::string_view bytes);

}  // namespace ingot
