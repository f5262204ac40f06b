#pragma once
// Queries, keys and values of a part of a prompt on their way to attention.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/models/decode/prompt/prompt.h"
#include "ingot/models/decode/prompt/prompt_block.cuh"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode::prompts {

// Rotates queries and keys, and stores keys and values in the cache. For sliding layers the keys and values are also
// stored in order, behind those of the window before. One block per token; the tokens of that window come first.
struct Rotate {
  const float *qkv, *cos, *sin;
  bf16 *q, *keys, *values;      // keys and values: the layer's cache
  bf16 *in_order, *v_in_order;  // null: the cache is in order
  uint32_t heads, kv_heads, dim, cache_dim, rows;
  uint32_t position, before;  // tokens of the window before this prompt
};
__device__ __forceinline__ int64_t cache_at(const Rotate& p, uint32_t position, uint32_t head) {
  return (int64_t(head) * p.rows + position % p.rows) * p.cache_dim;
}
__global__ void __launch_bounds__(kThreads) rotate_kernel(Rotate p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t width = p.kv_heads * p.dim;
  if (blockIdx.x < p.before) {
    const uint32_t position = p.position - p.before + blockIdx.x;
    for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
      const int64_t from = cache_at(p, position, i / p.dim) + i % p.dim, to = int64_t(blockIdx.x) * width + i;
      p.in_order[to] = p.keys[from];
      p.v_in_order[to] = p.values[from];
    }
    return;
  }
  const uint32_t t = blockIdx.x - p.before, position = p.position + t, half = p.dim / 2;
  const float* const row = p.qkv + int64_t(t) * (p.heads + 2 * p.kv_heads) * p.dim;
  for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * half; i += kThreads) {
    const uint32_t h = i / half, d = i % half, kv = h - p.heads;
    const float co = p.cos[int64_t(position) * half + d], si = p.sin[int64_t(position) * half + d];
    const float a = row[h * p.dim + d], b = row[h * p.dim + d + half];
    const bf16 low = bf16(a * co - b * si), high = bf16(b * co + a * si);
    if (h < p.heads) {
      bf16* const q = p.q + (int64_t(t) * p.heads + h) * p.dim + d;
      q[0] = low, q[half] = high;
      continue;
    }
    bf16* const key = p.keys + cache_at(p, position, kv) + d;
    key[0] = low, key[half] = high;
    if (p.in_order == nullptr) continue;
    bf16* const again = p.in_order + int64_t(p.before + t) * width + kv * p.dim + d;
    again[0] = low, again[half] = high;
  }
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
    const bf16 v = bf16(row[(p.heads + p.kv_heads) * p.dim + i]);
    p.values[cache_at(p, position, i / p.dim) + i % p.dim] = v;
    if (p.v_in_order != nullptr) p.v_in_order[int64_t(p.before + t) * width + i] = v;
  }
}

// The arrays that attention reads on the device, and the bounds of products of one group.
struct Lengths {
  int32_t *whole, *ends, *halves, *half_rows;
  float* half_weights;
  int32_t *rows, *keys, *sliding;
  int32_t T, last;  // rows; rows whose logits are computed
  uint32_t parts;
  struct {
    int32_t rows, keys, sliding;
  } part[kMostParts];
};
__global__ void __launch_bounds__(kMostParts) lengths_kernel(const __grid_constant__ Lengths p) {
  ptx::wait_for_earlier_kernels();
  const uint32_t i = threadIdx.x;
  if (i == 0) p.whole[0] = p.ends[0] = 0, p.whole[1] = p.T, p.ends[1] = p.last;
  if (i < 3) p.halves[i] = int32_t(i) * p.T;
  if (int32_t(i) < p.T && i < kMostSequences) {
    p.half_rows[2 * i] = int32_t(i), p.half_rows[2 * i + 1] = p.T + int32_t(i);
    p.half_weights[2 * i] = p.half_weights[2 * i + 1] = 1;
  }
  if (i >= p.parts) return;
  p.rows[2 * i] = p.keys[2 * i] = p.sliding[2 * i] = 0;
  p.rows[2 * i + 1] = p.part[i].rows, p.keys[2 * i + 1] = p.part[i].keys, p.sliding[2 * i + 1] = p.part[i].sliding;
}

}  // namespace ingot::decode::prompts
