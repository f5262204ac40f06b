#pragma once
// Finds libraries that are installed outside the loader's path.
#include <string>

namespace ingot::cli {

// Call before this process's first product on a GPU. Where neither INGOT_CUBLASLT names a cuBLASLt nor the loader finds
// one, selects a cuBLASLt that is installed elsewhere (io/cuda_libraries.h). Returns its path, or "".
std::string use_installed_cublaslt();
// The consequence of a missing cuBLASLt.
constexpr const char* kWithoutCublaslt =
    "small matrix products and the gradients of weights leave most of a GPU idle: pip install nvidia-cublas";

}  // namespace ingot::cli
