#pragma once
// Attention of one new token with all it sees, by the blocks of a persistent kernel, all `kThreads` of each for (key
// head, tile of 8 query heads, part of the keys). What earlier tokens left is asked for before the token's own numbers
// are there: from those to the result is one trip to L2. Where a head has several parts, as many as there are keys for,
// which the position decides, each of their blocks adds up some of its rows: one trip more, for what parts have seen
// travels with a stamp (tile/stamped.cuh). Of the matrix instructions' 16 rows 8 are zeros.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/stamped.cuh"
#include "ingot/kernels/attention/decode.cuh"

namespace ingot::token_attention {

using decode_attention::Params;

constexpr uint32_t kWarps = 8;            // that multiply, 16 keys each
constexpr uint32_t kRound = 16 * kWarps;  // keys at once; a part is a multiple of it
constexpr uint32_t kRows = 8;             // query heads of a tile

template <int kDim> struct Memory {
  static constexpr int kPitch = kDim + 8;            // rows start in different banks
  alignas(16) uint16_t q[kRows][kPitch], k[kPitch];  // bits of bf16; k: the new key
  union {
    uint16_t v[kWarps][16][kPitch];
    alignas(16) float out[kWarps][kRows][kDim];
  };
  float max[kWarps][kRows], sum[kWarps][kRows], sink[kRows];
};

// Of all a token sees, and of a part: which the position decides.
struct Keys {
  uint32_t low, fresh, each, parts;  // from low to fresh, the token's own; `each` of a part
  Keys() = default;
  __device__ __forceinline__ Keys(const Params& p, uint32_t position)
      : low(p.window > 0 && position + 1 > p.window ? position + 1 - p.window : 0), fresh(position) {
    const uint32_t keys = fresh + 1 - low;
    each = ((keys + p.parts - 1) / p.parts + kRound - 1) / kRound * kRound;
    parts = (keys + each - 1) / each;
  }
};

// A warp's 16 keys, as the matrix instructions' right operand: lane 4 g + t has numbers kEach t to kEach t + kEach - 1
// of keys g and g + 8. The products' order of a key's numbers is the queries' too.
template <int kDim> struct HeldKeys {
  static constexpr int kEach = kDim / 4, kWords = kEach / 2;
  uint32_t word[2][kWords];

  __device__ __forceinline__ void load(int n, const void* lane) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = __ldcg(reinterpret_cast<const uint4*>(lane) + i / 4);
      word[n][i] = w.x, word[n][i + 1] = w.y, word[n][i + 2] = w.z, word[n][i + 3] = w.w;
    }
  }
  __device__ __forceinline__ static void load_shared(uint32_t (&to)[kWords], const void* lane) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = reinterpret_cast<const uint4*>(lane)[i / 4];
      to[i] = w.x, to[i + 1] = w.y, to[i + 2] = w.z, to[i + 3] = w.w;
    }
  }
};

// What a warp has seen: of row g, in lane 4 g + t.
template <int kDim> struct Seen {
  float out[kDim / 8][4] = {};     // numbers 8 i + 2 t and the next; two are of the rows of zeros
  float max = -INFINITY, sum = 0;  // the sum is this lane's part of the row's

  // Keys from `end` on are not seen.
  __device__ __forceinline__ void add(const Memory<kDim>& m, const HeldKeys<kDim>& keys, uint32_t warp, uint32_t key,
                                      uint32_t end, float scale) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t q[HeldKeys<kDim>::kWords];
    HeldKeys<kDim>::load_shared(q, &m.q[g][HeldKeys<kDim>::kEach * t]);
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < HeldKeys<kDim>::kWords; i += 2) {
      const uint32_t a[4] = {q[i], 0, q[i + 1], 0};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b[2] = {keys.word[n][i], keys.word[n][i + 1]};
        ptx::mma_m16n8k16(bf16{}, s[n], a, b);
      }
    }
    float top = max;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& v = s[i / 2][i % 2];
      v = key + i / 2 * 8 + 2 * t + i % 2 < end ? v * scale : -INFINITY;
      top = fmaxf(top, v);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float base = top == -INFINITY ? 0 : top, keep = __expf(max - base);
    max = top;
    sum *= keep;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) out[d][0] *= keep, out[d][1] *= keep;
    uint32_t a[4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float e0 = __expf(s[n][0] - base), e1 = __expf(s[n][1] - base);
      sum += e0 + e1;
      a[2 * n] = ptx::pack(bf16{}, e0, e1);
    }
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t b[4];
      ptx::ldmatrix_trans(b, ptx::shared_address(&m.v[warp][lane / 8 % 2 * 8 + lane % 8][d + lane / 16 * 8]));
      const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      ptx::mma_m16n8k16(bf16{}, out[d / 8], a, b0);
      ptx::mma_m16n8k16(bf16{}, out[d / 8 + 1], a, b1);
    }
  }
  // After a barrier: the values are read, their memory takes the results.
  __device__ __forceinline__ void put(Memory<kDim>& m, uint32_t warp) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) m.max[warp][g] = max, m.sum[warp][g] = sum;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d)
      *reinterpret_cast<float2*>(&m.out[warp][g][8 * d + 2 * t]) = make_float2(out[d][0], out[d][1]);
  }
};

