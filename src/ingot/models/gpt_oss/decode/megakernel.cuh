#pragma once
// A whole token by one persistent kernel, a block an SM: one warp copies the block's share of the weights into a ring
// (megakernel/weight_stream.cuh), as far ahead as the router allows; fifteen warps multiply what has come. A hand-off
// after each stage:
//   qkv | attention | output, with the router's logits | gate and up | down | ... | head
// All that is handed over is words that say when they are complete (megakernel/sums.cuh, tile/stamped.cuh, TokenSums),
// so hand-offs have no fence and may be announced before the words are there; attention waits for its own head's words,
// not for all blocks. Every block keeps the residual stream to itself and adds to it what all have added up; its
// copying warp chooses the experts.
//
// What a product can know before its column comes is worked out while others are waited for, by threads that have
// nothing to end.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/granule_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/megakernel/exchange.cuh"
#include "ingot/megakernel/handoff.cuh"
#include "ingot/megakernel/sums.cuh"
#include "ingot/megakernel/weight_stream.cuh"
#include "ingot/models/gpt_oss/decode/choose.cuh"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/decode/piece_attention.cuh"
#include "ingot/models/gpt_oss/decode/screen.cuh"
#include "ingot/models/gpt_oss/decode/sections.h"
#include "ingot/models/gpt_oss/decode/stages.cuh"

