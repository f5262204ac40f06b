// Sampling on a GPU: the launches. For a row without filters, several blocks each find the largest sum of their ids
// (unfiltered.cuh). A row with filters takes a cluster of blocks, as large as lets all rows run at once (filtered.cuh);
// on GPUs without clusters the row takes one block.
#include <algorithm>
#include <array>
#include <mutex>

#include "ingot/gpu/device.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/sampling/filtered.cuh"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/kernels/sampling/sampling_config.h"
#include "ingot/kernels/sampling/unfiltered.cuh"

namespace ingot::cuda {
namespace {

using namespace sampling;

// The most turns of a block whose logits are kept in shared memory.
constexpr int kMostCachedTurns = 13 * 1024 / kFilterThreads;

// The blocks of a row without filters: every quad of ids gets a thread, but all rows together take no more blocks than
// the GPU runs at once.
int64_t blocks_of(int64_t rows, int64_t ids, int64_t sms) {
  const int64_t wanted = (ids + 4 * kThreads - 1) / (4 * kThreads);
  return std::max<int64_t>(1, std::min({wanted, 2 * sms / rows, int64_t(kMostBlocks)}));
}
// The turns in which a row's blocks read its logits, kFilterThreads quads per block and turn.
int64_t turns_of(int64_t ids, int64_t cluster) {
  return ((ids + 3) / 4 + cluster * kFilterThreads - 1) / (cluster * kFilterThreads);
}
// The most turns whose logits fit into the shared memory of a block.
int64_t most_cached_turns(const gpu::Limits& limits) {
  constexpr int64_t kOfDriver = 1024;  // bytes of shared memory that the driver keeps for itself in each block
  const int64_t fits =
      (limits.smem_per_block - int64_t(sizeof(FilterMemory)) - kOfDriver) / (kFilterThreads * int64_t(sizeof(float4)));
  return std::min(fits, int64_t(kMostCachedTurns));
}
gpu::Launch filter_launch(int64_t rows, int64_t cluster, int64_t cached_turns, int device) {
  return {.grid = rows * cluster,
          .block = kFilterThreads,
          .smem = cached_turns * kFilterThreads * int64_t(sizeof(float4)),
          .cluster = int(cluster),
          .overlap = true,
          .device = device};
}
// The clusters of every size that the GPU runs at once; a block fills its multiprocessor.
#ifdef INGOT_EMULATE
ResidentClusters resident_clusters_of(const gpu::Limits& limits, int) {
  ResidentClusters found{};
  for (const int cluster : {1, 2, 4, 8}) found[size_t(cluster)] = limits.resident(cluster);
  found[kMostCluster] = 1;
  return found;
}
#else
ResidentClusters resident_clusters_of(const gpu::Limits& limits, int device) {
  static std::mutex mutex;
  static std::array<ResidentClusters, 64> known{};
  const std::lock_guard lock(mutex);
  ResidentClusters& found = known[size_t(device) % known.size()];
  if (found[1] == 0) {
    for (const int cluster : {2, 3, 4, 5, 6, 7, 8, kMostCluster})
      found[size_t(cluster)] = int(gpu::resident_clusters("sample with filters", filter_kernel<float, true, true>,
                                                          filter_launch(1, cluster, kMostCachedTurns, device)));
    found[1] = limits.sms;
  }
  return found;
}
#endif
template <class T>
void launch_filters(SampleParams p, int64_t rows, int64_t ids, const gpu::Limits& limits, int device, Stream stream) {
  const int64_t most_cached = most_cached_turns(limits);
  p.cluster = 1;
  if (limits.hopper)
    p.cluster = pick_filter_cluster(rows, turns_of(ids, 1), most_cached, resident_clusters_of(limits, device));
  const int64_t turns = turns_of(ids, p.cluster);
  p.cached_turns = int32_t(std::min(turns, most_cached));
  const bool cached = p.cached_turns == turns;
  const auto kernel = !limits.hopper ? filter_kernel<T, false, false>
                      : cached       ? filter_kernel<T, true, true>
                                     : filter_kernel<T, true, false>;
  gpu::launch("sample with filters", kernel, filter_launch(rows, p.cluster, p.cached_turns, device), stream, p);
}
constexpr int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }
constexpr int64_t kBytesOfRow = 8 * kMostBlocks + int64_t(sizeof(FilterSpace));
// The rows of a workspace of at least sample_workspace_bytes(1). The number of rows determines the places of the
// arrays. The words that are zero between calls are therefore the same words for calls with any number of rows.
constexpr int64_t rows_of_workspace(int64_t bytes) { return bytes / (kBytesOfRow + 4); }

}  // namespace

int64_t sample_workspace_bytes(int64_t rows) { return aligned(4 * rows) + rows * kBytesOfRow; }

void sample(const Sample& s, const gpu::Limits& limits, Stream stream) {
  const int64_t rows = s.rows ? s.rows.size(0) : s.logits.size(0), V = s.logits.cols();
  if (rows == 0) return;
  const int device = s.logits.device.index;
  const int64_t room = rows_of_workspace(s.workspace.bytes());
  char* const workspace = static_cast<char*>(s.workspace.data);
  char* const best = workspace + aligned(4 * room);
  SampleParams p{.logits = s.logits.data,
                 .row_stride = s.logits.row_stride(),
                 .tokens = s.tokens.ptr<int32_t>(),
                 .token_step = s.tokens.step(0),
                 .rows = s.rows ? reinterpret_cast<const SampleRow*>(s.rows.data) : nullptr,
                 .common = row_of(s.options, V),
                 .device_step = s.device_step ? s.device_step.ptr<int32_t>() : nullptr,
                 .bias_ids = s.bias_ids ? s.bias_ids.ptr<int32_t>() : nullptr,
                 .biases = s.biases ? s.biases.ptr<float>() : nullptr,
                 .bias_id_stride = s.bias_ids ? s.bias_ids.row_stride() : 0,
                 .bias_stride = s.biases ? s.biases.row_stride() : 0,
                 .allowed = s.allowed ? s.allowed.ptr<uint32_t>() : nullptr,
                 .allowed_stride = s.allowed ? s.allowed.row_stride() : 0,
                 .arrived = reinterpret_cast<uint32_t*>(workspace),
                 .best = reinterpret_cast<uint64_t*>(best),
                 .filters = reinterpret_cast<FilterSpace*>(best + 8 * kMostBlocks * room),
                 .blocks = int32_t(blocks_of(rows, V, limits.sms))};
  p.common.seed = s.seed, p.common.step = s.step;
  p.common.biases = s.bias_ids ? int32_t(s.bias_ids.cols()) : 0, p.common.masked = s.allowed ? 1 : 0;
  const bool some_filtered = s.rows ? s.some_filtered : ingot::filters(p.common);
  const bool some_unfiltered = s.rows ? s.some_unfiltered : !some_filtered;
  with_gpu_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    using T = decltype(scalar);
    if (some_unfiltered)
      gpu::launch("sample", sample_kernel<T>,
                  {.grid = rows * p.blocks, .block = kThreads, .overlap = true, .device = device}, stream, p);
    if (some_filtered) launch_filters<T>(p, rows, V, limits, device, stream);
  });
}
void sample(const Sample& s, Stream stream) { sample(s, gpu::limits(s.logits.device.index), stream); }

}  // namespace ingot::cuda
