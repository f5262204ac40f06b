#pragma once
// A whole token by one persistent kernel, a block an SM: one warp copies the block's share of the weights into a ring
// (megakernel/weight_stream.cuh), as far ahead as the router allows; fifteen warps multiply what has come. A hand-off
// after each stage:
//   qkv | attention | output | router | gate and up | down | ... | head
// Every block keeps the residual stream to itself and adds to it what the others publish; every block chooses the
// experts by itself.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/granule_product.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/megakernel/handoff.cuh"
#include "ingot/megakernel/weight_stream.cuh"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/decode/sections.h"
#include "ingot/models/gpt_oss/decode/stages.cuh"

namespace ingot::gpt_oss_decode {

// That compute; one warp more copies, and sixteen in all leave 128 registers a thread.
constexpr uint32_t kTokenWarps = 15, kTokenThreads = 32 * kTokenWarps;
constexpr uint32_t kAttentionTeams = 2;
constexpr int kDim = kTokenHeadDim;
constexpr uint32_t kHeldBands = 12;  // whose sums have room at once

enum class Product { qkv, output, router, gate_up, down, head };

struct TokenTeam {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync_unaligned(3, kTokenThreads); }
};
// In dynamic shared memory: what the stages are told, then the places of `Token`.
struct TokenMemory {
  Token token;
  LayerStages layers[2];  // this one and the next
  megakernel::HandoffMemory handoffs;
  megakernel::WeightStreamMemory stream;
  Section sections[6];  // of Product
  uint64_t chosen;      // completes once a layer: its experts are known
  float squares[kTokenWarps];
  float sums[kHeldBands][kTokenWarps][16];  // zeros between products
};

inline void place(Token& t, const LayerStages& l, int64_t most_bytes) {
  const auto up = [](int64_t n, int64_t to) { return uint32_t((n + to - 1) / to * to); };
  t.choice = up(sizeof(TokenMemory), 16);
  t.x = up(t.choice + ChoiceMemory::bytes(1, t.experts, t.k), 16);
  t.stage = up(t.x + int64_t(granules::padded(l.qkv.w.cols)) * 4, 128);
  t.ring = up(t.stage + std::max({int64_t(kAttentionTeams * sizeof(decode_attention::Memory<kDim>)),
                                  int64_t(granules::column_stride(l.qkv.w.cols)),
                                  int64_t(granules::column_stride(l.output.w.cols)),
                                  int64_t(t.k) * granules::column_stride(l.down.w.cols)}),
              128);
  const int64_t slots = (most_bytes - t.ring) / megakernel::kSlotBytes;
  t.stream.slots = uint32_t(std::clamp<int64_t>(slots, 0, megakernel::kMostSlots));
  const uint32_t teams = kTokenWarps / t.stream.team_warps;
  t.stream.ahead = std::min(t.stream.ahead, t.stream.slots > teams ? t.stream.slots - teams : 0);
  t.bytes = t.ring + t.stream.slots * megakernel::kSlotBytes;
}

template <WeightFormat F> constexpr uint32_t kMostOfPiece = megakernel::kSlotBytes / granules::Form<F>::kBytes;

// What the readers of a piece need to know of it.
__device__ __forceinline__ megakernel::WeightNote note_of(const Piece& p) {
  return {p.entry, p.band, p.first, p.count};
}
__device__ __forceinline__ Piece noted(const megakernel::WeightNote& n) {
  return {nullptr, n.word[0], n.word[1], n.word[2], n.word[3]};
}

