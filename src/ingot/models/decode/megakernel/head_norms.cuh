#pragma once
// The queries, keys and values of a unit of attention in models of the families: a warp computes a head, so that the
// sum of squares of the head's norm needs no barrier.
//   q = rope(norm(q) w_q)      k = rope(norm(k) w_k)      norm(x) = x / sqrt(mean(x^2) + eps), where the model has it
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode::head_norms {

// Writes the queries of a unit, and in the last part the new key and value, to shared memory, and the new key and value
// to the cache. A failed wait for the words of `sums` is recorded with the number `wait`. If a key head has several
// tiles, all of its blocks store the same words to the cache.
template <TokenVariant V>
__device__ __forceinline__ void stage_heads(const TokenContext<V>& block, uint32_t layer, const uint64_t* sums,
                                            const split_kv_attention::Unit& u, uint32_t wait) {
  constexpr uint32_t kPairs = V.head_dim / 64;  // pairs of numbers, d and d + dim / 2, of a lane
  const LayerOf<V>& l = block.layer(layer);
  const decode_attention::Params& p = l.attention;
  auto& m = *reinterpret_cast<typename TokenContext<V>::AttentionMemory*>(block.vectors());
  const uint32_t half = p.dim / 2, lane = threadIdx.x % 32, fresh = block.m.keys[layer % 2].fresh,
                 all = u.rows + (u.end > fresh ? 2 : 0);
  // The last warps compute the first heads, because the first warp is occupied with another wait.
#pragma unroll 1
  for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < all; r += kTokenWarps) {
    const bool is_query = r < u.rows, is_value = r == u.rows + 1;
    const uint64_t* const from =
        sums + (is_query ? u.first + r : p.heads + (is_value ? p.kv_heads : 0) + u.head) * p.dim;
    const float* const weight = is_query ? l.q_norm : is_value ? nullptr : l.k_norm;
    const auto exists = [&](uint32_t n) { return lane + 32 * n < half; };
    // Requested before the words are complete.
    float cos[kPairs], sin[kPairs], gain[kPairs][2];
    uint64_t word[kPairs][2] = {};
#pragma unroll
    for (uint32_t n = 0; n < kPairs; ++n) {
      const uint32_t d = lane + 32 * n;
      const bool rotates = exists(n) && !is_value;
      cos[n] = rotates ? __ldg(p.cos + size_t(fresh) * half + d) : 1;
      sin[n] = rotates ? __ldg(p.sin + size_t(fresh) * half + d) : 0;
      gain[n][0] = exists(n) && weight != nullptr ? __ldg(weight + d) : 1;
      gain[n][1] = exists(n) && weight != nullptr ? __ldg(weight + d + half) : 1;
    }
    const auto load = [&] {
#pragma unroll
      for (uint32_t n = 0; n < kPairs; ++n)
        if (exists(n))
          word[n][0] = ptx::load_relaxed(from + lane + 32 * n),
          word[n][1] = ptx::load_relaxed(from + lane + 32 * n + half);
    };
    load();
    block.wait_for(
        load,
        [&] {
          bool complete = true;
#pragma unroll
          for (uint32_t n = 0; n < kPairs; ++n)
            complete &= ((RowSum::count(word[n][0]) == 2) & (RowSum::count(word[n][1]) == 2)) | !exists(n);
          return complete;
        },
        wait);
    float x[kPairs][2], squares = 0;
#pragma unroll
    for (uint32_t n = 0; n < kPairs; ++n)
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        x[n][h] = exists(n) ? RowSum::value(word[n][h]) : 0;
        squares += x[n][h] * x[n][h];
      }
    if (weight != nullptr) {
      const float rstd = 1 / sqrtf(weight_tiles::lanes_sum(squares) / float(p.dim) + l.qkv.eps);
#pragma unroll
      for (uint32_t n = 0; n < kPairs; ++n) x[n][0] *= gain[n][0] * rstd, x[n][1] *= gain[n][1] * rstd;
    }
    uint16_t* const to = is_query ? m.q[r] : is_value ? m.v[0] : m.k[0];
    bf16* const cache =
        (is_value ? p.values : p.keys) + (size_t(u.head) * p.rows + fresh % p.rows) * uint32_t(V.head_dim);
#pragma unroll
    for (uint32_t n = 0; n < kPairs; ++n) {
      const uint32_t d = lane + 32 * n;
      if (!exists(n)) continue;
      const bf16 low(x[n][0] * cos[n] - x[n][1] * sin[n]), high(x[n][1] * cos[n] + x[n][0] * sin[n]);
      to[d] = low.bits, to[d + half] = high.bits;
      if (!is_query) cache[d] = low, cache[d + half] = high;
    }
    for (uint32_t d = p.dim + lane; d < V.head_dim; d += 32) to[d] = 0;  // padding, which the cache has already
  }
}

}  // namespace ingot::decode::head_norms
