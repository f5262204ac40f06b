#pragma once
// Attention of one new token over all keys that the token sees, split over the blocks of a persistent kernel. All
// `kThreads` threads of a block compute a unit: a key head, a tile of 8 query heads, and a part of the keys. The keys
// and values of earlier tokens come through shared memory in chunks, which may be copied far ahead, before the queries
// of the token are complete. The number of parts of a head follows from its number of keys, and so from the position.
// With several parts, each of their blocks adds up some rows of the result, which costs one more round trip to L2: the
// result of a part travels in words with an epoch (tile/epoch_words.cuh). The matrix instructions of the scores have 16
// rows, of which 8 are zeros.
#include "ingot/megakernel/split_kv_keys.cuh"

namespace ingot::split_kv_attention {

// Computes units of attention. `Team::sync()` is a barrier of the block's kThreads threads. `dim` is a multiple of 4,
// and cos and sin belong to the token's position.
template <int kDim, uint32_t kThreads, class Team, uint32_t kFresh = 1, uint32_t kKeysOfWarp = kWarpKeys<kDim>>
class Attention {
  using EpochWords = tile::EpochWords;
  using Memory = split_kv_attention::Memory<kDim, kFresh>;

 public:
  __device__ __forceinline__ Attention(const Params& p, const Keys& keys, const Published& at, uint32_t epoch,
                                       Memory& m)
      : p_(p), at_(at), m_(m), keys_(keys), epoch_(epoch) {}
  __device__ __forceinline__ static uint32_t units(const Params& p, const Keys& keys) {
    return keys.parts * tiles(p) * p.kv_heads;
  }
  __device__ __forceinline__ bool has_parts() const { return keys_.parts > 1; }

  __device__ __forceinline__ static Unit unit_of(const Params& p, const Keys& keys, uint32_t unit) {
    Unit u;
    u.part = unit % keys.parts;
    const uint32_t rest = unit / keys.parts, tile = tiles(p) == 1 ? 0 : rest % tiles(p);
    u.head = tiles(p) == 1 ? rest : rest / tiles(p);
    u.first = u.head * p.group + kRows * tile, u.rows = min(p.group - kRows * tile, kRows);
    u.begin = keys.low + u.part * keys.each, u.end = min(u.begin + keys.each, keys.fresh + 1);
    return u;
  }
  // The number of chunks of the unit's keys.
  __device__ __forceinline__ static uint32_t chunks_of(const Unit& u) { return (u.end - u.begin + kKeys - 1) / kKeys; }
  // The addresses of the keys, and of the values, of a chunk.
  __device__ __forceinline__ static KeyRows rows_of(const Params& p, const Unit& u, uint32_t chunk) {
    const uint32_t key = u.begin + chunk * kKeys, row = key % p.rows, all = min(u.end - key, kKeys),
                   rows = min(all, p.rows - row);
    const size_t head = size_t(u.head) * p.rows;
    return {(head + row) * kDim, head * kDim, rows, all - rows};
  }

