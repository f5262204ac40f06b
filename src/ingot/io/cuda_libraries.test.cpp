#include "ingot/io/cuda_libraries.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

constexpr const char* kVariables[] = {"CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"};

// Sets all five variables, unnamed variables to nothing, and restores all five.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    for (const char* name : kVariables) {
      if (const char* before = std::getenv(name)) before_[name] = before;
      const auto given = values.find(name);
      ::setenv(name, given == values.end() ? "" : given->second.c_str(), 1);
    }
  }
  ~Environment() {
    for (const char* name : kVariables)
      before_.count(name) ? ::setenv(name, before_[name].c_str(), 1) : ::unsetenv(name);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::map<std::string, std::string> before_;
};

constexpr const char* kName = "libingot-looks-for-this.so.13";  // absent on every machine

std::string put(const std::string& folder, const std::string& name = kName) {
  create_directories(folder);
  const std::string path = join_path(folder, name);
  write_file(path, "");
  return path;
}

TEST(cuda_libraries, are_found_in_toolkits_and_in_pythons_packages_in_a_fixed_order) {
  const testing::TemporaryDirectory temporary;
  const std::string at = temporary.path();
  const std::string conda = put(at + "/conda/lib/python3.13/site-packages/nvidia/cublas/lib");
  const std::string older = put(at + "/env/lib/python3.11/site-packages/nvidia/cu13/lib");
  const std::string newer = put(at + "/env/lib/python3.12/site-packages/nvidia/cu13/lib");
  const std::string debian = put(at + "/env/lib/python3/dist-packages/nvidia/cublas/lib");
  const std::string users = put(at + "/home/.local/lib/python3.12/site-packages/nvidia/cublas/lib");
  const std::string target = put(at + "/cuda-13/targets/x86_64-linux/lib");
  const std::string other = put(at + "/other/lib64");
  put(at + "/cuda-13/lib64", "libingot-looks-for-this.so.12");
  put(at + "/env/lib/python3.12/site-packages/torch/lib");
  const Environment environment({{"CUDA_HOME", at + "/cuda-13"},
                                 {"CUDA_PATH", at + "/other"},
                                 {"VIRTUAL_ENV", at + "/env"},
                                 {"CONDA_PREFIX", at + "/conda"},
                                 {"HOME", at + "/home"}});
  EXPECT_EQ(installed_cuda_libraries(kName),
            (std::vector<std::string>{target, other, newer, older, debian, conda, users}));
}

TEST(cuda_libraries, a_folder_of_two_names_is_found_once_and_stars_in_a_name_are_characters) {
  const testing::TemporaryDirectory temporary;
  const std::string at = temporary.path();
  const std::string odd = put(at + "/a[b]*/lib64");
  put(at + "/ab-c/lib64");
  const Environment environment({{"CUDA_HOME", at + "/a[b]*"}, {"CUDA_PATH", at + "/a[b]*"}});
  EXPECT_EQ(installed_cuda_libraries(kName), std::vector<std::string>{odd});
}

TEST(cuda_libraries, none_is_found_in_an_empty_environment) {
  const Environment environment({});
  EXPECT_EQ(installed_cuda_libraries(kName), std::vector<std::string>{});
}

}  // namespace
}  // namespace ingot
