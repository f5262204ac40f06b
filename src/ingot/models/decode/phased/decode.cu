#include <algorithm>
#include <cmath>

#include "ingot/gpu/device.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/draft_head/head_launches.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/phased/decode.h"
#include "ingot/models/decode/phased/e4m3_inputs.cuh"
#include "ingot/models/decode/phased/phases.cuh"
#include "ingot/models/decode/phased/ranks.h"
#include "ingot/models/decode/phased/step_memory.h"
#include "ingot/models/decode/phased/vector_stages.h"
#include "ingot/models/decode/row_kernel/row_kernel.h"
#include "ingot/models/decode/small_batch/batched_sequences.cuh"
#include "ingot/models/decode/small_batch/small_batch_router.cuh"
#include "ingot/models/decode/small_batch/small_batch_sums.cuh"

namespace ingot::decode {

namespace {

// In a step of several sequences, attention has enough blocks without many parts. Contexts up to kShortContext use at
// most kShortParts parts, and windows up to kShortWindow use one part.
constexpr uint32_t kShortContext = 4096, kShortParts = 8, kShortWindow = 256;

// --- the launches that do not depend on a format

__global__ void __launch_bounds__(kThreads) embed_kernel(Embedding p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  embed(p, whole_grid());
}

template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) attention_kernel(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  decode_attention::attend<kDim>(p, blockIdx.x, tile::shared<decode_attention::Memory<kDim>>());
}
// For heads wider than 128 numbers, or with a softcap of scores.
__global__ void __launch_bounds__(decode_attention::kThreads)
    wide_attention_kernel(decode_attention::Params p, float softcap) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  decode_attention::attend<kWideDim>(p, blockIdx.x, decode_attention::CappedScale{p.scale, softcap},
                                     *tile::dynamic_shared<decode_attention::Memory<kWideDim>>());
}
// A block per token and key head.
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads) store_keys_kernel(decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t fresh = uint32_t(__ldcg(p.position)), key = fresh + blockIdx.x / p.kv_heads;
  decode_attention::store_keys<kDim>(p, {key, key + 1, fresh}, blockIdx.x % p.kv_heads, threadIdx.x);
}

// The last block to arrive chooses the experts.
template <int kCols> __global__ void __launch_bounds__(kThreads, 2) router_kernel(Router p, Normed normed) {
  auto& last = tile::shared<uint32_t>();
  char* const vectors = tile::dynamic_shared<char>();
  ptx::let_next_kernel_start();
  RouterFeed feed;
  feed.ask(split_of(p, blockIdx.x));
  ptx::wait_for_earlier_kernels();
  route<kCols>(p, whole_grid(), feed, vectors);
  if constexpr (kCols > 1) {
    small_batch::put_normed(p, normed, vectors, blockIdx.x / p.splits, blockIdx.x % p.splits);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    last = ptx::fetch_add_acq_rel(p.arrived, 1) == gridDim.x - 1;
    if (last) ptx::store_relaxed(p.arrived, 0);
  }
  __syncthreads();
  if (last == 0) return;
  const ChoiceMemory m(vectors, p.T, p.w.rows, p.k);
  if constexpr (kCols > 1) {
    constexpr int kTokens = int(routing::kTokens);
    const routing::Copy lists{p.lists.expert, p.lists.row, p.lists.weight};
    small_batch::begin_lists<kTokens>(m, p.w.rows, min(p.T * p.k, p.w.rows), lists);
    small_batch::choose_experts(p, m);
    const uint32_t count = small_batch::list_experts(m, p.T, p.w.rows, p.k, tile::shared<uint32_t, 1>(), lists);
    small_batch::list_tokens<kTokens>(m, p.T, p.k, lists);
    if (threadIdx.x == 0) *p.lists.count = count;
  } else {
    choose_experts(p, m);
    routing::make_lists(m.chosen, m.weights, p.k, p.lists);
  }
}

__global__ void __launch_bounds__(small_batch::kSplitThreads)
    add_residual_and_norm_kernel(const __grid_constant__ ResidualNorm p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  small_batch::add_residual_and_norm(p, blockIdx.x % p.T, blockIdx.x / p.T);
}