namespace ingot::gpt_oss_decode {

// That compute; one warp more copies, and sixteen in all leave 128 registers a thread.
constexpr uint32_t kTokenWarps = megakernel::kTeams * megakernel::kTeamWarps, kTokenThreads = 32 * kTokenWarps;
constexpr int kDim = kTokenHeadDim;
constexpr uint32_t kKeysAhead = 6;   // pieces of keys under way where there are many: nobody hands over meanwhile
constexpr uint32_t kHeldBands = 12;  // whose sums have room at once
// The threads that end rows, one for each sum that has room, take turns: those of the product that comes prepare while
// the others end the one before. None are of the first warp, which waits for the other blocks.
constexpr uint32_t kEnding = 16 * kHeldBands, kFirstEnding = kTokenThreads - kEnding, kFirstOfOthers = 32;
static_assert(kFirstOfOthers + kEnding <= kFirstEnding, "they are others");

constexpr uint32_t kChosenBarrier = 1;
using RowSum = megakernel::FixedSum<28>;    // of the two blocks that may share a row
using LogitSum = megakernel::FixedSum<20>;  // of all blocks

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
  megakernel::HandoffMemory handoffs;
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

using ScreenMemory = screen::Memory<kTokenWarps, kHeldBands>;
static_assert(sizeof(ScreenMemory) <= kBestBytes, "in the place of what the usual head keeps there");

inline void place(Token& t, const LayerStages& l, int64_t most_bytes) {
  const auto up = [](int64_t n, int64_t to) { return uint32_t((n + to - 1) / to * to); };
  t.choice = up(sizeof(TokenMemory) + (t.ranks != nullptr ? sizeof(RankMemory) : 0), 16);
  t.x = up(t.choice + ChoiceMemory::bytes(1, t.experts, t.k), 16);
  t.stage = up(t.x + int64_t(granules::padded(l.qkv.w.cols)) * 4, 128);
  t.ring = up(t.stage + std::max({int64_t(sizeof(piece_attention::Memory<kDim>)),
                                  int64_t(granules::column_stride(l.qkv.w.cols)) + kBestBytes,
                                  int64_t(granules::column_stride(l.output.w.cols)),
                                  t.k * granules::column_bytes(l.down.w.cols)}),
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

template <WeightFormat F> constexpr uint32_t kMostOfPiece = megakernel::kSlotBytes / granules::Form<F>::kBytes;

// What the readers of a piece need to know of it.
__device__ __forceinline__ megakernel::WeightNote note_of(const Piece& p) {
  return {p.entry, p.band, p.first, p.count};
}
__device__ __forceinline__ Piece noted(const megakernel::WeightNote& n) {
  return {nullptr, n.word[0], n.word[1], n.word[2], n.word[3]};
}

// A warp's part of a piece, in registers: while a column is waited for each team takes one out of the ring, which has
// room for as many more.
struct HeldPiece {
  granules::Stored<WeightFormat::bf16> granule[2];
  uint32_t what = 0;  // how many granules the piece has, of which of the round's bands (from bit 4), from which on (8)
};

// kRanks: several GPUs make the token; what output and down add to x is the sum of their parts.
// kScreened: of the head only the likeliest id is wanted, and Token::head's matrix is in 8 bits (ScreenedHead).
template <WeightFormat D, WeightFormat E, bool kTraced, bool kRanks, bool kScreened = false> class TokenProgram {
 public:
  __device__ __forceinline__ explicit TokenProgram(const ScreenedHead* screened = nullptr)
      : memory_(tile::dynamic_shared<char>()),
        m_(*reinterpret_cast<TokenMemory*>(memory_)),
        handoffs_(m_.token.grid, m_.handoffs),
        screened_(screened) {}

  __device__ __forceinline__ void run(const Token& token) {
    copy_words(m_.token, token);
    copy_words(m_.layers[0], token.layers[0]);
    if constexpr (kRanks) {
      copy_words(rank_memory().ranks, *token.ranks);
      if (threadIdx.x == 0) rank_memory().epoch = ptx::load_relaxed(token.ranks->exchange.epoch);
    }
    for (uint32_t i = threadIdx.x; i < sizeof(m_.sums) / 4; i += blockDim.x) (&m_.sums[0][0][0])[i] = 0;
    if (threadIdx.x == 0) {
      m_.stream.begin();
      ptx::mbarrier_init(&m_.routed, kTokenWarps);
      ptx::fence_mbarrier_init();
      m_.position = uint32_t(__ldcg(&token.embedding.state->position));
      m_.stamp = ptx::load_relaxed(token.stamps) + 1;  // memory begins as zeros
    }
    __syncthreads();
    const auto& rotation = m_.layers[0].attention;
    if (threadIdx.x == 0) m_.keys[0] = {rotation, m_.position};
    if (threadIdx.x < rotation.dim / 2) {
      m_.cos[threadIdx.x] = rotation.cos[size_t(m_.position) * (rotation.dim / 2) + threadIdx.x];
      m_.sin[threadIdx.x] = rotation.sin[size_t(m_.position) * (rotation.dim / 2) + threadIdx.x];
    }
    if (threadIdx.x <= uint32_t(Stage::head)) m_.sections[threadIdx.x] = section_of(Stage(threadIdx.x), layer(0));
    __syncthreads();
    if constexpr (kTraced) keep_bytes();
    sampling::Best top;
    if (threadIdx.x < kTokenThreads)
      compute(top);
    else
      copy_weights();
    __syncthreads();
    if (m_.token.head_rows == 0) {
      if (blockIdx.x == 0 && threadIdx.x == 0 && handoffs_.all_came()) m_.token.head.state->position += 1;
      if constexpr (kRanks) leave_ranks(blockIdx.x == 0 && threadIdx.x == 0);
      return;
    }
    uint64_t key;
    const bool last = likeliest_of_grid(m_.token.head, top, key);
    if constexpr (kRanks) key = last ? likeliest_of_ranks(key) : 0;
    if (last && handoffs_.all_came()) append(m_.token.head, key);
    if constexpr (kRanks) leave_ranks(last);
  }

 private:
  // What this block reads of each product, behind its times.
  __device__ __forceinline__ void keep_bytes() const {
    const megakernel::Trace& t = m_.token.grid.trace;
    if (blockIdx.x >= t.blocks || threadIdx.x >= kTracedBytes) return;
    const Section& s = m_.sections[threadIdx.x];
    t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + threadIdx.x] =
        uint64_t(s.range.end - s.range.begin) * uint64_t(s.granule_bytes) +
        (threadIdx.x == uint32_t(Stage::output) && s.range.begin < s.range.end
             ? uint64_t((s.range.end - 1) / s.granules - s.range.begin / s.granules + 1) * layer(0).router.w.bands * 512
             : 0);
  }

  // --- several GPUs

  __device__ __forceinline__ RankMemory& rank_memory() const {
    return *reinterpret_cast<RankMemory*>(memory_ + sizeof(TokenMemory));
  }
  // Of layer i: the output's sums, then down's.
  __device__ __forceinline__ uint32_t epoch_of(uint32_t i, Stage stage) const {
    return rank_memory().epoch + 2 * i + (stage == Stage::output ? 1 : 2);
  }
  // This block's part of a sum, to all ranks: of two, a begin is the first.
  __device__ __forceinline__ void send_part(uint32_t i, Stage stage, const RowPlace& row, float value) const {
    const megakernel::Exchange& x = rank_memory().ranks.exchange;
    const uint32_t epoch = epoch_of(i, stage), second = granules::padded(m_.token.embedding.C) + row.n;
    megakernel::send(x, epoch, row.begins() ? row.n : second, value);
    if (row.terms() == 2) megakernel::send(x, epoch, second, 0);
  }
  // Each block adds the ranks' parts of some bands and publishes them as one GPU's blocks do; the output's with what
  // the router makes of them.
  __device__ __forceinline__ void add_ranks(uint32_t i, Stage stage, const LayerStages& l) const {
    const Ranks& r = rank_memory().ranks;
    const bool routes = stage == Stage::output;
    const uint32_t C = m_.token.embedding.C, each = bands_of_block(C, gridDim.x), slot = threadIdx.x / 16,
                   row = threadIdx.x % 16, epoch = epoch_of(i, stage), from = routes ? r.heads : r.channels,
                   what = kHandoffsOfLayer * i + uint32_t(stage), end = min((blockIdx.x + 1) * each, (C + 15) / 16);
    uint64_t* const sums = routes ? m_.token.sums.output() : down_sums(i);
    keep_exchange(i, routes, 0);
#pragma unroll 1
    for (uint32_t band = blockIdx.x * each; band < end; band += kHeldBands) {
      const uint32_t held = min(end - band, kHeldBands), n = 16 * (band + slot) + row;
      if (routes) ask_router(l, band, held);
      if (slot < held) {
        float part = 0;
        if (n < C) {
          const float gain = routes ? l.router.weight[n] : 0;
          const float sum = megakernel::sum_of_ranks<2>(r.exchange, from, epoch, n, granules::padded(C), r.watch, what);
          RowSum::add(sums + n, sum, 2);
          part = gain * (x()[n] + sum);
        }
        put_normed(slot, row, part);
      }
      if (!routes) continue;
      TokenTeam::sync();
      if (band + held == end) keep_exchange(i, routes, 1);
      add_logits(l, band, held, band + held == end ? 1 : 0);
      if (band + held < end) TokenTeam::sync();
    }
    if constexpr (kTraced) TokenTeam::sync();
    if (!routes || blockIdx.x * each >= end) keep_exchange(i, routes, 1);
  }
  // The time of an exchange's begin or end, as the first thread sees it.
  __device__ __forceinline__ void keep_exchange(uint32_t i, bool output, uint32_t which) const {
    if constexpr (kTraced) {
      const megakernel::Trace& t = m_.token.grid.trace;
      if (threadIdx.x == 0 && blockIdx.x < t.blocks)
        t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + kTracedBytes + kExchangeStamps * i +
                (output ? 0 : 2) + which] = ptx::global_timer();
    }
  }
  // By one thread of the grid, which knows the best of this GPU's ids.
  __device__ __forceinline__ uint64_t likeliest_of_ranks(uint64_t key) const {
    const Ranks& r = rank_memory().ranks;
    return megakernel::largest_of_ranks(r.exchange, r.ids, rank_memory().epoch + 2 * m_.token.count, key, r.watch,
                                        kHandoffsOfLayer * m_.token.count);
  }
  // `last`: in one thread of the grid, when all have begun.
  __device__ __forceinline__ void leave_ranks(bool last) const {
    const Ranks& r = rank_memory().ranks;
    if (last) ptx::store_relaxed(r.exchange.epoch, rank_memory().epoch + 2 * m_.token.count);
    if (threadIdx.x == 0) megakernel::pass_on_stop(r.exchange, r.watch);
  }

  // --- what is where

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

  // --- this block's part of each product

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
  // A granule of a screened head's codes has the bytes of one of fp8.
  static constexpr WeightFormat kOfHead = kScreened ? WeightFormat::fp8 : D;
  static_assert(kScreenGranule == granules::Form<WeightFormat::fp8>::kBytes, "kOfHead");
  template <WeightFormat F>
  __device__ __forceinline__ Section section(const Matrix& w, uint32_t share, bool bank = false,
                                             bool by_band = false) const {
    const uint32_t entries = bank ? m_.token.k : 1;
    return {.granule_bytes = granules::Form<F>::kBytes,
            .band_bytes = w.band_bytes,
            .matrix_bytes = w.matrix_bytes,
            .expert = bank ? chosen() : nullptr,
            .granules = w.granules,
            .bands = max(w.bands, 1u),  // there are none where another GPU has them
            .entries = entries,
            .by_band = by_band,
            .piece = piece_of(w.granules, kMostOfPiece<F>),
            .column_stride = uint32_t(granules::column_bytes(w.cols)),
            .range = range_of(w.granules * w.bands * entries, share, blockIdx.x)};
  }
  // The same in all layers.
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

  // --- the warp that copies

  __device__ __forceinline__ void copy_weights() {
    megakernel::WeightWriter to(m_.token.stream, m_.stream, memory_ + m_.token.ring);
    uint32_t i = 0;
#pragma unroll 1
    for (Stage stage = Stage::qkv; stage != Stage::head || m_.token.head_rows > 0; stage = Stage(int(stage) + 1)) {
      put(to, stage, layer(i), i);
      if (stage == Stage::head) return;
      if (stage == Stage::down && ++i < m_.token.count) stage = Stage(int(Stage::qkv) - 1);
    }
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
      if (chooses) choose(l.router, i % 2);
      chooses = false;
      if (first >= end) return;
      s.add_expert(p);
      const uint32_t bytes = p.count * uint32_t(s.granule_bytes), count = min(end - first, 32u);
#pragma unroll 1
      for (uint32_t lane = 0; lane < count; ++lane) to.put(lane, p.data, bytes, note_of(p));
    }
  }

