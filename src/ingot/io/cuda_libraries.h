#pragma once
// NVIDIA's libraries installed outside the loader's path.
#include <string>
#include <vector>

namespace ingot {

// The files called `name` ("libcublasLt.so.13"), in the order of trial: of the toolkit in $CUDA_HOME or $CUDA_PATH, of
// Python's packages in the active environment ($VIRTUAL_ENV, $CONDA_PREFIX), of toolkits in /usr/local, and of the
// user's and the system's Python.
std::vector<std::string> installed_cuda_libraries(const std::string& name);

}  // namespace ingot
