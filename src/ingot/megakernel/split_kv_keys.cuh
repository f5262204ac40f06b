#pragma once
// The keys of split_kv_attention.cuh: their division into parts and chunks, and the numbers that a warp computes from
// its keys, which are the largest score, the sum of the weights, and the weighted sums of the values.
#include "ingot/gpu/tile/epoch_words.cuh"
#include "ingot/kernels/attention/decode.cuh"

namespace ingot::split_kv_attention {

using decode_attention::Params;
using token_attention::Published;

constexpr uint32_t kWarps = 8;  // warps whose results have memory
// The number of keys that a warp multiplies at once: together they have 1,024 numbers, for heads of 64 and of 128
// numbers alike, which fit into the registers of the warp's threads and into a slot of the ring. The form without the
// copy engine multiplies 8 keys at once, and passes 8 as the second argument of the templates below.
template <int kDim> constexpr uint32_t kWarpKeys = 1024 / kDim;
// the least size of a part in keys; a part of this size is called short
template <int kDim, uint32_t kKeys = kWarpKeys<kDim>> constexpr uint32_t kRound = kKeys* kWarps;
constexpr uint32_t kChunkWarps = 3;  // neighbouring warps that share a chunk
// keys of a chunk; the rows of the keys are followed by the rows of the values
template <int kDim, uint32_t kKeys = kWarpKeys<kDim>> constexpr uint32_t kChunkKeys = kKeys* kChunkWarps;
// The sizes of longer parts are multiples of this number. With 8 keys per warp a short part has only 64 keys; multiples
// of a chunk then divide some thousand keys over more blocks than multiples of 64 would.
template <int kDim, uint32_t kKeys = kWarpKeys<kDim>>
constexpr uint32_t kPartStep = kKeys == 8 ? kChunkKeys<kDim, kKeys> : kRound<kDim, kKeys>;
constexpr uint32_t kRows = 8;  // query heads of a tile

// A unit of work: query heads first to first + rows - 1, and the keys begin to end - 1 of their key head.
struct Unit {
  uint32_t part, first, rows, head, begin, end;
};

// The shared memory of a unit. `kFresh` is the number of keys of this step that a row may see, the row's own key
// included.
template <int kDim, uint32_t kFresh = 1> struct Memory {
  static constexpr int kPitch = kDim + 8;  // rows start in different banks
  // The bits of bf16 numbers. k and v are the new keys and values.
  alignas(16) uint16_t q[kRows][kPitch], k[kFresh][kPitch], v[kFresh][kPitch];
  static constexpr int kFloats = kDim + 4;
  alignas(16) float out[kWarps][kRows][kFloats];
  float max[kWarps][kRows], sum[kWarps][kRows], sink[kRows];

  // Numbers d to d + 3 of a row, where d is a multiple of 4.
  __device__ __forceinline__ float4* fours(uint32_t warp, uint32_t row, uint32_t d) {
    return reinterpret_cast<float4*>(&out[warp][row][d]);
  }
};

// The keys that a token sees, and their parts. Both follow from the position.
struct Keys {
  uint32_t low, fresh, each, parts;  // the token sees keys low to fresh, and `fresh` is its own; a part has `each` keys
  Keys() = default;
  // `round` and `step` are kRound and kPartStep of the heads' width.
  __device__ __forceinline__ Keys(const Params& p, uint32_t position, uint32_t round = kRound<64>,
                                  uint32_t step = kPartStep<64>)
      : low(p.window > 0 && position + 1 > p.window ? position + 1 - p.window : 0), fresh(position) {
    const uint32_t keys = fresh + 1 - low;
    each = ((keys + p.parts - 1) / p.parts + step - 1) / step * step;
    if (step < round && (keys + p.parts - 1) / p.parts <= round) each = round;
    parts = (keys + each - 1) / each;
  }
};

// The addresses of a chunk's keys or values: `rows` keys begin at `first`; the other keys continue at the start of the
// circular cache.
struct KeyRows {
  size_t first, begin;  // offsets into the cache
  uint32_t rows, others;
};

// A chunk where no ring brings the keys: rows `row` and later of a head in the circular cache.
template <int kDim> struct CachedKeys {
  const uint16_t *keys, *values;  // of the head
  uint32_t row, rows;

  // Key `of` of the chunk.
  __device__ __forceinline__ size_t offset(uint32_t of) const {
    const uint32_t r = row + of;
    return size_t(r < rows ? r : r - rows) * kDim;
  }
};

// The result of a warp. The maximum and the sum of row g are in lane 4 g + t.
template <int kDim, uint32_t kFresh = 1, uint32_t kKeys = kWarpKeys<kDim>> struct Seen {
  using Memory = split_kv_attention::Memory<kDim, kFresh>;

  // Number number(n) of rows 2 t and 2 t + 1, then the number after each.
  float out[kDim / 16][4] = {};
  float max = -INFINITY, sum = 0;  // `sum` is this lane's part of the row's sum

  // Adds kKeys keys of a chunk, which begin at row `row` of the chunk and at key number `key`. Keys from number
  // `end` on are not visible. The kFresh keys from number `fresh` on are new and lie in Memory instead of the chunk.
  // Lane 4 g + t has a quarter of the numbers of keys g and g + 8, in an order that the queries share, and numbers 8 g
  // to 8 g + 7 of each 64 numbers of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The products of the n-th numbers of all
  // lanes then give numbers 8 i + n of a result. With 8 keys there are no keys from g + 8 on and no values from 2 t + 8
  // on; zeros take their place in the instruction.
  template <class Chunk>
  __device__ __forceinline__ void add(const Memory& m, const Chunk& chunk, uint32_t row, uint32_t key, uint32_t end,
                                      uint32_t fresh, float scale) {
    static_assert(kDim == 64 || kDim == 128, "8 or 16 numbers of a value to a lane");
    constexpr int kEach = kDim / 4, kEights = kKeys / 8;
    // A lane's numbers of a key: 16 neighbours, or eight of each 32, which lie in other banks than the next lane's.
    constexpr uint32_t kLane = kDim == 64 ? kEach : 8, kStep = kDim == 64 ? 8 : 32;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto* const keys = in_ring(chunk) + (row + g) * kDim + kLane * t;
    const auto* const values = in_ring(chunk) + (kChunkKeys<kDim, kKeys> + row) * kDim + 8 * g;
    const auto key_of = [&](uint32_t n) {
      if constexpr (std::is_same_v<Chunk, const char*>)
        return keys + 8 * n * kDim;
      else
        return chunk.keys + chunk.offset(min(g + 8 * n, end - 1 - key)) + kLane * t;
    };
    const auto value_of = [&](uint32_t of) {
      if constexpr (std::is_same_v<Chunk, const char*>)
        return values + of * kDim;
      else
        return chunk.values + chunk.offset(of) + 8 * g;
    };
    fresh -= key;
    uint32_t q[kEach / 2], word[kEights][kEach / 2], value[2 * kEights][kDim / 16] = {};
    load<kStep>(q, &m.q[g][kLane * t]);
#pragma unroll
    for (uint32_t n = 0; n < kEights; ++n)
      load<kStep>(word[n], is_fresh(g + 8 * n, fresh) ? &m.k[index(g + 8 * n, fresh)][kLane * t] : key_of(n));
#pragma unroll
    for (int r = 0; r < 2 * kEights; ++r) {
      const uint32_t of = t * 2 + r % 2 + r / 2 * 8;
      if (key + of < end) load<64>(value[r], is_fresh(of, fresh) ? &m.v[index(of, fresh)][8 * g] : value_of(of));
    }
    float s[kEights][4] = {};
#pragma unroll
    for (int i = 0; i < kEach / 2; i += 2) {
      const uint32_t a[4] = {q[i], 0, q[i + 1], 0};
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const uint32_t b[2] = {word[n][i], word[n][i + 1]};
        ptx::mma_m16n8k16(bf16{}, s[n], a, b);
      }
    }
    float top = max;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {
      float& v = s[i / 2][i % 2];
      v = key + i / 2 * 8 + 2 * t + i % 2 < end ? v * scale : -INFINITY;
      top = fmaxf(top, v);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    lift(top);
    const float base = of(max);
    uint32_t shares[2] = {};
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float e0 = __expf(s[n][0] - base), e1 = __expf(s[n][1] - base);
      sum += e0 + e1;
      shares[n] = ptx::pack(bf16{}, e0, e1);
    }
    // The values are the left operand: 16 numbers of a value beside 8 rows.
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t a[4] = {};
#pragma unroll
      for (int h = 0; h < kEights; ++h) {
        const uint32_t one = value[2 * h][n], other = value[2 * h + 1][n];
        a[2 * h] = (one & 0xffff) | other << 16, a[2 * h + 1] = one >> 16 | (other & 0xffff0000u);
      }
      ptx::mma_m16n8k16(bf16{}, out[n], a, shares);
    }
  }
  __device__ __forceinline__ void add_lanes() {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
  // Adds the result that another warp has stored. Call after add_lanes() and before this warp stores its own result.
  __device__ __forceinline__ void fold(Memory& m, uint32_t warp) {
    const float other = m.max[warp][threadIdx.x % 32 / 4];
    lift(fmaxf(max, other));
    const float take = __expf(other - of(max));
    sum += m.sum[warp][threadIdx.x % 32 / 4] * take;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = of_row(take, r);
#pragma unroll
      for (int n = 0; n < kDim / 16; n += 2) {
        const float4 v = *fours(m, warp, r, n);
        out[n][r] += v.x * share, out[n][r + 2] += v.y * share;
        out[n + 1][r] += v.z * share, out[n + 1][r + 2] += v.w * share;
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void put(Memory& m, uint32_t warp) const {
    const uint32_t g = threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) m.max[warp][g] = max, m.sum[warp][g] = sum;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kDim / 16; n += 2)
        *fours(m, warp, r, n) = make_float4(out[n][r], out[n][r + 2], out[n + 1][r], out[n + 1][r + 2]);
  }

 private:
  __device__ __forceinline__ static const uint16_t* in_ring(const char* chunk) {
    return reinterpret_cast<const uint16_t*>(chunk);
  }
  __device__ __forceinline__ static const uint16_t* in_ring(const CachedKeys<kDim>&) { return nullptr; }
  // Groups of eight numbers, kStep numbers apart.
  template <uint32_t kStep, int kWords>
  __device__ __forceinline__ static void load(uint32_t (&to)[kWords], const uint16_t* from) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = *reinterpret_cast<const uint4*>(from + i / 4 * kStep);
      to[i] = w.x, to[i + 1] = w.y, to[i + 2] = w.z, to[i + 3] = w.w;
    }
  }
  // Whether a key is one of the new keys. `key` and `fresh` count from the same origin.
  __device__ __forceinline__ static bool is_fresh(uint32_t key, uint32_t fresh) {
    return kFresh == 1 ? fresh == key : key - fresh < kFresh;
  }
  __device__ __forceinline__ static uint32_t index(uint32_t key, uint32_t fresh) {
    return kFresh == 1 ? 0 : key - fresh;
  }
  // The number to subtract from scores of the maximum `top`: not -infinity, whose difference to itself is a NaN.
  __device__ __forceinline__ static float of(float top) { return top == -INFINITY ? 0 : top; }
  // Returns the value of row 2 t + r, where each lane passes the value of row g.
  __device__ __forceinline__ static float of_row(float v, int r) {
    return __shfl_sync(~0u, v, threadIdx.x % 4 * 8 + 4 * r);
  }
  __device__ __forceinline__ static uint32_t number(int n) { return n / 4 * 64 + threadIdx.x % 32 / 4 * 8 + n % 4 * 2; }
  __device__ __forceinline__ static float4* fours(Memory& m, uint32_t warp, int r, int n) {
    return m.fours(warp, threadIdx.x % 4 * 2 + r, number(n));
  }
  // Makes `top` the maximum, and scales the sums accordingly.
  __device__ __forceinline__ void lift(float top) {
    const float keep = __expf(max - of(top));
    max = top;
    sum *= keep;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = of_row(keep, r);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) out[n][r] *= share, out[n][r + 2] *= share;
    }
  }
};

}  // namespace ingot::split_kv_attention
