#pragma once
// Attention of the newest T tokens of a sequence over all their visible keys, by blocks of 128 threads, each for (key
// head, tile of 16 queries, part of the keys); the last block of a tile to finish adds up its parts. With a single
// tile, the block rotates and stores the new keys of its part; otherwise store_keys() has stored the keys before. Rows
// of the product are (token, query head of the group); each warp takes 16 keys at a time, keeping its own maximum and
// sums. Keys and values lie as (key heads, rows, kDim) bf16, a token at row position % rows.
#include <type_traits>

#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/attention/decode_params.h"
#include "ingot/kernels/quant/weight_tile_product.cuh"

namespace ingot::decode_attention {

// `kTeam`: the number of warps that compute products.
template <int kDim, int kTeam = kWarps> struct Memory {
  static constexpr int kPitch = kDim + 8;  // rows start in different banks
  alignas(16) uint16_t q[16][kPitch];      // bits of bf16
  union {
    struct {
      uint16_t k[kTeam][16][kPitch], v[kTeam][16][kPitch];
    };
    alignas(16) float out[kTeam][16][kDim];
  };
  float max[kTeam][16], sum[kTeam][16], sink[16];
  uint32_t last;
};

struct Keys {
  uint32_t begin, end;  // of this part
  uint32_t first_new;
};
__device__ __forceinline__ Keys keys_of_part(const Params& p, uint32_t part) {
  const uint32_t fresh = uint32_t(__ldcg(p.position)), end = fresh + p.T;
  const uint32_t low = p.window > 0 && fresh + 1 > p.window ? fresh + 1 - p.window : 0;
  const uint32_t each = ((end - low + p.parts - 1) / p.parts + kPartKeys - 1) / kPartKeys * kPartKeys;
  const uint32_t begin = min(low + part * each, end);
  return {begin, min(begin + each, end), fresh};
}

__device__ __forceinline__ void rotate(const Params& p, uint32_t position, const float* x, uint32_t i, float& low,
                                       float& high) {
  const uint32_t half = p.dim / 2;
  const float c = p.cos[size_t(position) * half + i], s = p.sin[size_t(position) * half + i];
  const float a = __ldcg(x + i), b = __ldcg(x + i + half);
  low = a * c - b * s;
  high = b * c + a * s;
}

template <int kDim>
__device__ __forceinline__ void store_keys(const Params& p, const Keys& part, uint32_t head, uint32_t thread) {
  const uint32_t begin = max(part.begin, part.first_new), half = p.dim / 2, width = (p.heads + 2 * p.kv_heads) * p.dim;
  if (begin >= part.end) return;
  for (uint32_t i = thread; i < (part.end - begin) * half; i += kThreads) {
    const uint32_t position = begin + i / half, d = i % half;
    const float* token = p.qkv + size_t(position - part.first_new) * width;
    const float *k = token + (p.heads + head) * p.dim, *v = k + p.kv_heads * p.dim;
    const size_t row = (size_t(head) * p.rows + position % p.rows) * kDim;
    float low, high;
    rotate(p, position, k, d, low, high);
    p.keys[row + d] = bf16(low), p.keys[row + d + half] = bf16(high);
    p.values[row + d] = bf16(__ldcg(v + d)), p.values[row + d + half] = bf16(__ldcg(v + d + half));
  }
}

// The token and the head of a tile's row; rows past the last token are left out.
struct Query {
  uint32_t token, head;
};
__device__ __forceinline__ Query query_of(const Params& p, uint32_t head, uint32_t tile, uint32_t row) {
  const uint32_t at = 16 * tile + row;
  return {at / p.group, head * p.group + at % p.group};
}
__device__ __forceinline__ uint32_t rows_of(const Params& p, uint32_t tile) {
  return min(p.T * p.group - 16 * tile, 16u);
}
// Rows of query tile `tile`: row r is token (16 tile + r) / group, head head * group + (16 tile + r) % group.
template <int kDim>
__device__ __forceinline__ void stage_queries(const Params& p, uint32_t fresh, uint32_t head, uint32_t tile,
                                              uint32_t thread, Memory<kDim>& m) {
  const uint32_t half = p.dim / 2, width = (p.heads + 2 * p.kv_heads) * p.dim;
#pragma unroll 4
  for (uint32_t i = thread; i < 16 * (kDim / 2); i += kThreads) {
    const uint32_t r = i / (kDim / 2), d = i % (kDim / 2);
    if (d >= half) continue;
    const Query query = query_of(p, head, tile, r);
    float low = 0, high = 0;
    if (query.token < p.T)
      rotate(p, fresh + query.token, p.qkv + size_t(query.token) * width + query.head * p.dim, d, low, high);
    m.q[r][d] = bf16(low).bits, m.q[r][d + half] = bf16(high).bits;
  }
#pragma unroll 1
  for (uint32_t i = thread; i < 16 * (kDim - p.dim); i += kThreads)
    m.q[i / (kDim - p.dim)][p.dim + i % (kDim - p.dim)] = 0;
}

// 16 keys and their values on their way to shared memory; keys from `end` on are zeros.
template <int kDim> struct Tile {
  static constexpr int kPieces = kDim / 16;  // of 16 bytes a lane
  uint4 k[kPieces], v[kPieces];

  __device__ __forceinline__ void load(const Params& p, uint32_t head, uint32_t key, uint32_t end) {
    const uint32_t lane = threadIdx.x % 32, first = key % p.rows;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = i * 32 + lane, ahead = piece / (kDim / 8);
      k[i] = v[i] = make_uint4(0, 0, 0, 0);
      if (key + ahead >= end) continue;
      // A circular cache has more rows than a tile. In a cache with fewer rows, no tile wraps around.
      const uint32_t row = first + ahead < p.rows ? first + ahead : first + ahead - p.rows;
      const size_t at = (size_t(head) * p.rows + row) * kDim + piece % (kDim / 8) * 8;
      k[i] = __ldcg(reinterpret_cast<const uint4*>(p.keys + at));
      v[i] = __ldcg(reinterpret_cast<const uint4*>(p.values + at));
    }
  }
  template <int kTeam> __device__ __forceinline__ void store(Memory<kDim, kTeam>& m, uint32_t warp) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = i * 32 + lane, row = piece / (kDim / 8), d = piece % (kDim / 8) * 8;
      *reinterpret_cast<uint4*>(&m.k[warp][row][d]) = k[i];
      *reinterpret_cast<uint4*>(&m.v[warp][row][d]) = v[i];
    }
  }
};

