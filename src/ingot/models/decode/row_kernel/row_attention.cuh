#pragma once
// Attention of the rows (megakernel/split_kv_attention.cuh). A unit of work is a row, a key head, a tile of query heads
// and a part of the keys. The number of parts follows from the position of the row. The keys of this step, the row's
// own and those of earlier rows of the same sequence, are computed from the sums of qkv; keys of earlier steps come
// through the ring.
#include "ingot/models/decode/row_kernel/row_context.cuh"

namespace ingot::decode::rows {

struct RowUnit {
  uint32_t row, unit;  // the unit among those of the row
};
// Unit `number` among the units of all rows. Beyond the last unit, `row` is T.
__device__ __forceinline__ RowUnit row_unit(const Context& block, const decode_attention::Params& p, const Keys* keys,
                                            uint32_t number) {
  RowUnit u{0, number};
#pragma unroll 1
  for (; u.row < block.m.step.T; ++u.row) {
    const uint32_t units = Attention::units(p, keys[u.row]);
    if (u.unit < units) break;
    u.unit -= units;
  }
  return u;
}
// The number of chunks of a unit, rounded up so that each unit begins with the first team.
__device__ __forceinline__ uint32_t padded_chunks(uint32_t chunks) { return (chunks + kTeams - 1) / kTeams * kTeams; }

// Writes the queries of a unit, and the keys and values of this step that the unit sees, to shared memory. The row's
// own key and value also go to the cache.
template <class Projected>
__device__ __forceinline__ void stage_unit(const Context& block, const decode_attention::Params& p,
                                           const split_kv_attention::Unit& u, uint32_t row, uint32_t first_fresh,
                                           AttentionMemory& m, Projected&& projected) {
  const uint32_t own = block.m.position[row], half = p.dim / 2, begin = max(u.begin, first_fresh),
                 fresh = u.end > begin ? u.end - begin : 0, all = u.rows + 2 * fresh;
#pragma unroll 1
  for (uint32_t i = kTokenThreads - 1 - threadIdx.x; i < all * (kDim / 2); i += kTokenThreads) {
    const uint32_t r = i / (kDim / 2), d = i % (kDim / 2), n = (r - u.rows) / 2, key = begin + n;
    const bool is_query = r < u.rows, is_value = !is_query && (r - u.rows) % 2 == 1;
    uint16_t* const to = is_query ? m.q[r] : is_value ? m.v[key - first_fresh] : m.k[key - first_fresh];
    if (d >= half) {  // padding
      for (uint32_t at = p.dim + 2 * (d - half); at < p.dim + 2 * (d - half) + 2; ++at) to[at] = 0;
      continue;
    }
    const uint32_t from = is_query ? u.first + r : p.heads + (is_value ? p.kv_heads : 0) + u.head,
                   of = is_query ? row : row - (own - key);
    float a, b;
    projected(of, from * p.dim + d, from * p.dim + d + half, a, b);
    const float c = is_value ? 1 : block.m.cos[of][d], s = is_value ? 0 : block.m.sin[of][d];
    const bf16 low = is_value ? bf16(a) : bf16(a * c - b * s), high = is_value ? bf16(b) : bf16(b * c + a * s);
    to[d] = low.bits, to[d + half] = high.bits;
    if (is_query || key != own) continue;
    bf16* const cache = reinterpret_cast<bf16*>(uintptr_t(is_value ? p.values : p.keys) + block.m.offset[row]) +
                        (size_t(u.head) * p.rows + own % p.rows) * kDim;
    cache[d] = low, cache[d + half] = high;
  }
}

__device__ __forceinline__ void attend(const Context& block, uint32_t layer, megakernel::WeightReader& weights) {
  const decode_attention::Params& p = block.layer(layer).attention;
  const RowStep& step = block.m.step;
  const Keys* const keys = block.m.keys[layer % 2];
  const uint32_t epoch = block.m.epoch + layer, terms = block.split(Stage::qkv).parts, width = p.heads * p.dim;
  auto& m = *reinterpret_cast<AttentionMemory*>(block.vectors());
  const auto projected = [&](uint32_t row, uint32_t i, uint32_t j, float& a, float& b) {
    const uint64_t* const sums = block.qkv(epoch, row);
    uint64_t word[2];
    const auto load = [&] { word[0] = ptx::load_relaxed(sums + i), word[1] = ptx::load_relaxed(sums + j); };
    load();
    block.wait_for(
        load, [&] { return (Sum::count(word[0]) == terms) & (Sum::count(word[1]) == terms); },
        kGridBarriersPerLayer * layer + uint32_t(Stage::qkv));
    a = Sum::value(word[0]), b = Sum::value(word[1]);
  };
  const auto with_unit = [&](uint32_t number, auto&& call) {
    const RowUnit u = row_unit(block, p, keys, number);
    if (u.row == step.T) return false;
    const token_attention::Published at{step.words.rows.parts + size_t(u.row) * p.heads * p.parts * (kDim / 2),
                                        nullptr};
    call(Attention(p, keys[u.row], at, epoch, m), u, [&](uint32_t n, uint32_t a, uint32_t b) {
      char* const vector = block.turn(epoch, u.row) + step.words.attended;
      const bool fp8 = p.columns == WeightFormat::fp8;
      const auto put_words = [&](uint32_t c, uint32_t one, uint32_t other) {
        const auto word = [&](uint32_t i) {
          return reinterpret_cast<uint32_t*>(vector + 2 * weight_tiles::place(fp8, i));
        };
        ptx::store_relaxed(word(c), ~one), ptx::store_relaxed(word(c + (fp8 ? 1 : 2)), ~other);
      };
      put_words(n, a, b);
      if (n + 4 == width)
#pragma unroll 1
        for (uint32_t behind = width; behind < weight_tiles::padded(width); behind += 4) put_words(behind, 0, 0);
    });
    return true;
  };
  bool parted = false;
#pragma unroll 1
  for (uint32_t number = blockIdx.x;; number += gridDim.x) {
    const bool found = with_unit(number, [&](const Attention& attention, const RowUnit& u, auto&& put) {
      if (number != blockIdx.x) ComputeThreads::sync();
      const uint32_t& first_fresh = block.m.first_fresh[u.row];
      parted |= attention.has_parts();
      attention.attend(
          u.unit, first_fresh,
          [&](const split_kv_attention::Unit& unit) { stage_unit(block, p, unit, u.row, first_fresh, m, projected); },
          [&](uint32_t count, auto&& use) {
            weights.read(padded_chunks(count), [&](const char* chunk, const megakernel::WeightNote& note) {
              if (note.word[0] != ~0u) use(chunk, note.word[0]);
            });
          },
          put, [] {});
    });
    if (!found) break;
  }
  if (!parted) return;
#pragma unroll 1
  for (uint32_t number = blockIdx.x;; number += gridDim.x) {
    const bool found = with_unit(number, [&](const Attention& attention, const RowUnit& u, auto&& put) {
      if (attention.has_parts())
        attention.add_parts(
            u.unit,
            [&](auto&& load, auto&& complete) {
              block.wait_for(load, complete, kGridBarriersPerLayer * layer + uint32_t(Stage::attention));
            },
            put);
    });
    if (!found) break;
  }
}

}  // namespace ingot::decode::rows