  // What earlier tokens have left, of the block's units.
  __device__ __forceinline__ void put_keys(megakernel::WeightWriter& to, const decode_attention::Params& p,
                                           const piece_attention::Keys& keys) const {
    constexpr uint32_t kRow = kDim * 2, kKeys = piece_attention::kPieceKeys;
    static_assert(2 * kKeys * kRow <= megakernel::kSlotBytes && piece_attention::kPieceWarps == megakernel::kTeamWarps);
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

  // --- the warps that multiply

  __device__ __forceinline__ void compute(sampling::Best& top) {
    handoffs_.begin();
    megakernel::WeightReader from(m_.token.stream, m_.stream, memory_ + m_.token.ring,
                                  threadIdx.x / 32 / megakernel::kTeamWarps, megakernel::kTeams);
    embed_token();
    HeldPiece held;
    uint32_t round = 0;  // of a product: its first band
    RowNumbers row;
    // One code for all products, one for all hand-offs: a program that does not fit into the instruction cache waits
    // for itself. It begins before a hand-off that there is none of.
    Stage stage = Stage::down;
#pragma unroll 1
    for (uint32_t i = ~0u;;) {
      const bool begins = i == ~0u;
      bool again = false;  // the same product's next round
      auto& attention_memory = *reinterpret_cast<piece_attention::Memory<kDim>*>(memory_ + m_.token.stage);
      if (!begins) {
        const LayerStages& l = layer(i);
        if (stage == Stage::attention) {
          attend({l.attention, m_.keys[i % 2], m_.token.attention, m_.stamp + i, attention_memory}, i, from);
        } else {
          multiply(stage, l, i, round, row, held, from);
          again = round + kHeldBands < m_.sections[int(stage)].end_sums;
        }
        if (again) {
          TokenTeam::sync();
        } else {
          if constexpr (kRanks)
            if (stage == Stage::output || stage == Stage::down) add_ranks(i, stage, l);
          if (!kScreened && stage == Stage::head) {
            if (ending(stage) < kEnding && m_.sections[int(stage)].range.begin < m_.sections[int(stage)].range.end)
              top = best();
            return handoffs_.end();
          }
          // Where it was announced before, the first warp already waits while the others end their rows.
          const bool announced = stage == Stage::attention ? blockIdx.x < units(i) : announces(stage);
          handoffs_.end_stage(!announced);
          if (stage == Stage::qkv)
            handoffs_.pass();
          else if (!announced)
            handoffs_.announce(stage == Stage::attention && m_.zeroes != 0);
        }
      }
      // What does not depend on the others' part of this stage, all that the next one can know of itself.
      const bool last = i + 1 == m_.token.count;
      const Stage next = again ? stage : stage != Stage::down ? Stage(int(stage) + 1) : last ? Stage::head : Stage::qkv;
      held = {};  // what a stage leaves to the next one and no other needs registers for
      if (!again && stage == Stage::down) ++i;
      const LayerStages& l = layer(i);
      // The output's rows are found while attention's queries are on their way: who attends is waited for.
      const Stage product = next == Stage::attention ? Stage::output : next;
      const Section& s = m_.sections[int(product)];
      round = again ? round + kHeldBands : s.begin_sums;
      if (next != Stage::output || again) row = row_end(product, l, s, round);
      if (next == Stage::attention) {
        zero(i, units(i));
        if (!last) copy_words_async(m_.layers[(i + 1) % 2], m_.token.layers[i + 1]);
        if (!last && threadIdx.x == 0) m_.keys[(i + 1) % 2] = {m_.token.layers[i + 1].attention, m_.position};
      } else {
        if (next == Stage::gate_up) {
          prefetch_norm(l.gate_up.weight, l.gate_up.w);
        } else if (next == Stage::down) {
          const ChoiceMemory m = choice();
          if (blockIdx.x == 0) routing::make_lists(m.chosen, m.weights, l.router.k, l.router.lists);
        } else {
          const NormProduct& product = next == Stage::head ? m_.token.head : l.qkv;
          prefetch_norm(product.weight, product.w);
        }
        if (next != Stage::gate_up && next != Stage::down && !(kScreened && next == Stage::head))
          hold(round, s.pieces_of(round, kHeldBands), from, held);
      }
      if (!begins && !again) {
        if (stage != Stage::qkv) handoffs_.wait(false);
        if (stage == Stage::output) route(layer(i), i);
        if (stage == Stage::attention && i == 0 && blockIdx.x == 0 && threadIdx.x == 0)  // all have read it
          ptx::store_relaxed(m_.token.stamps, m_.stamp - 1 + m_.token.count);
        if (next == Stage::head && m_.token.head_rows == 0) return handoffs_.end();
        if constexpr (kScreened)
          if (next == Stage::head) return screen_head(top, from);
      }
      stage = next;
    }
  }
  // Of what says by itself that it is there a block may announce that it is before it is: when its first warps have
  // multiplied their last weights, so that the rows are there when the others ask for them, or are asked for again. Not
  // where the others wait for what other GPUs add to it.
  __device__ __forceinline__ static bool announces(Stage stage) {
    return stage == Stage::gate_up || (!kRanks && (stage == Stage::output || stage == Stage::down));
  }

  __device__ __forceinline__ void embed_token() const {
    const Embedding& e = m_.token.embedding;
    const bf16* const row = e.table + int64_t(__ldcg(&e.state->tokens[0])) * e.C;
    for (uint32_t c = threadIdx.x; c < granules::padded(e.C); c += kTokenThreads) x()[c] = c < e.C ? float(row[c]) : 0;
    TokenTeam::sync();
  }
  // Brings a norm's weight near, by one thread of the grid.
  __device__ __forceinline__ static void prefetch_norm(const float* weight, const Matrix& w) {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 32) ptx::prefetch_to_l2(weight, w.cols * 4 / 16 * 16);
  }
  __device__ __forceinline__ uint64_t* qkv_sums(uint32_t layer) const { return m_.token.sums.qkv(m_.stamp + layer); }
  __device__ __forceinline__ uint64_t* down_sums(uint32_t layer) const { return m_.token.sums.down(m_.stamp + layer); }
  __device__ __forceinline__ uint64_t* logit_sums() const { return m_.token.sums.output() + m_.token.sums.logits; }
  __device__ __forceinline__ char* columns() const {
    return reinterpret_cast<char*>(m_.token.sums.output() + m_.token.sums.columns);
  }
  // During attention: what all blocks have read becomes zeros again. By the blocks that attention leaves idle, where
  // there are any, who then fence it: the others do not have to.
  __device__ __forceinline__ void zero(uint32_t layer, uint32_t units) const {
    const uint32_t first = units < gridDim.x ? units : 0;
    if (threadIdx.x == 0) m_.zeroes = blockIdx.x >= first;
    if (blockIdx.x < first) return;
    uint64_t* const from = m_.token.sums.used(m_.stamp + layer);
    const uint64_t* const to = from + m_.token.sums.used_words();
#pragma unroll 1
    for (uint64_t* p = from + (blockIdx.x - first) * kTokenThreads + threadIdx.x; p < to;
         p += (gridDim.x - first) * kTokenThreads)
      ptx::store_relaxed(p, uint64_t(0));
  }
  __device__ __forceinline__ uint32_t units(uint32_t i) const {
    return Attention::units(layer(i).attention, m_.keys[i % 2]);
  }
  template <class Load, class Complete>
  __device__ __forceinline__ void read_again(Load&& load, Complete&& complete) const {
    megakernel::read_again(load, complete, m_.token.grid.watch);
  }
  // x += sums, where there are any; x times the norm's weight becomes the column, a word of two numbers at a time.
  template <WeightFormat F>
  __device__ __forceinline__ void stage_normed(const float* weight, const Matrix& w, const uint64_t* sums) const {
    constexpr bool kFp8 = F == WeightFormat::fp8;
    constexpr uint32_t kHeld = 3,
                       kNext = kFp8 ? 2 : 1;  // words on their way at once; from a word's number to the other
    const auto number = [](uint32_t word) { return kFp8 ? word / 2 * 4 + word % 2 : 2 * word; };
    const uint32_t C = w.cols, words = 32 * w.granules;
    char* const column = stage();
    float* const x = this->x();
    float sum = 0;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < words; first += kHeld * kTokenThreads) {
      uint64_t added[kHeld][2] = {};
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u) {
          const uint32_t c = number(first + u * kTokenThreads);
          if (!kFp8 && c < C) ptx::load_relaxed(sums + c, added[u]);
          if (kFp8 && c < C) added[u][0] = ptx::load_relaxed(sums + c);
          if (kFp8 && c + kNext < C) added[u][1] = ptx::load_relaxed(sums + c + kNext);
        }
      };
      if (sums != nullptr) load();
      float scale[kHeld][2] = {};