// `Team`: a sync() of the block's kThreads threads. dim is a multiple of 4. cos, sin: of the token's position.
template <int kDim, uint32_t kThreads, class Team> class Attention {
  struct Unit {
    uint32_t part, first, rows, head, begin, end;  // first, rows: of the query heads
  };
  using Stamped = tile::Stamped;

 public:
  __device__ __forceinline__ Attention(const Params& p, const Keys& keys, const Published& at, uint32_t stamp,
                                       Memory<kDim>& m)
      : p_(p),
        at_(at),
        m_(m),
        fresh_(keys.fresh),
        low_(keys.low),
        each_(keys.each),
        parts_(keys.parts),
        stamp_(stamp) {}
  __device__ __forceinline__ uint32_t units() const { return parts_ * tiles() * p_.kv_heads; }
  __device__ __forceinline__ bool has_parts() const { return parts_ > 1; }

  // Asks for the unit's first keys and values, by others than the first warp, who has to wait for the hand-off. The
  // memory is the unit's from here on.
  __device__ __forceinline__ void ask(uint32_t unit, HeldKeys<kDim>& keys) const {
    const Unit u = unit_of(unit);
    const uint32_t warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    if (warp < kWarps) {
      ask_tile(u, warp, u.begin + 16 * warp, fresh_, keys);
    } else if (warp == kWarps) {
      if (lane < u.rows) m_.sink[lane] = p_.sinks[u.first + lane];
#pragma unroll 1
      for (uint32_t round = 1; lane == 0 && round < kAhead; ++round) prefetch(u, u.begin + round * kRound);
    }
  }
  // projected(i, j, a, b): numbers i and j of the token's queries, keys and values. Where there are several parts
  // add_parts() has to follow, when this was called for all of the block's units.
  template <class Projected>
  __device__ __forceinline__ void attend(uint32_t unit, const float* cos, const float* sin, HeldKeys<kDim>& keys,
                                         Projected&& projected) const {
    const Unit u = unit_of(unit);
    const uint32_t warp = threadIdx.x / 32 - 1;
    stage(u, cos, sin, projected);
    ptx::cp_async_wait_group<0>();
    Team::sync();
    Seen<kDim> seen;
    if (warp < kWarps) rounds(u, warp, keys, seen);
    Team::sync();
    if (warp < kWarps) seen.put(m_, warp);
    Team::sync();
    // A thread for each four numbers of a row.
    const uint32_t row = threadIdx.x / (kDim / 4), d = threadIdx.x % (kDim / 4) * 4;
    if (row >= u.rows) return;
    decode_attention::Total total;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) total.max = fmaxf(total.max, m_.max[w][row]);
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w)
      total.add(m_.max[w][row], m_.sum[w][row], *reinterpret_cast<const float4*>(&m_.out[w][row][d]));
    if (parts_ == 1) return put_result(u.first + row, d, total, m_.sink[row]);
    Stamped* const to = part(u.first + row, d, u.part);
    Stamped{{bits(total.out[0]), bits(total.out[1]), bits(total.out[2])}, stamp_}.store(to);
    Stamped{{bits(total.out[3]), bits(total.max), bits(total.sum)}, stamp_}.store(to + 1);
  }
  // wait_for(load, complete): until what load() brings is complete(), or a wait gave up.
  template <class WaitFor> __device__ __forceinline__ void add_parts(uint32_t unit, WaitFor&& wait_for) const {
    const Unit u = unit_of(unit);
    // Fours of numbers part, part + parts, ... of the tile; a thread for each part of a four.
    const uint32_t mine = (u.rows * (kDim / 4) - u.part + parts_ - 1) / parts_, k = threadIdx.x / parts_;
    auto* const seen = reinterpret_cast<float(*)[8]>(&m_.out[0][0][0]);
    static_assert(sizeof(m_.out) >= kThreads * 32, "room for a part of every thread");
    const uint32_t last = threadIdx.x * parts_ + u.part, last_query = u.first + last / (kDim / 4);
    float sink = 0;
    if (threadIdx.x < mine) sink = p_.sinks[last_query];
    Team::sync();  // what the memory held is read
    if (k < mine) {
      const uint32_t four = k * parts_ + u.part;
      const Stamped* const from = part(u.first + four / (kDim / 4), four % (kDim / 4) * 4, threadIdx.x % parts_);
      Stamped a, b;
      const auto load = [&] { a = Stamped::load(from), b = Stamped::load(from + 1); };
      load();
      wait_for(load, [&] { return a.stamp == stamp_ && b.stamp == stamp_; });
      float(&to)[8] = seen[threadIdx.x];
#pragma unroll
      for (int i = 0; i < 3; ++i) to[i] = __uint_as_float(a.word[i]), to[3 + i] = __uint_as_float(b.word[i]);
    }
    Team::sync();
    if (threadIdx.x >= mine) return;
    decode_attention::Total total;
#pragma unroll 1
    for (uint32_t s = 0; s < parts_; ++s) total.max = fmaxf(total.max, seen[threadIdx.x * parts_ + s][4]);
#pragma unroll 1
    for (uint32_t s = 0; s < parts_; ++s) {
      const float(&from)[8] = seen[threadIdx.x * parts_ + s];
      total.add(from[4], from[5], make_float4(from[0], from[1], from[2], from[3]));
    }
    put_result(last_query, last % (kDim / 4) * 4, total, sink);
  }

 private:
  static constexpr uint32_t kAhead = 4;  // rounds whose keys L2 is asked for before they are needed

  __device__ __forceinline__ static uint32_t bits(float v) { return __float_as_uint(v); }
  __device__ __forceinline__ uint32_t tiles() const { return (p_.group + kRows - 1) / kRows; }
  __device__ __forceinline__ Unit unit_of(uint32_t unit) const {
    Unit u;
    u.part = unit % parts_;
    const uint32_t rest = unit / parts_, tile = tiles() == 1 ? 0 : rest % tiles();
    u.head = tiles() == 1 ? rest : rest / tiles();
    u.first = u.head * p_.group + kRows * tile, u.rows = min(p_.group - kRows * tile, kRows);
    u.begin = low_ + u.part * each_, u.end = min(u.begin + each_, fresh_ + 1);
    return u;
  }
  __device__ __forceinline__ Stamped* part(uint32_t query, uint32_t d, uint32_t index) const {
    return at_.parts + ((size_t(query) * p_.parts + index) * (kDim / 4) + d / 4) * 2;
  }
  __device__ __forceinline__ void put_result(uint32_t query, uint32_t d, decode_attention::Total& total,
                                             float sink) const {
    total.finish(sink);
    if (d >= p_.dim) return;
    Stamped s;
    granules::words4(p_.columns, total.out, s.word[0], s.word[1]);
    s.stamp = stamp_;
    s.store(at_.mixed + (query * p_.dim + d) / 4);
  }
  // A ring has more rows than a tile; where there are fewer nothing wraps.
  __device__ __forceinline__ uint32_t row_of(uint32_t first, uint32_t ahead) const {
    return first + ahead < p_.rows ? first + ahead : first + ahead - p_.rows;
  }
  // By a warp: its 16 keys from `key` on and their values, without those of `but`; values from the part's end on are
  // zeros, keys whatever lies there.
  __device__ __forceinline__ void ask_tile(const Unit& u, uint32_t warp, uint32_t key, uint32_t but,
                                           HeldKeys<kDim>& keys) const {
    constexpr uint32_t kPieces = kDim / 8;
    const uint32_t lane = threadIdx.x % 32, first = key % p_.rows;
    const size_t head = size_t(u.head) * p_.rows;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t ahead = 8 * n + lane / 4;
      if (key + ahead < u.end) keys.load(n, p_.keys + (head + row_of(first, ahead)) * kDim + lane % 4 * (kDim / 4));
    }
