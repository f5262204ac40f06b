#pragma once
// The megakernel's screened head (screen.h has the bound, screen.cuh what it does to a weight tile): the codes say how
// large each row's logit can be, and what the largest is at least; rows that may be it are multiplied as the usual head
// multiplies all. Where several GPUs make the token each does so with its own rows and finds the likeliest of its ids,
// of which the usual exchange takes the likeliest of all: a lower end of another GPU's could leave fewer rows, but
// would be waited for.
#include "ingot/models/decode/megakernel/token_columns.cuh"
#include "ingot/models/decode/prefilter/screen.cuh"

namespace ingot::decode {

using ScreenMemory = screen::Memory<kTokenWarps, kHeldBands>;
static_assert(sizeof(ScreenMemory) <= kBestBytes, "in the place of what the usual head keeps there");

template <WeightFormat D, bool kRanks> class ScreenedHeadProgram : public TokenBlock {
 public:
  __device__ __forceinline__ explicit ScreenedHeadProgram(const ScreenedHead* head) : head_(head) {}

  // After the last layer's grid barrier: to `top` the likeliest of this block's rows that were multiplied.
  __device__ __forceinline__ void run(sampling::Best& top, megakernel::WeightReader& from) const {
    const NormProduct& p = m_.token.head;
    const Section& s = m_.sections[int(Stage::head)];
    ScreenMemory& m = memory();
    const uint32_t turn = from.turn();  // of the usual head's pieces, where it came now
    columns_.stage_normed<D>(p.weight, p.w, m_.token.count > 0 ? down_sums(m_.token.count - 1) : nullptr);
    if (threadIdx.x == 0) m.count = 0;
    TokenTeam::sync();
    const screen::Column x = norm_column(columns_.rstd(p.eps) * weight_tiles::Form<D>::kDrop);
    uint32_t lower = 0;
#pragma unroll 1
    for (uint32_t round = s.begin_sums; round < s.end_sums; round += kHeldBands) {
      const uint32_t n = 16 * round + threadIdx.x;
      const bool mine = is_screened_row(s, n);
      const ScreenRow row = mine ? head_->rows[n] : ScreenRow{};
      multiply_codes(s, round, from);
      TokenTeam::sync();
      if (threadIdx.x < kEnding) {
        float(&sums)[kTokenWarps][16] = m_.sums[threadIdx.x / 16];
        const screen::Range range = screen::range_of(of_warps(sums, threadIdx.x % 16), row, x);
#pragma unroll
        for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][threadIdx.x % 16] = 0;
        if (mine) p.y[n] = range.upper, lower = max(lower, range.lower);  // y[n] is this thread's alone
      }
      TokenTeam::sync();
    }
    const uint32_t least = largest_of_grid(lower);
    // Nobody has to wait for other blocks any more.
#pragma unroll 1
    for (uint32_t first = s.begin_sums; first < s.end_sums; first += screen::kRounds * kHeldBands) {
      find_rows(s, first, least);
      TokenTeam::sync();
      const uint32_t count = m.count;
#pragma unroll 1
      for (uint32_t at = 0; at < count; at += kHeldBands)
        multiply_found(s, m.found + at, min(count - at, kHeldBands), turn, x.drop, top);
      TokenTeam::sync();
      if (threadIdx.x == 0) m.count = 0;
      TokenTeam::sync();
    }
  }