#pragma unroll
      for (uint32_t i = 0; i < 2 * kHeld; ++i) {
        const uint32_t c = number(first + i / 2 * kTokenThreads) + i % 2 * kNext;
        if (c < C) scale[i / 2][i % 2] = __ldcg(weight + c);
      }
      if (sums != nullptr)
        read_again(load, [&] {
          bool all = true;
#pragma unroll
          for (uint32_t i = 0; i < 2 * kHeld; ++i)
            all &= (RowSum::count(added[i / 2][i % 2]) == 2) |
                   (number(first + i / 2 * kTokenThreads) + i % 2 * kNext >= C);
          return all;
        });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u) {
        const uint32_t c = number(first + u * kTokenThreads);
        if (first + u * kTokenThreads >= words) continue;
        float v[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          v[h] = x[c + h * kNext];
          if (c + h * kNext < C) v[h] += RowSum::value(added[u][h]);
          if (sums != nullptr) x[c + h * kNext] = v[h];
          sum += v[h] * v[h];
          v[h] *= scale[u][h] * granules::Form<F>::kLift;
        }
        *reinterpret_cast<uint32_t*>(column + 2 * granules::place(kFp8, c)) = ptx::pack(bf16{}, v[0], v[1]);
      }
    }
    sum = granules::lanes_sum(sum);
    if (threadIdx.x % 32 == 0) m_.squares[threadIdx.x / 32] = sum;
  }
  // Of numbers of the hidden size, after a barrier.
  __device__ __forceinline__ float rstd(float eps) const {
    const float of_all = 1 / float(m_.token.embedding.C);
    float sum[16];
#pragma unroll
    for (uint32_t w = 0; w < 16; ++w) sum[w] = w < kTokenWarps ? m_.squares[w] : 0;
#pragma unroll
    for (uint32_t w = 0; w < 8; ++w) sum[w] += sum[w + 8];
    const float halves = (sum[0] + sum[4]) + (sum[2] + sum[6]), others = (sum[1] + sum[5]) + (sum[3] + sum[7]);
    return rsqrtf((halves + others) * of_all + eps);
  }
  // What attention has published of this layer; meanwhile() while it travels.
  template <class Meanwhile>
  __device__ __forceinline__ void stage_mixed(uint32_t C, uint32_t stamp, Meanwhile&& meanwhile) const {
    constexpr uint32_t kHeld = 3;  // on their way at once
    const tile::Stamped* const from = m_.token.attention.mixed;
    char* const column = stage();
    uint32_t first = threadIdx.x;
#pragma unroll 1
    do {
      tile::Stamped held[kHeld];
      const auto is_there = [&](uint32_t u) { return 4 * (first + u * kTokenThreads) < C; };
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (is_there(u)) held[u] = tile::Stamped::load(from + first + u * kTokenThreads);
      };
      load();
      if (first == threadIdx.x) meanwhile();
      read_again(load, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u) all &= (held[u].stamp == stamp) | !is_there(u);
        return all;
      });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (4 * (first + u * kTokenThreads) < granules::padded(C))
          granules::put_words4(column, D, 4 * (first + u * kTokenThreads), held[u].word[0], held[u].word[1]);
      first += kHeld * kTokenThreads;
    } while (first < granules::padded(C) / 4);
  }
  // All columns of `down`, of C channels each.
  __device__ __forceinline__ void stage_columns(uint32_t C, uint32_t count) const {
    constexpr uint32_t kHeld = 3;  // pieces of 16 bytes on their way at once
    const uint32_t all = count * uint32_t(granules::column_bytes(C)) / 16;
    const char* const from = columns();
    char* const to = stage();
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < all; first += kHeld * kTokenThreads) {
      uint64_t held[kHeld][2] = {};
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (first + u * kTokenThreads < all)
            ptx::load_relaxed_16(from + (first + u * kTokenThreads) * 16, held[u][0], held[u][1]);
      };
      load();
      read_again(load, [&] {
        bool there = true;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kHeld; ++i)
          there &= ((uint32_t(held[i / 2][i % 2]) != 0) & (held[i / 2][i % 2] >> 32 != 0)) |
                   (first + i / 2 * kTokenThreads >= all);
        return there;
      });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (first + u * kTokenThreads < all) {
          const uint64_t low = ~held[u][0], high = ~held[u][1];
          *reinterpret_cast<uint4*>(to + (first + u * kTokenThreads) * 16) =
              make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
        }
    }
  }
  // By whole warps: lane `row` of 16 has channel n in its row 2 (n % 8); two channels are a word of a column. Whoever
  // has the last ones adds the zeros behind them.
  __device__ __forceinline__ void put_channel(const RowPlace& row, const Matrix& w, float value) const {
    constexpr bool kFp8 = E == WeightFormat::fp8;
    constexpr uint32_t kNext = kFp8 ? 2 : 1;
    constexpr float kLift = granules::Form<E>::kLift;
    const uint32_t width = w.rows / 2, n = row.n / 2;
    if (!row.mine()) value = 0;
    const float next = __shfl_down_sync(~0u, value, 2 * kNext);
    if (!row.ends() || row.n % 2 != 0 || n % (2 * kNext) >= kNext) return;
    char* const column = columns() + row.entry() * granules::column_bytes(width);
    const auto put = [&](uint32_t channel, uint32_t word) {
      ptx::store_relaxed(reinterpret_cast<uint32_t*>(column + 2 * granules::place(kFp8, channel)), ~word);
    };
    put(n, ptx::pack(bf16{}, value * kLift, next * kLift));
    if (n / 8 + 1 == w.bands)
#pragma unroll 1
      for (uint32_t behind = n + 8; behind < granules::padded(width); behind += 8) put(behind, 0);
  }

  // The number of a thread among those that end a product's rows; of others kEnding or more.
  __device__ __forceinline__ static bool by_others(Stage stage) {
    return stage == Stage::output || stage == Stage::down;
  }
  __device__ __forceinline__ static uint32_t ending(Stage stage) {
    return threadIdx.x - (by_others(stage) ? kFirstOfOthers : kFirstEnding);
  }
  __device__ __forceinline__ RowPlace& row_place(Stage stage) const { return m_.rows[by_others(stage)][ending(stage)]; }
  __device__ __forceinline__ RowNumbers row_end(Stage stage, const LayerStages& l, const Section& s,
                                                uint32_t round) const {
    RowNumbers e{.scale = 1};
    const uint32_t v = round + ending(stage) / 16, begin = v * s.of_sums();
    if (ending(stage) >= kEnding) return e;
    RowPlace& place = row_place(stage);
    place.what = 0;
    if (v >= s.end_sums) return e;
    const bool begins = s.range.begin <= begin, ends = s.range.end >= begin + s.of_sums();
    const uint32_t entry = stage == Stage::gate_up ? v / s.bands : 0, band = v - entry * s.bands,
                   n = 16 * band + threadIdx.x % 16;
    const Matrix& w = matrix(stage, l);
    place = {n, 32 * entry + RowPlace::kEnds + (begins ? RowPlace::kBegins + RowPlace::kTerm : 0) +
                    (ends ? RowPlace::kTerm : 0) + (n < w.rows ? RowPlace::kMine : 0)};
    const float* const scale =
        D == WeightFormat::fp8 && stage != Stage::gate_up && stage != Stage::down
            ? reinterpret_cast<const float*>(w.data + band * w.band_bytes + w.granules * granules::Form<D>::kBytes) +
                  threadIdx.x % 16
            : nullptr;
    if (stage == Stage::output) {
      // They travel while others are waited for, and take no registers.
      RowNumbers& to = m_.output_rows[ending(stage)];
      to = {};
      if (scale != nullptr)
        bring(to.scale, scale);
      else
        to.scale = 1;
      if (n < w.rows) bring(to.gain, l.router.weight + n);
      if (n < w.rows && l.output.bias != nullptr && place.begins()) bring(to.bias, l.output.bias + n);
      return e;
    }
    if (scale != nullptr) e.scale = *scale;
    if (n >= w.rows) return e;
    if (stage != Stage::gate_up) e.bias = bias_of(stage, l, w.rows, 0, n);
    return e;
  }
  __device__ __forceinline__ static void bring(float& to, const float* from) {
    ptx::cp_async<4>(ptx::shared_address(&to), from);
  }
  __device__ __forceinline__ float bias_of(Stage stage, const LayerStages& l, uint32_t rows, uint32_t entry,
                                           uint32_t n) const {
    const float* const bias = stage == Stage::qkv       ? l.qkv.bias
                              : stage == Stage::output  ? l.output.bias
                              : stage == Stage::gate_up ? l.gate_up.bias
                              : stage == Stage::down    ? l.down.bias
                                                        : nullptr;
    if (bias == nullptr) return 0;
    if (stage == Stage::gate_up) return bias[int64_t(chosen()[entry]) * rows + n];
    if (stage != Stage::down) return bias[n];
    float sum = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < m_.token.k; ++j) sum += choice().weights[j] * bias[int64_t(chosen()[j]) * rows + n];
    return sum;
  }

  // Other instances have fewer dense weights than the ring has room for, or no registers left.
  static constexpr bool kHolds = D == WeightFormat::bf16 && E == WeightFormat::mxfp4 && !kRanks;
  __device__ __forceinline__ void hold(uint32_t round, uint32_t pieces, megakernel::WeightReader& from,
                                       HeldPiece& held) const {
    if constexpr (kHolds) {
      constexpr uint32_t team = megakernel::kTeamWarps;
      static_assert(2 * team >= kMostOfPiece<D>, "a warp holds two granules");
      const uint32_t lane = threadIdx.x % 32, begin = threadIdx.x / 32 % team;
      from.read_one(pieces, [&](const char* granule, const megakernel::WeightNote& note) {
        const Piece p = noted(note);
        held.what = p.count + 16 * (p.band - round) + 256 * p.first;
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u)
          if (begin + u * team < p.count)
            load_staged(held.granule[u], granule + (begin + u * team) * granules::Form<D>::kBytes, lane);
      });
    }
  }

  // A round of the block's part of a product.
  __device__ __forceinline__ void multiply_round(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                                 const RowNumbers& row, HeldPiece& held,
                                                 megakernel::WeightReader& from) const {
    const Section& s = m_.sections[int(stage)];
    const bool experts = stage == Stage::gate_up || stage == Stage::down, routes = !kRanks && stage == Stage::output,
               last = round + kHeldBands >= s.end_sums;
    float drop = experts ? granules::Form<E>::kDrop : granules::Form<D>::kDrop;
    if (ending(stage) < kEnding && !by_others(stage))  // these columns are normed
      drop *= rstd(stage == Stage::qkv ? l.qkv.eps : stage == Stage::gate_up ? l.gate_up.eps : m_.token.head.eps);
    const uint32_t pieces = s.pieces_of(round, kHeldBands);
    if (experts)
      multiply_pieces<E, true>(s, (stage == Stage::down ? l.down.w : l.gate_up.w).data, pieces, round, held, from);
    else
      multiply_pieces<D, false>(s, nullptr, pieces, round, held, from);
    if (last && announces(stage)) handoffs_.announce();
    if (s.range.begin == s.range.end) return;
    TokenTeam::sync();
    if (ending(stage) < kEnding) end(stage, l, i, round, row, drop);
    if (routes) {
      TokenTeam::sync();
      add_logits(l, round, s.bands_of(round, kHeldBands), last ? 1 : 0);
    }
  }
  template <WeightFormat F, bool kBank>
  __device__ __forceinline__ void multiply_pieces(const Section& s, const uint8_t* data, uint32_t pieces, uint32_t band,
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
        granules::load_row_scales(data + s.expert[entry] * s.matrix_bytes + of_band * s.band_bytes, s.granules, of_row);
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
        const char* const mine[1] = {column + held.what / 256 * granules::kColumnBytes};
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u)
          if (first + u * team < held.what % 16)
            granules::multiply<F, 1>(held.granule[u], mine, (first + u * team) * granules::kColumnBytes, sum);
      }
    }
    from.read(pieces, [&](const char* granule, const megakernel::WeightNote& note) {
      const Piece p = noted(note);
      if (of_band != ~0u && (p.band != of_band || p.entry != entry)) leave();
      entry = p.entry, of_band = p.band;
      const char* const mine[1] = {column + p.entry * stride + p.first * granules::kColumnBytes};
#pragma unroll 1
      for (uint32_t g = first; g < p.count; g += team) {
        granules::Stored<F> w;
        load_staged(w, granule + g * granules::Form<F>::kBytes, lane);
        granules::multiply<F, 1>(w, mine, g * granules::kColumnBytes, sum);
      }
    });
    if (of_band != ~0u) leave();
  }
  template <WeightFormat F>
  __device__ __forceinline__ static void load_staged(granules::Stored<F>& s, const char* granule, uint32_t lane) {
#pragma unroll
    for (int i = 0; i < int(sizeof(s.word) / 16); ++i) {
      const uint4 w = *reinterpret_cast<const uint4*>(granule + i * 512 + lane * 16);
      s.word[i][0] = w.x, s.word[i][1] = w.y, s.word[i][2] = w.z, s.word[i][3] = w.w;
    }
    if constexpr (F == WeightFormat::mxfp4) s.scales = *reinterpret_cast<const uint32_t*>(granule + 512 + lane / 4 * 4);
  }
  // --- the router: each block multiplies the part of the residual stream whose sums it has by the router's columns

  // A band's 16 rows are the columns of one step of the router's granules.
  static constexpr uint32_t kStepBytes = 512;
  __device__ __forceinline__ static const uint8_t* router_step(const Matrix& w, uint32_t router_band, uint32_t band) {
    return w.data + router_band * w.band_bytes + band / 4 * granules::Form<WeightFormat::bf16>::kBytes +
           band % 4 * kStepBytes + threadIdx.x % 32 * 16;
  }
  // This lane's part of the steps that were asked for, behind the output's column; null where they have no room there.
  __device__ __forceinline__ char* asked_steps(const LayerStages& l, uint32_t held) const {
    const uint32_t column = (granules::column_stride(l.output.w.cols) + 127) / 128 * 128;
    if (m_.token.stage + column + held * l.router.w.bands * kStepBytes > m_.token.ring) return nullptr;
    return stage() + column + threadIdx.x % 32 * 16;
  }
  __device__ __forceinline__ void ask_router(const LayerStages& l, uint32_t band, uint32_t bands) const {
    char* const to = asked_steps(l, bands);
    if (to == nullptr) return;
    const Matrix& w = l.router.w;
#pragma unroll 1
    for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.bands; r += kTokenWarps)
