#pragma once
// Attention of one new token with all it sees, by the blocks of a persistent kernel, all `kThreads` of each for (key
// head, tile of 8 query heads, part of the keys). What earlier tokens left is asked for before the token's own numbers
// are there: from those to the result is one trip to L2. Where a head has several parts, as many as there are keys for,
// which the position decides, each of their blocks adds up some of its rows: one trip more, for what parts have seen
// travels with a stamp (tile/stamped.cuh). Where a part has many keys more warps take some, for what is on its way at
// once bounds how fast they come.
// Of the scores' matrix instructions 8 of 16 rows are zeros.
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/tile/stamped.cuh"
#include "ingot/kernels/attention/decode.cuh"

namespace ingot::held_attention {

using decode_attention::Params;
using token_attention::Published;

constexpr uint32_t kWarps = 8;            // that multiply, 16 keys each, where a part has no more
constexpr uint32_t kMostWarps = 14;       // where it has: the more keys are on their way at once
constexpr uint32_t kRound = 16 * kWarps;  // a part is a multiple of it
constexpr uint32_t kRows = 8;             // query heads of a tile

// A tile's query heads, rows of them from the first on, and the keys from begin to end - 1 of their key head.
struct Unit {
  uint32_t part, first, rows, head, begin, end;
};

template <int kDim> struct Memory {
  static constexpr int kPitch = kDim + 8;                       // rows start in different banks
  alignas(16) uint16_t q[kRows][kPitch], k[kPitch], v[kPitch];  // bits of bf16; k, v: the new key and value
  static constexpr int kFloats = kDim + 4;
  alignas(16) float out[kWarps][kRows][kFloats];
  float max[kWarps][kRows], sum[kWarps][kRows], sink[kRows];
  Unit unit;

  // Numbers d to d + 3 of a row, d a multiple of 4.
  __device__ __forceinline__ float4* fours(uint32_t warp, uint32_t row, uint32_t d) {
    return reinterpret_cast<float4*>(&out[warp][row][d]);
  }
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

// A warp's 16 keys and values, as the matrix instructions' right operands. Lane 4 g + t has numbers kEach t to
// kEach t + kEach - 1 of keys g and g + 8, whose order in the products is the queries' too, and numbers 8 g to 8 g + 7
// of values 2 t, 2 t + 1 and the eighth after each: products of all lanes' n-th ones give numbers 8 i + n of a result.
template <int kDim> struct HeldKeys {
  static_assert(kDim == 64, "eight numbers of a value to a lane");
  static constexpr int kEach = kDim / 4, kWords = kEach / 2;
  uint32_t word[2][kWords], value[4][4];

  __device__ __forceinline__ static uint32_t value_of(int r) { return threadIdx.x % 4 * 2 + r % 2 + r / 2 * 8; }
  __device__ __forceinline__ void load(int n, const void* lane) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = __ldcg(reinterpret_cast<const uint4*>(lane) + i / 4);
      word[n][i] = w.x, word[n][i + 1] = w.y, word[n][i + 2] = w.z, word[n][i + 3] = w.w;
    }
  }
  __device__ __forceinline__ void put_value(int r, const uint4& w) {
    value[r][0] = w.x, value[r][1] = w.y, value[r][2] = w.z, value[r][3] = w.w;
  }
  __device__ __forceinline__ static void load_shared(uint32_t (&to)[kWords], const void* lane) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = reinterpret_cast<const uint4*>(lane)[i / 4];
      to[i] = w.x, to[i + 1] = w.y, to[i + 2] = w.z, to[i + 3] = w.w;
    }
  }
};

