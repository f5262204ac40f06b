#pragma once
// A whole token by one persistent kernel: the stages of stages.cuh in order, a hand-off after each. Before a block
// waits it asks for the first weights of its next stage, wherever those are known.
//   embed | qkv | attention | output | router | gate and up | down | ... | head
// Every block adds up the router's parts and chooses by itself, which saves a hand-off.
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/megakernel/handoff.cuh"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/decode/stages.cuh"

namespace ingot::gpt_oss_decode {

template <int kDim> constexpr int kTokenBlocksPerSm = kDim == 64 ? kBlocksPerSm : 1;
constexpr uint32_t kTeams = kThreads / decode_attention::kThreads;

// In dynamic shared memory, where everything that stages are told lies: held in registers across the layers it would
// leave too few for the weights. After it come the router's choice and what stages use in turn.
struct TokenMemory {
  Token token;
  LayerStages layers[2];  // this one and the next
  megakernel::Handoffs::Memory handoffs;
};
template <int kDim> void place(Token& t, const LayerStages& l) {
  t.choice = (uint32_t(sizeof(TokenMemory)) + 15) / 16 * 16;
  t.stage = (t.choice + uint32_t(ChoiceMemory::bytes(1, t.experts, t.k)) + 127) / 128 * 128;
  t.bytes = t.stage +
            std::max({kTeams * uint32_t(sizeof(decode_attention::Memory<kDim>)), granules::column_stride(l.qkv.w.cols),
                      granules::column_stride(l.output.w.cols), t.k * granules::column_stride(l.down.w.cols)});
}

template <WeightFormat D, WeightFormat E, int kDim> class TokenProgram {
 public:
  __device__ __forceinline__ TokenProgram()
      : m_(*tile::dynamic_shared<TokenMemory>()), handoffs_(m_.token.grid, m_.handoffs) {}

  __device__ __forceinline__ void run(const Token& token) {
    copy_words(m_.token, token);
    copy_words(m_.layers[0], token.layers[0]);
    __syncthreads();
    handoffs_.begin();
    Dense feed{};
    feed.ask(band_of<D>(m_.layers[0].qkv.w, at().block));
    embed(m_.token.embedding, at());
    handoffs_.arrive();
    handoffs_.wait();
#pragma unroll 1
    for (uint32_t i = 0; i < m_.token.count; ++i) feed = run_layer(i, feed);
    if (m_.token.head_rows > 0)
      head(feed);
    else if (at().block == 0 && threadIdx.x == 0 && handoffs_.all_came())
      m_.token.head.state->position += 1;
  }

 private:
  using Dense = granules::Feed<D>;

  template <class T> __device__ __forceinline__ static void copy_words(T& to, const T& from) {
    static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>, "copied by words of 8 bytes");
    for (uint32_t w = threadIdx.x; w < sizeof(T) / 8; w += kThreads)
      reinterpret_cast<uint64_t*>(&to)[w] = reinterpret_cast<const uint64_t*>(&from)[w];
  }
  __device__ __forceinline__ static At at() { return {blockIdx.x, gridDim.x}; }
  __device__ __forceinline__ const LayerStages& layer(uint32_t i) const { return m_.layers[i % 2]; }
  __device__ __forceinline__ char* stage() const { return reinterpret_cast<char*>(&m_) + m_.token.stage; }
  __device__ __forceinline__ ChoiceMemory choice() const {
    return {reinterpret_cast<char*>(&m_) + m_.token.choice, 1, m_.token.experts, m_.token.k};
  }

  // A Feed for each product: one that is asked for nothing must not keep what an earlier one held.
  __device__ __forceinline__ Dense run_layer(uint32_t i, Dense& qkv) {
    if (i + 1 < m_.token.count) copy_words(m_.layers[(i + 1) % 2], m_.token.layers[i + 1]);  // several barriers ahead
    const LayerStages& l = layer(i);
    norm_product<D, 1>(l.qkv, at(), qkv, stage());
    handoffs_.arrive();
    prefetch_keys(l.attention);
    handoffs_.wait();

    attend(l.attention);
    handoffs_.arrive();
    Dense output{};
    output.ask(band_of<D>(l.output.w, at().block));
    handoffs_.wait();

    residual_product<D, 1>(l.output, at(), output, stage());
    handoffs_.arrive();
    RouterFeed splits{};
    splits.ask(split_of(l.router, at().block));
    handoffs_.wait();

    experts(l, splits);
    handoffs_.arrive();
    Dense next{};
    next.ask(band_of<D>(i + 1 < m_.token.count ? layer(i + 1).qkv.w : m_.token.head.w, at().block));
    handoffs_.wait();
    return next;
  }
  __device__ __forceinline__ void experts(const LayerStages& l, RouterFeed& splits) {
    route<1>(l.router, at(), splits, stage());
    handoffs_.arrive();
    stage_gate_up<E, 1>(l.gate_up, stage());
    handoffs_.wait();

    const routing::Copy lists = choose(l.router);
    const uint32_t k = m_.token.k, units = k * l.gate_up.w.bands;
    granules::Feed<E> bands{};
    bands.ask(unit_of<E>(l.gate_up.w, lists, at().block, units));
    gate_up<E, 1>(l.gate_up, at(), lists, units, bands, stage());
    handoffs_.arrive();
    granules::Feed<E> entries{};
    entries.ask(entry_of<E>(l.down.w, lists, k, at().block, 0, at().blocks));
    handoffs_.wait();

    down<E, 1>(l.down, at(), lists, k, entries, stage());
  }

