#include <algorithm>
#include <cmath>

#include "ingot/gpu/device.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/granules.h"
#include "ingot/models/gpt_oss/decode/decode.h"
#include "ingot/models/gpt_oss/decode/phases.cuh"

namespace ingot::gpt_oss_decode {

extern template struct Phases<WeightFormat::bf16>;
extern template struct Phases<WeightFormat::fp8>;
extern template struct Phases<WeightFormat::mxfp4>;

namespace {

// --- embedding

constexpr int kEmbedThreads = 256;

__global__ void __launch_bounds__(kEmbedThreads)
    embed(const bf16* table, const State* state, float* x, int64_t x_stride, uint32_t C) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x;
  const bf16* const row = table + int64_t(__ldcg(&state->tokens[t])) * C;
  for (uint32_t c = threadIdx.x; c < C; c += kEmbedThreads) x[t * x_stride + c] = float(row[c]);
}

// --- attention

template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) attention(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t index = blockIdx.x % p.parts, at = blockIdx.x / p.parts;
  decode_attention::attend<kDim>(p, at / p.tiles, at % p.tiles, index);
}
// A block per token and key head.
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) store_keys(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t fresh = uint32_t(__ldcg(p.position)), key = fresh + blockIdx.x / p.kv_heads;
  decode_attention::store_keys<kDim>(p, {key, key + 1, fresh}, blockIdx.x % p.kv_heads);
}

// --- router: a block takes some granules of a band; the last one adds up and chooses

constexpr uint32_t kSplitGranules = 8;  // one a warp

struct Router {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;
  Matrix w;
  float *part, *squares;  // (splits, 16, E), (splits, 16)
  uint32_t* arrived;
  routing::Lists lists;
  uint32_t T, k, splits;
  float eps;
};
template <int kCols> struct RouterMemory {
  granules::Sums<kCols> sums;
  float squares[kWarps][kCols];
  uint32_t last;
};
// In dynamic shared memory, after the columns: logits (T, E), chosen (T, k), weights (T, k), first (E + 1).
struct ChoiceMemory {
  float* logits;
  uint32_t* chosen;
  float* weights;
  uint32_t* first;
  static int64_t bytes(uint32_t T, uint32_t E, uint32_t k) { return 4 * (int64_t(T) * (E + 2 * k) + E + 1); }
  __device__ ChoiceMemory(char* memory, uint32_t T, uint32_t E, uint32_t k) {
    logits = reinterpret_cast<float*>(memory);
    chosen = reinterpret_cast<uint32_t*>(logits + T * E);
    weights = reinterpret_cast<float*>(chosen + T * k);
    first = reinterpret_cast<uint32_t*>(weights + T * k);
  }
};

__device__ void choose_experts(const Router& p, const ChoiceMemory& m) {
  const uint32_t E = p.w.rows;
  for (uint32_t i = threadIdx.x; i < p.T * E; i += kThreads) {
    const uint32_t t = i / E, e = i % E;
    const float bias = p.bias[e];
    float sum = 0, squares = 0;
    constexpr uint32_t kHeld = 8;  // parts on their way at once
    for (uint32_t first = 0; first < p.splits; first += kHeld) {
      float part[kHeld], square[kHeld];
#pragma unroll
      for (uint32_t s = 0; s < kHeld; ++s) {
        const uint32_t at = (first + s) * kColumns + t;
        part[s] = first + s < p.splits ? __ldcg(p.part + at * E + e) : 0;
        square[s] = first + s < p.splits ? __ldcg(p.squares + at) : 0;
      }
#pragma unroll
      for (uint32_t s = 0; s < kHeld; ++s) sum += part[s], squares += square[s];
    }
    m.logits[i] = sum / sqrtf(squares / float(p.w.cols) + p.eps) + bias;
  }
  __syncthreads();
  for (uint32_t t = threadIdx.x / 32; t < p.T; t += kWarps)
    routing::choose(m.logits + t * E, E, p.k, m.chosen + t * p.k, m.weights + t * p.k);
  __syncthreads();
  routing::make_lists(m.chosen, m.weights, p.T, E, p.k, m.first, p.lists);
}