// What a warp has seen: maximum and sum of row g in lane 4 g + t.
template <int kDim> struct Seen {
  float out[kDim / 16][4] = {};    // numbers 8 g + 2 n of rows 2 t and 2 t + 1, then the ones behind them
  float max = -INFINITY, sum = 0;  // the sum is this lane's part of the row's

  // Keys from `end` on are not seen. next(): when the keys are read.
  template <class Next>
  __device__ __forceinline__ void add(const Memory<kDim>& m, const HeldKeys<kDim>& keys, uint32_t key, uint32_t end,
                                      float scale, Next&& next) {
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
    next();
    float top = max;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& v = s[i / 2][i % 2];
      v = key + i / 2 * 8 + 2 * t + i % 2 < end ? v * scale : -INFINITY;
      top = fmaxf(top, v);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    lift(top);
    const float base = of(max);
    uint32_t shares[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float e0 = __expf(s[n][0] - base), e1 = __expf(s[n][1] - base);
      sum += e0 + e1;
      shares[n] = ptx::pack(bf16{}, e0, e1);
    }
    // Values are the left operand: 16 of their numbers beside 8 rows.
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t one = keys.value[2 * h][n], other = keys.value[2 * h + 1][n];
        a[2 * h] = (one & 0xffff) | other << 16, a[2 * h + 1] = one >> 16 | (other & 0xffff0000u);
      }
      ptx::mma_m16n8k16(bf16{}, out[n], a, shares);
    }
  }
  __device__ __forceinline__ void add_lanes() {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
  // Takes what another warp has put there, before this one does. After add_lanes().
  __device__ __forceinline__ void fold(Memory<kDim>& m, uint32_t warp) {
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
  __device__ __forceinline__ void put(Memory<kDim>& m, uint32_t warp) const {
    const uint32_t g = threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) m.max[warp][g] = max, m.sum[warp][g] = sum;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kDim / 16; n += 2)
        *fours(m, warp, r, n) = make_float4(out[n][r], out[n][r + 2], out[n + 1][r], out[n + 1][r + 2]);
  }

 private:
  __device__ __forceinline__ static float of(float top) { return top == -INFINITY ? 0 : top; }
  // Of a number of row g, that of row 2 t + r.
  __device__ __forceinline__ static float of_row(float v, int r) {
    return __shfl_sync(~0u, v, threadIdx.x % 4 * 8 + 4 * r);
  }
  __device__ __forceinline__ static float4* fours(Memory<kDim>& m, uint32_t warp, int r, int n) {
    return m.fours(warp, threadIdx.x % 4 * 2 + r, threadIdx.x % 32 / 4 * 8 + 2 * n);
  }
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

