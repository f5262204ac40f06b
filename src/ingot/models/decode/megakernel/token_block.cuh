#pragma once
// What one block of the megakernel has of a token: its shared memory, what lies where in it and in the words that
// blocks hand to each other, and how those words are waited for. The program's parts (token_*.cuh, screened_head.cuh)
// are classes on top of TokenBlock; besides its two addresses they hold each other, and the screened head its matrix.
#include <algorithm>
#include <type_traits>

#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/megakernel/sums.cuh"
#include "ingot/megakernel/weight_stream.cuh"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/megakernel/piece_attention.cuh"
#include "ingot/models/decode/megakernel/sections.h"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot::decode {

// That compute; one warp more copies, and sixteen in all leave 128 registers a thread.
constexpr uint32_t kTokenWarps = megakernel::kTeams * megakernel::kTeamWarps, kTokenThreads = 32 * kTokenWarps;
constexpr int kDim = kTokenHeadDim;
constexpr uint32_t kHeldBands = 12;  // whose sums have room at once
// The threads that end rows, one for each sum that has room, take turns: those of the product that comes prepare while
// the others end the one before. None are of the first warp, which waits for the other blocks.
constexpr uint32_t kEnding = 16 * kHeldBands, kFirstEnding = kTokenThreads - kEnding, kFirstOfOthers = 32;
static_assert(kFirstOfOthers + kEnding <= kFirstEnding, "they are others");

using RowSum = megakernel::FixedSum<28>;  // of the two blocks that may share a row

enum class Stage { qkv, attention, output, gate_up, down, head };

// The row whose sum a thread ends in a round: all that can be known before the round's column is there.
struct RowPlace {
  uint32_t n;                             // of its matrix
  uint32_t what;                          // the matrix's entry, from bit 5 on, and
  static constexpr uint32_t kEnds = 1;    // there is a band of which it is a row, which may be beyond the matrix
  static constexpr uint32_t kBegins = 2;  // its sum's begin is this block's
  static constexpr uint32_t kTerm = 4;    // terms of its sum that are this block's: two of a whole band
  static constexpr uint32_t kMine = 16;   // it is a row of the matrix

  __device__ __forceinline__ bool ends() const { return (what & kEnds) != 0; }
  __device__ __forceinline__ bool begins() const { return (what & kBegins) != 0; }
  __device__ __forceinline__ uint32_t terms() const { return what / kTerm % 4; }
  __device__ __forceinline__ bool mine() const { return (what & kMine) != 0; }
  __device__ __forceinline__ uint32_t entry() const { return what / 32; }
};
// And the numbers it needs, asked for by then; `scale` of fp8.
struct RowNumbers {
  float bias, gain, scale;
};

struct TokenTeam {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync_unaligned(3, kTokenThreads); }
};
// In dynamic shared memory: what the stages are told, then the places of `Token`.
struct TokenMemory {
  Token token;
  LayerStages layers[2];  // this one and the next
  piece_attention::Keys keys[2];
  megakernel::GridBarrierMemory grid_barriers;
  megakernel::WeightStreamMemory stream;
  Section sections[6];  // of Stage; attention reads no weights
  uint64_t routed;      // completes once a layer: what its experts are chosen by is there
  RowNumbers output_rows[kEnding];
  uint32_t position;                   // of the token
  uint32_t stamp;                      // of its first layer
  RowPlace rows[2][kEnding];           // of the ending threads
  uint32_t zeroes, unused;             // whether this block makes zeros during attention
  float cos[kDim / 2], sin[kDim / 2];  // of its position
  float squares[kTokenWarps];
  float sums[kHeldBands][kTokenWarps][16];        // zeros between products
  alignas(4) uint16_t normed[2][kHeldBands][16];  // what the router takes of the output's rows: two bf16 a number
};

// Behind it where several GPUs make the token.
struct RankMemory {
  Ranks ranks;
  uint32_t epoch, unused;  // of the last exchange before this token
};

constexpr int64_t kBestBytes = 16 * kHeldBands * sizeof(sampling::Best);  // behind the head's column

constexpr int64_t kMostShared = 226 * 1024;  // what a block can have, less what is declared beside it

// Where all of it lies, behind what is declared here, and how many slots of the ring that leaves room for.
inline void place(Token& t, const LayerStages& l, int64_t most_bytes) {
  const auto up = [](int64_t n, int64_t to) { return uint32_t((n + to - 1) / to * to); };
  t.choice = up(sizeof(TokenMemory) + (t.ranks != nullptr ? sizeof(RankMemory) : 0), 16);
  t.x = up(t.choice + ChoiceMemory::bytes(1, t.experts, t.k), 16);
  t.stage = up(t.x + int64_t(weight_tiles::padded(l.qkv.w.cols)) * 4, 128);
  t.ring = up(t.stage + std::max({int64_t(sizeof(piece_attention::Memory<kDim>)),
                                  int64_t(weight_tiles::column_stride(l.qkv.w.cols)) + kBestBytes,
                                  int64_t(weight_tiles::column_stride(l.output.w.cols)),
                                  t.k * weight_tiles::column_bytes(l.down.w.cols)}),
              128);
  const int64_t slots = (most_bytes - t.ring) / megakernel::kSlotBytes;
  t.stream.slots = uint32_t(std::clamp<int64_t>(slots, 0, megakernel::kMostSlots));
  constexpr uint32_t kTeams = megakernel::kTeams;
  t.stream.ahead = std::min(t.stream.ahead, t.stream.slots > kTeams ? t.stream.slots - kTeams : 0);
  t.bytes = t.ring + t.stream.slots * megakernel::kSlotBytes;
}