#pragma unroll 1
      for (uint32_t i = 0; i < bands; ++i)
        ptx::cp_async<16>(ptx::shared_address(to + (i * w.bands + r) * kStepBytes), router_step(w, r, band + i));
    ptx::cp_async_commit_group();
  }
  // Of m_.normed, to all logits. Each lane reads what it has asked for itself.
  __device__ __forceinline__ void add_logits(const LayerStages& l, uint32_t band, uint32_t bands,
                                             uint32_t count) const {
    const Matrix& w = l.router.w;
    const char* const asked = asked_steps(l, bands);
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    ptx::cp_async_wait_group<0>();
#pragma unroll 1
    for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.bands; r += kTokenWarps) {
      float sum[4] = {};
#pragma unroll 1
      for (uint32_t i = 0; i < bands; ++i) {
        const uint4 step = asked != nullptr ? *reinterpret_cast<const uint4*>(asked + (i * w.bands + r) * kStepBytes)
                                            : *reinterpret_cast<const uint4*>(router_step(w, r, band + i));
        const uint32_t a[4] = {step.x, step.y, step.z, step.w};
        uint32_t b[2] = {};  // two of the eight columns: a number's first eight bits, and what they leave
        if (g < 2) {
          b[0] = *reinterpret_cast<const uint32_t*>(&m_.normed[g][i][2 * t]);
          b[1] = *reinterpret_cast<const uint32_t*>(&m_.normed[g][i][2 * t + 8]);
        }
        ptx::mma_m16n8k16(bf16{}, sum, a, b);
      }
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t e = 16 * r + g + 8 * h;
        if (t == 0 && e < w.rows) LogitSum::add(logit_sums() + e, sum[2 * h] + sum[2 * h + 1], count);
      }
    }
  }
  // After the output's hand-off: its sums become the column of gate and up, the logits are laid before the copying
  // warp, who chooses. The last warps, which have least of the column to make, read the logits.
  __device__ __forceinline__ void route(const LayerStages& l, uint32_t i) const {
    const Router& p = l.router;
    const ChoiceMemory m = choice();
    uint64_t word = 0;
    uint32_t e = kTokenThreads - 1 - threadIdx.x;
    const auto load = [&] {
      if (e < p.w.rows) word = ptx::load_relaxed(logit_sums() + e);
    };
    load();
    stage_normed<E>(l.gate_up.weight, l.gate_up.w, m_.token.sums.output());
#pragma unroll 1
    while (e < p.w.rows) {
      read_again(load, [&] { return LogitSum::count(word) == m_.token.shares.routers; });
      m.logits[e] = LogitSum::value(word);
      e += kTokenThreads;
      load();
    }
    // By all warps: what each wrote, the next layer's stages too, is the copying warp's to read.
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&m_.routed);
    ptx::barrier_sync_unaligned(kChosenBarrier, kTokenThreads + 32);
    if (threadIdx.x / 32 == kTokenWarps - 1) weigh(m.logits, p.k, m.chosen, m.weights);  // down asks for it
  }
  // By the copying warp, as soon as there is what it needs.
  __device__ __forceinline__ void choose(const Router& p, uint32_t parity) const {
    const ChoiceMemory m = choice();
    float* const logits = m.logits;
    const uint32_t lane = threadIdx.x % 32, rows = p.w.rows, k = p.k;
    constexpr uint32_t kHeld = kLogitsOfLane;
    float bias[kHeld], logit[kHeld] = {};  // biases that are there before
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) bias[u] = lane + 32 * u < rows ? p.bias[lane + 32 * u] : 0;
    megakernel::wait_for_slot(&m_.routed, parity);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u)
      if (lane + 32 * u < rows) logit[u] = logits[lane + 32 * u];
    const float scale = rstd(p.eps);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) {
      logit[u] = logit[u] * scale + bias[u];
      if (lane + 32 * u < rows) logits[lane + 32 * u] = logit[u];
    }