template <int kCols> __global__ void __launch_bounds__(kThreads, 2) router(Router p) {
  auto& m = tile::shared<RouterMemory<kCols>>();
  char* columns = tile::dynamic_shared<char>();
  const uint32_t band = blockIdx.x / p.splits, split = blockIdx.x % p.splits, E = p.w.rows;
  const uint32_t first = split * kSplitGranules, end = min(first + kSplitGranules, p.w.granules);
  const uint8_t* const data = p.w.data + band * p.w.band_bytes;
  ptx::let_next_kernel_start();
  granules::Feed<WeightFormat::bf16> feed;
  const granules::Feed<WeightFormat::bf16>::Band mine_of_band{data, first + threadIdx.x / 32, end};
  feed.ask(mine_of_band);
  ptx::wait_for_earlier_kernels();
  const uint32_t stride = granules::column_stride(p.w.cols);
  granules::stage_normed<WeightFormat::bf16, kCols>(columns, stride, p.x, p.x_stride, p.weight, p.w.cols, p.T, first,
                                                    end, m.squares);
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  granules::lane_columns(columns, stride, p.T, mine);
  float sum[kBlocks8<kCols>][4] = {};
  feed.multiply_band(mine_of_band, {}, mine, sum);
  granules::put_sums<kCols>(m.sums.part[0], sum);
  __syncthreads();
  const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols, e = 16 * band + row;
  if (threadIdx.x < 16 * kCols && j < p.T && e < E)
    p.part[(split * kColumns + j) * E + e] = granules::total<kCols>(m.sums.part[0], row, j);
  if (band == 0 && threadIdx.x < p.T)
    p.squares[split * kColumns + threadIdx.x] = granules::sum_of<kCols>(m.squares, threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    m.last = ptx::fetch_add_acq_rel(p.arrived, 1) == gridDim.x - 1;
    if (m.last) ptx::store_relaxed(p.arrived, 0);
  }
  __syncthreads();
  if (m.last) choose_experts(p, ChoiceMemory(columns, p.T, E, p.k));
}

__global__ void advance(State* state, uint32_t by) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x == 0) state->position += int32_t(by);
}

uint32_t splits_of(uint32_t granules) { return (granules + kSplitGranules - 1) / kSplitGranules; }
int device() { return std::max(0, gpu::current_device()); }

// --- one step

struct Run {
  const Model& m;
  const GptOssConfig& c;
  const Buffers& b;
  const Step& step;
  Stream stream;

  template <class P, class Call> void with_format(WeightFormat f, const P& p, Call&& call) {
    if (f == WeightFormat::bf16) return call(Phases<WeightFormat::bf16>{}, p);
    if (f == WeightFormat::fp8) return call(Phases<WeightFormat::fp8>{}, p);
    call(Phases<WeightFormat::mxfp4>{}, p);
  }

  // Experts that may be chosen.
  uint32_t most() const { return std::min(step.T * uint32_t(c.experts_per_token), uint32_t(c.experts)); }