// Of C rows, whose bands all blocks share: what each has at most, where several GPUs' parts are added.
INGOT_HD constexpr uint32_t bands_of_block(uint32_t C, uint32_t blocks) {
  return ((C + 15) / 16 + blocks - 1) / blocks;
}

template <WeightFormat F> constexpr uint32_t kMostOfPiece = megakernel::kSlotBytes / weight_tiles::Form<F>::kBytes;

// What the readers of a piece need to know of it.
__device__ __forceinline__ megakernel::WeightNote note_of(const Piece& p) {
  return {p.entry, p.band, p.first, p.count};
}
__device__ __forceinline__ Piece noted(const megakernel::WeightNote& n) {
  return {nullptr, n.word[0], n.word[1], n.word[2], n.word[3]};
}

class TokenBlock {
 public:
  using Attention = piece_attention::Attention<kDim, kTokenThreads, TokenTeam>;

  __device__ __forceinline__ TokenBlock()
      : memory_(tile::dynamic_shared<char>()), m_(*reinterpret_cast<TokenMemory*>(memory_)) {}

 protected:
  template <class T> __device__ __forceinline__ static void copy_words(T& to, const T& from) {
    static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
    for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kTokenThreads)
      reinterpret_cast<uint64_t*>(&to)[w] = reinterpret_cast<const uint64_t*>(&from)[w];
  }
  // The same, on their way until everybody's join_copies() and a barrier.
  template <class T> __device__ __forceinline__ static void copy_words_async(T& to, const T& from) {
    static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
#pragma unroll 1
    for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kTokenThreads)
      ptx::cp_async<8>(ptx::shared_address(reinterpret_cast<uint64_t*>(&to) + w),
                       reinterpret_cast<const uint64_t*>(&from) + w);
  }
  __device__ __forceinline__ static void join_copies() {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }
  __device__ __forceinline__ const LayerStages& layer(uint32_t i) const { return m_.layers[i % 2]; }
  __device__ __forceinline__ char* stage() const { return memory_ + m_.token.stage; }
  __device__ __forceinline__ float* x() const { return reinterpret_cast<float*>(memory_ + m_.token.x); }
  __device__ __forceinline__ ChoiceMemory choice() const {
    return {memory_ + m_.token.choice, 1, m_.token.experts, m_.token.k};
  }
  __device__ __forceinline__ const int32_t* chosen() const { return reinterpret_cast<const int32_t*>(choice().chosen); }

  // Behind the head's column: what its end, usual or screened, keeps.
  __device__ __forceinline__ char* behind_column() const {
    return stage() + weight_tiles::column_stride(m_.token.embedding.C);
  }
  __device__ __forceinline__ const Matrix& matrix(Stage stage, const LayerStages& l) const {
    switch (stage) {
      case Stage::qkv: return l.qkv.w;
      case Stage::output: return l.output.w;
      case Stage::gate_up: return l.gate_up.w;
      case Stage::down: return l.down.w;
      case Stage::attention:
      case Stage::head: break;
    }
    return m_.token.head.w;
  }
  __device__ __forceinline__ RankMemory& rank_memory() const {
    return *reinterpret_cast<RankMemory*>(memory_ + sizeof(TokenMemory));
  }
  __device__ __forceinline__ uint64_t* qkv_sums(uint32_t layer) const { return m_.token.sums.qkv(m_.stamp + layer); }
  __device__ __forceinline__ uint64_t* down_sums(uint32_t layer) const { return m_.token.sums.down(m_.stamp + layer); }
  __device__ __forceinline__ uint64_t* logit_sums() const { return m_.token.sums.output() + m_.token.sums.logits; }
  __device__ __forceinline__ char* columns() const {
    return reinterpret_cast<char*>(m_.token.sums.output() + m_.token.sums.columns);
  }
  __device__ __forceinline__ uint32_t units(uint32_t i) const {
    return Attention::units(layer(i).attention, m_.keys[i % 2]);
  }
  template <class Load, class Complete>
  __device__ __forceinline__ void read_again(Load&& load, Complete&& complete) const {
    megakernel::read_again(load, complete, m_.token.grid.watch);
  }
  // Of what no grid barrier has announced: until what load() brings is complete(). Gives up before those who wait for
  // this block do, so that the record names what was missing first.
  template <class Load, class Complete>
  __device__ __forceinline__ void wait_for(Load&& load, Complete&& complete, uint32_t number) const {
    if (complete()) return;
    gpu::Watch watch = m_.token.grid.watch;
    watch.limit_ns = watch.limit_ns / 4 * 3;
    tile::wait_until(
        [&] {
          load();
          return complete();
        },
        [] { return 0u; }, 1, watch, number);
  }

  // A row's sum over all warps, in the order that its bits depend on.
  __device__ __forceinline__ static float of_warps(const float (&sums)[kTokenWarps][16], uint32_t of) {
    float fours[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w)
      fours[w] = (sums[4 * w][of] + sums[4 * w + 1][of]) + (sums[4 * w + 2][of] + (w < 3 ? sums[4 * w + 3][of] : 0));
    return (fours[0] + fours[1]) + (fours[2] + fours[3]);
  }

  char* const memory_;
  TokenMemory& m_;
};

}  // namespace ingot::decode