#pragma unroll 1
    for (uint32_t e = lane + 32 * kHeld; e < rows; e += 32) logits[e] = logits[e] * scale + p.bias[e];
    __syncwarp();
    choose_held(logits, logit, rows, k, m.chosen);
    ptx::barrier_arrive(kChosenBarrier, kTokenThreads + 32);
  }

  // --- stages

  using Attention = piece_attention::Attention<kDim, kTokenThreads, TokenTeam>;
  // Who attends waits for the queries, keys and values himself, and announces before his result is there.
  __device__ __forceinline__ void attend(const Attention& attention, uint32_t layer,
                                         megakernel::WeightReader& from) const {
    const uint64_t* const sums = qkv_sums(layer);
    const auto projected = [&](uint32_t i, uint32_t j, float& a, float& b) {
      uint64_t word[2];
      const auto load = [&] { word[0] = ptx::load_relaxed(sums + i), word[1] = ptx::load_relaxed(sums + j); };
      load();
      wait_for(
          load, [&] { return (RowSum::count(word[0]) == 2) & (RowSum::count(word[1]) == 2); },
          kHandoffsOfLayer * layer + uint32_t(Stage::qkv));
      a = RowSum::value(word[0]), b = RowSum::value(word[1]);
    };
    const uint32_t number = kHandoffsOfLayer * layer + uint32_t(Stage::attention), units = this->units(layer);
    const auto put = [&](uint32_t n, uint32_t a, uint32_t b) {
      tile::Stamped{{a, b, 0}, m_.stamp + layer}.store(m_.token.attention.mixed + n / 4);
    };
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
      if (unit != blockIdx.x) TokenTeam::sync();
      attention.attend(
          unit, m_.cos, m_.sin,
          [&](uint32_t count, auto&& use) {
            from.read(count, [&](const char* piece, const megakernel::WeightNote& note) { use(piece, note.word[0]); });
          },
          projected, put,
          [&] {
            if (units - unit <= gridDim.x) handoffs_.announce(m_.zeroes != 0);
          });
    }
    if (!attention.has_parts()) return;
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x)
      attention.add_parts(
          unit, [&](auto&& load, auto&& complete) { wait_for(load, complete, number); }, put);
  }
  // Of what no hand-off has announced: until what load() brings is complete(). Gives up before those who wait for this
  // block do, so that the record names what was missing first.
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

  // From the columns to what the block publishes, a round of it.
  __device__ __forceinline__ void multiply(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                           RowNumbers& row, HeldPiece& held, megakernel::WeightReader& from) const {
    if (stage == Stage::gate_up) {  // its column is there, the choice now too
      if (ending(stage) < kEnding && row_place(stage).mine())
        row.bias = bias_of(stage, l, l.gate_up.w.rows, row_place(stage).entry(), row_place(stage).n);
    } else if (stage == Stage::output) {
      const bool begins = round == m_.sections[int(stage)].begin_sums;
      stage_mixed(begins ? l.output.w.cols : 0, m_.stamp + i, [&] {
        join_copies();
        if (!kRanks) ask_router(l, round, m_.sections[int(stage)].bands_of(round, kHeldBands));
      });
    } else if (round > m_.sections[int(stage)].begin_sums) {
      // the column is that of the round before
    } else if (stage == Stage::down) {
      stage_columns(l.down.w.cols, m_.token.k);
    } else {
      const NormProduct& p = stage == Stage::qkv ? l.qkv : m_.token.head;
      stage_normed<D>(p.weight, p.w, i > 0 ? down_sums(i - 1) : nullptr);
    }
    TokenTeam::sync();
    multiply_round(stage, l, i, round, row, held, from);
  }
  // The likeliest id of what an ending thread has seen.
  __device__ __forceinline__ sampling::Best& best() const {
    return reinterpret_cast<sampling::Best*>(stage() +
                                             granules::column_stride(m_.token.embedding.C))[ending(Stage::head)];
  }
  __device__ __forceinline__ static float of_warps(const float (&sums)[kTokenWarps][16], uint32_t of) {
    float fours[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w)
      fours[w] = (sums[4 * w][of] + sums[4 * w + 1][of]) + (sums[4 * w + 2][of] + (w < 3 ? sums[4 * w + 3][of] : 0));
    return (fours[0] + fours[1]) + (fours[2] + fours[3]);
  }
  // By the ending threads, whole warps of them, after a barrier: a row's sum over all warps goes where it belongs.
  __device__ __forceinline__ void end(Stage stage, const LayerStages& l, uint32_t i, uint32_t round, RowNumbers row,
                                      float drop) const {
    static_assert(kTokenWarps == 15, "the sum's tree");
    if (stage == Stage::output) row = m_.output_rows[ending(stage)];
    float(&sums)[kTokenWarps][16] = m_.sums[ending(stage) / 16];
    const uint32_t of = threadIdx.x % 16;
    const RowPlace place = row_place(stage);
    finish(stage, l, i, round, place, row, of_warps(sums, of) * (drop * row.scale));
    if (place.ends())
#pragma unroll
      for (uint32_t w = 0; w < kTokenWarps; ++w) sums[w][of] = 0;
  }
  __device__ __forceinline__ void finish(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                         const RowPlace& place, const RowNumbers& row, float y) const {
    const bool mine = place.mine() && !(stage == Stage::qkv && is_missing(i));
    if (stage == Stage::gate_up) {
      y += row.bias;
      const float up = __shfl_xor_sync(~0u, y, 1);
      return put_channel(place, l.gate_up.w, gated(y, up, l.gate_up.limit, l.gate_up.alpha));
    }
    if (!kScreened && stage == Stage::head) {
      sampling::Best top;
      if (round > m_.sections[int(stage)].begin_sums) top = best();
      if (mine) {
        m_.token.head.y[place.n] = y;
        const uint32_t id = (kRanks ? m_.token.head.first_id : 0) + place.n;
        if (id < m_.token.head.vocab) top.add(y, id);
      }
      best() = top;
      return;
    }
    if (place.begins()) y += row.bias;
    if constexpr (kRanks)
      if (stage != Stage::qkv) {
        if (mine) send_part(i, stage, place, y);
        return;
      }
    const bool routes = stage == Stage::output;
    if (mine)
      RowSum::add((routes                ? m_.token.sums.output()
                   : stage == Stage::qkv ? qkv_sums(i)
                                         : down_sums(i)) +
                      place.n,
                  y, place.terms());
    if (!routes || !place.ends()) return;
    put_normed(ending(stage) / 16, threadIdx.x % 16, mine ? row.gain * (y + (place.begins() ? x()[place.n] : 0)) : 0);
  }
  // For tests: this block's queries, keys and values stay away, which no hand-off announces.
  __device__ __forceinline__ bool is_missing(uint32_t i) const {
    return m_.token.grid.missing == kHandoffsOfLayer * i + uint32_t(Stage::qkv) && blockIdx.x == gridDim.x - 1;
  }
  __device__ __forceinline__ void put_normed(uint32_t slot, uint32_t row, float value) const {
    const bf16 high(value), low(value - float(high));
    m_.normed[0][slot][row] = high.bits, m_.normed[1][slot][row] = low.bits;
  }

  // --- a screened head (screen.h)

  // Behind the column, where the usual head keeps the best of each thread.
  __device__ __forceinline__ ScreenMemory& screen_memory() const {
    return *reinterpret_cast<ScreenMemory*>(stage() + granules::column_stride(m_.token.embedding.C));
  }
  // The codes say how large each row's logit can be, and what the largest is at least; rows that may be it are
  // multiplied as the usual head multiplies all.
  __device__ __forceinline__ void screen_head(sampling::Best& top, megakernel::WeightReader& from) const {
    const NormProduct& p = m_.token.head;
    const Section& s = m_.sections[int(Stage::head)];
    ScreenMemory& m = screen_memory();
    const uint32_t turn = from.turn();  // of the usual head's pieces, where it came now
    stage_normed<D>(p.weight, p.w, m_.token.count > 0 ? down_sums(m_.token.count - 1) : nullptr);
    if (threadIdx.x == 0) m.count = 0;
    TokenTeam::sync();
    const screen::Column x = norm_column(rstd(p.eps) * granules::Form<D>::kDrop);
    uint32_t lower = 0;
#pragma unroll 1
    for (uint32_t round = s.begin_sums; round < s.end_sums; round += kHeldBands) {
      const uint32_t n = 16 * round + threadIdx.x;
      const bool mine = is_screened_row(s, n);
      const ScreenRow row = mine ? screened_->rows[n] : ScreenRow{};
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
    handoffs_.end();
  }
  // Whether this thread compares row n, of a round's first `kEnding`.
  __device__ __forceinline__ bool is_screened_row(const Section& s, uint32_t n) const {
    const NormProduct& p = m_.token.head;
    return threadIdx.x < kEnding && n < min(16 * s.end_sums, min(p.w.rows, p.vocab));
  }
  __device__ __forceinline__ screen::Column norm_column(float drop) const {
    ScreenMemory& m = screen_memory();
    const uint32_t words = 32 * m_.token.head.w.granules;
    float squares = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < words; i += kTokenThreads) {
      float a, b;
      ptx::unpack(bf16{}, reinterpret_cast<const uint32_t*>(stage())[i], a, b);
      squares += a * a + b * b;
    }
    squares = granules::lanes_sum(squares);
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
    from.read(s.pieces_of(round, kHeldBands), [&](const char* granule, const megakernel::WeightNote& note) {
      const Piece p = noted(note);
      float sum[4] = {};
#pragma unroll 2
      for (uint32_t g = warp % team; g < p.count; g += team)
        screen::multiply(granule + g * kScreenGranule, column + (p.first + g) * granules::kColumnBytes, lane, sum);
      float(&to)[16] = m_.sums[p.band - round][warp];
      if (lane % 4 == 0) to[lane / 4] += sum[0], to[lane / 4 + 8] += sum[2];
    });
  }
  // Of what each block knows: a word of each, which says of which token it is.
  __device__ __forceinline__ uint32_t largest_of_grid(uint32_t lower) const {
    ScreenMemory& m = screen_memory();
    const uint32_t warp = threadIdx.x / 32, number = kHandoffsOfLayer * m_.token.count;
    lower = __reduce_max_sync(~0u, lower);
    if (threadIdx.x % 32 == 0) m.lower[warp] = lower;
    TokenTeam::sync();
    if (threadIdx.x == 0 && !(m_.token.grid.missing == number && blockIdx.x == gridDim.x - 1)) {
#pragma unroll
      for (uint32_t w = 1; w < kTokenWarps; ++w) lower = max(lower, m.lower[w]);
      ptx::store_relaxed(screened_->lowest + blockIdx.x, uint64_t(m_.stamp) << 32 | lower);
    }
    uint32_t largest = 0;
#pragma unroll 1
    for (uint32_t b = threadIdx.x; b < gridDim.x; b += kTokenThreads) {
      uint64_t word;
      const auto load = [&] { word = ptx::load_relaxed(screened_->lowest + b); };
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
    ScreenMemory& m = screen_memory();
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
    static_assert(kOfPiece * team >= kMostOfPiece<D>, "a warp's granules of a piece");
    const Matrix& w = screened_->head;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = warp % team,
                   piece = piece_of(w.granules, kMostOfPiece<D>), of_band = (w.granules + piece - 1) / piece;
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
        granules::Stored<D> granule[kHalves][kOfPiece];
        const auto granule_of = [&](uint32_t h, uint32_t u) { return (first + h * teams) * piece + begin + u * team; };
        const auto is_there = [&](uint32_t h, uint32_t u) {
          return begin + u * team < piece && granule_of(h, u) < w.granules;
        };
#pragma unroll
        for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
          for (uint32_t u = 0; u < kOfPiece; ++u) {
            granule[h][u] = {};
            if (wanted && is_there(h, u))
              granules::load(granule[h][u], data + granule_of(h, u) * granules::Form<D>::kBytes, lane);
          }
        __syncwarp();
#pragma unroll
        for (uint32_t h = 0; h < kHalves; ++h)
#pragma unroll
          for (uint32_t u = 0; u < kOfPiece; ++u)
            if (is_there(h, u))
              granules::multiply<D, 1>(granule[h][u], mine, granule_of(h, u) * granules::kColumnBytes, sum);
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
      top.add(y, n);
    }
    TokenTeam::sync();
  }

  char* const memory_;
  TokenMemory& m_;
  const megakernel::Handoffs<TokenTeam, kTraced> handoffs_;
  const ScreenedHead* const screened_;
};