// The same for heads that leave no registers for a tile: store() copies from the cache.
template <int kDim> struct UnloadedTile {
  const Params* params;
  uint32_t head, key, end;

  __device__ __forceinline__ void load(const Params& p, uint32_t of_head, uint32_t first, uint32_t last) {
    params = &p, head = of_head, key = first, end = last;
  }
  __device__ __forceinline__ void store(Memory<kDim>& m, uint32_t warp) const {
    const Params& p = *params;
    const uint32_t lane = threadIdx.x % 32, first = key % p.rows;
#pragma unroll 4
    for (uint32_t i = 0; i < kDim / 16; ++i) {
      const uint32_t piece = i * 32 + lane, ahead = piece / (kDim / 8), d = piece % (kDim / 8) * 8;
      uint4 k = make_uint4(0, 0, 0, 0), v = k;
      if (key + ahead < end) {
        const uint32_t row = first + ahead < p.rows ? first + ahead : first + ahead - p.rows;
        const size_t at = (size_t(head) * p.rows + row) * kDim + d;
        k = __ldcg(reinterpret_cast<const uint4*>(p.keys + at));
        v = __ldcg(reinterpret_cast<const uint4*>(p.values + at));
      }
      *reinterpret_cast<uint4*>(&m.k[warp][ahead][d]) = k;
      *reinterpret_cast<uint4*>(&m.v[warp][ahead][d]) = v;
    }
  }
};
template <int kDim> using TileOf = std::conditional_t<kDim <= 128, Tile<kDim>, UnloadedTile<kDim>>;

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
  // Makes room for numbers up to `top`.
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
  // Old keys are loaded at once; new keys are stored only after the barrier.
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
