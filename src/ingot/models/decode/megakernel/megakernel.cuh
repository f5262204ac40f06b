#pragma once
// A whole token by one persistent kernel, a block an SM: one warp copies the block's share of the weights into a ring
// (megakernel/weight_stream.cuh), as far ahead as the router allows; fifteen warps multiply what has come. A grid
// barrier after each stage:
//   qkv | attention | output, with the router's logits | gate and up | down | ... | head
// All that is handed over is words that say when they are complete (megakernel/sums.cuh, tile/stamped.cuh, TokenSums),
// so grid barriers have no fence and may be announced before the words are there; attention waits for its own head's
// words, not for all blocks. Every block keeps the residual stream to itself and adds to it what all have added up; its
// copying warp chooses the experts.
//
// What a product can know before its column comes is worked out while others are waited for, by threads that have
// nothing to end.
//
// Here are the order of the stages, attention, the kernels and their launch. The rest is in parts:
//   token_block.cuh     a block's memory and what its parts share
//   token_weights.cuh   the copying warp, and which weights are this block's
//   token_columns.cuh   what a product multiplies
//   token_products.cuh  weights times column
//   token_rows.cuh      the ends of products
//   token_router.cuh    the choice of experts
//   token_ranks.cuh     several GPUs
//   screened_head.cuh   a head of which few rows are read in bf16
#include "ingot/gpu/launch.h"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/megakernel/token_products.cuh"
#include "ingot/models/decode/megakernel/token_rows.cuh"
#include "ingot/models/decode/megakernel/token_weights.cuh"
#include "ingot/models/decode/prefilter/screened_head.cuh"

namespace ingot::decode {

template <TokenVariant V> class TokenProgram : public TokenBlock {
  static constexpr WeightFormat D = V.dense, E = V.experts;
  static constexpr bool kTraced = V.traced, kRanks = V.ranks, kScreened = V.screened;

 public:
  __device__ __forceinline__ explicit TokenProgram(const ScreenedHead* screened)
      : grid_barriers_(m_.token.grid, m_.grid_barriers), screened_head_(screened) {}

  __device__ __forceinline__ void run(const Token& token) {
    copy_words(m_.token, token);
    copy_words(m_.layers[0], token.layers[0]);
    if constexpr (kRanks) ranks_.begin(*token.ranks);
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
    if (threadIdx.x <= uint32_t(Stage::head))
      m_.sections[threadIdx.x] = weights_.section_of(Stage(threadIdx.x), layer(0));
    __syncthreads();
    if constexpr (kTraced) keep_bytes();
    sampling::Best top;
    if (threadIdx.x < kTokenThreads)
      compute(top);
    else
      weights_.copy();
    __syncthreads();
    if (m_.token.head_rows == 0) {
      if (blockIdx.x == 0 && threadIdx.x == 0 && grid_barriers_.all_came()) m_.token.head.state->position += 1;
      if constexpr (kRanks) ranks_.leave(blockIdx.x == 0 && threadIdx.x == 0);
      return;
    }
    uint64_t key;
    const bool last = likeliest_of_grid(m_.token.head, top, key);
    if constexpr (kRanks) key = last ? ranks_.likeliest(key) : 0;
    if (last && grid_barriers_.all_came()) append(m_.token.head, key);
    if constexpr (kRanks) ranks_.leave(last);
  }

 private:
  // What this block reads of each product, behind its times.
  __device__ __forceinline__ void keep_bytes() const {
    const megakernel::Trace& t = m_.token.grid.trace;
    if (blockIdx.x >= t.blocks || threadIdx.x >= kTracedBytes) return;
    const Section& s = m_.sections[threadIdx.x];
    t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + threadIdx.x] =
        uint64_t(s.range.end - s.range.begin) * uint64_t(s.weight_tile_bytes) +
        (threadIdx.x == uint32_t(Stage::output) && s.range.begin < s.range.end
             ? uint64_t((s.range.end - 1) / s.weight_tiles - s.range.begin / s.weight_tiles + 1) *
                   layer(0).router.w.bands * 512
             : 0);
  }

  // --- the warps that multiply

