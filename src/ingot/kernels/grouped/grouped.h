#pragma once
// Many rows times weights in weight tiles (kernels/quant/weight_tiles.h), each group of rows with a matrix of its own:
// the products of a mixture of experts, or any product as a single group.
//   y[r] (+)= x[r] w[g]^T + bias[g]        offsets[g] <= r < offsets[g + 1]
//   h[r]    = gate of this sum, where elements 2 j and 2 j + 1 are gate and up of channel j (kernels/swiglu)
// On GPUs of compute capability 8.0 or later. Each sum is formed by one thread in one order: results repeat bit for
// bit.
#include "ingot/core/tensor.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot {

struct GroupedLinear {
  Tensor x;                // (R, K) bf16, rows 16-byte aligned
  const uint8_t* w;        // on the device: `groups` matrices of N rows in weight tiles of `format`
                           // (quant/device_order.h)
  WeightFormat format;     // bf16, fp8 or mxfp4
  int64_t groups, n;       // n = N
  const float* bias;       // (groups, N) or null
  const int32_t* offsets;  // (groups + 1), read on the device
  Tensor y;                // (R, N) f32, or (R, N / 2) bf16: gated
  bool add = false;        // y += ...; not where y is gated
  float limit = 7, alpha = 1.702f;
  // A counter on the device, or null. The counter is zero before and after the launch. With a counter, each block
  // claims its next tile when it has finished a tile, which helps if groups have different numbers of rows. Two
  // launches that may run at once need two counters.
  uint32_t* claims = nullptr;
  // Above 1, with one group: K is divided among `parts` sums, so that a product of few rows of x occupies more
  // multiprocessors. offsets is then {0, R, 2 R, ...} (parts + 1 entries), y has parts * R rows of f32, and row i * R +
  // r is part i of row r. Part 0 includes the bias. The numbers of a part do not depend on R. See
  // grouped_takes_parts().
  int64_t parts = 1;
};
void grouped_linear(const GroupedLinear& a, Stream stream);
// Whether grouped_linear takes several parts on this device: Hopper's kernels do.
bool grouped_takes_parts(Device device);

}  // namespace ingot
