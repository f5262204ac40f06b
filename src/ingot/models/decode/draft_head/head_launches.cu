#include "ingot/gpu/device.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/models/decode/draft_head/head_launches.h"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot::decode {
namespace {

int device() { return std::max(0, gpu::current_device()); }

// The sum over all threads of a block. Every call of a kernel needs memory of its own.
__device__ __forceinline__ float block_sum(float v, float (&parts)[kWarps]) {
  v = weight_tiles::lanes_sum(v);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w];
  return sum;
}
// 1 / rms of C numbers, where value(c) is number c. A thread handles the numbers threadIdx.x, + kThreads, ...
template <class Value>
__device__ __forceinline__ float rstd_of(uint32_t C, float eps, float (&parts)[kWarps], Value&& value) {
  float squares = 0;
  for (uint32_t c = threadIdx.x; c < C; c += kThreads) {
    const float v = value(c);
    squares += v * v;
  }
  return 1 / sqrtf(block_sum(squares, parts) / float(C) + eps);
}

// A block for each row. `index`: the number of the boundary among those that the head reads.
struct Kept {
  KeptStates states;
  const float* x;
  int64_t x_stride;
  uint32_t C, index;
};
__global__ void __launch_bounds__(kThreads) keep_states_kernel(const __grid_constant__ Kept p) {
  auto& parts = tile::shared<float[kWarps]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const KeptStates& s = p.states;
  const uint32_t t = blockIdx.x, first = p.index * p.C;
  const float* const x = p.x + int64_t(t) * p.x_stride;
  char* const vector = s.vectors + int64_t(t) * weight_tiles::vector_bytes(s.count * p.C);
  float squares = 0;
  for (uint32_t c = threadIdx.x; s.weight != nullptr && c < p.C; c += kThreads) {
    const float v = __ldcg(x + c);
    squares += v * v;
  }
  squares = block_sum(squares, parts);
  const float rstd = s.each ? 1 / sqrtf(squares / float(p.C) + s.eps) : 1;
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) {
    const float weight = s.weight != nullptr ? s.weight[first + c] : 1;
    weight_tiles::put(vector, s.format, first + c, __ldcg(x + c) * weight * rstd);
  }
  if (threadIdx.x == 0) s.squares[(t / s.group * s.count + p.index) * kMostTokens + t % s.group] = squares;
}

__global__ void __launch_bounds__(kThreads) place_features_kernel(const __grid_constant__ PlacedRows p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x;
  const float* const x = p.x + t * p.x_stride;
  bf16* const to = p.slots.features + p.slot[t] * p.slots.of_features + int64_t(p.position[t]) * p.C;
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) to[c] = bf16(__ldcg(x + c));
}

// A block for each row.
__global__ void __launch_bounds__(kThreads) head_inputs_kernel(const __grid_constant__ HeadInputs p) {
  auto& parts = tile::shared<float[3][kWarps]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x;
  char* const vector = p.vectors + int64_t(t) * weight_tiles::vector_bytes(2 * p.C);
  int32_t token = p.token[t];
  if (p.before != nullptr) {
    // If the logits are NaN there is no largest one, and the token may be no valid id.
    token = min(max(__ldcg(&p.before->tokens[0]), 0), int32_t(p.draft_vocab) - 1);
    if (p.ids != nullptr) token = p.ids[token];
  }
  const bf16* const row = p.embed + int64_t(token) * p.C;
  const float of_embedding = rstd_of(p.C, p.eps, parts[0], [&](uint32_t c) { return float(row[c]); });
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads)
    weight_tiles::put(vector, p.format, c, float(row[c]) * p.embed_norm[c] * of_embedding);
  const auto stored = [&](uint32_t c) {
    if (p.features == nullptr) return __ldcg(p.x + c);
    return __uint_as_float(uint32_t(__ldcg(&p.features[int64_t(t) * p.C + c].bits)) << 16);
  };
  float of_output = 1;
  if (p.output_norm != nullptr) of_output = rstd_of(p.C, p.eps, parts[1], stored);
  const auto feature = [&](uint32_t c) {
    return p.output_norm != nullptr ? stored(c) * p.output_norm[c] * of_output : stored(c);
  };
  const float of_features = rstd_of(p.C, p.eps, parts[2], feature);
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) {
    const float v = feature(c), normed = v * p.hidden_norm[c] * of_features;
    weight_tiles::put(vector, p.format, p.C + c, normed);
    if (p.x != nullptr) p.x[c] = p.normed_residual ? normed : v;
  }
}

// A block for each row and key head.
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) store_head_keys_kernel(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t first = uint32_t(__ldcg(p.position)), key = first + blockIdx.x / p.kv_heads;
  decode_attention::store_keys<kDim>(p, {key, key + 1, first}, blockIdx.x % p.kv_heads, threadIdx.x);
}
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) head_attention_kernel(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  decode_attention::attend<kDim>(p, blockIdx.x, tile::shared<decode_attention::Memory<kDim>>());
}

gpu::Launch rows_launch(uint32_t T) { return {.grid = T, .block = kThreads, .overlap = true, .device = device()}; }
gpu::Launch attention_launch(int64_t blocks) {
  return {.grid = blocks, .block = decode_attention::kThreads, .overlap = true, .device = device()};
}

}  // namespace

void keep_states(const KeptStates& states, uint32_t layers, const float* x, int64_t x_stride, uint32_t T, uint32_t C,
                 Stream stream) {
  for (uint32_t i = 0; i < states.count; ++i)
    if (states.boundary[i] == layers)
      gpu::launch("draft head states", keep_states_kernel, rows_launch(T), stream, Kept{states, x, x_stride, C, i});
}

void place_features(const PlacedRows& rows, Stream stream) {
  gpu::launch("draft head features", place_features_kernel, rows_launch(rows.T), stream, rows);
}

void head_inputs(const HeadInputs& inputs, Stream stream) {
  gpu::launch("draft head inputs", head_inputs_kernel, rows_launch(inputs.T), stream, inputs);
}

void store_head_keys(const decode_attention::Params& p, uint32_t cache_dim, Stream stream) {
  const auto kernel = cache_dim == 64 ? store_head_keys_kernel<64> : store_head_keys_kernel<128>;
  gpu::launch("draft head keys", kernel, attention_launch(int64_t(p.T) * p.kv_heads), stream, p);
}

void attend_head(const decode_attention::Params& p, uint32_t cache_dim, Stream stream) {
  const auto kernel = cache_dim == 64 ? head_attention_kernel<64> : head_attention_kernel<128>;
  gpu::launch("draft head attention", kernel, attention_launch(decode_attention::units_of(p)), stream, p);
}

}  // namespace ingot::decode