__global__ void advance(State* state, uint32_t by, const uint32_t* stop) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x == 0 && !is_stopped(stop)) state->position += int32_t(by);
}

int device() { return std::max(0, gpu::current_device()); }

// --- one step

struct Run {
  const Plan& plan;
  const DecoderSpec& spec;
  Stream stream;
  bool draft = false;  // Step::draft
  bool e4m3_inputs = spec.e4m3_inputs;
  bool uses_small_batch() const { return plan.T > 1 || draft; }
  // Rounded inputs take the small-batch kernels even for one token.
  bool uses_small_batch_experts() const { return uses_small_batch() || e4m3_inputs; }

  void embed_tokens() {
    const Embedding p = embedding_of(plan);
    if (spec.embedding_scale != 1 || has_dense_mlp(spec))
      return embed_scaled({p, float(spec.embedding_scale), plan.b.dense}, stream);
    const int64_t grid = (int64_t(p.T) * p.C + kThreads - 1) / kThreads;
    gpu::launch(
        "decode embedding", embed_kernel,
        {.grid = std::min<int64_t>(grid, most_blocks()), .block = kThreads, .overlap = true, .device = device()},
        stream, p);
  }
  void qkv(const Layer& l) {
    const NormProduct p = qkv_of(plan, l);
    with_phases(l.qkv.format, [&](auto phases) {
      uses_small_batch() ? phases.small_batch(small_batch_product(p, normed_of(plan, l.qkv.format)), stream)
                         : phases.norm_product(p, p.T, stream);
    });
  }
  void normalise(const Layer& l) {
    if (l.q_norm == nullptr) return;
    normalise_heads({.qkv = plan.b.qkv,
                     .query = l.q_norm,
                     .key = l.k_norm,
                     .T = plan.T,
                     .heads = plan.heads,
                     .kv_heads = plan.kv_heads,
                     .dim = plan.head_dim,
                     .eps = plan.eps},
                    stream);
  }
  void attend(const Layer& l) {
    const decode_attention::Params p = attention_of(plan, l);
    const uint32_t dim = cache_dim(spec);
    if (dim == 64) return launch_attention(attention_kernel<64>, store_keys_kernel<64>, p);
    if (dim == 128) return launch_attention(attention_kernel<128>, store_keys_kernel<128>, p);
    store_keys(store_keys_kernel<kWideDim>, p);
    gpu::launch("decode attention", wide_attention_kernel, wide_launch(decode_attention::units_of(p)), stream, p,
                float(spec.attention_softcap));
  }
  static gpu::Launch wide_launch(int64_t units) {
    return {.grid = units,
            .block = decode_attention::kThreads,
            .smem = int64_t(sizeof(decode_attention::Memory<kWideDim>)),
            .overlap = true,
            .device = device()};
  }
  template <class Kernel> void store_keys(Kernel kernel, const decode_attention::Params& p) {
    if (p.tiles == 1) return;
    gpu::launch(
        "decode keys", kernel,
        {.grid = int64_t(p.T) * p.kv_heads, .block = decode_attention::kThreads, .overlap = true, .device = device()},
        stream, p);
  }
  template <class Kernel> void launch_attention(Kernel attention, Kernel keys, const decode_attention::Params& p) {
    store_keys(keys, p);
    gpu::launch("decode attention", attention,
                {.grid = decode_attention::units_of(p),
                 .block = decode_attention::kThreads,
                 .overlap = true,
                 .device = device()},
                stream, p);
  }
  decode_attention::Params attention_of_one(const Layer& l) const {
    Plan one = plan;
    one.T = 1;
    decode_attention::Params p = attention_of(one, l);
    if (p.window > 0 && p.window <= kShortWindow)
      p.parts = 1;
    else if (plan.capacity <= kShortContext)
      p.parts = std::min(p.parts, kShortParts);
    return p;
  }
  void attend(const Layer& l, const BatchedSequences& s) {
    if (draft) return attend_draft(l, s);
    const decode_attention::Params p = attention_of_one(l);
    const int64_t units = int64_t(plan.T) * decode_attention::units_of(p);
    const uint32_t dim = cache_dim(spec);
    if (dim == kWideDim)
      return gpu::launch("decode attention of sequences", wide_sequence_attention_kernel, wide_launch(units), stream, s,
                         p, float(spec.attention_softcap));
    const gpu::Launch at{.grid = units, .block = decode_attention::kThreads, .overlap = true, .device = device()};
    const auto kernel = dim == 64 ? sequence_attention_kernel<64> : sequence_attention_kernel<128>;
    gpu::launch("decode attention of sequences", kernel, at, stream, s, p);
  }
  void attend_draft(const Layer& l, const BatchedSequences& s) {
    const decode_attention::Params p = attention_of_one(l);
    const uint32_t dim = cache_dim(spec);
    const gpu::Launch keys{
        .grid = int64_t(plan.T) * p.kv_heads, .block = decode_attention::kThreads, .overlap = true, .device = device()};
    const auto store = dim == 64    ? store_row_keys_kernel<64>
                       : dim == 128 ? store_row_keys_kernel<128>
                                    : store_row_keys_kernel<kWideDim>;
    gpu::launch("decode keys of rows", store, keys, stream, s, p);
    const int64_t units = int64_t(plan.T) * decode_attention::units_of(p);
    if (dim == kWideDim)
      return gpu::launch("decode attention of rows", wide_row_attention_kernel, wide_launch(units), stream, s, p,
                         float(spec.attention_softcap));
    const gpu::Launch at{.grid = units, .block = decode_attention::kThreads, .overlap = true, .device = device()};
    gpu::launch("decode attention of rows", dim == 64 ? row_attention_kernel<64> : row_attention_kernel<128>, at,
                stream, s, p);
  }
  void gather(const BatchedSequences& s) {
    gpu::launch("decode tokens", gather_tokens_kernel, {.grid = 1, .block = 32, .overlap = true, .device = device()},
                stream, s, plan.b.state, plan.T);
  }
  void scatter(const BatchedSequences& s) {
    gpu::launch("decode logits", scatter_logits_kernel,
                {.grid = int64_t(plan.T) * BatchedSequences::kBestParts,
                 .block = kThreads,
                 .overlap = true,
                 .device = device()},
                stream, s, plan.b.logits, plan.vocab, plan.sample_vocab);
    gpu::launch("decode ids", append_tokens_kernel,
                {.grid = 1, .block = 32 * int64_t(plan.T), .overlap = true, .device = device()}, stream, s,
                plan.b.stop);
  }
  void output(const Layer& l) {
    const ResidualProduct p = output_of(plan, l);
    with_phases(l.o.format, [&](auto phases) {
      uses_small_batch() ? phases.small_batch(small_batch_product(p), stream) : phases.residual_product(p, stream);
    });
  }
  void route(const Layer& l, uint32_t index) {
    const Router p = router_of(plan, l, index);
    const Normed x = normed_of(plan, l.gate_up.format);
    const int64_t smem = std::max<int64_t>(int64_t(p.T) * weight_tiles::vector_stride(p.w.cols),
                                           ChoiceMemory::bytes(p.T, p.w.rows, p.k));
    const gpu::Launch at{.grid = int64_t(p.w.row_tiles) * p.splits,
                         .block = kThreads,
                         .smem = smem,
                         .overlap = true,
                         .device = device()};
    if (!uses_small_batch_experts()) return gpu::launch("decode router", router_kernel<1>, at, stream, p, x);
    if (p.T <= 8) return gpu::launch("decode router", router_kernel<8>, at, stream, p, x);
    gpu::launch("decode router", router_kernel<16>, at, stream, p, x);
  }
  void gate_up(const Layer& l, uint32_t index, const Routed& routed = {}) {
    GeneralGateUp p{gate_up_of(plan, l, index), gate_of(spec)};
    const bool general = !is_clamped_gate(spec);
    Normed x = uses_small_batch_experts() ? normed_of(plan, l.gate_up.format) : Normed{};
    if (e4m3_inputs) {
      gpu::launch("decode rounded norm", round_norm_kernel<kMostTokens>, rounding_launch(p.T, p.w.cols, device()),
                  stream, RoundedNorm{p.x, p.x_stride, p.weight, x, p.T, p.w.cols, p.eps});
      x.parts = 0, p.eps = 1;  // the vectors are normalized: the factor becomes 1 / sqrt(0 + 1)
    }
    with_phases(l.gate_up.format, [&](auto phases) {
      general ? phases.gate_up(p, x, routed, stream) : phases.gate_up(static_cast<const GateUp&>(p), x, routed, stream);
    });
    if (!e4m3_inputs) return;
    gpu::launch("decode rounded channels", round_rows_kernel<true>,
                rounding_launch(p.T * plan.k, l.down.cols, device()), stream,
                RoundedRows{p.hidden, weight_tiles::vector_bytes(l.down.cols), p.T * plan.k, l.down.cols, p.down});
  }
  // Whether the blocks of gate and up can compute the router: the blocks must be able to wait for each other, and need
  // enough shared memory.
  bool can_route_within(const Layer& l) const {
    const auto bytes = plan.T <= 8 ? small_batch::router_bytes<8> : small_batch::router_bytes<16>;
    return l.experts && uses_small_batch() && !e4m3_inputs && plan.b.watch.stop != nullptr &&
           bytes(plan.T, l.router.rows, plan.k) <=
               (plan.T <= 8 ? small_batch::kSumsBytes<8> : small_batch::kSumsBytes<16>);
  }
  Routed routed(const Layer& l, uint32_t index) const {
    return {router_of(plan, l, index), plan.b.routed, plan.b.watch, wait_for_router(index)};
  }
  void down(const Layer& l, uint32_t index) {
    const Down p = down_of(plan, l, index);
    const ChoiceSums sums = uses_small_batch_experts()
                                ? ChoiceSums{plan.b.choice_sums, plan.b.x_stride,
                                             staged_vectors(plan.T, p.w.cols, p.most, gpu::current_limits())}
                                : ChoiceSums{};
    with_phases(l.down.format, [&](auto phases) { phases.down(p, sums, stream); });
  }
  // x += the norm of an output, for models with such norms.
  void add_branch(const float* weight) {
    if (plan.b.branch == nullptr) return;
    add_normed_branch({plan.b.x, plan.b.branch, plan.b.x_stride, weight, plan.T, plan.hidden, plan.eps}, stream);
  }
  // For a small batch: adds the results of the experts of `layer` (null: nothing), and writes the activation vectors of
  // the product of norm(x) with `next` (null: none).
  void add_residual_and_norm(const Layer* layer, const float* weight, const Matrix* next) {
    if (!uses_small_batch() && (layer == nullptr || !uses_small_batch_experts())) return;
    if (!uses_small_batch()) next = nullptr;
    const ResidualNorm p{.x = layer != nullptr ? plan.added() : plan.b.x,
                         .x_stride = plan.b.x_stride,
                         .sums = plan.b.choice_sums,
                         .sums_stride = plan.b.x_stride,
                         .T = plan.T,
                         .k = layer != nullptr ? plan.choices(*layer) : 0,
                         .C = plan.hidden,
                         .first_part = layer != nullptr && plan.adds_later(),
                         .weight = next != nullptr ? weight : nullptr,
                         .normed = next != nullptr ? normed_of(plan, next->format) : Normed{}};
    const int64_t grid = int64_t(p.T) * splits_of((p.C + 63) / 64);
    gpu::launch("decode experts' sums", add_residual_and_norm_kernel,
                {.grid = grid, .block = small_batch::kSplitThreads, .overlap = true, .device = device()}, stream, p);
  }
  void head(bool appends = true) {
    NormProduct p = head_of(plan);
    if (!appends) p.best = nullptr;
    with_phases(plan.head.format, [&](auto phases) { phases.norm_product(p, draft ? kMostDraftRows : p.T, stream); });
    if (spec.logit_softcap > 0) cap_logits({p.y, int64_t(p.T) * p.y_stride, float(spec.logit_softcap)}, stream);
  }
};

}  // namespace

