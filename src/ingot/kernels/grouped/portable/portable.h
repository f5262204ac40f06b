#pragma once
// The portable form of the kernels: mma.sync and cp.async, for every GPU from compute capability 8.0 on.
#include "ingot/kernels/grouped/grouped_kernel.h"

namespace ingot::cuda::grouped_portable {

using namespace grouped;

// x in memory, rows of 16-bit numbers.
struct Rows {
  const char* data;
  int64_t stride;    // bytes
  uint32_t columns;  // columns beyond are zeros
};
struct Arguments {
  Product product;
  Rows x;
};
struct Kernel {
  void (*kernel)(const Arguments);
  int64_t smem;
};
constexpr int kThreads = 256;
// width: of kPortableWidths. One translation unit per format instantiates the kernels.
template <WeightFormat F> Kernel kernel_of(int width, bool gated);

}  // namespace ingot::cuda::grouped_portable