template <WeightFormat D, WeightFormat E, bool kTraced> class TokenProgram {
 public:
  __device__ __forceinline__ TokenProgram()
      : memory_(tile::dynamic_shared<char>()),
        m_(*reinterpret_cast<TokenMemory*>(memory_)),
        handoffs_(m_.token.grid, m_.handoffs) {}

  __device__ __forceinline__ void run(const Token& token) {
    copy_words(m_.token, token);
    copy_words(m_.layers[0], token.layers[0]);
    for (uint32_t i = threadIdx.x; i < sizeof(m_.sums) / 4; i += blockDim.x) (&m_.sums[0][0][0])[i] = 0;
    if (threadIdx.x == 0) {
      m_.stream.begin(token.stream);
      ptx::mbarrier_init(&m_.chosen, kTokenThreads);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x <= uint32_t(Product::head)) m_.sections[threadIdx.x] = section_of(Product(threadIdx.x), layer(0));
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
      return;
    }
    sampling::Drawn drawn;
    if (likeliest_of_grid(m_.token.head, top, drawn) && handoffs_.all_came()) append(m_.token.head, drawn);
  }

 private:
  // What this block reads of each product, behind its times.
  __device__ __forceinline__ void keep_bytes() const {
    const megakernel::Trace& t = m_.token.grid.trace;
    if (blockIdx.x >= t.blocks || threadIdx.x >= t.extra) return;
    const Section& s = m_.sections[threadIdx.x];
    t.words[int64_t(blockIdx.x) * t.words_of_block() + t.stamps() + threadIdx.x] =
        uint64_t(s.range.end - s.range.begin) * uint64_t(s.granule_bytes);
  }

  // --- what is where

  template <class T> __device__ __forceinline__ static void copy_words(T& to, const T& from) {
    static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
    for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kTokenThreads)
      reinterpret_cast<uint64_t*>(&to)[w] = reinterpret_cast<const uint64_t*>(&from)[w];
  }
  __device__ __forceinline__ const LayerStages& layer(uint32_t i) const { return m_.layers[i % 2]; }
  __device__ __forceinline__ char* stage() const { return memory_ + m_.token.stage; }
  __device__ __forceinline__ float* x() const { return reinterpret_cast<float*>(memory_ + m_.token.x); }
  __device__ __forceinline__ ChoiceMemory choice() const {
    return {memory_ + m_.token.choice, 1, m_.token.experts, m_.token.k};
  }
  __device__ __forceinline__ const int32_t* chosen() const { return reinterpret_cast<const int32_t*>(choice().chosen); }

  // --- this block's part of each product

  __device__ __forceinline__ const Matrix& matrix(Product product, const LayerStages& l) const {
    switch (product) {
      case Product::qkv: return l.qkv.w;
      case Product::output: return l.output.w;
      case Product::router: return l.router.w;
      case Product::gate_up: return l.gate_up.w;
      case Product::down: return l.down.w;
      case Product::head: break;
    }
    return m_.token.head.w;
  }
  template <WeightFormat F>
  __device__ __forceinline__ Section section(const Matrix& w, uint32_t share, bool bank = false,
                                             bool by_band = false) const {
    const uint32_t entries = bank ? m_.token.k : 1;
    return {.granule_bytes = granules::Form<F>::kBytes,
            .band_bytes = w.band_bytes,
            .matrix_bytes = w.matrix_bytes,
            .expert = bank ? chosen() : nullptr,
            .granules = w.granules,
            .bands = w.bands,
            .entries = entries,
            .by_band = by_band,
            .piece = piece_of(w.granules, kMostOfPiece<F>),
            .column_stride = granules::column_stride(w.cols),
            .range = range_of(w.granules * w.bands * entries, share, blockIdx.x)};
  }
  // The same in all layers.
  __device__ __forceinline__ Section section_of(Product product, const LayerStages& l) const {
    const Shares& share = m_.token.shares;
    const Matrix& w = matrix(product, l);
    Section s = product == Product::qkv       ? section<D>(w, share.qkv)
                : product == Product::output  ? section<D>(w, share.output)
                : product == Product::gate_up ? section<E>(w, share.gate_up, true)
                : product == Product::down    ? section<E>(w, share.down, true, true)
                : product == Product::head    ? section<D>(w, share.head)
                                              : section<WeightFormat::bf16>(w, share.router);
    if (product == Product::router && share.splits > 1) {
      const uint32_t band = blockIdx.x / share.splits, first = blockIdx.x % share.splits * share.router;
      s.range = {w.granules * w.bands, w.granules * w.bands};
      if (band < w.bands)
        s.range = {band * w.granules + first, band * w.granules + min(first + share.router, w.granules)};
    }
    s.begin();
    return s;
  }

  // --- the warp that copies

  __device__ __forceinline__ void copy_weights() {
    megakernel::WeightWriter to(m_.token.stream, m_.stream, memory_ + m_.token.ring);
#pragma unroll 1
    for (uint32_t i = 0; i < m_.token.count; ++i) {
      const LayerStages& l = layer(i);
#pragma unroll 1
      for (int product = 0; product <= int(Product::down); ++product) {
        if (Product(product) == Product::gate_up) megakernel::wait_for_slot(&m_.chosen, i % 2);
        put(to, Product(product), l);
      }
    }
    if (m_.token.head_rows > 0) put(to, Product::head, layer(0));
  }
  __device__ __forceinline__ void put(megakernel::WeightWriter& to, Product product, const LayerStages& l) const {
    const Section& s = m_.sections[int(product)];
    const uint8_t* const data = matrix(product, l).data;
    const uint32_t end = s.end_piece;
#pragma unroll 1
    for (uint32_t first = s.first_piece; first < end; first += 32) {  // a lane finds a piece: one by one takes too long
      const Piece p = s.piece_at(min(first + threadIdx.x % 32, end - 1), data);
      const uint32_t bytes = p.count * uint32_t(s.granule_bytes), count = min(end - first, 32u);
#pragma unroll 1
      for (uint32_t lane = 0; lane < count; ++lane) to.put(lane, p.data, bytes, note_of(p));
    }
  }

  // --- the warps that multiply

  __device__ __forceinline__ void compute(sampling::Best& top) {
    handoffs_.begin();
    megakernel::WeightReader from(m_.token.stream, m_.stream, memory_ + m_.token.ring,
                                  threadIdx.x / 32 / m_.token.stream.team_warps,
                                  kTokenWarps / m_.token.stream.team_warps);
    embed_token();
    uint32_t i = 0;
    // One code for all products: a program that does not fit into the instruction cache waits for itself.
#pragma unroll 1
    for (Product product = Product::qkv;;) {
      const LayerStages& l = layer(i);
      multiply(product, l, i > 0, top, from);
      if (product == Product::head) return handoffs_.end();
      handoffs_.arrive();
      if (product == Product::qkv) {
        prefetch_keys(l.attention);
        if (i + 1 < m_.token.count) copy_words(m_.layers[(i + 1) % 2], m_.token.layers[i + 1]);
        handoffs_.wait();
        attend(l.attention);
        handoffs_.arrive();
      } else if (product == Product::output) {
        prefetch_norm(l.router.weight, l.router.w);
      } else if (product == Product::router) {
        stage_normed<E>(l.gate_up.weight, l.gate_up.w, nullptr);
      } else if (product == Product::down) {
        const NormProduct& next = ++i < m_.token.count ? layer(i).qkv : m_.token.head;
        prefetch_norm(next.weight, next.w);
      }
      handoffs_.wait();
      if (product == Product::router) choose(l.router);
      product = product != Product::down ? Product(int(product) + 1)
                : i < m_.token.count     ? Product::qkv
                                         : Product::head;
      if (product == Product::head && m_.token.head_rows == 0) return handoffs_.end();
    }
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
  // x += what the blocks that hold its rows published, in two parts; x times the norm's weight becomes the column.
  template <WeightFormat F>
  __device__ __forceinline__ void stage_normed(const float* weight, const Matrix& w, const float* parts) const {
    float sum = 0;
#pragma unroll 2
    for (uint32_t c = 4 * threadIdx.x; c < 64 * w.granules; c += 4 * kTokenThreads) {
      float4 v = *reinterpret_cast<const float4*>(x() + c);
      float scale[4];
      granules::load4(weight, c, w.cols, scale);
      if (parts != nullptr) {
        const float4 a = __ldcg(reinterpret_cast<const float4*>(parts + c)),
                     b = __ldcg(reinterpret_cast<const float4*>(parts + m_.token.x_stride + c));
        v = make_float4(v.x + (a.x + b.x), v.y + (a.y + b.y), v.z + (a.z + b.z), v.w + (a.w + b.w));
        *reinterpret_cast<float4*>(x() + c) = v;
      }
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      const float normed[4] = {v.x * scale[0], v.y * scale[1], v.z * scale[2], v.w * scale[3]};
      granules::put4<F>(stage(), c, normed);
    }
    sum = granules::lanes_sum(sum);
    if (threadIdx.x % 32 == 0) m_.squares[threadIdx.x / 32] = sum;
  }
  // After a barrier.
  __device__ __forceinline__ float rstd(uint32_t C, float eps) const {
    float sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) sum += m_.squares[w];
    return 1 / sqrtf(sum / float(C) + eps);
  }
  __device__ __forceinline__ void stage_columns(const char* from, uint32_t C, uint32_t count) const {
    const uint32_t pieces = uint32_t(granules::column_bytes(C)) / 16, stride = granules::column_stride(C);
    constexpr uint32_t kHeld = 4;  // columns on their way at once
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kHeld)
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < pieces; i += kTokenThreads) {
        uint4 held[kHeld];
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          held[u] = first + u < count ? __ldcg(reinterpret_cast<const uint4*>(from) + (first + u) * pieces + i)
                                      : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (first + u < count) *reinterpret_cast<uint4*>(stage() + (first + u) * stride + i * 16) = held[u];
      }
  }

  // What the block's threads need to end a product's rows.
  struct Ending {
    Product product;
    const Matrix& w;
    const float* bias;  // may be null; of a bank (entries, rows)
    float scale, drop;
  };
  // The block's part of a product, in rounds of as many bands as have room for their sums.
  __device__ __forceinline__ void multiply(const Section& s, const Ending& ending, const LayerStages& l,
                                           sampling::Best& top, megakernel::WeightReader& from) {
    const bool experts = ending.product == Product::gate_up || ending.product == Product::down;
    const uint32_t of_sums = s.of_sums(), slot = threadIdx.x / 16, row = threadIdx.x % 16;
    uint32_t band = s.first_sums(), until = s.range.begin, piece = s.first_piece;
#pragma unroll 1
    for (; until < s.range.end; band += kHeldBands) {
      until = min(s.range.end, (band + kHeldBands) * of_sums);
      const bool ends = slot < kHeldBands && (band + slot) * of_sums < until;
      const float bias = ends ? bias_of(ending, s, band + slot, row) : 0;
      const uint32_t end_piece = until == s.range.end ? s.end_piece : s.piece_of_sums(band + kHeldBands);
      if (experts)
        multiply_round<E>(s, ending.w.data, end_piece - piece, band, from);
      else if (D == WeightFormat::bf16 || ending.product != Product::router)
        multiply_round<D>(s, ending.w.data, end_piece - piece, band, from);
      else
        multiply_round<WeightFormat::bf16>(s, ending.w.data, end_piece - piece, band, from);
      piece = end_piece;
      TokenTeam::sync();
      if (slot < kHeldBands) {
        float sum = 0;
        if (ends)
#pragma unroll
          for (uint32_t w = 0; w < kTokenWarps; ++w) {
            sum += m_.sums[slot][w][row];
            m_.sums[slot][w][row] = 0;
          }
        end(ending, s, l, ends, band + slot, row, sum * ending.drop, bias, top);
      }
      if (until < s.range.end) TokenTeam::sync();
    }
  }
  template <WeightFormat F>
  __device__ __forceinline__ void multiply_round(const Section& s, const uint8_t* data, uint32_t pieces, uint32_t band,
                                                 megakernel::WeightReader& from) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = m_.token.stream.team_warps;
    const uint32_t stride = s.by_band ? s.column_stride : 0;
    const char* const column = stage() + lane % 4 * 16;
    float sum[1][4] = {};
    uint32_t entry = 0, of_band = ~0u;  // what `sum` is of: a band of an entry; ~0: nothing yet
    const auto leave = [&] {
      float scale[2] = {1, 1};
      if (s.by_band) scale[0] = scale[1] = choice().weights[entry];
      if constexpr (F == WeightFormat::fp8) {
        const uint8_t* const matrix = s.expert == nullptr ? data : data + s.expert[entry] * s.matrix_bytes;
        float of_row[2];
        granules::load_row_scales(matrix + of_band * s.band_bytes, s.granules, of_row);
        scale[0] *= of_row[0], scale[1] *= of_row[1];
      }
      // A band's rows g and g + 8 are in every lane of the four that share g.
      float(&to)[16] = m_.sums[of_band + (s.by_band ? 0 : entry * s.bands) - band][warp];
      if (lane % 4 == 0) to[lane / 4] += scale[0] * sum[0][0], to[lane / 4 + 8] += scale[1] * sum[0][2];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[0][c] = 0;
    };
    const uint32_t first = warp % team;
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
  // Rows of a product whose bands may be shared by two blocks: whoever has a band's begin writes the first part, with
  // the bias; whoever has its end the second.
  __device__ __forceinline__ static void publish(const Section& s, uint32_t band, uint32_t n, float value, float bias,
                                                 float* first, int64_t second) {
    const bool begins = s.range.begin <= band * s.of_sums(), ends = s.range.end >= (band + 1) * s.of_sums();
    if (!begins) return void(first[second + n] = value);
    first[n] = value + bias;
    if (ends) first[second + n] = 0;
  }

  // --- stages

  __device__ __forceinline__ float* output_parts() const { return m_.token.parts; }
  __device__ __forceinline__ float* down_parts() const { return m_.token.parts + 2 * m_.token.x_stride; }

  // Two teams of the block take a unit of attention each.
  __device__ __forceinline__ static uint32_t first_unit() {
    return blockIdx.x + threadIdx.x / decode_attention::kThreads * gridDim.x;
  }
  __device__ __forceinline__ static void prefetch_keys(const decode_attention::Params& p) {
    if (threadIdx.x < kAttentionTeams * decode_attention::kThreads && threadIdx.x % decode_attention::kThreads == 32 &&
        first_unit() < decode_attention::units_of(p))
      decode_attention::prefetch_keys<kDim>(p, first_unit());
  }
  __device__ __forceinline__ void attend(const decode_attention::Params& p) {
    if (threadIdx.x >= kAttentionTeams * decode_attention::kThreads) return;
    const decode_attention::HalfBlock team;
    auto& m = reinterpret_cast<decode_attention::Memory<kDim>*>(stage())[threadIdx.x / decode_attention::kThreads];
    const uint32_t units = decode_attention::units_of(p);
#pragma unroll 1
    for (uint32_t unit = first_unit(); unit < units; unit += kAttentionTeams * gridDim.x) {
      decode_attention::attend<kDim>(p, unit, team, m);
      team.sync();
    }
  }

  // By every block for itself; block 0 leaves the lists for who asks afterwards.
  __device__ __forceinline__ void choose(const Router& p) {
    const ChoiceMemory m = choice();
    const float scale = rstd(p.w.cols, p.eps);
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < p.w.rows; e += kTokenThreads) {
      const float bias = p.bias[e];
      float sum = 0;
      constexpr uint32_t kHeld = 16;  // parts on their way at once
#pragma unroll 1
      for (uint32_t first = 0; first < m_.token.shares.splits; first += kHeld) {
        float part[kHeld];
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s)
          part[s] = first + s < m_.token.shares.splits ? __ldcg(p.part + (first + s) * p.w.rows + e) : 0;
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s) sum += part[s];
      }
      m.logits[e] = sum * scale + bias;
    }
    TokenTeam::sync();
    if (threadIdx.x < 32) routing::choose(m.logits, p.w.rows, p.k, m.chosen, m.weights);
    TokenTeam::sync();
    // By all: what each wrote, the next layer's stages too, is the copying warp's to read.
    ptx::mbarrier_arrive(&m_.chosen);
    if (blockIdx.x == 0) routing::make_lists(m.chosen, m.weights, 1, p.w.rows, p.k, m.first, p.lists);
  }

  // From the columns to what the block publishes.
  __device__ __forceinline__ void multiply(Product product, const LayerStages& l, bool later, sampling::Best& top,
                                           megakernel::WeightReader& from) {
    const Matrix& w = matrix(product, l);
    float eps = 0;
    if (product == Product::qkv || product == Product::head) {
      const NormProduct& p = product == Product::qkv ? l.qkv : m_.token.head;
      stage_normed<D>(p.weight, w, later || product == Product::head ? down_parts() : nullptr);
      eps = p.eps;
    } else if (product == Product::router) {
      stage_normed<WeightFormat::bf16>(l.router.weight, w, output_parts());
    } else if (product == Product::output) {
      stage_columns(l.output.columns, w.cols, 1);
    } else if (product == Product::down) {
      stage_columns(l.down.hidden, w.cols, m_.token.k);
    } else {
      eps = l.gate_up.eps;  // staged while the router's choice was on its way
    }
    TokenTeam::sync();
    const Ending ending{.product = product,
                        .w = w,
                        .bias = product == Product::qkv       ? l.qkv.bias
                                : product == Product::output  ? l.output.bias
                                : product == Product::gate_up ? l.gate_up.bias
                                : product == Product::down    ? l.down.bias
                                                              : nullptr,
                        .scale = eps > 0 ? rstd(w.cols, eps) : 1,
                        .drop = product == Product::gate_up || product == Product::down ? granules::Form<E>::kDrop
                                : product == Product::router                            ? 1
                                                                                        : granules::Form<D>::kDrop};
    multiply(m_.sections[int(product)], ending, l, top, from);
  }
  __device__ __forceinline__ float bias_of(const Ending& e, const Section& s, uint32_t v, uint32_t row) const {
    const uint32_t band = e.product == Product::gate_up ? v % s.bands : v, n = 16 * band + row;
    if (e.bias == nullptr || n >= e.w.rows) return 0;
    if (e.product == Product::gate_up) return e.bias[int64_t(chosen()[v / s.bands]) * e.w.rows + n];
    if (e.product != Product::down) return e.bias[n];
    float bias = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < s.entries; ++i) bias += choice().weights[i] * e.bias[int64_t(chosen()[i]) * e.w.rows + n];
    return bias;
  }
  // By whole warps.
  __device__ __forceinline__ void end(const Ending& e, const Section& s, const LayerStages& l, bool ends, uint32_t v,
                                      uint32_t row, float sum, float bias, sampling::Best& top) const {
    if (e.product == Product::gate_up) {
      const float y = sum * e.scale + bias, up = __shfl_xor_sync(~0u, y, 1);
      const uint32_t n = 8 * (v % s.bands) + row / 2, width = e.w.rows / 2;
      if (ends && row % 2 == 0 && n < width)
        granules::put(l.gate_up.hidden + v / s.bands * granules::column_bytes(width), l.gate_up.down, n,
                      gated(y, up, l.gate_up.limit, l.gate_up.alpha));
      return;
    }
    const uint32_t n = 16 * v + row;
    if (!ends || n >= e.w.rows) return;
    const float y = sum * e.scale;
    if (e.product == Product::head) {
      m_.token.head.y[n] = y;
      if (n < m_.token.head.vocab) top.add(y, n);
    } else if (e.product == Product::router) {
      const uint32_t splits = m_.token.shares.splits, split = splits == 1 ? 0 : blockIdx.x % splits;
      l.router.part[split * e.w.rows + n] = y;
    } else if (e.product == Product::qkv) {
      publish(s, v, n, y, bias, l.qkv.y, l.qkv.y_stride);
    } else {
      publish(s, v, n, y, bias, e.product == Product::output ? output_parts() : down_parts(), m_.token.x_stride);
    }
  }

  char* const memory_;
  TokenMemory& m_;
  const megakernel::Handoffs<TokenTeam, kTraced> handoffs_;
};