template <WeightFormat D, WeightFormat E, bool kTraced, bool kRanks>
__global__ void __launch_bounds__(kTokenThreads + 32, 1) token_kernel(const __grid_constant__ Token token) {
  TokenProgram<D, E, kTraced, kRanks>().run(token);
}

template <WeightFormat D>
__global__ void __launch_bounds__(kTokenThreads + 32, 1)
    screened_token_kernel(const __grid_constant__ Token token, const __grid_constant__ ScreenedHead head) {
  TokenProgram<D, WeightFormat::mxfp4, false, false, true>(&head).run(token);
}

// --- launcher

inline Shares shares_of(const Token& t, const LayerStages& l, uint32_t blocks) {
  const auto granules = [&](const Matrix& w, uint32_t entries) {
    return share_of_granules(uint64_t(w.bands) * entries, w.granules, blocks);
  };
  Shares s{.qkv = granules(l.qkv.w, 1),
           .output = granules(l.output.w, 1),
           .gate_up = share_of_bands(uint64_t(l.gate_up.w.bands) * t.k, l.gate_up.w.granules, blocks),
           .down = std::max(granules(l.down.w, t.k), l.down.w.granules * t.k),
           .head = share_of_bands(t.head.w.bands, t.head.w.granules, blocks)};
  const uint32_t of_output = l.output.w.bands * l.output.w.granules;
  s.routers = (of_output + s.output - 1) / s.output;
  if (t.ranks != nullptr) {
    const uint32_t each = bands_of_block(t.embedding.C, blocks);
    s.routers = ((t.embedding.C + 15) / 16 + each - 1) / each;
  }
  return s;
}

