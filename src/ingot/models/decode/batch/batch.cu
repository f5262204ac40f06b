#include <algorithm>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/watch.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/batch/batch_attention.cuh"
#include "ingot/models/decode/small_batch/slot_rows.cuh"

namespace ingot::decode {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ uint32_t count_of(const BatchedSequences& s) { return __ldcg(&s.input->count); }

__global__ void __launch_bounds__(kMostSequences)
    gather_batch_kernel(const __grid_constant__ BatchedSequences s, int32_t* ids, uint32_t T) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t j = threadIdx.x;
  if (j >= T) return;
  int32_t id = 0;
  if (j < count_of(s)) {
    id = __ldcg(&s.input->token[j]);
    if (id < 0) id = __ldcg(&in_slot(s.state, s, slot_of(s, j))->tokens[0]);
  }
  ids[j] = max(id, 0);  // a slot without a token has the id -1
}

// For heads wider than 128 numbers, or with a softcap of scores.
__global__ void __launch_bounds__(decode_attention::kThreads)
    attend_wide_batch_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p, float softcap) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = decode_attention::units_of(p), j = blockIdx.x / units;
  if (j >= count_of(s)) return;
  row_attention::point_to_row<kWideDim>(s, j, p);
  decode_attention::attend<kWideDim>(p, blockIdx.x % units, decode_attention::CappedScale{p.scale, softcap},
                                     *tile::dynamic_shared<decode_attention::Memory<kWideDim>>());
}

// One block processes one part of a row.
__global__ void __launch_bounds__(kThreads)
    scatter_batch_kernel(const __grid_constant__ BatchedSequences s, const float* rows, uint32_t V, uint32_t vocab) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  auto& m = tile::shared<sampling::BestMemory>();
  const uint32_t j = blockIdx.x / BatchedSequences::kBestParts, part = blockIdx.x % BatchedSequences::kBestParts;
  if (j >= count_of(s)) return;
  const uint64_t key = scatter_logits<kThreads>(s, j, part, rows, V, vocab, m);
  if (threadIdx.x == 0) s.best[blockIdx.x] = key;
}
// One warp processes one sequence.
__global__ void __launch_bounds__(kThreads)
    append_batch_kernel(const __grid_constant__ BatchedSequences s, const uint32_t* stop) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t j = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (j >= count_of(s)) return;
  const uint64_t key = best_of_parts(s.best + j * BatchedSequences::kBestParts + lane);
  if (lane != 0 || (stop != nullptr && ptx::load_relaxed(stop) != gpu::kRunning)) return;
  State& state = *in_slot(s.state, s, slot_of(s, j));
  set_best(state, key);
  state.position += int32_t(__ldcg(&s.input->appended[j]));
}

// The most blocks that compute the second and later parts of the rows; these blocks share the parts.
constexpr int64_t kMostFurtherBlocks = 256;

template <class F>
void attend_rows(const BatchedSequences& s, const decode_attention::Params& p, int64_t T, int device, Stream stream) {
  const int64_t first_parts = T * p.kv_heads * row_attention::query_tiles(p),
                further = std::min<int64_t>(first_parts * (p.parts - 1), kMostFurtherBlocks);
  gpu::launch("batch attention", row_attention::attend_rows_kernel<F>,
              {.grid = first_parts + further,
               .block = F::kThreads,
               .smem = int64_t(sizeof(row_attention::Memory<F>)),
               .overlap = true,
               .device = device},
              stream, s, p, uint32_t(T));
}
template <int kDim>
void attend_rows(const BatchedSequences& s, const decode_attention::Params& p, int64_t T, int device, Stream stream) {
  // With a short window each warp has one group of keys. Some older GPUs lack the shared memory for two groups.
  const bool short_window = p.window > 0 && p.window <= row_attention::kGroup * row_attention::Form<kDim, 1>::kWarps;
  if (short_window || !gpu::device_limits({Device::cuda, device}).hopper)
    return attend_rows<row_attention::Form<kDim, 1>>(s, p, T, device, stream);
  attend_rows<row_attention::Form<kDim, 2>>(s, p, T, device, stream);
}

}  // namespace

void gather_batch(const BatchedSequences& s, int32_t* ids, int64_t T, int device, Stream stream) {
  gpu::launch("batch tokens", gather_batch_kernel,
              {.grid = 1, .block = int64_t(kMostSequences), .overlap = true, .device = device}, stream, s, ids,
              uint32_t(T));
}

void attend_batch(const BatchedSequences& s, decode_attention::Params p, const BatchAttention& how, int64_t T,
                  int device, Stream stream) {
  p.part_max = s.part_max, p.part_sum = s.part_sum, p.part_out = s.part_out, p.arrived = s.arrived;
  if (how.cache_dim == kWideDim)
    return gpu::launch("batch attention", attend_wide_batch_kernel,
                       {.grid = T * decode_attention::units_of(p),
                        .block = decode_attention::kThreads,
                        .smem = int64_t(sizeof(decode_attention::Memory<kWideDim>)),
                        .overlap = true,
                        .device = device},
                       stream, s, p, how.softcap);
  how.cache_dim == 64 ? attend_rows<64>(s, p, T, device, stream) : attend_rows<128>(s, p, T, device, stream);
}

void scatter_batch(const BatchedSequences& s, const BatchLogits& rows, int device, Stream stream) {
  gpu::launch("batch logits", scatter_batch_kernel,
              {.grid = rows.T * BatchedSequences::kBestParts, .block = kThreads, .overlap = true, .device = device},
              stream, s, rows.logits, uint32_t(rows.ids), uint32_t(rows.vocab));
  gpu::launch("batch ids", append_batch_kernel,
              {.grid = (rows.T + kWarps - 1) / kWarps, .block = kThreads, .overlap = true, .device = device}, stream, s,
              rows.stop);
}

}  // namespace ingot::decode