  void embed_tokens() {
    gpu::launch("decode embedding", embed,
                {.grid = step.T, .block = kEmbedThreads, .overlap = true, .device = device()}, stream, m.embed, b.state,
                b.x, b.x_stride, uint32_t(c.hidden));
  }
  void qkv(const Layer& l) {
    with_format(l.qkv.format,
                NormProduct{.x = b.x,
                            .x_stride = b.x_stride,
                            .weight = l.attn_norm,
                            .bias = l.b_qkv,
                            .w = l.qkv,
                            .y = b.qkv,
                            .y_stride = c.qkv_width(),
                            .T = step.T,
                            .eps = float(c.norm_eps)},
                [&](auto phases, const NormProduct& p) { phases.norm_product(p, stream); });
  }
  void attend(const Layer& l) {
    const uint32_t parts = attention_parts(step.T, l.window, step.capacity);
    const uint32_t tiles = decode_attention::tiles_of(step.T, uint32_t(c.heads / c.kv_heads));
    const decode_attention::Params p{.position = &b.state->position,
                                     .qkv = b.qkv,
                                     .cos = m.cos,
                                     .sin = m.sin,
                                     .sinks = l.sinks,
                                     .keys = l.keys,
                                     .values = l.values,
                                     .mixed = b.mixed,
                                     .part_max = b.part_max,
                                     .part_sum = b.part_sum,
                                     .part_out = b.part_out,
                                     .arrived = b.arrived + 2,
                                     .T = step.T,
                                     .heads = uint32_t(c.heads),
                                     .kv_heads = uint32_t(c.kv_heads),
                                     .dim = uint32_t(c.head_dim),
                                     .rows = l.cache_rows,
                                     .window = l.window,
                                     .parts = parts,
                                     .tiles = tiles,
                                     .scale = float(1 / std::sqrt(double(c.head_dim))),
                                     .columns = l.o.format};
    if (cache_dim(c) == 64)
      launch_attention(attention<64>, store_keys<64>, p);
    else
      launch_attention(attention<128>, store_keys<128>, p);
  }
  template <class Kernel>
  void launch_attention(Kernel attention, Kernel store_keys, const decode_attention::Params& p) {
    gpu::Launch at{.block = decode_attention::kThreads, .overlap = true, .device = device()};
    if (p.tiles > 1) {
      at.grid = step.T * c.kv_heads;
      gpu::launch("decode keys", store_keys, at, stream, p);
    }
    at.grid = int64_t(p.parts) * p.tiles * c.kv_heads;
    gpu::launch("decode attention", attention, at, stream, p);
  }
  void output(const Layer& l) {
    with_format(
        l.o.format,
        ResidualProduct{.columns = b.mixed, .bias = l.b_o, .w = l.o, .x = b.x, .x_stride = b.x_stride, .T = step.T},
        [&](auto phases, const ResidualProduct& p) { phases.residual_product(p, stream); });
  }
  void route(const Layer& l, size_t index) {
    const uint32_t E = uint32_t(c.experts), k = uint32_t(c.experts_per_token), splits = splits_of(l.router.granules);
    const Router p{.x = b.x,
                   .x_stride = b.x_stride,
                   .weight = l.mlp_norm,
                   .bias = l.b_router,
                   .w = l.router,
                   .part = b.router_part,
                   .squares = b.router_squares,
                   .arrived = b.arrived,
                   .lists = b.lists_of(index),
                   .T = step.T,
                   .k = k,
                   .splits = splits,
                   .eps = float(c.norm_eps)};
    const int64_t smem =
        std::max<int64_t>(int64_t(step.T) * granules::column_stride(l.router.cols), ChoiceMemory::bytes(step.T, E, k));
    const gpu::Launch at{
        .grid = int64_t(l.router.bands) * splits, .block = kThreads, .smem = smem, .overlap = true, .device = device()};
    if (step.T == 1) return gpu::launch("decode router", router<1>, at, stream, p);
    if (step.T <= 8) return gpu::launch("decode router", router<8>, at, stream, p);
    gpu::launch("decode router", router<16>, at, stream, p);
  }
  void gate_up(const Layer& l, size_t index) {
    with_format(l.gate_up.format,
                GateUp{.x = b.x,
                       .x_stride = b.x_stride,
                       .weight = l.mlp_norm,
                       .bias = l.b_gate_up,
                       .w = l.gate_up,
                       .hidden = b.hidden,
                       .down = l.down.format,
                       .lists = b.lists_of(index),
                       .T = step.T,
                       .most = most(),
                       .eps = float(c.norm_eps),
                       .limit = float(c.swiglu_limit),
                       .alpha = float(c.swiglu_alpha)},
                [&](auto phases, const GateUp& p) { phases.gate_up(p, stream); });
  }
  void down(const Layer& l, size_t index) {
    with_format(l.down.format,
                Down{.hidden = b.hidden,
                     .bias = l.b_down,
                     .w = l.down,
                     .x = b.x,
                     .x_stride = b.x_stride,
                     .lists = b.lists_of(index),
                     .T = step.T,
                     .k = uint32_t(c.experts_per_token),
                     .most = most()},
                [&](auto phases, const Down& p) { phases.down(p, stream); });
  }
  void head() {
    const uint32_t first = step.T - step.head_rows;
    with_format(m.head.format,
                NormProduct{.x = b.x + first * b.x_stride,
                            .x_stride = b.x_stride,
                            .weight = m.norm,
                            .bias = nullptr,
                            .w = m.head,
                            .y = b.logits,
                            .y_stride = c.vocab,
                            .T = step.head_rows,
                            .eps = float(c.norm_eps),
                            .best = b.best,
                            .arrived = b.arrived + 1,
                            .state = b.state,
                            .vocab = step.vocab > 0 ? step.vocab : uint32_t(c.vocab),
                            .advance = step.T},
                [&](auto phases, const NormProduct& p) { phases.norm_product(p, stream); });
  }
};

}  // namespace