template <WeightFormat D, WeightFormat E, bool kTraced>
__global__ void __launch_bounds__(kTokenThreads + 32, 1) token_kernel(const __grid_constant__ Token token) {
  TokenProgram<D, E, kTraced>().run(token);
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
  const Matrix& r = l.router.w;
  const uint32_t of_band = std::max<uint32_t>(1, blocks / r.bands);  // blocks that may share one
  s.router = (r.granules + of_band - 1) / of_band;
  s.splits = (r.granules + s.router - 1) / s.router;
  if (s.splits == 1) s.router = share_of_bands(r.bands, r.granules, blocks);
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

template <WeightFormat D, WeightFormat E, bool kTraced = false>
void launch_token(Token token, const LayerStages& layer, int64_t blocks, Stream stream) {
  place(token, layer, kMostShared);
  const auto kernel = token_kernel<D, E, kTraced>;
  gpu::Launch at{.block = kTokenThreads + 32,
                 .smem = token.bytes,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device(),
                 .cooperative = true};
  at.grid = std::min<int64_t>(gpu::resident_blocks("decode token", kernel, at), kMostBlocks);
  if (blocks > 0) at.grid = blocks;
  token.shares = shares_of(token, layer, uint32_t(at.grid));
  gpu::launch("decode token", kernel, at, stream, token);
}

template <WeightFormat D>
void Megakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  const WeightFormat experts = layer.down.w.format;
  if (experts == WeightFormat::mxfp4) return launch_token<D, WeightFormat::mxfp4>(token, layer, blocks, stream);
  if (experts == WeightFormat::fp8) return launch_token<D, WeightFormat::fp8>(token, layer, blocks, stream);
  launch_token<D, WeightFormat::bf16>(token, layer, blocks, stream);
}

template <WeightFormat D>
void TracedMegakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  launch_token<D, WeightFormat::mxfp4, true>(token, layer, blocks, stream);
}

}  // namespace ingot::gpt_oss_decode
