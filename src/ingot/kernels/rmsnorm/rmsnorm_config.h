#pragma once
// How the CUDA forward pass spreads rows over threads. A pure function of sizes, so that the choice is tested without a
// GPU.
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot::cuda {

// A row of `vecs` 16-byte vectors is held in registers by `cluster` blocks' groups of `group` threads,
// `vecs_per_thread` each. A group of a block takes `rows_per_group` neighbouring rows at once, so that narrow rows too
// have four loads in flight.
struct RmsNormConfig {
  bool vectors = true;      // false: elements one by one, two passes over the row; any alignment and length
  int vecs_per_thread = 4;  // 1, 2, 4 or 8; times rows_per_group: 4 or 8
  int rows_per_group = 1;
  int group = 32;     // threads per row and block, a power of two
  int cluster = 1;    // blocks per row; above 1 only with group == threads
  int threads = 128;  // per block
  int rows_per_block() const { return vectors ? threads / group * rows_per_group : 1; }
  bool operator==(const RmsNormConfig&) const = default;
};

constexpr int kRmsNormMaxThreads = 512;
constexpr int kRmsNormMaxCluster = 8;

struct RmsNormShape {
  int64_t rows = 0, cols = 0;
  DType dtype = DType::bf16;  // of x
  bool aligned = true;        // every operand's rows start where a whole vector can be read or written
  bool residual = false;
};

constexpr int64_t round_up_pow2(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr RmsNormConfig pick_rmsnorm_config(const RmsNormShape& s, int sms = 132) {
  const int64_t per_vec = 16 / size_of(s.dtype);
  const int64_t vecs = s.cols / per_vec;
  RmsNormConfig c;
  // With a residual each vector needs twice the registers.
  const int most = s.residual ? 4 : 8;
  if (!s.aligned || s.cols % per_vec != 0 || vecs > int64_t(most) * kRmsNormMaxThreads * kRmsNormMaxCluster) {
    c.vectors = false;
    c.vecs_per_thread = c.rows_per_group = c.group = 1;
    // About eight elements a thread and pass, in whole warps.
    const int64_t wanted = round_up_pow2((s.cols + 7) / 8);
    c.threads = int(wanted < 32 ? 32 : wanted > kRmsNormMaxThreads ? kRmsNormMaxThreads : wanted);
    return c;
  }
  const bool few_rows = s.rows <= 4 * int64_t(sms);
  if (vecs <= 64 && !few_rows) {
    c.vecs_per_thread = vecs <= 32 ? 1 : 2;
    c.rows_per_group = 4 / c.vecs_per_thread;
  } else {
    c.vecs_per_thread = vecs <= 1024 ? 4 : most;
  }
  int64_t group = round_up_pow2((vecs + c.vecs_per_thread - 1) / c.vecs_per_thread);
  // Few rows leave the GPU empty: shorter work per thread shortens the only thing that is left, latency.
  if (few_rows)
    while (group < 256 && group < vecs) group *= 2;
  while (group > kRmsNormMaxThreads) {
    group /= 2;
    c.cluster *= 2;
  }
  c.group = int(group);
  c.threads = c.cluster > 1 || group > 128 ? int(group) : 128;
  return c;
}

// The forward pass under a given configuration: what benches and tests compare. It must fit the operands.
struct RmsNormTuning {
  RmsNormConfig config;
  bool overlap = true;   // programmatic dependent launch
  int evict_first = -1;  // stores of y: 1 yes, 0 no, -1 by size
};

}  // namespace ingot::cuda

namespace ingot {
struct RmsNorm;
namespace cuda {
void rmsnorm(const RmsNorm& a, Stream stream);
void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream);
RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a);
}  // namespace cuda
}  // namespace ingot