 private:
  // Behind the column, where the usual head keeps the best of each thread.
  __device__ __forceinline__ ScreenMemory& memory() const { return *reinterpret_cast<ScreenMemory*>(behind_column()); }
  // Whether this thread compares row n, of a round's first `kEnding`.
  __device__ __forceinline__ bool is_screened_row(const Section& s, uint32_t n) const {
    const NormProduct& p = m_.token.head;
    if constexpr (kRanks)
      return threadIdx.x < kEnding && n < min(16 * s.end_sums, p.w.rows) && p.first_id + n < p.vocab;
    else
      return threadIdx.x < kEnding && n < min(16 * s.end_sums, min(p.w.rows, p.vocab));
  }
  __device__ __forceinline__ screen::Column norm_column(float drop) const {
    ScreenMemory& m = memory();
    const uint32_t words = 32 * m_.token.head.w.weight_tiles;
    float squares = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < words; i += kTokenThreads) {
      float a, b;
      ptx::unpack(bf16{}, reinterpret_cast<const uint32_t*>(stage())[i], a, b);
      squares += a * a + b * b;
    }
    squares = weight_tiles::lanes_sum(squares);
    if (threadIdx.x % 32 == 0) m.squares[threadIdx.x / 32] = squares;
    TokenTeam::sync();
    float sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) sum += m.squares[w];
    return screen::column_of(sum, drop);
  }
  // Of a round's bands, to the sums.
  __device__ __forceinline__ void multiply_codes(const Section& s, uint32_t round,
                                                 megakernel::WeightReader& from) const {
    constexpr uint32_t team = megakernel::kTeamWarps;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const char* const column = stage() + lane % 4 * 16;
    from.read(s.pieces_of(round, kHeldBands), [&](const char* weight_tile, const megakernel::WeightNote& note) {
      const Piece p = noted(note);
      float sum[4] = {};
#pragma unroll 2
      for (uint32_t g = warp % team; g < p.count; g += team)
        screen::multiply(weight_tile + g * kScreenWeightTile, column + (p.first + g) * weight_tiles::kColumnBytes, lane,
                         sum);
      float(&to)[16] = m_.sums[p.band - round][warp];
      if (lane % 4 == 0) to[lane / 4] += sum[0], to[lane / 4 + 8] += sum[2];
    });
  }
  // Of what each block knows: a word of each, which says of which token it is.
  __device__ __forceinline__ uint32_t largest_of_grid(uint32_t lower) const {
    ScreenMemory& m = memory();
    const uint32_t warp = threadIdx.x / 32, number = kGridBarriersPerLayer * m_.token.count;
    lower = __reduce_max_sync(~0u, lower);
    if (threadIdx.x % 32 == 0) m.lower[warp] = lower;
    TokenTeam::sync();
    if (threadIdx.x == 0 && !(m_.token.grid.missing == number && blockIdx.x == gridDim.x - 1)) {
#pragma unroll
      for (uint32_t w = 1; w < kTokenWarps; ++w) lower = max(lower, m.lower[w]);
      ptx::store_relaxed(head_->lower_bounds + blockIdx.x, uint64_t(m_.stamp) << 32 | lower);
    }
    uint32_t largest = 0;
#pragma unroll 1
    for (uint32_t b = threadIdx.x; b < gridDim.x; b += kTokenThreads) {
      uint64_t word;
      const auto load = [&] { word = ptx::load_relaxed(head_->lower_bounds + b); };
      load();
      wait_for(
          load, [&] { return uint32_t(word >> 32) == m_.stamp; }, number);
      largest = max(largest, uint32_t(word));
    }
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) m.largest[warp] = largest;
    TokenTeam::sync();
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) largest = max(largest, m.largest[w]);
    return largest;
  }
  // Lists the bands, from `first` on, that have rows which may be the largest.
  __device__ __forceinline__ void find_rows(const Section& s, uint32_t first, uint32_t least) const {
    if (threadIdx.x >= kEnding) return;
    ScreenMemory& m = memory();
    float upper[screen::kRounds];
#pragma unroll
    for (uint32_t r = 0; r < screen::kRounds; ++r) {
      const uint32_t n = 16 * (first + r * kHeldBands) + threadIdx.x;
      upper[r] = is_screened_row(s, n) ? m_.token.head.y[n] : 0;
    }
#pragma unroll 1
    for (uint32_t r = 0; r < screen::kRounds; ++r) {
      const uint32_t band = first + r * kHeldBands + threadIdx.x / 16;
      float u = 0;  // of an array in registers
#pragma unroll
      for (uint32_t k = 0; k < screen::kRounds; ++k) u = k == r ? upper[k] : u;
      const bool found = is_screened_row(s, 16 * band + threadIdx.x % 16) && screen::ordered(u) >= least;
      const uint32_t rows = __ballot_sync(~0u, found) >> threadIdx.x % 32 / 16 * 16 & 0xffffu;
      if (threadIdx.x % 16 == 0 && rows != 0) m.found[atomicAdd(&m.count, 1u)] = make_uint2(band, rows);
    }
  }
  // Of at most kHeldBands bands the rows that were found, each as the usual head has it: the same pieces by the same
  // warps, in the same order. Other rows meet zeros.
  __device__ __forceinline__ void multiply_found(const Section& s, const uint2* found, uint32_t count, uint32_t turn,
                                                 float drop, sampling::Best& top) const {
    constexpr uint32_t team = megakernel::kTeamWarps, teams = megakernel::kTeams, kHalves = 2, kOfPiece = 2;
    static_assert(kOfPiece * team >= kMostOfPiece<D>, "a warp's weight tiles of a piece");
    const Matrix& w = head_->head;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = warp % team,
                   piece = piece_of(w.weight_tiles, kMostOfPiece<D>), of_band = (w.weight_tiles + piece - 1) / piece;
    const char* const mine[1] = {stage() + lane % 4 * 16};
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const uint2 band = found[i];
      const bool wanted = (band.y >> lane / 4 & 0x101u) != 0;
      const uint8_t* const data = w.data + band.x * w.band_bytes;
      float sum[1][4] = {};
#pragma unroll 1
      for (uint32_t first = (turn + teams - (band.x - s.begin_sums) * of_band % teams) % teams; first < of_band;
           first += kHalves * teams) {
        weight_tiles::Stored<D> weight_tile[kHalves][kOfPiece];
        const auto weight_tile_of = [&](uint32_t h, uint32_t u) {
          return (first + h * teams) * piece + begin + u * team;
        };
        const auto is_there = [&](uint32_t h, uint32_t u) {
          return begin + u * team < piece && weight_tile_of(h, u) < w.weight_tiles;
        };
#pragma unroll
        for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
          for (uint32_t u = 0; u < kOfPiece; ++u) {
            weight_tile[h][u] = {};
            if (wanted && is_there(h, u))
              weight_tiles::load(weight_tile[h][u], data + weight_tile_of(h, u) * weight_tiles::Form<D>::kBytes, lane);
          }
        __syncwarp();
#pragma unroll
        for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
          for (uint32_t u = 0; u < kOfPiece; ++u)
            if (is_there(h, u))
              weight_tiles::multiply<D, 1>(weight_tile[h][u], mine, weight_tile_of(h, u) * weight_tiles::kColumnBytes,
                                           sum);
      }
      float(&to)[16] = m_.sums[i][warp];
      if (lane % 4 == 0) to[lane / 4] = 0.f + sum[0][0], to[lane / 4 + 8] = 0.f + sum[0][2];
    }
    TokenTeam::sync();
    const uint32_t slot = threadIdx.x / 16, row = threadIdx.x % 16;
    if (slot < count && (found[slot].y >> row & 1) != 0) {
      const uint32_t n = 16 * found[slot].x + row;
      const float y = of_warps(m_.sums[slot], row) * drop;
      m_.token.head.y[n] = y;
      top.add(y, (kRanks ? m_.token.head.first_id : 0) + n);
    }
    TokenTeam::sync();
  }

  const ScreenedHead* const head_;
  const TokenColumns columns_;
};

}  // namespace ingot::decode