Matrix matrix_of(const WeightMatrix& w) {
  INGOT_CHECK(w.in_granules(), "decode: found ", w.format, " in rows, expected granules");
  Matrix m{.data = w.data.ptr<uint8_t>(), .format = w.format, .rows = uint32_t(w.rows()), .cols = uint32_t(w.cols())};
  m.bands = uint32_t(granule_bands(w.rows()));
  m.granules = uint32_t(granule_padded_cols(w.cols()) / kGranuleCols);
  m.band_bytes = band_bytes(w.format, w.cols());
  m.matrix_bytes = m.bands * m.band_bytes;
  return m;
}

uint32_t cache_dim(const GptOssConfig& c) { return c.head_dim <= 64 ? 64 : 128; }

uint32_t max_columns(const GptOssConfig& c) {
  const int64_t widest = granules::column_stride(uint32_t(std::max(c.hidden, c.q_width())));
  for (uint32_t T : {16u, 8u})
    if (T * widest <= 180 * 1024) return T;
  return 1;
}

void check_supported(const GptOssConfig& c) {
  const auto at_most = [](const char* what, int64_t found, int64_t most) {
    if (found > most)
      fail(ErrorCode::unsupported, "decode on a GPU: found ", what, " ", found, ", expected at most ", most);
  };
  constexpr int64_t kWidest = 90 * 1024;  // numbers of a column in shared memory
  at_most("head_dim", c.head_dim, 128);
  at_most("hidden_size", c.hidden, kWidest);
  at_most("an attention width of", c.q_width(), kWidest);
  at_most("intermediate_size times experts_per_token", c.intermediate * c.experts_per_token, kWidest);
  at_most("num_local_experts", c.experts, 2048);
}

// Enough blocks to fill the GPU where there are many keys, and no more than there are pieces of them.
uint32_t attention_parts(uint32_t T, uint32_t window, uint32_t capacity) {
  const uint32_t keys = window > 0 ? std::min(window - 1 + T, capacity) : capacity;
  return std::clamp((keys + decode_attention::kPartKeys - 1) / decode_attention::kPartKeys, 1u,
                    decode_attention::kMostParts);
}

int64_t lay_out(const GptOssConfig& c, uint32_t capacity, char* memory, Buffers& b) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t n) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (n * int64_t(sizeof(*p)) + 255) / 256 * 256;
  };
  const int64_t T = kColumns, k = c.experts_per_token, parts = attention_parts(kColumns, 0, capacity),
                entries = std::min(c.experts, T * k);
  b.x_stride = granule_padded_cols(c.hidden);
  take(b.state, 1);
  take(b.x, T * b.x_stride);
  take(b.qkv, T * c.qkv_width());
  take(b.mixed, T * granules::column_bytes(uint32_t(c.q_width())));
  take(b.hidden, T * k * granules::column_bytes(uint32_t(c.intermediate)));
  take(b.part_max, T * c.heads * parts);
  take(b.part_sum, T * c.heads * parts);
  take(b.part_out, T * c.heads * parts * cache_dim(c));
  const int64_t splits = splits_of(uint32_t(granule_padded_cols(c.hidden) / kGranuleCols));
  take(b.router_part, splits * T * c.experts);
  take(b.router_squares, splits * T);
  b.entries = entries;
  take(b.lists.count, c.layers);
  take(b.lists.expert, c.layers * entries);
  take(b.lists.weight, c.layers * entries * routing::kTokens);
  take(b.lists.row, c.layers * entries * routing::kTokens);
  take(b.logits, T * c.vocab);
  take(b.best, kMostBlocks);
  take(b.arrived, 2 + c.kv_heads * decode_attention::tiles_of(kColumns, uint32_t(c.heads / c.kv_heads)));
  return at;
}

void run(const Model& model, const Buffers& buffers, const Step& step, Stream stream) {
  Run r{model, model.config, buffers, step, stream};
  const auto wanted = [&](uint32_t phase) { return (step.phases & phase) != 0; };
  if (wanted(kEmbed)) r.embed_tokens();
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layer& l = model.layers[i];
    if (wanted(kQkv)) r.qkv(l);
    if (wanted(kAttention)) r.attend(l);
    if (wanted(kOutput)) r.output(l);
    if (wanted(kRouter)) r.route(l, i);
    if (wanted(kGateUp)) r.gate_up(l, i);
    if (wanted(kDown)) r.down(l, i);
  }
  if (!wanted(kHead)) return;
  if (step.head_rows > 0) return r.head();
  gpu::launch("decode position", advance, {.grid = 1, .block = 32, .overlap = true, .device = device()}, stream,
              buffers.state, step.T);
}

}  // namespace ingot::gpt_oss_decode
