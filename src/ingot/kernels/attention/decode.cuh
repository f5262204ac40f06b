#pragma once
// Attention of the newest T tokens of a sequence over all their visible keys, by blocks of 128 threads, each for (key
// head, tile of 16 queries, part of the keys); the last block of a tile to finish adds up its parts. With a single
// tile, the block rotates and stores the new keys of its part; otherwise store_keys() has stored the keys before. Rows
// of the product are (token, query head of the group); each warp takes 16 keys at a time, keeping its own maximum and
// sums. Keys and values lie as (key heads, rows, kDim) bf16, a token at row position % rows.
#include "ingot/kernels/attention/decode_operands.cuh"

namespace ingot::decode_attention {

// The score of a query and a key, from their product.
struct CappedScale {
  float scale, cap;  // cap 0: none
};
__device__ __forceinline__ float score_of(float v, float scale) { return v * scale; }
__device__ __forceinline__ float score_of(float v, const CappedScale& s) {
  return s.cap > 0 ? s.cap * tanhf(v * s.scale / s.cap) : v * s.scale;
}

// A warp's maximum and sums of a query tile so far: rows g and g + 8.
template <int kDim> struct Seen {
  float out[kDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};  // sums are this lane's part of the row's

  template <int kTeam>
  __device__ __forceinline__ void scores(const Memory<kDim, kTeam>& m, uint32_t warp, float (&s)[2][4]) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t a[4], b[4];
      ptx::ldmatrix(a, ptx::shared_address(&m.q[lane % 16][d + lane / 16 * 8]));
      ptx::ldmatrix(b, ptx::shared_address(&m.k[warp][lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]));
      const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      ptx::mma_m16n8k16(bf16{}, s[0], a, b0);
      ptx::mma_m16n8k16(bf16{}, s[1], a, b1);
    }
  }
  // Keys [low[r], high[r]) are visible to row g + 8 r. `Scale`: float or CappedScale.
  template <int kTeam, class Scale>
  __device__ __forceinline__ void add(const Memory<kDim, kTeam>& m, uint32_t warp, uint32_t key, const Scale& scale,
                                      const uint32_t (&low)[2], const uint32_t (&high)[2]) {
    float s[2][4] = {};
    scores(m, warp, s);
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    uint32_t p[2][2];  // for row g + 8 r: keys 8 n + 2 t and the next key
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = max[r];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t at = key + 8 * n + 2 * t + i;
          float& v = s[n][2 * r + i];
          v = at >= low[r] && at < high[r] ? score_of(v, scale) : -INFINITY;
          top = fmaxf(top, v);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -INFINITY ? 0 : top, keep = __expf(max[r] - base);
      max[r] = top;
      sum[r] *= keep;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) out[d][2 * r] *= keep, out[d][2 * r + 1] *= keep;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float e0 = __expf(s[n][2 * r] - base), e1 = __expf(s[n][2 * r + 1] - base);
        sum[r] += e0 + e1;
        p[n][r] = ptx::pack(bf16{}, e0, e1);
      }
    }
    const uint32_t a[4] = {p[0][0], p[0][1], p[1][0], p[1][1]};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t b[4];
      ptx::ldmatrix_trans(b, ptx::shared_address(&m.v[warp][lane / 8 % 2 * 8 + lane % 8][d + lane / 16 * 8]));
      const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      ptx::mma_m16n8k16(bf16{}, out[d / 8], a, b0);
      ptx::mma_m16n8k16(bf16{}, out[d / 8 + 1], a, b1);
    }
  }
  // Adds the sums of the lanes that share a row. Called once, after the last tile.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
  // Stores the results in the memory of keys and values. Called after a barrier, when keys and values have been read.
  template <int kTeam> __device__ __forceinline__ void put(Memory<kDim, kTeam>& m, uint32_t warp) const {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (t == 0) m.max[warp][g + 8 * r] = max[r], m.sum[warp][g + 8 * r] = sum[r];
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d)
        m.out[warp][g + 8 * r][8 * d + 2 * t] = out[d][2 * r],
                                           m.out[warp][g + 8 * r][8 * d + 2 * t + 1] = out[d][2 * r + 1];
    }
  }
};

// Four numbers of a row, added up over several teams or warps.
struct Total {
  float max = -INFINITY, sum = 0, out[4] = {0, 0, 0, 0};
  // Raises the maximum to `top`, and scales the sums accordingly.
  __device__ __forceinline__ void lift(float top) {
    top = fmaxf(max, top);
    const float keep = __expf(max - (top == -INFINITY ? 0 : top));
    sum *= keep;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] *= keep;
    max = top;
  }
  // Adds the sums of a team, whose maximum m must not exceed `max`.
  __device__ __forceinline__ void add(float m, float l, const float4& o) {
    const float take = __expf(m - (max == -INFINITY ? 0 : max));
    sum += l * take;
    out[0] += o.x * take, out[1] += o.y * take, out[2] += o.z * take, out[3] += o.w * take;
  }
  // A sink is a further score without a value.
  __device__ __forceinline__ void finish(float sink) {
    lift(sink);
    const float share = 1 / (sum + __expf(sink - max));
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] *= share;
  }
};
// Numbers d to d + 3 of a row.
__device__ __forceinline__ void put_result(const Params& p, Query q, uint32_t d, Total& total, float sink) {
  total.finish(sink);
  if (p.mixed_rows != nullptr) {
    bf16* const row = p.mixed_rows + (size_t(q.token) * p.heads + q.head) * p.dim + d;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      if (d + i < p.dim) row[i] = bf16(total.out[i]);
    return;
  }
  char* const column = p.mixed + q.token * weight_tiles::vector_bytes(p.heads * p.dim);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    if (d + i < p.dim) weight_tiles::put(column, p.columns, q.head * p.dim + d + i, total.out[i]);
}