Plan plan_of(const Model& m, const Buffers& b, const Step& step) {
  const DecoderSpec& c = m.config;
  const uint32_t kv_heads = uint32_t(m.kv_heads < 0 ? c.kv_heads : m.kv_heads), group = uint32_t(c.heads / c.kv_heads);
  return {.b = b,
          .table = m.embed,
          .norm = m.norm,
          .head = m.head,
          .layers = uint32_t(m.layers.size()),
          .hidden = uint32_t(c.hidden),
          .heads = kv_heads * group,
          .kv_heads = kv_heads,
          .group = group,
          .head_dim = uint32_t(c.head_dim),
          .experts = uint32_t(bank_experts(c)),
          .k = uint32_t(bank_choices(c)),
          .vocab = uint32_t(c.vocab),
          .T = step.T,
          .head_rows = step.head_rows,
          .sample_vocab = step.vocab > 0 ? step.vocab : uint32_t(c.vocab),
          .capacity = step.capacity,
          .eps = float(c.norm.eps),
          .limit = float(c.gate.limit),
          .alpha = float(c.gate.alpha),
          .scale = float(c.scale_of_attention())};
}

Matrix matrix_of(const WeightMatrix& w) {
  INGOT_CHECK(w.in_weight_tiles(), "decode: found ", w.format, " in rows, expected weight tiles");
  Matrix m{.data = w.data.ptr<uint8_t>(), .format = w.format, .rows = uint32_t(w.rows()), .cols = uint32_t(w.cols())};
  m.row_tiles = w.cols() > 0 ? uint32_t(row_tile_count(w.rows())) : 0;  // another GPU may have all columns
  m.weight_tiles = std::max<uint32_t>(1, uint32_t(weight_tile_padded_cols(w.cols()) / kWeightTileCols));
  m.row_tile_bytes = row_tile_bytes(w.format, w.cols());
  m.matrix_bytes = m.row_tiles * m.row_tile_bytes;
  return m;
}

