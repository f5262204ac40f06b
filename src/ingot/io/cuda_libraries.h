#pragma once
// Files of NVIDIA's libraries that are installed where the loader does not look.
#include <string>
#include <vector>

namespace ingot {

// Those called `name` ("libcublasLt.so.13"), in the order in which they should be tried: of the toolkit that $CUDA_HOME
// or $CUDA_PATH names, of Python's packages in the environment that is active ($VIRTUAL_ENV, $CONDA_PREFIX), of
// toolkits in /usr/local, and of the user's and the system's Python.
std::vector<std::string> installed_cuda_libraries(const std::string& name);

}  // namespace ingot