  // Computes a unit, which occupies the whole Memory. projected(i, j, a, b) returns numbers i and j of the token's
  // queries, keys and values. chunks(count, use) calls use(chunk, index) in each warp of the team that shares a chunk;
  // in a short part no warp gets two chunks. put(n, a, b) publishes numbers n to n + 3 of the result as two words of an
  // activation vector. With several parts, add_parts() publishes the result instead, and is called after attend() has
  // computed all units of the block. All threads call soon() when the result will be complete after one more round trip
  // to L2.
  template <class Chunks, class Projected, class Put, class Soon>
  __device__ __forceinline__ void attend(uint32_t unit, const float* cos, const float* sin, Chunks&& chunks,
                                         Projected&& projected, Put&& put, Soon&& soon) const {
    attend(
        unit, keys_.fresh, [&](const Unit& u) { stage(u, cos, sin, projected); }, chunks, put, soon);
  }
  // The same with stage(unit) in place of projected(). stage() writes the queries to Memory, and those of the kFresh
  // new keys and values from `first_fresh` on that are visible.
  template <class Stage, class Chunks, class Put, class Soon>
  __device__ __forceinline__ void attend(uint32_t unit, const uint32_t& first_fresh, Stage&& stage, Chunks&& chunks,
                                         Put&& put, Soon&& soon) const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_of_chunk = warp % kChunkWarps;
    const bool is_long = keys_.each > kRound<kDim, kKeysOfWarp>;
    const Unit u = unit_of(p_, keys_, unit);
    if (warp == 0 && lane < u.rows) m_.sink[lane] = p_.sinks[u.first + lane];
    stage(u);
    Team::sync();
    if (!has_parts()) soon();
    uint32_t place = is_long ? warp : ~0u;  // the slot of Memory for the warp's result
    Seen<kDim, kFresh, kKeysOfWarp> seen;
    chunks(chunks_of(u), [&](const auto& chunk, uint32_t index) {
      const uint32_t tile = index * kChunkWarps + warp_of_chunk, key = u.begin + kKeysOfWarp * tile;
      if (key >= u.end) return;
      if (!is_long) place = tile;
      seen.add(m_, chunk, kKeysOfWarp * warp_of_chunk, key, u.end, first_fresh, p_.scale);
    });
    seen.add_lanes();
    if (is_long) {
      static_assert(kThreads / 32 >= kWarps && kThreads / 32 <= 2 * kWarps, "two warps' results have a place");
      if (place >= kWarps) seen.put(m_, place - kWarps);
      Team::sync();
      if (place + kWarps < kThreads / 32) seen.fold(m_, place);
    }
    if (place < kWarps) seen.put(m_, place);
    Team::sync();
    if (has_parts()) soon();
    // One thread handles four numbers of a row.
    const uint32_t row = from_last() / (kDim / 4), d = from_last() % (kDim / 4) * 4,
                   places = is_long ? kWarps : (u.end - u.begin + kKeysOfWarp - 1) / kKeysOfWarp;
    if (row >= u.rows) return;
    decode_attention::Total total;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) total.max = fmaxf(total.max, w < places ? m_.max[w][row] : -INFINITY);
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w)
      if (w < places) total.add(m_.max[w][row], m_.sum[w][row], *m_.fours(w, row, d));
    if (!has_parts()) return put_result(u.first + row, d, total, m_.sink[row], put);
    EpochWords* const to = part(u.first + row, u.part);
    packed(total.out).store(to + d / 4);
    if (d == 0) EpochWords{{bits(total.max), bits(total.sum), 0}, epoch_}.store(to + kDim / 4);
  }
  // With several parts: adds some rows of the result, while the units of the other parts add the remaining rows. This
  // unit takes the groups of four numbers `part`, part + parts, ... of the tile, with one lane for each part of a
  // group.
  template <class WaitFor, class Put>
  __device__ __forceinline__ void add_parts(uint32_t unit, WaitFor&& wait_for, Put&& put) const {
    const Unit u = unit_of(p_, keys_, unit);
    uint32_t lanes = 1;  // lanes that share a group of four numbers
#pragma unroll 1
    while (lanes < keys_.parts) lanes *= 2;
    static_assert(kThreads >= threads_of_parts(), "room for all lanes of at most 16 parts");
    const uint32_t index = from_last() % lanes, four = from_last() / lanes * keys_.parts + u.part,
                   query = u.first + four / (kDim / 4);
    const bool mine = four < u.rows * (kDim / 4);
    float sink = 0;
    decode_attention::Total total;
    if (mine) sink = p_.sinks[query];
    if (mine && index < keys_.parts) {
      const EpochWords* const from = part(query, index);
      EpochWords a, b;
      const auto load = [&] { a = EpochWords::load(from + four % (kDim / 4)), b = EpochWords::load(from + kDim / 4); };
      load();
      wait_for(load, [&] { return a.epoch == epoch_ && b.epoch == epoch_; });
      const float4 v = unpacked(a);
      total = {__uint_as_float(b.word[0]), __uint_as_float(b.word[1]), {v.x, v.y, v.z, v.w}};
    }
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
  static constexpr uint32_t kKeys = kChunkKeys<kDim, kKeysOfWarp>;
  // The most threads that add_parts() needs for a number of parts.
  static constexpr uint32_t threads_of_parts() {
    uint32_t most = 0;
    for (uint32_t parts = 2, lanes = 2; parts <= decode_attention::kMostParts; ++parts) {
      if (lanes < parts) lanes *= 2;
      const uint32_t threads = lanes * ((kRows * (kDim / 4) + parts - 1) / parts);
      most = threads > most ? threads : most;
    }
    return most;
  }
  // Numbers the threads from the last one down, because the first warps are occupied with another wait.
  __device__ __forceinline__ static uint32_t from_last() { return kThreads - 1 - threadIdx.x; }
  __device__ __forceinline__ static uint32_t bits(float v) { return __float_as_uint(v); }
  __device__ __forceinline__ static uint32_t tiles(const Params& p) { return (p.group + kRows - 1) / kRows; }
  // The result of a part: words of four numbers in 16 bytes, followed by the maximum and the sum.
  __device__ __forceinline__ EpochWords* part(uint32_t query, uint32_t index) const {
    return at_.parts + (size_t(query) * p_.parts + index) * (kDim / 2);
  }
  // Each number is sent with 24 bits, eight more than an activation vector has.
  __device__ __forceinline__ EpochWords packed(const float (&v)[4]) const {
    const uint32_t last = bits(v[3]);
    return {{(bits(v[0]) & ~0xffu) | last >> 24, (bits(v[1]) & ~0xffu) | (last >> 16 & 0xff),
             (bits(v[2]) & ~0xffu) | (last >> 8 & 0xff)},
            epoch_};
  }
  __device__ __forceinline__ static float4 unpacked(const EpochWords& s) {
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
    weight_tiles::words4(p_.columns, total.out, a, b);
    put(query * p_.dim + d, a, b);
  }
  // Rotates the queries and, in the last part, the new key, and stores the new key and value. The blocks of several
  // tiles store equal words.
  template <class Projected>
  __device__ __forceinline__ void stage(const Unit& u, const float* cos, const float* sin,
                                        Projected&& projected) const {
    const uint32_t half = p_.dim / 2, all = u.rows + (u.end > keys_.fresh ? 2 : 0);
    const size_t stored = (size_t(u.head) * p_.rows + keys_.fresh % p_.rows) * kDim;
#pragma unroll 1
    for (uint32_t i = from_last(); i < all * (kDim / 2); i += kThreads) {
      const uint32_t r = i / (kDim / 2), d = i % (kDim / 2);
      const bool is_query = r < u.rows, is_value = r == u.rows + 1;
      uint16_t* const to = is_query ? m_.q[r] : is_value ? m_.v[0] : m_.k[0];
      if (d >= half) {  // padding
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

  const Params& p_;
  const Published& at_;
  Memory& m_;
  const Keys& keys_;
  const uint32_t epoch_;
};

}  // namespace ingot::split_kv_attention
