#include "ingot/io/cuda_libraries.h"

#include <glob.h>

#include <algorithm>
#include <cstdlib>

namespace ingot {
namespace {

constexpr const char* kInToolkit[] = {"/lib64/", "/targets/x86_64-linux/lib/"};
constexpr const char* kInPython[] = {"/lib/python3*/site-packages/nvidia/*/lib/",
                                     "/lib/python3*/dist-packages/nvidia/*/lib/"};

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A path as a pattern that matches only this path.
std::string literal(const std::string& path) {
  std::string pattern;
  for (const char c : path) {
    if (c == '*' || c == '?' || c == '[' || c == '\\') pattern += '\\';
    pattern += c;
  }
  return pattern;
}

class Search {
 public:
  explicit Search(const std::string& name) : name_(literal(name)) {}
  // `root` is a pattern; "" is nowhere.
  template <size_t N> void look(const std::string& root, const char* const (&folders)[N]) {
    if (root.empty()) return;
    for (const char* folder : folders) {
      glob_t matches{};
      if (::glob((root + folder + name_).c_str(), 0, nullptr, &matches) == 0)
        for (size_t i = matches.gl_pathc; i-- > 0;) add(matches.gl_pathv[i]);  // cuda-13.1 before cuda-12.8
      ::globfree(&matches);
    }
  }
  std::vector<std::string> found;

 private:
  void add(const char* path) {
    if (std::find(found.begin(), found.end(), path) == found.end()) found.emplace_back(path);
  }
  std::string name_;
};

}  // namespace

std::vector<std::string> installed_cuda_libraries(const std::string& name) {
  Search search(name);
  for (const char* named : {"CUDA_HOME", "CUDA_PATH"}) search.look(literal(variable(named)), kInToolkit);
  for (const char* named : {"VIRTUAL_ENV", "CONDA_PREFIX"}) search.look(literal(variable(named)), kInPython);
  for (const char* root : {"/usr/local/cuda", "/usr/local/cuda-*"}) search.look(root, kInToolkit);
  if (const std::string home = variable("HOME"); !home.empty()) search.look(literal(home) + "/.local", kInPython);
  for (const char* root : {"/usr/local", "/usr", "/opt/conda"}) search.look(root, kInPython);
  return std::move(search.found);
}

}  // namespace ingot