// Without `kStores` all keys of p.T tokens are in the cache, and p.tiles may be 1.
template <int kDim, bool kStores, class Scale>
__device__ __forceinline__ void attend_tile(const Params& p, const Keys& part, uint32_t head, uint32_t index,
                                            uint32_t tile, const Scale& scale, Memory<kDim>& m) {
  const uint32_t thread = threadIdx.x, warp = thread / 32, g = threadIdx.x % 32 / 4;
  uint32_t key = part.begin + 16 * warp;
  TileOf<kDim> next;
  // Old keys can be loaded now. New keys can be loaded only after the barrier, because this block stores them first.
  const bool early = !kStores || p.tiles > 1 || part.end <= part.first_new;
  if (early) next.load(p, head, key, part.end);
  if (kStores && p.tiles == 1 && part.end > part.first_new) store_keys<kDim>(p, part, head, thread);
  stage_queries<kDim>(p, part.first_new, head, tile, thread, m);
  __syncthreads();
  if (!early) next.load(p, head, key, part.end);
  uint32_t low[2], high[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t token = query_of(p, head, tile, g + 8 * r).token, seen = part.first_new + token + 1;
    high[r] = token < p.T ? min(seen, part.end) : 0;
    low[r] = p.window > 0 && token < p.T && seen > p.window ? seen - p.window : 0;
  }
  Seen<kDim> seen;
#pragma unroll 1
  for (; key < part.end; key += 16 * kWarps) {
    __syncwarp();
    next.store(m, warp);
    __syncwarp();
    next.load(p, head, key + 16 * kWarps, part.end);
    seen.add(m, warp, key, scale, low, high);
  }
  seen.add_lanes();
  __syncthreads();
  seen.put(m, warp);
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = thread; i < rows_of(p, tile) * (kDim / 4); i += kThreads) {
    const uint32_t row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    const Query q = query_of(p, head, tile, row);
    Total total;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total.max = fmaxf(total.max, m.max[w][row]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      total.add(m.max[w][row], m.sum[w][row], *reinterpret_cast<const float4*>(&m.out[w][row][d]));
    if (p.parts == 1) {
      put_result(p, q, d, total, m.sink[row]);
      continue;
    }
    const size_t slot = (size_t(q.token) * p.heads + q.head) * p.parts + index;
    *reinterpret_cast<float4*>(p.part_out + slot * kDim + d) =
        make_float4(total.out[0], total.out[1], total.out[2], total.out[3]);
    if (d == 0) p.part_max[slot] = total.max, p.part_sum[slot] = total.sum;
  }
}

// Numbers d to d + 3 of a row, added up over its first `count` parts.
template <int kDim>
__device__ __forceinline__ Total total_of_parts(const Params& p, Query q, uint32_t d, uint32_t count) {
  const size_t first = (size_t(q.token) * p.heads + q.head) * p.parts;
  Total total;
  constexpr uint32_t kHeld = 8;  // loads in flight at once
#pragma unroll 1
  for (size_t from = first; from < first + count; from += kHeld) {
    float max[kHeld], sum[kHeld], top = -INFINITY;
    float4 out[kHeld];
#pragma unroll
    for (uint32_t s = 0; s < kHeld; ++s) {
      const bool there = from + s < first + count;
      max[s] = there ? __ldcg(p.part_max + from + s) : -INFINITY;
      sum[s] = there ? __ldcg(p.part_sum + from + s) : 0;
      out[s] =
          there ? __ldcg(reinterpret_cast<const float4*>(p.part_out + (from + s) * kDim + d)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t s = 0; s < kHeld; ++s) top = fmaxf(top, max[s]);
    total.lift(top);
#pragma unroll
    for (uint32_t s = 0; s < kHeld; ++s) total.add(max[s], sum[s], out[s]);
  }
  return total;
}
// Called by the last block of a tile to finish: adds up the parts.
template <int kDim>
__device__ __forceinline__ void add_parts(const Params& p, uint32_t head, uint32_t tile, uint32_t thread,
                                          const Memory<kDim>& m) {
#pragma unroll 1
  for (uint32_t i = thread; i < rows_of(p, tile) * (kDim / 4); i += kThreads) {
    const uint32_t row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    const Query q = query_of(p, head, tile, row);
    Total total = total_of_parts<kDim>(p, q, d, p.parts);
    put_result(p, q, d, total, m.sink[row]);
  }
}

// Computes unit `unit` of units_of(p): a part of a tile of a key head.
template <int kDim, bool kStores = true, class Scale>
__device__ __forceinline__ void attend(const Params& p, uint32_t unit, const Scale& scale, Memory<kDim>& m) {
  const uint32_t index = unit % p.parts, tile = unit / p.parts % p.tiles, head = unit / p.parts / p.tiles;
  const uint32_t thread = threadIdx.x;
  if (thread < rows_of(p, tile)) m.sink[thread] = p.sinks[query_of(p, head, tile, thread).head];
  attend_tile<kDim, kStores>(p, keys_of_part(p, index), head, index, tile, scale, m);
  if (p.parts == 1) return;
  __syncthreads();
  if (thread == 0) {
    uint32_t* const arrived = p.arrived + head * p.tiles + tile;
    m.last = ptx::fetch_add_acq_rel(arrived, 1) == p.parts - 1;
    if (m.last) ptx::store_relaxed(arrived, 0);
  }
  __syncthreads();
  if (m.last) add_parts<kDim>(p, head, tile, thread, m);
}
template <int kDim> __device__ __forceinline__ void attend(const Params& p, uint32_t unit, Memory<kDim>& m) {
  attend<kDim>(p, unit, p.scale, m);
}

}  // namespace ingot::decode_attention