  __device__ __forceinline__ void compute(sampling::Best& top) {
    grid_barriers_.begin();
    megakernel::WeightReader from(m_.token.stream, m_.stream, memory_ + m_.token.ring,
                                  threadIdx.x / 32 / megakernel::kTeamWarps, megakernel::kTeams);
    embed_token();
    HeldPiece held;
    uint32_t round = 0;  // of a product: its first band
    RowNumbers row;
    // One code for all products, one for all grid barriers: a program that does not fit into the instruction cache
    // waits for itself. It begins before a grid barrier that there is none of.
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
            if (stage == Stage::output || stage == Stage::down) ranks_.add(i, stage, l);
          if (!kScreened && stage == Stage::head) {
            if (rows_.ending(stage) < kEnding &&
                m_.sections[int(stage)].range.begin < m_.sections[int(stage)].range.end)
              top = rows_.best();
            return grid_barriers_.end();
          }
          // Where it was announced before, the first warp already waits while the others end their rows.
          const bool announced = stage == Stage::attention ? blockIdx.x < units(i) : announces(stage);
          grid_barriers_.end_stage(!announced);
          if (stage == Stage::qkv)
            grid_barriers_.pass();
          else if (!announced)
            grid_barriers_.announce(stage == Stage::attention && m_.zeroes != 0);
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
      if (next != Stage::output || again) row = rows_.begin(product, l, s, round);
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
          products_.hold(round, s.pieces_of(round, kHeldBands), from, held);
      }
      if (!begins && !again) {
        if (stage != Stage::qkv) grid_barriers_.wait(false);
        if (stage == Stage::output) router_.route<E>(layer(i), i);
        if (stage == Stage::attention && i == 0 && blockIdx.x == 0 && threadIdx.x == 0)  // all have read it
          ptx::store_relaxed(m_.token.stamps, m_.stamp - 1 + m_.token.count);
        if (next == Stage::head && m_.token.head_rows == 0) return grid_barriers_.end();
        if constexpr (kScreened)
          if (next == Stage::head) {
            screened_head_.run(top, from);
            return grid_barriers_.end();
          }
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
    for (uint32_t c = threadIdx.x; c < weight_tiles::padded(e.C); c += kTokenThreads)
      x()[c] = c < e.C ? float(row[c]) : 0;
    TokenTeam::sync();
  }
  // Brings a norm's weight near, by one thread of the grid.
  __device__ __forceinline__ static void prefetch_norm(const float* weight, const Matrix& w) {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 32) ptx::prefetch_to_l2(weight, w.cols * 4 / 16 * 16);
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
  // A round of the block's part of a product.
  __device__ __forceinline__ void multiply_round(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                                 const RowNumbers& row, HeldPiece& held,
                                                 megakernel::WeightReader& from) const {
    const Section& s = m_.sections[int(stage)];
    const bool experts = stage == Stage::gate_up || stage == Stage::down, routes = !kRanks && stage == Stage::output,
               last = round + kHeldBands >= s.end_sums;
    float drop = experts ? weight_tiles::Form<E>::kDrop : weight_tiles::Form<D>::kDrop;
    if (rows_.ending(stage) < kEnding && !rows_.by_others(stage))  // these columns are normed
      drop *= columns_.rstd(stage == Stage::qkv       ? l.qkv.eps
                            : stage == Stage::gate_up ? l.gate_up.eps
                                                      : m_.token.head.eps);
    const uint32_t pieces = s.pieces_of(round, kHeldBands);
    if (experts)
      products_.template multiply<E, true>(s, (stage == Stage::down ? l.down.w : l.gate_up.w).data, pieces, round, held,
                                           from);
    else
      products_.template multiply<D, false>(s, nullptr, pieces, round, held, from);
    if (last && announces(stage)) grid_barriers_.announce();
    if (s.range.begin == s.range.end) return;
    TokenTeam::sync();
    if (rows_.ending(stage) < kEnding) rows_.end(stage, l, i, round, row, drop);
    if (routes) {
      TokenTeam::sync();
      router_.add_logits(l, round, s.bands_of(round, kHeldBands), last ? 1 : 0);
    }
  }
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
          kGridBarriersPerLayer * layer + uint32_t(Stage::qkv));
      a = RowSum::value(word[0]), b = RowSum::value(word[1]);
    };
    const uint32_t number = kGridBarriersPerLayer * layer + uint32_t(Stage::attention), units = this->units(layer);
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
            if (units - unit <= gridDim.x) grid_barriers_.announce(m_.zeroes != 0);
          });
    }
    if (!attention.has_parts()) return;
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x)
      attention.add_parts(
          unit, [&](auto&& load, auto&& complete) { wait_for(load, complete, number); }, put);
  }
  // From the columns to what the block publishes, a round of it.
  __device__ __forceinline__ void multiply(Stage stage, const LayerStages& l, uint32_t i, uint32_t round,
                                           RowNumbers& row, HeldPiece& held, megakernel::WeightReader& from) const {
    if (stage == Stage::gate_up) {  // its column is there, the choice now too
      if (rows_.ending(stage) < kEnding && rows_.place_of(stage).mine())
        row.bias = rows_.bias_of(stage, l, l.gate_up.w.rows, rows_.place_of(stage).entry(), rows_.place_of(stage).n);
    } else if (stage == Stage::output) {
      const bool begins = round == m_.sections[int(stage)].begin_sums;
      columns_.stage_mixed<D>(begins ? l.output.w.cols : 0, m_.stamp + i, [&] {
        join_copies();
        if (!kRanks) router_.ask_router(l, round, m_.sections[int(stage)].bands_of(round, kHeldBands));
      });
    } else if (round > m_.sections[int(stage)].begin_sums) {
      // the column is that of the round before
    } else if (stage == Stage::down) {
      columns_.stage_columns(l.down.w.cols, m_.token.k);
    } else {
      const NormProduct& p = stage == Stage::qkv ? l.qkv : m_.token.head;
      columns_.stage_normed<D>(p.weight, p.w, i > 0 ? down_sums(i - 1) : nullptr);
    }
    TokenTeam::sync();
    multiply_round(stage, l, i, round, row, held, from);
  }

  const megakernel::GridBarriers<TokenTeam, kTraced> grid_barriers_;
  const TokenColumns columns_;
  const TokenRouter router_;
  const TokenRanks<kTraced> ranks_;
  const TokenWeights<D, E, kScreened> weights_;
  const TokenProducts<D, E, kRanks> products_;
  const TokenRows<D, E, kTraced, kRanks, kScreened> rows_;
  const ScreenedHeadProgram<D, kRanks> screened_head_;
};

