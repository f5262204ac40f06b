#pragma once
// Libraries that the program looks for beyond where the loader finds them.
#include <string>

namespace ingot::cli {

// Before this process's first product on a GPU: where neither INGOT_CUBLASLT names a cuBLASLt nor the loader finds one,
// it gets one that is installed elsewhere (io/cuda_libraries.h). Which it is, or "".
std::string use_installed_cublaslt();
// What is lost without.
constexpr const char* kWithoutCublaslt =
    "products of few tiles, all gradients of weights among them, leave most of a GPU idle: pip install nvidia-cublas";

}  // namespace ingot::cli