bool has_dense_mlp(const DecoderSpec& c) {
  return std::any_of(c.layer.begin(), c.layer.end(), [](const LayerSpec& l) { return !l.experts; });
}
int64_t bank_experts(const DecoderSpec& c) { return std::max<int64_t>(1, c.experts); }
int64_t bank_choices(const DecoderSpec& c) { return std::max<int64_t>(1, c.experts_per_token); }

uint32_t cache_dim(const DecoderSpec& c) {
  return c.attention_softcap > 0 ? kWideDim : padded_dim(uint32_t(c.head_dim));
}

uint32_t max_step_tokens(const DecoderSpec& c) { return max_step_tokens(c, gpu::current_limits()); }

uint32_t max_product_rows(int64_t cols) {
  const int64_t room = shared_of_block() - small_batch::least_bytes(8);
  return uint32_t(std::clamp<int64_t>(room / weight_tiles::vector_stride(uint32_t(cols)), 0, 8));
}

void check_supported(const DecoderSpec& c) {
  const auto at_most = [](const char* what, int64_t found, int64_t most) {
    if (found > most)
      fail(ErrorCode::unsupported, "decode on a GPU: found ", what, " ", found, ", expected at most ", most);
  };
  constexpr int64_t kWidest = 90 * 1024;  // numbers of an activation vector in shared memory
  at_most("head_dim", c.head_dim, kWideDim);
  at_most("hidden_size", c.hidden, kWidest);
  at_most("an attention width of", c.q_width(), kWidest);
  at_most("intermediate_size times experts_per_token", c.intermediate * bank_choices(c), kWidest);
  at_most("num_local_experts", c.experts, 2048);
  const gpu::Limits& limits = gpu::current_limits();
  if (const int64_t bytes = one_token_bytes(c), most = shared_of_block(limits); bytes > most)
    fail(ErrorCode::unsupported, "decode on a GPU: found activation vectors of ", bytes, " bytes, expected at most ",
         most, ", as many as find room in a block's shared memory");
  if (c.e4m3_inputs && !holds_rounded_experts(c, limits))
    fail(ErrorCode::unsupported, "decode on a GPU: found experts of rounded inputs that are too wide for a block's ",
         limits.smem_per_block, " bytes of shared memory beside the columns of 8 tokens");
}

