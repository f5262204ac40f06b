#include <algorithm>

#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/elements.cuh"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/embedding/embedding.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;

// --- y = table[ids]

struct GatherParams {
  const int32_t* ids;
  int64_t id_step, tokens, vocab;
  tile::Rows table, y;
  int units;  // of a row
  bool accumulate;
};
// An id outside of the table gives a row of NaNs: a kernel cannot report errors.
template <class T, int N> __global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ GatherParams p) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, token = i / p.units;
  if (token >= p.tokens) return;
  const int64_t unit = i - token * p.units, id = p.ids[token * p.id_step];
  T* to = static_cast<T*>(p.y.data) + token * p.y.stride + unit * N;
  float x[N], y[N] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] = __int_as_float(0x7fffffff);
  if (id >= 0 && id < p.vocab)
    tile::load_elements(x, static_cast<const T*>(p.table.data) + id * p.table.stride + unit * N);
  if (p.accumulate) tile::load_elements(y, to);
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] += y[n];
  tile::store_elements(to, x);
}

template <class T> void gather_typed(const Embedding& a, Stream stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const bool vectors =
      a.table.cols() % kVector == 0 && tile::rows_start_aligned(a.table, 16) && tile::rows_start_aligned(a.y, 16);
  const int N = vectors ? kVector : 1;
  const GatherParams p{.ids = a.ids.ptr<int32_t>(),
                       .id_step = a.ids.step(0),
                       .tokens = a.ids.size(0),
                       .vocab = a.table.size(0),
                       .table = tile::rows_of(a.table),
                       .y = tile::rows_of(a.y),
                       .units = int(a.table.cols() / N),
                       .accumulate = a.accumulate};
  const gpu::Launch grid{
      .grid = (p.tokens * p.units + kThreads - 1) / kThreads, .block = kThreads, .device = a.table.device.index};
  gpu::launch("embedding", vectors ? gather<T, kVector> : gather<T, 1>, grid, stream, p);
}

// --- dtable[ids] += dy, in token order

// A block owns a few ids and columns: it reads all ids, a chunk at a time, lists the tokens with its own ids, and adds
// their rows up in shared memory. No two blocks share an id and a column, and every sum has a fixed order.
constexpr int kColumns = 512, kOwnIds = 16, kChunk = 4096, kPerThread = kColumns / kThreads;
static_assert(kChunk % kThreads == 0);
struct ScatterParams {
  const int32_t* ids;
  int64_t id_step, tokens, vocab, cols;
  tile::Rows dy, dtable;
  int column_blocks;
};
struct ScatterMemory {
  float sums[kOwnIds][kColumns];
  int32_t token[kChunk];  // index in the chunk
  int8_t which[kChunk];   // number of the token's id among the block's ids
  int32_t of_warps[kThreads / 32];
};
// Lists the chunk's tokens whose id is the block's own, in order; returns how many.
__device__ inline int list_own(const ScatterParams& p, int64_t chunk, int64_t first_id, ScatterMemory& memory) {
  constexpr int kEach = kChunk / kThreads;  // neighbouring tokens, so that a thread's tokens are in order
  int32_t own[kEach];
  int count = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int64_t t = chunk + int64_t(threadIdx.x) * kEach + k;
    const int64_t id = t < p.tokens ? p.ids[t * p.id_step] : -1;
    own[k] = id >= first_id && id < first_id + kOwnIds && id < p.vocab ? int32_t(id - first_id) : -1;
    count += own[k] >= 0;
  }
  int before = count;  // inclusive, then exclusive
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) memory.of_warps[warp] = before;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += memory.of_warps[w];
    total += memory.of_warps[w];
  }
  before -= count;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (own[k] >= 0) {
      memory.token[before] = int32_t(threadIdx.x) * kEach + k;
      memory.which[before++] = int8_t(own[k]);
    }
  __syncthreads();
  return total;
}

template <class T> __global__ void __launch_bounds__(kThreads, 4) scatter_add(const __grid_constant__ ScatterParams p) {
  ScatterMemory& memory = *tile::dynamic_shared<ScatterMemory>();
  const int64_t first_id = int64_t(blockIdx.x / p.column_blocks) * kOwnIds;
  const int64_t first = int64_t(blockIdx.x % p.column_blocks) * kColumns + threadIdx.x;
  for (int i = 0; i < kOwnIds; ++i)
    for (int k = 0; k < kPerThread; ++k) memory.sums[i][threadIdx.x + k * kThreads] = 0;
  const T* dy = static_cast<const T*>(p.dy.data);
  for (int64_t chunk = 0; chunk < p.tokens; chunk += kChunk) {
    const int listed = list_own(p, chunk, first_id, memory);
    constexpr int kAhead = 16;  // rows in flight; a frequent id has thousands of rows, which are added in turn
    for (int j = 0; j < listed; j += kAhead) {
      float x[kAhead][kPerThread];
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
          const int64_t c = first + k * kThreads;
          const bool there = j + a < listed && c < p.cols;
          x[a][k] = there ? tile::to_float(dy[(chunk + memory.token[j + a]) * p.dy.stride + c]) : 0.f;
        }
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (j + a < listed)
#pragma unroll
          for (int k = 0; k < kPerThread; ++k) memory.sums[memory.which[j + a]][threadIdx.x + k * kThreads] += x[a][k];
    }
    __syncthreads();  // before the next chunk is listed
  }
  float* dtable = static_cast<float*>(p.dtable.data);
  for (int i = 0; i < kOwnIds && first_id + i < p.vocab; ++i)
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t c = first + k * kThreads;
      const float sum = memory.sums[i][threadIdx.x + k * kThreads];
      if (c < p.cols && sum != 0) dtable[(first_id + i) * p.dtable.stride + c] += sum;
    }
}

template <class T> void scatter_typed(const EmbeddingBackward& a, Stream stream) {
  const ScatterParams p{.ids = a.ids.ptr<int32_t>(),
                        .id_step = a.ids.step(0),
                        .tokens = a.ids.size(0),
                        .vocab = a.dtable.size(0),
                        .cols = a.dtable.cols(),
                        .dy = tile::rows_of(a.dy),
                        .dtable = tile::rows_of(a.dtable),
                        .column_blocks = int((a.dtable.cols() + kColumns - 1) / kColumns)};
  const int64_t owners = (p.vocab + kOwnIds - 1) / kOwnIds;
  gpu::launch("embedding_backward", scatter_add<T>,
              {.grid = owners * p.column_blocks,
               .block = kThreads,
               .smem = sizeof(ScatterMemory),
               .device = a.dtable.device.index},
              stream, p);
}

}  // namespace

void embedding(const Embedding& a, Stream stream) {
  if (a.ids.size(0) == 0 || a.table.cols() == 0) return;
  with_gpu_float_type(a.table.dtype, "embedding", [&](auto scalar) { gather_typed<decltype(scalar)>(a, stream); });
}

void embedding_backward(const EmbeddingBackward& a, Stream stream) {
  const char* op = "embedding_backward";
  if (a.dtable.dtype != DType::f32)
    fail(ErrorCode::unsupported, op, ": found dtable of ", a.dtable.dtype, " on a GPU, expected f32");
  if (a.ids.size(0) == 0 || a.dtable.numel() == 0) return;
  with_gpu_float_type(a.dy.dtype, op, [&](auto scalar) { scatter_typed<decltype(scalar)>(a, stream); });
}

}  // namespace ingot::cuda