  // Half a block a unit of attention.
  __device__ __forceinline__ static uint32_t first_unit() {
    return at().block + threadIdx.x / decode_attention::kThreads * at().blocks;
  }
  __device__ __forceinline__ static void prefetch_keys(const decode_attention::Params& p) {
    if (threadIdx.x % decode_attention::kThreads == 32 && first_unit() < decode_attention::units_of(p))
      decode_attention::prefetch_keys<kDim>(p, first_unit());
  }
  __device__ __forceinline__ void attend(const decode_attention::Params& p) {
    const decode_attention::HalfBlock team;
    auto& m = reinterpret_cast<decode_attention::Memory<kDim>*>(stage())[threadIdx.x / decode_attention::kThreads];
    const uint32_t units = decode_attention::units_of(p);
    for (uint32_t unit = first_unit(); unit < units; unit += kTeams * at().blocks) {
      decode_attention::attend<kDim>(p, unit, team, m);
      team.sync();
    }
  }

  __device__ __forceinline__ routing::Copy choose(const Router& r) {
    const ChoiceMemory m = choice();
    choose_experts(r, m);
    if (at().block == 0) routing::make_lists(m.chosen, m.weights, 1, r.w.rows, r.k, m.first, r.lists);
    for (uint32_t i = threadIdx.x; i < r.k; i += kThreads) m.first[i] = i;
    __syncthreads();
    return {reinterpret_cast<int32_t*>(m.chosen), reinterpret_cast<int32_t*>(m.first), m.weights};
  }

  __device__ __forceinline__ void head(Dense& feed) {
    const sampling::Best top = norm_product<D, 1>(m_.token.head, at(), feed, stage());
    sampling::Drawn drawn;
    if (likeliest_of_grid(m_.token.head, top, drawn) && handoffs_.all_came()) append(m_.token.head, drawn);
  }

  TokenMemory& m_;
  const megakernel::Handoffs handoffs_;
};

template <WeightFormat D, WeightFormat E, int kDim>
__global__ void __launch_bounds__(kThreads, kTokenBlocksPerSm<kDim>) token_kernel(const __grid_constant__ Token token) {
  TokenProgram<D, E, kDim>().run(token);
}

// --- launcher

template <WeightFormat D, WeightFormat E, int kDim>
void launch_token(Token token, const LayerStages& layer, int64_t blocks, Stream stream) {
  place<kDim>(token, layer);
  const auto kernel = token_kernel<D, E, kDim>;
  gpu::Launch at{.block = kThreads,
                 .smem = token.bytes,
                 .device = gpu::current_device() < 0 ? 0 : gpu::current_device(),
                 .cooperative = true};
  at.grid = std::min<int64_t>(gpu::resident_blocks("decode token", kernel, at), kMostBlocks);
  if (blocks > 0) at.grid = blocks;
  gpu::launch("decode token", kernel, at, stream, token);
}

template <WeightFormat D>
void Megakernel<D>::launch(const Token& token, const LayerStages& layer, int64_t blocks, Stream stream) {
  const auto go = [&]<WeightFormat E>() {
    if (padded_dim(layer.attention.dim) == 64)
      launch_token<D, E, 64>(token, layer, blocks, stream);
    else
      launch_token<D, E, 128>(token, layer, blocks, stream);
  };
  const WeightFormat experts = layer.down.w.format;
  if (experts == WeightFormat::mxfp4) return go.template operator()<WeightFormat::mxfp4>();
  if (experts == WeightFormat::fp8) return go.template operator()<WeightFormat::fp8>();
  go.template operator()<WeightFormat::bf16>();
}

}  // namespace ingot::gpt_oss_decode
