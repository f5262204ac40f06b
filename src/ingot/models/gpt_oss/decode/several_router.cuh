#pragma once
// The router's end of several tokens: the columns of gate and up, each token's choice, the lists of all.
#include "ingot/kernels/moe/route.cuh"
#include "ingot/models/gpt_oss/decode/several_sums.cuh"

namespace ingot::gpt_oss_decode::several {

// Of what route() has staged, columns of the next product: a token or some by each of its bands' blocks, by half of
// their threads.
__device__ __forceinline__ void put_normed(const Router& p, const Normed& to, const char* columns, uint32_t band,
                                           uint32_t split) {
  constexpr uint32_t kFirst = granules::kThreads / 2;
  const uint32_t first = split * kSplitGranules * 64, end = min(first + kSplitGranules * 64, p.w.granules * 64);
  if (threadIdx.x < kFirst) return;
  for (uint32_t t = band; t < p.T; t += p.w.bands)
    for (uint32_t c = first + 4 * (threadIdx.x - kFirst); c < end; c += 4 * kFirst) {
      float v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        v[i] = float(*reinterpret_cast<const bf16*>(columns + t * granules::column_stride(p.w.cols) +
                                                    2 * granules::place(false, c + i)));
      put_normed(to, t, p.w.cols, c, v);
    }
}

// A token a warp: its logits, of which all parts are asked for at once, and its choice.
__device__ __forceinline__ void choose_experts(const Router& p, const ChoiceMemory& m) {
  const uint32_t E = p.w.rows, lane = threadIdx.x % 32;
  constexpr uint32_t kHeld = 6, kItems = 4;
#pragma unroll 1
  for (uint32_t t = threadIdx.x / 32; t < p.T; t += granules::kWarps) {
    float squares = 0;
    for (uint32_t s = lane; s < p.splits; s += 32) squares += __ldcg(p.squares + s * kColumns + t);
    float* const logits = m.logits + t * E;
#pragma unroll 1
    for (uint32_t of_all = 0; of_all < E; of_all += 32 * kItems) {
      const uint32_t begin = of_all + lane;
      float sum[kItems] = {}, bias[kItems];
#pragma unroll
      for (uint32_t u = 0; u < kItems; ++u) bias[u] = begin + 32 * u < E ? p.bias[begin + 32 * u] : 0;
#pragma unroll 1
      for (uint32_t first = 0; first < p.splits; first += kHeld) {
        float part[kHeld][kItems];
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s)
#pragma unroll
          for (uint32_t u = 0; u < kItems; ++u)
            part[s][u] = first + s < p.splits && begin + 32 * u < E
                             ? __ldcg(p.part + ((first + s) * kColumns + t) * E + begin + 32 * u)
                             : 0;
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s)
#pragma unroll
          for (uint32_t u = 0; u < kItems; ++u) sum[u] += part[s][u];
      }
      if (of_all == 0) squares = granules::lanes_sum(squares);
#pragma unroll
      for (uint32_t u = 0; u < kItems; ++u)
        if (begin + 32 * u < E) logits[begin + 32 * u] = sum[u] / sqrtf(squares / float(p.w.cols) + p.eps) + bias[u];
    }
    __syncwarp();
    routing::choose(logits, E, p.k, m.chosen + t * p.k, m.weights + t * p.k);
  }
  __syncthreads();
}

// By all threads of the block: warps take 32 experts in turn, whose entries follow those before.
__device__ __forceinline__ void make_lists(const ChoiceMemory& m, uint32_t T, uint32_t E, uint32_t k,
                                           const routing::Lists& lists) {
  for (uint32_t e = threadIdx.x; e < E; e += blockDim.x) {
    uint32_t tokens = 0;
#pragma unroll 1
    for (uint32_t t = 0; t < T; ++t)
#pragma unroll 4
      for (uint32_t s = 0; s < k; ++s) tokens |= m.chosen[t * k + s] == e ? 1u << t : 0;
    m.first[e] = tokens;
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % 32, t = lane % 16;
  const auto chosen_of = [&](uint32_t chunk) {
    const uint32_t e = 32 * chunk + lane;
    return __ballot_sync(~0u, int(e < E && m.first[e] != 0));
  };
  uint32_t before = 0, next = 0;
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x / 32; 32 * chunk < E; chunk += blockDim.x / 32) {
    for (; next < chunk; ++next) before += uint32_t(__popc(chosen_of(next)));
    const uint32_t all = chosen_of(chunk), count = uint32_t(__popc(all));
    if (32 * chunk + 32 >= E && lane == 0) *lists.count = before + count;
    uint32_t left = all;
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += 2) {  // half a warp an entry
      uint32_t bit = left & (0 - left);
      left &= left - 1;
      if (lane >= 16) bit = left & (0 - left);
      left &= left - 1;
      if (bit == 0) continue;
      const uint32_t e = 32 * chunk + uint32_t(__popc(bit - 1)), entry = before + i + lane / 16;
      float weight = 0;
      int32_t row = -1;
      for (uint32_t s = 0; t < T && s < k; ++s)
        if (m.chosen[t * k + s] == e) weight = m.weights[t * k + s], row = int32_t(t * k + s);
      if (t == 0) lists.expert[entry] = int32_t(e);
      lists.weight[entry * routing::kTokens + t] = weight;
      lists.row[entry * routing::kTokens + t] = row;
    }
  }
}

}  // namespace ingot::gpt_oss_decode::several