int64_t lay_out(const DecoderSpec& c, uint32_t capacity, char* memory, Buffers& b) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t n) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (n * int64_t(sizeof(*p)) + 255) / 256 * 256;
  };
  const int64_t T = kMostTokens, k = bank_choices(c), parts = decode_attention::parts_of(kMostTokens, 0, capacity),
                expert_slots = std::min(c.experts, T * k);
  b.x_stride = weight_tile_padded_cols(c.hidden);
  take(b.state, 1);
  take(b.noise, 1);
  take(b.x, T * b.x_stride);
  take(b.qkv, T * c.qkv_width());
  take(b.mixed, T * weight_tiles::vector_bytes(uint32_t(c.q_width())));
  take(b.hidden, T * k * weight_tiles::vector_bytes(uint32_t(c.intermediate)));
  take(b.part_max, T * c.heads * parts);
  take(b.part_sum, T * c.heads * parts);
  take(b.part_out, T * c.heads * parts * cache_dim(c));
  take(b.normed, T * weight_tiles::vector_bytes(uint32_t(c.hidden)));
  take(b.choice_sums, T * k * b.x_stride);
  const int64_t splits = splits_of(uint32_t(weight_tile_padded_cols(c.hidden) / kWeightTileCols));
  take(b.router_part, splits * T * c.experts);
  take(b.router_squares, splits * T);
  b.expert_slots = expert_slots;
  take(b.lists.count, c.layers);
  take(b.lists.expert, c.layers * expert_slots);
  take(b.lists.weight, c.layers * expert_slots * routing::kTokens);
  take(b.lists.row, c.layers * expert_slots * routing::kTokens);
  take(b.logits, T * c.vocab);
  b.own_logits = b.logits;
  take(b.best, kMostBlocks);
  if (b.ranks.several()) take(b.ranks.added, T * b.x_stride), take(b.ranks.key, 1);
  if (c.norm.post) take(b.branch, T * b.x_stride);
  if (has_dense_mlp(c)) {
    take(b.dense.count, 1), take(b.dense.expert, 1);
    take(b.dense.weight, routing::kTokens), take(b.dense.row, routing::kTokens);
  }
  const auto take_bytes = [&](auto*& p, int64_t bytes) {
    char* place;
    take(place, bytes);
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(place);
  };
  const int64_t handover = at;
  take(b.grid_barrier, 1);
  take_bytes(b.attention.parts, token_attention::Published::parts_bytes(c.heads, parts, cache_dim(c)));
  take_bytes(b.attention.mixed, token_attention::Published::mixed_bytes(c.heads, c.head_dim));
  take(b.last_epoch, 1);
  take(b.lower_bounds, kMostBlocks);
  take(b.sums, token_sums_of(c, nullptr).all());
  if (b.ranks.several()) take(b.ranks.arrived, 1);
  take(b.routed, 1);
  take(b.arrived, 2 + c.kv_heads * decode_attention::tiles_of(kMostTokens, uint32_t(c.heads / c.kv_heads)));
  b.handover_bytes = at - handover;
  return at;
}

