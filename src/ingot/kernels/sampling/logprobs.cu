// Each block finds the likeliest ids of a part of a row and sums the part's exponentials; one further block per row
// combines the parts.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kMostParts = 64;

struct Part {
  double high, sum;  // `sum` is the sum of exp(logit - high)
};
struct LogprobParams {
  const float* logits;
  const int32_t* token;
  int32_t* top;
  double* values;
  int64_t logit_stride, token_stride, top_stride, value_stride;
  const SampleRow* rows;  // null: all rows
  Part* parts;            // (rows, count)
  uint64_t* keys;         // (rows, count, k): the keys of each part, largest first; 0: no further key
  int32_t V, k, count;
};
// The arguments for one row.
struct LogprobRow {
  const float* logits;
  Part* parts;
  uint64_t* keys;
  int32_t row, V;
  __device__ LogprobRow(const LogprobParams& p, int32_t r)
      : parts(p.parts + int64_t(r) * p.count),
        keys(p.keys + int64_t(r) * p.count * p.k),
        row(p.rows != nullptr ? p.rows[r].row : r),
        V(p.rows != nullptr ? p.rows[r].ids : p.V) {
    logits = p.logits + row * p.logit_stride;
  }
};
struct LogprobMemory {
  sampling::BestMemory best;
  double sums[kWarps];
};

// Returns the sum of all threads' numbers, with the same bits in every thread.
__device__ inline double block_sum(double sum, LogprobMemory& m) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  __syncthreads();  // other threads may still read the earlier sum
  if (threadIdx.x % 32 == 0) m.sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += m.sums[w];
  return sum;
}
__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ LogprobParams p) {
  LogprobMemory& m = tile::shared<LogprobMemory>();
  const LogprobRow row(p, int32_t(blockIdx.x) / p.count);
  const int32_t part = int32_t(blockIdx.x) % p.count, each = (row.V + p.count - 1) / p.count,
                begin = min(part * each, row.V), end = min(begin + each, row.V);
  uint64_t below = ~uint64_t(0), first = 0;
  for (int32_t i = 0; i < max(p.k, 1); ++i) {
    sampling::Best mine;
    for (int32_t v = begin + int32_t(threadIdx.x); v < end; v += kThreads) {
      sampling::Best one;
      one.add(row.logits[v], uint32_t(v));
      if (one.key < below && one.key > mine.key) mine.key = one.key;
    }
    below = sampling::block_best(mine.key, m.best);
    if (i == 0) first = below;
    if (threadIdx.x == 0 && i < p.k) row.keys[int64_t(part) * p.k + i] = below;
  }
  // -infinity where the part is empty or all its logits are -infinity.
  const double high = first == 0 ? -INFINITY : double(sampling::float_of_ordered(uint32_t(first >> 32)));
  double sum = 0;
  if (high != -INFINITY)
    for (int32_t v = begin + int32_t(threadIdx.x); v < end; v += kThreads) sum += exp(double(row.logits[v]) - high);
  sum = block_sum(sum, m);
  if (threadIdx.x == 0) row.parts[part] = {high, sum};
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ LogprobParams p) {
  LogprobMemory& m = tile::shared<LogprobMemory>();
  const LogprobRow row(p, int32_t(blockIdx.x));
  double* const values = p.values + row.row * p.value_stride;
  double high = -INFINITY, sum = 0;
  for (int32_t i = 0; i < p.count; ++i) high = fmax(high, row.parts[i].high);
  for (int32_t i = int32_t(threadIdx.x); i < p.count; i += kThreads)
    if (row.parts[i].high != -INFINITY) sum += row.parts[i].sum * exp(row.parts[i].high - high);
  const double log_sum = log(block_sum(sum, m)) + high;
  if (threadIdx.x == 0) {
    const int32_t token = p.token[row.row * p.token_stride];
    values[0] = token < 0 ? NAN : double(row.logits[token]) - log_sum;  // a negative token means that no id was sampled
  }
  uint64_t below = ~uint64_t(0);
  for (int32_t i = 0; i < p.k; ++i) {
    uint64_t mine = 0;
    for (int32_t j = int32_t(threadIdx.x); j < p.count * p.k; j += kThreads)
      if (row.keys[j] < below && row.keys[j] > mine) mine = row.keys[j];
    below = sampling::block_best(mine, m.best);
    if (threadIdx.x != 0) continue;
    const int32_t id = below == 0 ? 0 : int32_t(~uint32_t(below));  // 0: k is larger than the number of ids in the row
    p.top[row.row * p.top_stride + i] = id;
    values[1 + i] = double(row.logits[id]) - log_sum;
  }
}

int64_t parts_of(int64_t V) { return std::min(kMostParts, (V + kThreads - 1) / kThreads); }

}  // namespace

int64_t logprobs_workspace_bytes(int64_t V, int64_t k, int64_t rows) {
  return rows * parts_of(V) * int64_t(sizeof(Part) + 8 * k);
}

void logprobs(const Logprobs& l, Stream stream) {
  const int64_t count = parts_of(l.logits.cols()), rows = l.rows ? l.rows.size(0) : l.logits.size(0);
  if (rows == 0) return;
  Part* const parts = static_cast<Part*>(l.workspace.data);
  const LogprobParams p{.logits = l.logits.ptr<float>(),
                        .token = l.token.ptr<int32_t>(),
                        .top = l.top ? l.top.ptr<int32_t>() : nullptr,
                        .values = l.values.ptr<double>(),
                        .logit_stride = l.logits.row_stride(),
                        .token_stride = l.token.step(0),
                        .top_stride = l.top ? l.top.row_stride() : 0,
                        .value_stride = l.values.row_stride(),
                        .rows = l.rows ? static_cast<const SampleRow*>(l.rows.data) : nullptr,
                        .parts = parts,
                        .keys = reinterpret_cast<uint64_t*>(parts + rows * count),
                        .V = int32_t(l.logits.cols()),
                        .k = l.top ? int32_t(l.top.cols()) : 0,
                        .count = int32_t(count)};
  const int device = l.logits.device.index;
  gpu::launch("logprobs of parts", parts_kernel, {.grid = rows * count, .block = kThreads, .device = device}, stream,
              p);
  gpu::launch("logprobs", merge_kernel, {.grid = rows, .block = kThreads, .device = device}, stream, p);
}

}  // namespace ingot::cuda