constexpr int64_t kMostShared = 226 * 1024;  // what a block can have, less what is declared beside it

template <WeightFormat D> bool Megakernel<D>::fits(const Model& m) {
  Token token{.experts = uint32_t(m.config.experts), .k = uint32_t(m.config.experts_per_token)};
  LayerStages layer{};
  layer.qkv.w = m.layers[0].qkv, layer.output.w = m.layers[0].o, layer.down.w = m.layers[0].down;
  place(token, layer, kMostShared);
  return token.stream.ahead > 0;
}

template <class Kernel, class... More>
void launch_kernel(Kernel kernel, Token token, const LayerStages& layer, int64_t blocks, Stream stream,
                   const More&... more) {
  place(token, layer, kMostShared);
  gpu::Launch at{.block = kTokenThreads + 32,
                 .smem = token.bytes,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device(),
                 .cooperative = true};
  at.grid = std::min<int64_t>(gpu::resident_blocks("decode token", kernel, at), kMostBlocks);
  if (blocks > 0) at.grid = blocks;
  token.shares = shares_of(token, layer, uint32_t(at.grid));
  gpu::launch("decode token", kernel, at, stream, token, more...);
}
template <WeightFormat D, WeightFormat E, bool kTraced = false, bool kRanks = false>
void launch_token(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  launch_kernel(token_kernel<D, E, kTraced, kRanks>, token, layer, blocks, stream);
}

template <WeightFormat D>
void Megakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  const WeightFormat experts = layer.down.w.format;
  if (experts == WeightFormat::mxfp4) return launch_token<D, WeightFormat::mxfp4>(token, layer, blocks, stream);
  if (experts == WeightFormat::fp8) return launch_token<D, WeightFormat::fp8>(token, layer, blocks, stream);
  launch_token<D, WeightFormat::bf16>(token, layer, blocks, stream);
}

template <WeightFormat D>
void ScreenedMegakernel<D>::launch(const Token& token, const ScreenedHead& head, const LayerStages& layer,
                                   int64_t blocks, Stream stream) {
  launch_kernel(screened_token_kernel<D>, token, layer, blocks, stream, head);
}

template <WeightFormat D>
void RankMegakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  launch_token<D, WeightFormat::mxfp4, false, true>(token, layer, blocks, stream);
}

template <WeightFormat D>
void TracedRankMegakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  launch_token<D, WeightFormat::mxfp4, true, true>(token, layer, blocks, stream);
}

template <WeightFormat D>
void TracedMegakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  launch_token<D, WeightFormat::mxfp4, true>(token, layer, blocks, stream);
}

}  // namespace ingot::gpt_oss_decode
