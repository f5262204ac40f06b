#pragma once
// Which of each product's weights are this block's, and the warp that copies them, with attention's keys, into the ring
// (megakernel/weight_stream.cuh).
#include "ingot/models/decode/megakernel/token_router.cuh"
#include "ingot/models/decode/prefilter/screen.h"

namespace ingot::decode {

constexpr uint32_t kKeysAhead = 6;  // pieces of keys under way where there are many: nobody hands over meanwhile

template <WeightFormat D, WeightFormat E, bool kScreened> class TokenWeights : public TokenBlock {
 public:
  // This block's part of a product, the same in all layers.
  __device__ __forceinline__ Section section_of(Stage stage, const LayerStages& l) const {
    const Shares& share = m_.token.shares;
    const Matrix& w = matrix(stage, l);
    Section s = stage == Stage::qkv       ? section<D>(w, share.qkv)
                : stage == Stage::output  ? section<D>(w, share.output)
                : stage == Stage::gate_up ? section<E>(w, share.gate_up, true)
                : stage == Stage::down    ? section<E>(w, share.down, true, true)
                                          : section<kOfHead>(w, stage == Stage::head ? share.head : 0);
    s.begin();
    return s;
  }

  // By the copying warp: all of a token, stage by stage, as fast as slots become free.
  __device__ __forceinline__ void copy() const {
    megakernel::WeightWriter to(m_.token.stream, m_.stream, memory_ + m_.token.ring);
    uint32_t i = 0;
#pragma unroll 1
    for (Stage stage = Stage::qkv; stage != Stage::head || m_.token.head_rows > 0; stage = Stage(int(stage) + 1)) {
      put(to, stage, layer(i), i);
      if (stage == Stage::head) return;
      if (stage == Stage::down && ++i < m_.token.count) stage = Stage(int(Stage::qkv) - 1);
    }
  }

 private:
  // A weight tile of a screened head's codes has the bytes of one of fp8.
  static constexpr WeightFormat kOfHead = kScreened ? WeightFormat::fp8 : D;
  static_assert(kScreenWeightTile == weight_tiles::Form<WeightFormat::fp8>::kBytes,
                "a weight tile of codes has the bytes of fp8's");
  template <WeightFormat F>
  __device__ __forceinline__ Section section(const Matrix& w, uint32_t share, bool bank = false,
                                             bool by_band = false) const {
    const uint32_t entries = bank ? m_.token.k : 1;
    return {.weight_tile_bytes = weight_tiles::Form<F>::kBytes,
            .band_bytes = w.band_bytes,
            .matrix_bytes = w.matrix_bytes,
            .expert = bank ? chosen() : nullptr,
            .weight_tiles = w.weight_tiles,
            .bands = max(w.bands, 1u),  // there are none where another GPU has them
            .entries = entries,
            .by_band = by_band,
            .piece = piece_of(w.weight_tiles, kMostOfPiece<F>),
            .column_stride = uint32_t(weight_tiles::column_bytes(w.cols)),
            .range = range_of(w.weight_tiles * w.bands * entries, share, blockIdx.x)};
  }
  __device__ __forceinline__ void put(megakernel::WeightWriter& to, Stage stage, const LayerStages& l,
                                      uint32_t i) const {
    if (stage == Stage::attention) return put_keys(to, l.attention, m_.keys[i % 2]);
    const Section& s = m_.sections[int(stage)];
    const uint8_t* const data = matrix(stage, l).data;
    const uint32_t end = s.end_piece;
    bool chooses = stage == Stage::gate_up;
#pragma unroll 1
    for (uint32_t first = s.first_piece; first < end || chooses; first += 32) {
      // A lane finds a piece: one by one takes too long. And it does before its expert is known.
      Piece p = s.piece_at(min(first + threadIdx.x % 32, end - 1), data);
      if (chooses) router_.choose(l.router, i % 2);
      chooses = false;
      if (first >= end) return;
      s.add_expert(p);
      const uint32_t bytes = p.count * uint32_t(s.weight_tile_bytes), count = min(end - first, 32u);
#pragma unroll 1
      for (uint32_t lane = 0; lane < count; ++lane) to.put(lane, p.data, bytes, note_of(p));
    }
  }

  // What earlier tokens have left, of the block's units.
  __device__ __forceinline__ void put_keys(megakernel::WeightWriter& to, const decode_attention::Params& p,
                                           const piece_attention::Keys& keys) const {
    constexpr uint32_t kRow = kDim * 2, kKeys = piece_attention::kPieceKeys;
    static_assert(2 * kKeys * kRow <= megakernel::kSlotBytes, "a slot has room for a piece's keys and values");
    static_assert(piece_attention::kPieceWarps == megakernel::kTeamWarps, "a team reads a piece");
    const uint32_t units = Attention::units(p, keys), most = m_.token.stream.slots - megakernel::kTeams,
                   ahead = keys.each > piece_attention::kRound ? min(kKeysAhead, most) : m_.token.stream.ahead;
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const piece_attention::Unit u = Attention::unit_of(p, keys, unit);
      const uint32_t pieces = Attention::pieces_of(u);
#pragma unroll 1
      for (uint32_t first = 0; first < pieces; first += 32) {
        const uint32_t piece = min(first + threadIdx.x % 32, pieces - 1), count = min(pieces - first, 32u);
        const piece_attention::KeyRows r = Attention::rows_of(p, u, piece);
#pragma unroll 1
        for (uint32_t lane = 0; lane < count; ++lane)
          to.put(lane, 2 * (r.rows + r.others) * kRow, {piece}, ahead, [&](char* slot, uint64_t* full) {
#pragma unroll 1
            for (uint32_t i = 0; i < 2; ++i, slot += kKeys * kRow) {
              const bf16* const from = i == 0 ? p.keys : p.values;
              ptx::bulk_load(slot, from + r.first, r.rows * kRow, full);
              if (r.others > 0) ptx::bulk_load(slot + r.rows * kRow, from + r.begin, r.others * kRow, full);
            }
          });
      }
    }
  }

  const TokenRouter router_;
};

}  // namespace ingot::decode
