#pragma once
// Attention of one new token with all it sees, by the blocks of a persistent kernel, all `kThreads` of each for (key
// head, tile of 16 query heads, part of the keys). What earlier tokens left is asked for before the token's own numbers
// are there: from those to the result is one trip to L2. Where a head has several parts, as many as there are keys for,
// which the position decides, each of their blocks adds up some of its rows: one trip more, for what parts have seen
// travels with a stamp (tile/stamped.cuh).
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/stamped.cuh"
#include "ingot/kernels/attention/decode.cuh"

namespace ingot::token_attention {

using decode_attention::Params;

constexpr uint32_t kWarps = 8;            // that multiply
constexpr uint32_t kRound = 16 * kWarps;  // keys at once; a part is a multiple of it
template <int kDim> using Memory = decode_attention::Memory<kDim, kWarps>;

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

// `Team`: a sync() of the block's kThreads threads. dim is a multiple of 4.
template <int kDim, uint32_t kThreads, class Team> class Attention {
  struct Unit {
    uint32_t part, tile, head, begin, end;
  };

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
  __device__ __forceinline__ uint32_t units() const { return parts_ * p_.tiles * p_.kv_heads; }

  // Asks for the unit's first keys and their values. The memory is the unit's from here on.
  __device__ __forceinline__ void ask(uint32_t unit) const {
    const Unit u = unit_of(unit);
    const uint32_t warp = threadIdx.x / 32;
    if (warp < kWarps) {
      ask_tile(u, warp, u.begin + 16 * warp, fresh_);
    } else if (threadIdx.x == 32 * kWarps) {
#pragma unroll 1
      for (uint32_t round = 1; round < kAhead; ++round) prefetch(u, u.begin + round * kRound);
    }
  }
  // projected(i, j, a, b): numbers i and j of the token's queries, keys and values. Where there are several parts
  // add_parts() has to follow, when this was called for all of the block's units.
  template <class Projected> __device__ __forceinline__ void attend(uint32_t unit, Projected&& projected) const {
    const Unit u = unit_of(unit);
    const uint32_t warp = threadIdx.x / 32, rows = decode_attention::rows_of(p_, u.tile);
    if (threadIdx.x >= kThreads - rows)
      m_.sink[kThreads - 1 - threadIdx.x] = p_.sinks[u.head * p_.group + 16 * u.tile + kThreads - 1 - threadIdx.x];
    stage(u, rows, projected);
    ptx::cp_async_wait_group<0>();
    Team::sync();
    decode_attention::Seen<kDim> seen;
    if (warp < kWarps) {
      rounds(u, warp, seen);
      seen.add_lanes();
    }
    Team::sync();
    if (warp < kWarps) seen.put(m_, warp);
    Team::sync();
    // A thread for each four numbers of a row.
    const uint32_t row = threadIdx.x / (kDim / 4), d = threadIdx.x % (kDim / 4) * 4;
    const uint32_t query = u.head * p_.group + 16 * u.tile + row;
    const bool ends = row < rows;
    decode_attention::Total total;
    if (ends) {
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) total.max = fmaxf(total.max, m_.max[w][row]);
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w)
        total.add(m_.max[w][row], m_.sum[w][row], *reinterpret_cast<const float4*>(&m_.out[w][row][d]));
    }
    if (!ends) return;
    if (parts_ == 1) return put_result(query, d, total, m_.sink[row]);
    Stamped* const to = part(u, query, d, u.part);
    Stamped{{bits(total.out[0]), bits(total.out[1]), bits(total.out[2])}, stamp_}.store(to);
    Stamped{{bits(total.out[3]), bits(total.max), bits(total.sum)}, stamp_}.store(to + 1);
  }
  __device__ __forceinline__ bool has_parts() const { return parts_ > 1; }
  // wait_for(load, complete): until what load() brings is complete(), or a wait gave up.
  template <class WaitFor> __device__ __forceinline__ void add_parts(uint32_t unit, WaitFor&& wait_for) const {
    const Unit u = unit_of(unit);
    // Fours of numbers part, part + parts, ... of the tile; a thread for each part of a four.
    const uint32_t fours = decode_attention::rows_of(p_, u.tile) * (kDim / 4);
    const uint32_t mine = (fours - u.part + parts_ - 1) / parts_, k = threadIdx.x / parts_;
    const uint32_t four = k * parts_ + u.part, d = four % (kDim / 4) * 4;
    const uint32_t query = u.head * p_.group + 16 * u.tile + four / (kDim / 4);
    auto* const seen = reinterpret_cast<float(*)[8]>(&m_.out[0][0][0]);
    static_assert(sizeof(m_.out) >= kThreads * 32, "room for a part of every thread");
    float sink = 0;
    if (threadIdx.x < mine)
      sink = p_.sinks[u.head * p_.group + 16 * u.tile + (threadIdx.x * parts_ + u.part) / (kDim / 4)];
    Team::sync();  // what the memory held is read
    if (k < mine) {
      const Stamped* const from = part(u, query, d, threadIdx.x % parts_);
      Stamped a, b;
      const auto load = [&] { a = Stamped::load(from), b = Stamped::load(from + 1); };
      load();
      wait_for(load, [&] { return a.stamp == stamp_ && b.stamp == stamp_; });
      float(&to)[8] = seen[threadIdx.x];
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
    const uint32_t last = threadIdx.x * parts_ + u.part;
    put_result(u.head * p_.group + 16 * u.tile + last / (kDim / 4), last % (kDim / 4) * 4, total, sink);
  }

 private:
  using Stamped = tile::Stamped;
  __device__ __forceinline__ static uint32_t bits(float v) { return __float_as_uint(v); }
  __device__ __forceinline__ Stamped* part(const Unit& u, uint32_t query, uint32_t d, uint32_t index) const {
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
  static constexpr uint32_t kAhead = 4;  // rounds whose keys L2 is asked for before they are needed

  __device__ __forceinline__ Unit unit_of(uint32_t unit) const {
    Unit u;
    u.part = unit % parts_;
    const uint32_t rest = unit / parts_;
    u.tile = p_.tiles == 1 ? 0 : rest % p_.tiles, u.head = p_.tiles == 1 ? rest : rest / p_.tiles;
    u.begin = low_ + u.part * each_, u.end = min(u.begin + each_, fresh_ + 1);
    return u;
  }
  // By a warp: its 16 keys from `key` on and their values, without `but`; zeros from the part's end on.
  __device__ __forceinline__ void ask_tile(const Unit& u, uint32_t warp, uint32_t key, uint32_t but) const {
    constexpr uint32_t kPieces = kDim / 8;
    const uint32_t first = key % p_.rows;
    const size_t head = size_t(u.head) * p_.rows;
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32; i < 16 * kPieces; i += 32) {
      const uint32_t row = i / kPieces, d = i % kPieces * 8;
      if (key + row == but) continue;
      // A ring has more rows than a tile; where there are fewer nothing wraps.
      const size_t at = (head + (first + row < p_.rows ? first + row : first + row - p_.rows)) * kDim + d;
      const uint32_t valid = key + row < u.end ? 16 : 0;
      ptx::cp_async<16>(ptx::shared_address(&m_.k[warp][row][d]), p_.keys + at, valid);
      ptx::cp_async<16>(ptx::shared_address(&m_.v[warp][row][d]), p_.values + at, valid);
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
  __device__ __forceinline__ void stage(const Unit& u, uint32_t rows, Projected&& projected) const {
    const uint32_t half = p_.dim / 2, slot = fresh_ - u.begin, all = rows + (u.end > fresh_ ? 2 : 0);
    const size_t stored = (size_t(u.head) * p_.rows + fresh_ % p_.rows) * kDim;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all * (kDim / 2); i += kThreads) {
      const uint32_t r = i / (kDim / 2), d = i % (kDim / 2);
      const bool is_query = r < rows, is_value = r == rows + 1, in_tile = is_query || slot < kRound;
      uint16_t* const to = is_query ? m_.q[r] : (is_value ? m_.v : m_.k)[slot / 16 % kWarps][slot % 16];
      if (d >= half) {  // beyond dim
        for (uint32_t at = p_.dim + 2 * (d - half); at < kDim && at < p_.dim + 2 * (d - half) + 2; ++at)
          if (in_tile) to[at] = 0;
        continue;
      }
      const uint32_t from = is_query   ? u.head * p_.group + 16 * u.tile + r
                            : is_value ? p_.heads + p_.kv_heads + u.head
                                       : p_.heads + u.head;
      const float c = is_value ? 1 : p_.cos[size_t(fresh_) * half + d],
                  s = is_value ? 0 : p_.sin[size_t(fresh_) * half + d];
      float a, b;
      projected(from * p_.dim + d, from * p_.dim + d + half, a, b);
      const bf16 low = is_value ? bf16(a) : bf16(a * c - b * s), high = is_value ? bf16(b) : bf16(b * c + a * s);
      if (in_tile) to[d] = low.bits, to[d + half] = high.bits;
      if (is_query) continue;
      bf16* const cache = (is_value ? p_.values : p_.keys) + stored;
      cache[d] = low, cache[d + half] = high;
    }
  }
  __device__ __forceinline__ void rounds(const Unit& u, uint32_t warp, decode_attention::Seen<kDim>& seen) const {
    const uint32_t low[2] = {0, 0}, high[2] = {u.end, u.end};
#pragma unroll 1
    for (uint32_t key = u.begin + 16 * warp; key < u.end; key += kRound) {
      if (key >= u.begin + kRound) {  // the first ones lie there
        if (threadIdx.x == 0) prefetch(u, key + (kAhead - 1) * kRound);
        __syncwarp();
        ask_tile(u, warp, key, ~0u);
        ptx::cp_async_wait_group<0>();
        __syncwarp();
      }
      seen.add(m_, warp, key, p_.scale, low, high);
    }
  }

  const Params& p_;
  const Published& at_;
  Memory<kDim>& m_;
  const uint32_t fresh_, low_, each_, parts_, stamp_;
};

}  // namespace ingot::token_attention