// `Team`: a sync() of the block's kThreads threads. dim is a multiple of 4. cos, sin: of the token's position.
template <int kDim, uint32_t kThreads, class Team> class Attention {
  using Stamped = tile::Stamped;

 public:
  __device__ __forceinline__ Attention(const Params& p, const Keys& keys, const Published& at, uint32_t stamp,
                                       Memory<kDim>& m)
      : p_(p), at_(at), m_(m), keys_(keys), stamp_(stamp) {}
  __device__ __forceinline__ static uint32_t units(const Params& p, const Keys& keys) {
    return keys.parts * tiles(p) * p.kv_heads;
  }
  __device__ __forceinline__ bool has_parts() const { return keys_.parts > 1; }

  // Brings the unit's first keys and values near, as many rounds of them, by one thread, long before attend().
  __device__ __forceinline__ void bring_near(uint32_t unit, uint32_t rounds) const {
    const Unit u = unit_of(unit);
#pragma unroll 1
    for (uint32_t round = 0; round < rounds; ++round) prefetch(u, u.begin + round * 16 * warps());
  }
  // The memory is the unit's. projected(i, j, a, b): numbers i and j of the token's queries, keys and values, asked for
  // after what earlier tokens have left. put(n, a, b): the result's numbers n to n + 3, as two words of a column; where
  // there are several parts add_parts() does that, after this was called for all of the block's units. `keys`: zeros;
  // forget(): in the end, by the warps that used them. soon(of_parts): by all threads, the first among them, where the
  // result is a trip to L2 away; `of_parts` where there are several.
  template <class Projected, class Put, class Forget, class Soon>
  __device__ __forceinline__ void attend(uint32_t unit, const float* cos, const float* sin, HeldKeys<kDim>& keys,
                                         Projected&& projected, Put&& put, Forget&& forget, Soon&& soon) const {
    const uint32_t warp = threadIdx.x / 32 - 1, active = warps();
    {
      const Unit u = unit_of(unit);
      ask(u, keys);
      if (threadIdx.x == 0) m_.unit = u;  // for later: no registers are free for it
      stage(u, cos, sin, projected);
    }
    Team::sync();
    soon(false);
    const Unit& u = m_.unit;
    if (warp < active) {
      Seen<kDim> seen;
      rounds({.head = u.head, .begin = u.begin, .end = u.end}, warp, keys, seen);
      seen.add_lanes();
      if (active > kWarps) {
        if (warp >= kWarps) seen.put(m_, warp - kWarps);
        Team::sync();
        if (warp + kWarps < active) seen.fold(m_, warp);
      }
      if (warp < kWarps) seen.put(m_, warp);
      forget();
    } else if (active > kWarps) {
      Team::sync();
    }
    Team::sync();
    // A thread for each four numbers of a row.
    const uint32_t row = threadIdx.x / (kDim / 4), d = threadIdx.x % (kDim / 4) * 4;
    if (row >= u.rows) return;
    decode_attention::Total total;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) total.max = fmaxf(total.max, m_.max[w][row]);
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) total.add(m_.max[w][row], m_.sum[w][row], *m_.fours(w, row, d));
    if (keys_.parts == 1) return put_result(u.first + row, d, total, m_.sink[row], put);
    Stamped* const to = part(u.first + row, u.part);
    packed(total.out).store(to + d / 4);
    if (d == 0) Stamped{{bits(total.max), bits(total.sum), 0}, stamp_}.store(to + kDim / 4);
    soon(true);
  }
  // Some rows of the unit's, as add_parts() of the other parts' units does the rest: fours of numbers part,
  // part + parts, ... of the tile, a lane for each part of a four.
  template <class WaitFor, class Put>
  __device__ __forceinline__ void add_parts(uint32_t unit, WaitFor&& wait_for, Put&& put) const {
    const Unit u = unit_of(unit);
    uint32_t lanes = 1;  // of a four
#pragma unroll 1
    while (lanes < keys_.parts) lanes *= 2;
    static_assert(kThreads >= 2 * kRows * (kDim / 4) + 32, "room for all lanes of at most 16 parts");
    const uint32_t index = threadIdx.x % lanes, four = threadIdx.x / lanes * keys_.parts + u.part,
                   query = u.first + four / (kDim / 4);
    const bool mine = four < u.rows * (kDim / 4);
    float sink = 0;
    decode_attention::Total total;
    if (mine) sink = p_.sinks[query];
    if (mine && index < keys_.parts) {
      const Stamped* const from = part(query, index);
      Stamped a, b;
      const auto load = [&] { a = Stamped::load(from + four % (kDim / 4)), b = Stamped::load(from + kDim / 4); };
      load();
      wait_for(load, [&] { return a.stamp == stamp_ && b.stamp == stamp_; });
      const float4 v = unpacked(a);
      total = {__uint_as_float(b.word[0]), __uint_as_float(b.word[1]), {v.x, v.y, v.z, v.w}};
    }
    __syncwarp();
    float top = total.max;
#pragma unroll 1
    for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
    total.lift(top);
#pragma unroll 1
    for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) {
      total.sum += __shfl_xor_sync(~0u, total.sum, mask);
#pragma unroll
      for (int n = 0; n < 4; ++n) total.out[n] += __shfl_xor_sync(~0u, total.out[n], mask);
    }
    if (mine && index == 0) put_result(query, four % (kDim / 4) * 4, total, sink, put);
  }

 private:
  // The thread's number, formed anew: what depends on it is not kept in registers from long before.
  __device__ __forceinline__ static uint32_t first_of_thread() {
    uint32_t thread = threadIdx.x;
    ptx::settle(thread);
    return thread;
  }
  static constexpr uint32_t kAhead = 3;  // rounds whose keys L2 is asked for before they are needed
  static constexpr uint32_t kMost = kThreads / 32 - 1 < kMostWarps ? kThreads / 32 - 1 : kMostWarps;
  static_assert(kMost >= kWarps && kMost <= 2 * kWarps, "two warps' results have a place");
  __device__ __forceinline__ uint32_t warps() const { return keys_.each > kRound ? kMost : kWarps; }

  __device__ __forceinline__ static uint32_t bits(float v) { return __float_as_uint(v); }
  __device__ __forceinline__ static uint32_t tiles(const Params& p) { return (p.group + kRows - 1) / kRows; }
  __device__ __forceinline__ Unit unit_of(uint32_t unit) const {
    Unit u;
    u.part = unit % keys_.parts;
    const uint32_t rest = unit / keys_.parts, tile = tiles(p_) == 1 ? 0 : rest % tiles(p_);
    u.head = tiles(p_) == 1 ? rest : rest / tiles(p_);
    u.first = u.head * p_.group + kRows * tile, u.rows = min(p_.group - kRows * tile, kRows);
    u.begin = keys_.low + u.part * keys_.each, u.end = min(u.begin + keys_.each, keys_.fresh + 1);
    return u;
  }
  // Its numbers, four a word, and then its maximum and its sum.
  __device__ __forceinline__ Stamped* part(uint32_t query, uint32_t index) const {
    return at_.parts + (size_t(query) * p_.parts + index) * (kDim / 4 + 1);
  }
  // Of a part's numbers the first 24 bits travel: eight more than a column's numbers have.
  __device__ __forceinline__ Stamped packed(const float (&v)[4]) const {
    const uint32_t last = bits(v[3]);
    return {{(bits(v[0]) & ~0xffu) | last >> 24, (bits(v[1]) & ~0xffu) | (last >> 16 & 0xff),
             (bits(v[2]) & ~0xffu) | (last >> 8 & 0xff)},
            stamp_};
  }
  __device__ __forceinline__ static float4 unpacked(const Stamped& s) {
    const uint32_t last = s.word[0] << 24 | (s.word[1] & 0xff) << 16 | (s.word[2] & 0xff) << 8;
    return make_float4(__uint_as_float(s.word[0] & ~0xffu), __uint_as_float(s.word[1] & ~0xffu),
                       __uint_as_float(s.word[2] & ~0xffu), __uint_as_float(last));
  }
  template <class Put>
  __device__ __forceinline__ void put_result(uint32_t query, uint32_t d, decode_attention::Total& total, float sink,
                                             Put&& put) const {
    total.finish(sink);
    if (d >= p_.dim) return;
    uint32_t a, b;
    granules::words4(p_.columns, total.out, a, b);
    put(query * p_.dim + d, a, b);
  }
  // A ring has more rows than a tile; where there are fewer nothing wraps.
  __device__ __forceinline__ uint32_t row_of(uint32_t first, uint32_t ahead) const {
    return first + ahead < p_.rows ? first + ahead : first + ahead - p_.rows;
  }
  // For the unit's first keys and values.
  __device__ __forceinline__ void ask(const Unit& u, HeldKeys<kDim>& keys) const {
    const uint32_t warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    if (warp < warps()) {
      ask_keys(u, u.begin + 16 * warp, keys);
      ask_values(u, u.begin + 16 * warp, keys);
    } else if (warp == ~0u) {
      if (lane < u.rows) m_.sink[lane] = p_.sinks[u.first + lane];
#pragma unroll 1
      for (uint32_t round = 1; lane == 0 && round < kAhead; ++round) prefetch(u, u.begin + round * 16 * warps());
    }
  }
  // By a warp: its 16 keys from `key` on; from the part's end on those before stay, which are numbers.
  __device__ __forceinline__ void ask_keys(const Unit& u, uint32_t key, HeldKeys<kDim>& keys) const {
    const uint32_t lane = threadIdx.x % 32, first = key % p_.rows;
    const bf16* const from = p_.keys + size_t(u.head) * p_.rows * kDim + lane % 4 * (kDim / 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t ahead = 8 * n + lane / 4;
      if (key + ahead < u.end) keys.load(n, from + size_t(row_of(first, ahead)) * kDim);
    }
  }
  // And their values.
  __device__ __forceinline__ void ask_values(const Unit& u, uint32_t key, HeldKeys<kDim>& keys) const {
    const uint32_t first = key % p_.rows;
    const bf16* const from = p_.values + size_t(u.head) * p_.rows * kDim + threadIdx.x % 32 / 4 * 8;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t ahead = HeldKeys<kDim>::value_of(r);
      if (key + ahead < u.end)
        keys.put_value(r, __ldcg(reinterpret_cast<const uint4*>(from + size_t(row_of(first, ahead)) * kDim)));
    }
  }
  // By one thread: a round's keys and values come near.
  __device__ __forceinline__ void prefetch(const Unit& u, uint32_t key) const {
    if (key >= u.end) return;
    const uint32_t row = key % p_.rows, rows = min(min(u.end - key, 16 * warps()), p_.rows - row);
    const size_t at = (size_t(u.head) * p_.rows + row) * kDim;
    ptx::prefetch_to_l2(p_.keys + at, rows * kDim * 2);
    ptx::prefetch_to_l2(p_.values + at, rows * kDim * 2);
  }
  // Rotates the queries and, in the last part, the new key; stores it and its value. Blocks of several tiles store the
  // same.
  template <class Projected>
  __device__ __forceinline__ void stage(const Unit& u, const float* cos, const float* sin,
                                        Projected&& projected) const {
    const uint32_t half = p_.dim / 2, all = u.rows + (u.end > keys_.fresh ? 2 : 0);
    const size_t stored = (size_t(u.head) * p_.rows + keys_.fresh % p_.rows) * kDim;
#pragma unroll 1
    for (uint32_t i = first_of_thread(); i < all * (kDim / 2); i += kThreads) {
      const uint32_t r = i / (kDim / 2), d = i % (kDim / 2);
      const bool is_query = r < u.rows, is_value = r == u.rows + 1;
      uint16_t* const to = is_query ? m_.q[r] : is_value ? m_.v : m_.k;
      if (d >= half) {  // beyond dim
        for (uint32_t at = p_.dim + 2 * (d - half); at < p_.dim + 2 * (d - half) + 2; ++at) to[at] = 0;
        continue;
      }
      const uint32_t from = is_query ? u.first + r : p_.heads + (is_value ? p_.kv_heads : 0) + u.head;
      float a, b;
      projected(from * p_.dim + d, from * p_.dim + d + half, a, b);
      const float c = is_value ? 1 : cos[d], s = is_value ? 0 : sin[d];
      const bf16 low = is_value ? bf16(a) : bf16(a * c - b * s), high = is_value ? bf16(b) : bf16(b * c + a * s);
      to[d] = low.bits, to[d + half] = high.bits;
      if (is_query) continue;
      bf16* const cache = (is_value ? p_.values : p_.keys) + stored;
      cache[d] = low, cache[d + half] = high;
    }
  }
  __device__ __forceinline__ void rounds(const Unit& u, uint32_t warp, HeldKeys<kDim>& keys, Seen<kDim>& seen) const {
    const uint32_t round = 16 * warps();
#pragma unroll 1
    for (uint32_t key = u.begin + 16 * warp; key < u.end; key += round) {
      if (threadIdx.x == 32) prefetch(u, key + kAhead * round);
      const uint32_t fresh = keys_.fresh - key;  // the new key and its value lie in shared memory
      const void* const lane = &m_.k[threadIdx.x % 4 * (kDim / 4)];
      if (fresh == threadIdx.x % 32 / 4) HeldKeys<kDim>::load_shared(keys.word[0], lane);
      if (fresh == threadIdx.x % 32 / 4 + 8) HeldKeys<kDim>::load_shared(keys.word[1], lane);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (fresh == HeldKeys<kDim>::value_of(r))
          keys.put_value(r, *reinterpret_cast<const uint4*>(&m_.v[threadIdx.x % 32 / 4 * 8]));
      seen.add(m_, keys, key, u.end, p_.scale, [&] { ask_keys(u, key + round, keys); });
      ask_values(u, key + round, keys);
    }
  }

  const Params& p_;
  const Published& at_;
  Memory<kDim>& m_;
  const Keys& keys_;
  const uint32_t stamp_;
};

}  // namespace ingot::held_attention