#pragma unroll 1
    for (uint32_t i = lane; i < 16 * kPieces; i += 32) {
      const uint32_t row = i / kPieces, d = i % kPieces * 8;
      if (key + row == but) continue;
      ptx::cp_async<16>(ptx::shared_address(&m_.v[warp][row][d]), p_.values + (head + row_of(first, row)) * kDim + d,
                        key + row < u.end ? 16 : 0);
    }
    ptx::cp_async_commit_group();
  }
  // By one thread: a round's keys and values come near.
  __device__ __forceinline__ void prefetch(const Unit& u, uint32_t key) const {
    if (key >= u.end) return;
    const uint32_t row = key % p_.rows, rows = min(min(u.end - key, kRound), p_.rows - row);
    const size_t at = (size_t(u.head) * p_.rows + row) * kDim;
    ptx::prefetch_to_l2(p_.keys + at, rows * kDim * 2);
    ptx::prefetch_to_l2(p_.values + at, rows * kDim * 2);
  }
  // Rotates the queries and, in the last part, the new key; stores it and its value. Blocks of several tiles store the
  // same.
  template <class Projected>
  __device__ __forceinline__ void stage(const Unit& u, const float* cos, const float* sin,
                                        Projected&& projected) const {
    const uint32_t half = p_.dim / 2, slot = fresh_ - u.begin, all = u.rows + (u.end > fresh_ ? 2 : 0);
    const size_t stored = (size_t(u.head) * p_.rows + fresh_ % p_.rows) * kDim;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all * (kDim / 2); i += kThreads) {
      const uint32_t r = i / (kDim / 2), d = i % (kDim / 2);
      const bool is_query = r < u.rows, is_value = r == u.rows + 1, in_memory = !is_value || slot < kRound;
      uint16_t* const to = is_query ? m_.q[r] : is_value ? m_.v[slot / 16 % kWarps][slot % 16] : m_.k;
      if (d >= half) {  // beyond dim
        for (uint32_t at = p_.dim + 2 * (d - half); at < p_.dim + 2 * (d - half) + 2; ++at)
          if (in_memory) to[at] = 0;
        continue;
      }
      const uint32_t from = is_query ? u.first + r : p_.heads + (is_value ? p_.kv_heads : 0) + u.head;
      float a, b;
      projected(from * p_.dim + d, from * p_.dim + d + half, a, b);
      const float c = is_value ? 1 : cos[d], s = is_value ? 0 : sin[d];
      const bf16 low = is_value ? bf16(a) : bf16(a * c - b * s), high = is_value ? bf16(b) : bf16(b * c + a * s);
      if (in_memory) to[d] = low.bits, to[d + half] = high.bits;
      if (is_query) continue;
      bf16* const cache = (is_value ? p_.values : p_.keys) + stored;
      cache[d] = low, cache[d + half] = high;
    }
  }
  __device__ __forceinline__ void rounds(const Unit& u, uint32_t warp, HeldKeys<kDim>& keys, Seen<kDim>& seen) const {
#pragma unroll 1
    for (uint32_t key = u.begin + 16 * warp; key < u.end; key += kRound) {
      if (key >= u.begin + kRound) {  // the first ones are there
        if (threadIdx.x == 32) prefetch(u, key + (kAhead - 1) * kRound);
        __syncwarp();
        ask_tile(u, warp, key, ~0u, keys);
        ptx::cp_async_wait_group<0>();
        __syncwarp();
      }
      const uint32_t ahead = fresh_ - key - threadIdx.x % 32 / 4;  // the new key lies in shared memory
      const void* const lane = &m_.k[threadIdx.x % 4 * (kDim / 4)];
      if (ahead == 0) HeldKeys<kDim>::load_shared(keys.word[0], lane);
      if (ahead == 8) HeldKeys<kDim>::load_shared(keys.word[1], lane);
      seen.add(m_, keys, warp, key, u.end, p_.scale);
    }
  }

  const Params& p_;
  const Published& at_;
  Memory<kDim>& m_;
  const uint32_t fresh_, low_, each_, parts_, stamp_;
};

}  // namespace ingot::token_attention
