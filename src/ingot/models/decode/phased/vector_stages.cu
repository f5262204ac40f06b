#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/phased/vector_stages.h"

namespace ingot::decode {
namespace {

__global__ void __launch_bounds__(kThreads) embed_scaled_kernel(ScaledEmbedding p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const Embedding& e = p.embedding;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < e.T * e.C; i += gridDim.x * kThreads) {
    const uint32_t t = i / e.C, c = i % e.C;
    e.x[t * e.x_stride + c] = p.scale * float(e.table[int64_t(__ldcg(&e.state->tokens[t])) * e.C + c]);
  }
  const uint32_t t = threadIdx.x;
  if (blockIdx.x > 0 || t >= routing::kTokens || p.dense.count == nullptr) return;
  if (t == 0) *p.dense.count = 1, p.dense.expert[0] = 0;
  p.dense.weight[t] = t < e.T ? 1 : 0;
  p.dense.row[t] = t < e.T ? int32_t(t) : -1;
}

// A warp for each head of each token.
__global__ void __launch_bounds__(kThreads) normalise_heads_kernel(HeadNorm p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t normed = p.heads + p.kv_heads, lane = threadIdx.x % 32;
  const uint32_t unit = blockIdx.x * kWarps + threadIdx.x / 32, t = unit / normed, head = unit % normed;
  if (t >= p.T) return;
  float* const x = p.qkv + (int64_t(t) * (normed + p.kv_heads) + head) * p.dim;
  const float* const weight = head < p.heads ? p.query : p.key;
  float squares = 0;
  for (uint32_t d = lane; d < p.dim; d += 32) {
    const float v = __ldcg(x + d);
    squares += v * v;
  }
  const float rstd = 1 / sqrtf(weight_tiles::lanes_sum(squares) / float(p.dim) + p.eps);
  for (uint32_t d = lane; d < p.dim; d += 32) x[d] = __ldcg(x + d) * weight[d] * rstd;
}

// A block for each token.
__global__ void __launch_bounds__(kThreads) add_normed_branch_kernel(BranchNorm p) {
  auto& parts = tile::shared<float[kWarps]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  float* const x = p.x + blockIdx.x * p.stride;
  const float* const y = p.y + blockIdx.x * p.stride;
  float squares = 0;
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) {
    const float v = __ldcg(y + c);
    squares += v * v;
  }
  squares = weight_tiles::lanes_sum(squares);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w];
  const float rstd = 1 / sqrtf(sum / float(p.C) + p.eps);
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) x[c] = __ldcg(x + c) + __ldcg(y + c) * p.weight[c] * rstd;
}

__global__ void __launch_bounds__(kThreads) cap_logits_kernel(CappedLogits p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += int64_t(gridDim.x) * kThreads)
    p.x[i] = p.cap * tanhf(__ldcg(p.x + i) / p.cap);
}

template <class Kernel, class P> void launch(const char* name, Kernel kernel, int64_t grid, const P& p, Stream stream) {
  gpu::launch(name, kernel,
              {.grid = grid, .block = kThreads, .overlap = true, .device = std::max(0, gpu::current_device())}, stream,
              p);
}
int64_t blocks_for(int64_t n, int64_t of_block) { return (n + of_block - 1) / of_block; }

}  // namespace

void embed_scaled(const ScaledEmbedding& p, Stream stream) {
  const int64_t n = int64_t(p.embedding.T) * p.embedding.C;
  launch("decode embedding", embed_scaled_kernel, std::min<int64_t>(blocks_for(n, kThreads), kMostBlocks), p, stream);
}
void normalise_heads(const HeadNorm& p, Stream stream) {
  const int64_t heads = int64_t(p.T) * (p.heads + p.kv_heads);
  launch("decode norms of heads", normalise_heads_kernel, blocks_for(heads, kWarps), p, stream);
}
void add_normed_branch(const BranchNorm& p, Stream stream) {
  launch("decode norm of a branch", add_normed_branch_kernel, p.T, p, stream);
}
void cap_logits(const CappedLogits& p, Stream stream) {
  launch("decode softcap", cap_logits_kernel, std::min<int64_t>(blocks_for(p.n, kThreads), kMostBlocks), p, stream);
}

}  // namespace ingot::decode
