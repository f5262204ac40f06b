// One warp handles one row and head. Where the segments cover all rows, a block reads the last offsets and ends.
#include <algorithm>
#include <cmath>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/clear_uncovered.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Rows {
  const int32_t* covered;  // null: no rows to clear
  char* data;
  int64_t tokens, token_bytes, head_bytes;
  int heads, width_bytes;
  float* lse;  // or null
  int64_t lse_stride;
};
struct AllRows {
  Rows of[3];
};

__global__ void __launch_bounds__(kThreads) clear_uncovered_rows(const __grid_constant__ AllRows all) {
  const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = int(threadIdx.x % 32);
  for (const Rows& r : all.of) {
    if (r.covered == nullptr) continue;
    for (int64_t i = int64_t(*r.covered) * r.heads + warp; i < r.tokens * r.heads; i += int64_t(gridDim.x) * kWarps) {
      const int64_t token = i / r.heads, head = i % r.heads;
      char* const row = r.data + token * r.token_bytes + head * r.head_bytes;
      for (int at = lane * 16; at < r.width_bytes; at += 512)
        *reinterpret_cast<uint4*>(row + at) = make_uint4(0, 0, 0, 0);
      if (r.lse != nullptr && lane == 0) r.lse[head * r.lse_stride + token] = -INFINITY;
    }
  }
}

Rows rows_of(const UncoveredRows& u) {
  if (!u.rows) return {};
  const int64_t size = size_of(u.rows.dtype);
  return {.covered = u.cu.ptr<int32_t>() + u.cu.size(0) - 1,
          .data = static_cast<char*>(u.rows.data),
          .tokens = u.rows.size(0),
          .token_bytes = u.rows.stride[0] * size,
          .head_bytes = u.rows.stride[1] * size,
          .heads = int(u.rows.size(1)),
          .width_bytes = int(u.rows.size(2) * size),
          .lse = u.lse ? static_cast<float*>(u.lse.data) : nullptr,
          .lse_stride = u.lse ? u.lse.stride[0] : 0};
}

}  // namespace

void clear_uncovered(const char* op, const UncoveredRows& a, const UncoveredRows& b, const UncoveredRows& c,
                     Stream stream) {
  const AllRows all{{rows_of(a), rows_of(b), rows_of(c)}};
  int64_t most = 0;
  for (const Rows& r : all.of) most = std::max(most, r.tokens * r.heads);
  if (most == 0) return;
  gpu::launch(op, clear_uncovered_rows,
              {.grid = std::min<int64_t>(gpu::device_limits(a.rows.device).sms, (most + kWarps - 1) / kWarps),
               .block = kThreads,
               .device = a.rows.device.index},
              stream, all);
}

}  // namespace ingot::cuda
