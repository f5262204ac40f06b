#pragma once
// A block's part of a product: pieces of weights out of the ring times the column in shared memory, to each warp's sums
// of TokenMemory.
#include "ingot/models/decode/megakernel/token_block.cuh"

namespace ingot::decode {

// A warp's part of a piece, in registers: while a column is waited for each team takes one out of the ring, which has
// room for as many more.
struct HeldPiece {
  weight_tiles::Stored<WeightFormat::bf16> weight_tile[2];
  uint32_t what =
      0;  // how many weight tiles the piece has, of which of the round's bands (from bit 4), from which on (8)
};

template <WeightFormat D, WeightFormat E, bool kRanks> class TokenProducts : public TokenBlock {
 public:
  // Other instances have fewer dense weights than the ring has room for, or no registers left.
  static constexpr bool kHolds = D == WeightFormat::bf16 && E == WeightFormat::mxfp4 && !kRanks;
  // Takes a piece of the coming product, which is dense, out of the ring before its column is there.
  __device__ __forceinline__ void hold(uint32_t round, uint32_t pieces, megakernel::WeightReader& from,
                                       HeldPiece& held) const {
    if constexpr (kHolds) {
      constexpr uint32_t team = megakernel::kTeamWarps;
      static_assert(2 * team >= kMostOfPiece<D>, "a warp holds two weight tiles");
      const uint32_t lane = threadIdx.x % 32, begin = threadIdx.x / 32 % team;
      from.read_one(pieces, [&](const char* weight_tile, const megakernel::WeightNote& note) {
        const Piece p = noted(note);
        held.what = p.count + 16 * (p.band - round) + 256 * p.first;
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u)
          if (begin + u * team < p.count)
            load_staged(held.weight_tile[u], weight_tile + (begin + u * team) * weight_tiles::Form<D>::kBytes, lane);
      });
    }
  }
  // A round: `pieces` of them, of bands from `band` on. kBank: of the chosen experts' matrices, which lie at `data`.
  template <WeightFormat F, bool kBank>
  __device__ __forceinline__ void multiply(const Section& s, const uint8_t* data, uint32_t pieces, uint32_t band,
                                           HeldPiece& held, megakernel::WeightReader& from) const {
    constexpr uint32_t team = megakernel::kTeamWarps;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Kept, for what is written to shared memory may be any of it to the compiler.
    const bool by_band = kBank && s.by_band;
    const uint32_t stride = by_band ? s.column_stride : 0, of_entry = kBank && !by_band ? s.bands : 0;
    const float* const weights = choice().weights;
    const char* const column = stage() + lane % 4 * 16;
    float sum[1][4] = {};
    uint32_t entry = 0, of_band = ~0u;  // what `sum` is of: a band of an entry; ~0: nothing yet
    const auto leave = [&] {
      float scale[2] = {1, 1};
      if (by_band) scale[0] = scale[1] = weights[entry];
      if constexpr (kBank && F == WeightFormat::fp8) {
        float of_row[2];
        weight_tiles::load_row_scales(data + s.expert[entry] * s.matrix_bytes + of_band * s.band_bytes, s.weight_tiles,
                                      of_row);
        scale[0] *= of_row[0], scale[1] *= of_row[1];
      }
      // A band's rows g and g + 8 are in every lane of the four that share g.
      float(&to)[16] = m_.sums[of_band + entry * of_entry - band][warp];
      if (lane % 4 == 0) to[lane / 4] += scale[0] * sum[0][0], to[lane / 4 + 8] += scale[1] * sum[0][2];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[0][c] = 0;
    };
    const uint32_t first = warp % team;
    if constexpr (kHolds && !kBank) {
      if (held.what != 0) {
        of_band = band + held.what / 16 % 16;
        const char* const mine[1] = {column + held.what / 256 * weight_tiles::kColumnBytes};
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u)
          if (first + u * team < held.what % 16)
            weight_tiles::multiply<F, 1>(held.weight_tile[u], mine, (first + u * team) * weight_tiles::kColumnBytes,
                                         sum);
      }
    }
    from.read(pieces, [&](const char* weight_tile, const megakernel::WeightNote& note) {
      const Piece p = noted(note);
      if (of_band != ~0u && (p.band != of_band || p.entry != entry)) leave();
      entry = p.entry, of_band = p.band;
      const char* const mine[1] = {column + p.entry * stride + p.first * weight_tiles::kColumnBytes};
#pragma unroll 1
      for (uint32_t g = first; g < p.count; g += team) {
        weight_tiles::Stored<F> w;
        load_staged(w, weight_tile + g * weight_tiles::Form<F>::kBytes, lane);
        weight_tiles::multiply<F, 1>(w, mine, g * weight_tiles::kColumnBytes, sum);
      }
    });
    if (of_band != ~0u) leave();
  }

 private:
  template <WeightFormat F>
  __device__ __forceinline__ static void load_staged(weight_tiles::Stored<F>& s, const char* weight_tile,
                                                     uint32_t lane) {
#pragma unroll
    for (int i = 0; i < int(sizeof(s.word) / 16); ++i) {
      const uint4 w = *reinterpret_cast<const uint4*>(weight_tile + i * 512 + lane * 16);
      s.word[i][0] = w.x, s.word[i][1] = w.y, s.word[i][2] = w.z, s.word[i][3] = w.w;
    }
    if constexpr (F == WeightFormat::mxfp4)
      s.scales = *reinterpret_cast<const uint32_t*>(weight_tile + 512 + lane / 4 * 4);
  }
};

}  // namespace ingot::decode
