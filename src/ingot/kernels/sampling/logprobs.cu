// Blocks find the likeliest of a part of the row each and add up its exponentials; one more block puts them together.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/logprobs.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kMostParts = 64;

struct Part {
  double high, sum;  // of exp(logit - high)
};
struct LogprobParams {
  const float* logits;
  const int32_t* token;
  int32_t* top;
  double* values;
  Part* parts;
  uint64_t* keys;  // (parts, k): of each part, largest first; 0: there are no more
  int32_t V, k, count;
};
struct LogprobMemory {
  sampling::BestMemory best;
  double sums[kWarps];
};

// Every thread's number added up, the same bits in all of them.
__device__ inline double block_sum(double sum, LogprobMemory& m) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  __syncthreads();  // who still reads what was there
  if (threadIdx.x % 32 == 0) m.sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += m.sums[w];
  return sum;
}
__device__ inline float logit_of(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ LogprobParams p) {
  LogprobMemory& m = tile::shared<LogprobMemory>();
  const int32_t each = (p.V + p.count - 1) / p.count, begin = min(int32_t(blockIdx.x) * each, p.V),
                end = min(begin + each, p.V);
  uint64_t below = ~uint64_t(0), first = 0;
  for (int32_t i = 0; i < max(p.k, 1); ++i) {
    sampling::Best mine;
    for (int32_t v = begin + int32_t(threadIdx.x); v < end; v += kThreads) {
      sampling::Best one;
      one.add(p.logits[v], uint32_t(v));
      if (one.key < below && one.key > mine.key) mine.key = one.key;
    }
    below = sampling::block_best(mine.key, m.best);
    if (i == 0) first = below;
    if (threadIdx.x == 0 && i < p.k) p.keys[int64_t(blockIdx.x) * p.k + i] = below;
  }
  // -infinity where the part is empty, or holds nothing else.
  const double high = first == 0 ? -INFINITY : double(logit_of(first));
  double sum = 0;
  if (high != -INFINITY)
    for (int32_t v = begin + int32_t(threadIdx.x); v < end; v += kThreads) sum += exp(double(p.logits[v]) - high);
  sum = block_sum(sum, m);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = {high, sum};
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ LogprobParams p) {
  LogprobMemory& m = tile::shared<LogprobMemory>();
  double high = -INFINITY, sum = 0;
  for (int32_t i = 0; i < p.count; ++i) high = fmax(high, p.parts[i].high);
  for (int32_t i = int32_t(threadIdx.x); i < p.count; i += kThreads)
    if (p.parts[i].high != -INFINITY) sum += p.parts[i].sum * exp(p.parts[i].high - high);
  const double log_sum = log(block_sum(sum, m)) + high;
  if (threadIdx.x == 0) p.values[0] = *p.token < 0 ? NAN : double(p.logits[*p.token]) - log_sum;  // no draw: no id
  uint64_t below = ~uint64_t(0);
  for (int32_t i = 0; i < p.k; ++i) {
    uint64_t mine = 0;
    for (int32_t j = int32_t(threadIdx.x); j < p.count * p.k; j += kThreads)
      if (p.keys[j] < below && p.keys[j] > mine) mine = p.keys[j];
    below = sampling::block_best(mine, m.best);
    if (threadIdx.x != 0) continue;
    p.top[i] = int32_t(~uint32_t(below));
    p.values[1 + i] = double(p.logits[~uint32_t(below)]) - log_sum;
  }
}

int64_t parts_of(int64_t V) { return std::min(kMostParts, (V + kThreads - 1) / kThreads); }

}  // namespace

int64_t logprobs_workspace_bytes(int64_t V, int64_t k) { return parts_of(V) * int64_t(sizeof(Part) + 8 * k); }

void logprobs(const Logprobs& l, Stream stream) {
  const int64_t count = parts_of(l.logits.numel());
  Part* const parts = static_cast<Part*>(l.workspace.data);
  const LogprobParams p{.logits = l.logits.ptr<float>(),
                        .token = l.token.ptr<int32_t>(),
                        .top = l.top ? l.top.ptr<int32_t>() : nullptr,
                        .values = l.values.ptr<double>(),
                        .parts = parts,
                        .keys = reinterpret_cast<uint64_t*>(parts + count),
                        .V = int32_t(l.logits.numel()),
                        .k = l.top ? int32_t(l.top.numel()) : 0,
                        .count = int32_t(count)};
  const int device = l.logits.device.index;
  gpu::launch("logprobs of parts", parts_kernel, {.grid = count, .block = kThreads, .device = device}, stream, p);
  gpu::launch("logprobs", merge_kernel, {.grid = 1, .block = kThreads, .device = device}, stream, p);
}

}  // namespace ingot::cuda