// The kernel's parameters: the token, and of a screened variant its head.
template <bool kScreened> struct TokenArguments {
  Token token;
  __device__ __forceinline__ const ScreenedHead* screened_head() const { return nullptr; }
};
template <> struct TokenArguments<true> {
  Token token;
  ScreenedHead head;
  __device__ __forceinline__ const ScreenedHead* screened_head() const { return &head; }
};

// The fields of a TokenVariant: nvcc takes no struct as a kernel's template argument.
template <WeightFormat kDense, WeightFormat kExperts, bool kTraced, bool kRanks, bool kScreened>
__global__ void __launch_bounds__(kTokenThreads + 32, 1)
    token_kernel(const __grid_constant__ TokenArguments<kScreened> p) {
  TokenProgram<TokenVariant{kDense, kExperts, kTraced, kRanks, kScreened}>(p.screened_head()).run(p.token);
}

// --- launcher

inline Shares shares_of(const Token& t, const LayerStages& l, uint32_t blocks) {
  const auto weight_tiles = [&](const Matrix& w, uint32_t entries) {
    return share_of_weight_tiles(uint64_t(w.bands) * entries, w.weight_tiles, blocks);
  };
  Shares s{.qkv = weight_tiles(l.qkv.w, 1),
           .output = weight_tiles(l.output.w, 1),
           .gate_up = share_of_bands(uint64_t(l.gate_up.w.bands) * t.k, l.gate_up.w.weight_tiles, blocks),
           .down = std::max(weight_tiles(l.down.w, t.k), l.down.w.weight_tiles * t.k),
           .head = share_of_bands(t.head.w.bands, t.head.w.weight_tiles, blocks)};
  const uint32_t of_output = l.output.w.bands * l.output.w.weight_tiles;
  s.routers = (of_output + s.output - 1) / s.output;
  if (t.ranks != nullptr) {
    const uint32_t each = bands_of_block(t.embedding.C, blocks);
    s.routers = ((t.embedding.C + 15) / 16 + each - 1) / each;
  }
  return s;
}

template <TokenVariant V>
void Megakernel<V>::launch(const Token& token, const ScreenedHead& head, const LayerStages& layer, int64_t blocks,
                           Stream stream) {
  TokenArguments<V.screened> p{token};
  if constexpr (V.screened) p.head = head;
  place(p.token, layer, kMostShared);
  gpu::Launch at{.block = kTokenThreads + 32,
                 .smem = p.token.bytes,
                 .device = std::max(0, gpu::current_device()),
                 .cooperative = true};
  const auto kernel = token_kernel<V.dense, V.experts, V.traced, V.ranks, V.screened>;
  at.grid = blocks > 0 ? blocks : std::min<int64_t>(gpu::resident_blocks("decode token", kernel, at), kMostBlocks);
  p.token.shares = shares_of(p.token, layer, uint32_t(at.grid));
  gpu::launch("decode token", kernel, at, stream, p);
}

}  // namespace ingot::decode
