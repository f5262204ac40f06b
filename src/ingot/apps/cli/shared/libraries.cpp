#include "ingot/apps/cli/shared/libraries.h"

#include <dlfcn.h>

#include <cstdlib>

#include "ingot/gpu/device.h"
#include "ingot/io/cuda_libraries.h"

namespace ingot::cli {
namespace {

constexpr const char* kVariable = "INGOT_CUBLASLT";  // read by gpu/cublaslt.h

// The library stays open, so that the next dlopen() of this name returns at once.
bool opens(const std::string& name) { return dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr; }

// A library of CUDA 13 does not work with a driver of CUDA 12.
bool driver_serves_13() {
  constexpr int kVersion13 = 13000;
  return gpu::device_count() == 0 || gpu::device_info().driver >= kVersion13;
}

}  // namespace

std::string use_installed_cublaslt() {
  if (const char* given = std::getenv(kVariable); given != nullptr && *given != 0) return opens(given) ? given : "";
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
    if (opens(name)) return name;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (std::string(name).ends_with("13") && !driver_serves_13()) continue;
    for (const std::string& file : installed_cuda_libraries(name))
      if (opens(file)) {
        ::setenv(kVariable, file.c_str(), 1);
        return file;
      }
  }
  return "";
}

}  // namespace ingot::cli