int64_t lay_out(const DecoderSpec& c, int64_t most, char* memory, BatchInput*& input, BatchedSequences& s) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t n) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (n * int64_t(sizeof(*p)) + 255) / 256 * 256;
  };
  take(input, 1);
  s.input = input;
  take(s.arrived, most * c.kv_heads * decode_attention::tiles_of(1, uint32_t(c.heads / c.kv_heads)));
  take(s.best, most * BatchedSequences::kBestParts);
  take(s.part_max, most * c.heads * kBatchParts);
  take(s.part_sum, most * c.heads * kBatchParts);
  take(s.part_out, most * c.heads * kBatchParts * cache_dim(c));
  return at;
}

void keep_accepted(const BatchedSequences& sequences, const int32_t* sampled, const uint32_t* stop, Stream stream) {
  gpu::launch("decode accepted rows", keep_accepted_kernel,
              {.grid = 1, .block = 32, .overlap = true, .device = device()}, stream, sequences, sampled, stop);
}

void run(const Model& model, const Buffers& buffers, const Step& step, Stream stream) {
  const Plan plan = plan_of(model, buffers, step);
  Run r{plan, model.config, stream, step.draft};
  INGOT_CHECK(!(r.e4m3_inputs && buffers.ranks.several()), "decode: found rounded inputs of experts over several GPUs");
  const Ranks& ranks = buffers.ranks;
  const bool several = ranks.several(), heads = ranks.of(ranks.heads), channels = ranks.of(ranks.channels),
             ids = ranks.of(ranks.ids);
  const auto wanted = [&](uint32_t phase, bool here = true) { return (step.phases & phase) != 0 && here; };
  if (step.row_kernel != nullptr) {
    run_row_kernel(model, buffers, step, *step.row_kernel, stream);
    if (step.sequences != nullptr && !step.draft) r.scatter(*step.sequences);
    return;
  }
  if (step.sequences != nullptr) {
    INGOT_CHECK(step.T <= kMostSmallBatch && step.head_rows == step.T && (step.draft || !several), "decode: found ",
                step.T, " sequences, expected at most ", kMostSmallBatch,
                ", with the logits of all, on one GPU or in a draft step");
    if (wanted(kEmbed)) r.gather(*step.sequences);
  }
  if (wanted(kEmbed)) r.embed_tokens();
  const auto keep = [&](uint32_t layers) {
    if (step.states != nullptr)
      keep_states(*step.states, layers, buffers.x, buffers.x_stride, step.T, plan.hidden, stream);
  };
  const auto begin_layer = [&](const Layer* done, const Layer* next) {
    next != nullptr ? r.add_residual_and_norm(done, next->attn_norm, &next->qkv)
                    : r.add_residual_and_norm(done, nullptr, nullptr);
  };
  if (wanted(kEmbed)) keep(0);
  if (wanted(kEmbed, heads) && plan.layers > 0) begin_layer(nullptr, &model.layers[0]);
  for (uint32_t i = 0; i < plan.layers; ++i) {
    const Layer& l = model.layers[i];
    if (wanted(kQkv, heads)) r.qkv(l), r.normalise(l);
    if (wanted(kAttention, heads)) step.sequences != nullptr ? r.attend(l, *step.sequences) : r.attend(l);
    if (wanted(kOutput, heads)) r.output(l), r.add_branch(l.attn_post_norm);
    if (wanted(kOutput, several)) add_ranks(buffers, {.T = step.T, .width = plan.hidden, .layer = i}, stream);
    if (wanted(kRouter) && wanted(kGateUp, channels) && r.can_route_within(l)) {
      r.gate_up(l, i, r.routed(l, i));
    } else {
      if (wanted(kRouter)) l.experts ? r.route(l, i) : r.add_residual_and_norm(nullptr, l.mlp_norm, &l.gate_up);
      if (wanted(kGateUp, channels)) r.gate_up(l, i);
    }
    const Layer* const next = i + 1 < plan.layers && heads ? &model.layers[i + 1] : nullptr;
    const bool later = plan.adds_later();
    if (wanted(kDown, channels)) r.down(l, i), begin_layer(&l, later ? nullptr : next), r.add_branch(l.mlp_post_norm);
    if (wanted(kDown) && plan.b.branch != nullptr && next != nullptr) begin_layer(nullptr, next);
    if (wanted(kDown, several))
      add_ranks(buffers, {.T = step.T, .width = plan.hidden, .layer = i, .down = true}, stream);
    if (wanted(kDown)) keep(i + 1);
    if (!wanted(kDown, several)) continue;
    if (next != nullptr) begin_layer(nullptr, next);
  }
  if (!wanted(kHead)) return;
  if (step.sequences != nullptr) {
    if (ids) r.head(false);
    if (!step.draft) r.scatter(*step.sequences);
    return;
  }
  if (step.head_rows > 0) {
    if (ids) r.head();
    if (several) sample_over_ranks(buffers, {.T = step.T, .layer = plan.layers}, stream);
    return;
  }
  gpu::launch("decode position", advance, {.grid = 1, .block = 32, .overlap = true, .device = device()}, stream,
              buffers.state, step.T, buffers.stop);
}

}  // namespace ingot::decode
