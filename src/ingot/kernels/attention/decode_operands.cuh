#pragma once
// The operands of decode.cuh on their way to the products: new keys and values to the cache, queries and tiles of 16
// keys to shared memory.
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

// 16 keys and their values that are being copied to shared memory; keys from `end` on are zeros.
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

// The same for heads so wide that no registers are left for a tile: store() copies from the cache to shared memory.
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

}  // namespace ingot::decode_attention
