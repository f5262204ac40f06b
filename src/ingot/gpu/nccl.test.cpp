#include "ingot/gpu/nccl.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace ingot {
namespace {

// In a process of its own, because the library is searched for only once.
TEST(nccl, a_missing_library_is_an_error_with_advice_in_one_line) {
  const auto print = [](const char* path, const char* nvls) {
    ::setenv("INGOT_NCCL", path, 1);
    nvls != nullptr ? ::setenv("NCCL_NVLS_ENABLE", nvls, 1) : ::unsetenv("NCCL_NVLS_ENABLE");
    std::fprintf(stderr, "%s|%s|%d", gpu::nccl_version().c_str(), std::getenv("NCCL_NVLS_ENABLE"),
                 int(gpu::nccl_available()));
    std::exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print("/nowhere/libnccl.so.2", nullptr), ::testing::ExitedWithCode(0),
              "^NCCL: found no library at INGOT_NCCL=/nowhere/libnccl.so.2\\|0\\|0$");
  // A library that is not NCCL.
  EXPECT_EXIT(print("libm.so.6", nullptr), ::testing::ExitedWithCode(0),
              "^NCCL: found a library without ncclGetVersion, expected version 2.10 or later\\|0\\|0$");
  // Multicast is on where the user asks for it.
  EXPECT_EXIT(print("/nowhere", "1"), ::testing::ExitedWithCode(0), "\\|1\\|0$");
}

}  // namespace
}  // namespace ingot
