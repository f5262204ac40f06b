#include <algorithm>
#include <array>
#include <utility>

#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/megakernel/token_context.cuh"
#include "ingot/models/decode/phased/decode.h"

namespace ingot::decode {
namespace {

// The variants that room.cmake instantiates: first those of GPT-OSS whose weights the copy engine brings.
constexpr auto kVariants = [] {
  constexpr WeightFormat bf16 = WeightFormat::bf16, fp8 = WeightFormat::fp8, mxfp4 = WeightFormat::mxfp4;
  std::array<TokenVariant, 20> all{};
  size_t n = 0;
  for (const WeightFormat dense : {bf16, fp8, mxfp4}) {
    for (const WeightFormat experts : {bf16, fp8, mxfp4}) all[n++] = {.dense = dense, .experts = experts};
    all[n++] = {.dense = dense, .experts = mxfp4, .traced = true};
    all[n++] = {.dense = dense, .experts = mxfp4, .ranks = true};
    all[n++] = {.dense = dense, .experts = mxfp4, .traced = true, .ranks = true};
  }
  all[n++] = {.dense = bf16, .experts = mxfp4, .prefiltered = true};
  all[n++] = {.dense = bf16, .experts = mxfp4, .ranks = true, .prefiltered = true};
  return all;
}();
constexpr TokenVariant family_variant(WeightFormat format, bool dense_mlp, uint32_t head_dim, bool traced = false,
                                      bool prefiltered = false) {
  return {.dense = format,
          .experts = format,
          .traced = traced,
          .prefiltered = prefiltered,
          .family = true,
          .dense_mlp = dense_mlp,
          .head_dim = head_dim};
}
// The variants of one kind of MLP and one width of heads.
constexpr auto family_variants(bool dense_mlp, uint32_t head_dim) {
  std::array<TokenVariant, 5> all{};
  size_t n = 0;
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    all[n++] = family_variant(format, dense_mlp, head_dim);
  all[n++] = family_variant(WeightFormat::bf16, dense_mlp, head_dim, true);
  all[n++] = family_variant(WeightFormat::bf16, dense_mlp, head_dim, false, true);
  return all;
}
// The variants of GPT-OSS in which warps copy the weights, without the copy engine.
constexpr auto kRingVariants = [] {
  std::array<TokenVariant, 9> all{};
  size_t n = 0;
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (const WeightFormat experts : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
      all[n++] = {.dense = dense, .experts = experts, .warp_rings = true};
  return all;
}();
constexpr auto kDense64Variants = family_variants(true, 64), kDense128Variants = family_variants(true, 128),
               kMixtureVariants = family_variants(false, 128);

template <const auto& kAll, size_t... I, class... Arguments>
bool launch_instance(std::index_sequence<I...>, const TokenVariant& variant, const Arguments&... arguments) {
  return ((kAll[I] == variant && (Megakernel<kAll[I]>::launch(arguments...), true)) || ...);
}
template <const auto& kAll, class... Arguments>
void launch(const TokenVariant& variant, const Arguments&... arguments) {
  const bool found = launch_instance<kAll>(std::make_index_sequence<kAll.size()>(), variant, arguments...);
  INGOT_CHECK(found, "decode token: found no kernel of ", variant.dense, " with experts in ", variant.experts);
}

bool is_family(const DecoderSpec& c) { return megakernel_path(c) == DecodePath::family_megakernel; }

// Whether a block's shared memory has room for a token's activations and a ring of weights.
template <TokenVariant V> bool fits_variant(const Model& m, int64_t shared_bytes) {
  TokenOf<V> token{};
  token.experts = uint32_t(bank_experts(m.config)), token.k = uint32_t(bank_choices(m.config));
  LayerOf<V> layer{};
  layer.qkv.w = m.layers[0].qkv, layer.output.w = m.layers[0].o, layer.down.w = m.layers[0].down;
  place_memory<V>(token, layer, shared_bytes);
  return token.stream.ahead > 0;
}
// Whether the numbers of all steps are in the range that Divisor can divide.
bool numbers_all_steps(const Model& m) {
  const auto numbers = [](const Matrix& w, int64_t slots) {
    const uint64_t most_steps = 4 * uint64_t(w.weight_tiles);  // of a row tile, in bf16
    return uint64_t(slots) * w.row_tiles * most_steps * most_steps < uint64_t(1) << 32;
  };
  const Layer& l = m.layers[0];
  const int64_t k = bank_choices(m.config);
  return numbers(l.qkv, 1) && numbers(l.o, 1) && numbers(l.gate_up, k) && numbers(l.down, k) && numbers(m.head, 1);
}
bool fits(const Model& m, const TokenKernelForm& form) {  // the formats do not matter
  const int64_t bytes = form.shared_bytes;
  if (form.copies == TokenCopies::warps) return numbers_all_steps(m) && fits_variant<kRingVariants[0]>(m, bytes);
  if (!is_family(m.config)) return fits_variant<kVariants[0]>(m, bytes);
  if (!has_dense_mlp(m.config)) return fits_variant<kMixtureVariants[0]>(m, bytes);
  return cache_dim(m.config) == 64 ? fits_variant<kDense64Variants[0]>(m, bytes)
                                   : fits_variant<kDense128Variants[0]>(m, bytes);
}

}  // namespace

TokenSums token_sums_of(const DecoderSpec& c, uint64_t* words) {
  return TokenSums::at(words, c.qkv_width(), weight_tile_padded_cols(c.hidden), c.experts,
                       bank_choices(c) * weight_tiles::vector_bytes(uint32_t(c.intermediate)));
}

uint32_t grid_barriers_of(const Model& m) { return kGridBarriersPerLayer * uint32_t(m.layers.size()); }
megakernel::Trace trace_of(const Model& m, uint32_t blocks, uint64_t* words) {
  const uint32_t exchanges = m.kv_heads < 0 ? 0 : kExchangeStamps * uint32_t(m.layers.size());
  return {.words = words, .blocks = blocks, .grid_barriers = grid_barriers_of(m), .extra = kTracedBytes + exchanges};
}

bool supports_megakernel(const Model& m, const gpu::Limits& limits) {
  const TokenKernelForm form = token_kernel_form(limits);
  if (form.copies == TokenCopies::none) return false;
  if (!unsupported_reason(m.config, megakernel_path(m.config)).empty()) return false;
  if (form.copies == TokenCopies::warps && (is_family(m.config) || m.kv_heads >= 0)) return false;
  if (is_family(m.config)) {
    const bool one_format = std::all_of(m.layers.begin(), m.layers.end(), [&](const Layer& l) {
      return l.qkv.format == m.head.format && l.o.format == m.head.format && l.gate_up.format == m.head.format &&
             l.down.format == m.head.format;
    });
    const bool has_kernel = cache_dim(m.config) == 128 || (cache_dim(m.config) == 64 && has_dense_mlp(m.config));
    return one_format && has_kernel && m.kv_heads < 0 && m.config.head_dim % 4 == 0 && fits(m, form);
  }
  const bool formats = std::all_of(m.layers.begin(), m.layers.end(), [&](const Layer& l) {
    return l.qkv.format == m.head.format && l.o.format == m.head.format &&
           l.gate_up.format == m.layers[0].gate_up.format && l.down.format == m.layers[0].gate_up.format;
  });
  return formats && (m.kv_heads < 0 || m.layers[0].down.format == WeightFormat::mxfp4) && m.config.head_dim % 4 == 0 &&
         padded_dim(uint32_t(m.config.head_dim)) <= kTokenHeadDim && fits(m, form);
}

bool supports_trace(const Model& m, const gpu::Limits& limits) {
  return limits.hopper && supports_megakernel(m, limits) &&
         m.layers[0].down.format == (is_family(m.config) ? WeightFormat::bf16 : WeightFormat::mxfp4);
}

bool supports_prefilter(const Model& m, const gpu::Limits& limits) {
  return limits.hopper && supports_megakernel(m, limits) && m.head.format == WeightFormat::bf16 &&
         m.head.row_tiles > 0 &&
         m.layers[0].down.format == (is_family(m.config) ? WeightFormat::bf16 : WeightFormat::mxfp4);
}

void run_megakernel(const Model& m, const Buffers& b, const Step& step, const Persistent& how, Stream stream) {
  INGOT_CHECK(step.T == 1, "decode token: found ", step.T, " tokens, expected 1");
  const bool family = is_family(m.config), dense = has_dense_mlp(m.config);
  const gpu::Limits& limits = how.limits != nullptr ? *how.limits : gpu::current_limits();
  const TokenKernelForm form = token_kernel_form(limits);
  INGOT_CHECK(supports_megakernel(m, limits), "decode token: found a model of heads of ", m.config.head_dim,
              " numbers, of several formats, or too wide for an SM's memory, expected one that supports_megakernel()");
  const Plan plan = plan_of(m, b, step);
  Token token{.embedding = embedding_of(plan),
              .head = head_of(plan),
              .layers = how.layers,
              .ranks = b.ranks.several() ? how.ranks : nullptr,
              .attention = b.attention,
              .last_epoch = b.last_epoch,
              .sums = token_sums_of(m.config, b.sums),
              .count = plan.layers,
              .head_rows = plan.head_rows,
              .experts = plan.experts,
              .k = plan.k,
              .grid = {.counter = b.grid_barrier, .watch = how.watch, .trace = how.trace, .missing = how.missing}};
  token.head.noise = b.noise;
  const bool traced = how.trace.words != nullptr, several = b.ranks.several();
  INGOT_CHECK(!traced || supports_trace(m, limits), "decode token: found ", dense ? "matrices in " : "experts in ",
              m.layers[0].down.format, ", expected ", family ? "bf16" : "mxfp4", " for a trace");
  INGOT_CHECK(!traced || how.trace.words_of_block() == trace_of(m, 0, nullptr).words_of_block(),
              "decode trace: found room for ", how.trace.words_of_block(), " words, expected ",
              trace_of(m, 0, nullptr).words_of_block());
  const TokenLimits most{.blocks = how.blocks > 0 ? how.blocks : std::min<int64_t>(limits.sms, kMostBlocks),
                         .shared_bytes = form.shared_bytes,
                         .exact = how.blocks > 0};
  PrefilteredHead head{};
  if (how.prefiltered) {
    INGOT_CHECK(supports_prefilter(m, limits) && m.prefilter.rows != nullptr && step.head_rows == 1 && !traced,
                "decode token: found the int8 prefilter requested for a model without one, for ", step.head_rows,
                " rows of logits, or with a trace, expected a model with one, one row and no trace");
    token.head.w = m.prefilter.codes;
    token.head.y = b.own_logits;  // in this GPU's own memory, because the kernel reads the logits again
    head = {m.head, m.prefilter.rows, b.own_logits + plan.vocab, b.lower_bounds};
  }
  if (family) {
    INGOT_CHECK(!several && how.family_layers != nullptr,
                "decode token: found several GPUs or no arguments of layers, expected one GPU and family_layers");
    const uint32_t width = cache_dim(m.config);
    const TokenVariant variant = family_variant(m.head.format, dense, width, traced, how.prefiltered);
    if (!dense) {
      MixtureToken of_mixture{token, static_cast<const MixtureLayerStages*>(how.family_layers)};
      // The last chunk of a row tile of 32 weight tiles has only two of them, so four chunks have as many bytes as
      // three full chunks.
      of_mixture.stream.ahead = 4;
      return launch<kMixtureVariants>(variant, of_mixture, head, mixture_stages_of(plan, m.layers[0], 0), most, stream);
    }
    const DenseToken of_dense{token, static_cast<const DenseLayerStages*>(how.family_layers)};
    const DenseLayerStages layer = dense_stages_of(plan, m.layers[0]);
    return width == 64 ? launch<kDense64Variants>(variant, of_dense, head, layer, most, stream)
                       : launch<kDense128Variants>(variant, of_dense, head, layer, most, stream);
  }
  const LayerStages layer = stages_of(plan, m.layers[0], 0);
  INGOT_CHECK(!several || layer.down.w.format == WeightFormat::mxfp4, "decode token: found experts in ",
              layer.down.w.format, ", expected mxfp4 over several GPUs");
  if (several) {
    INGOT_CHECK(how.ranks != nullptr,
                "decode token over several GPUs: found no ranks, expected the memory of all GPUs");
    token.head.key = nullptr;  // the kernel itself appends the token
  }
  const TokenVariant variant{.dense = m.head.format,
                             .experts = layer.down.w.format,
                             .traced = traced,
                             .ranks = several,
                             .prefiltered = how.prefiltered,
                             .warp_rings = form.copies == TokenCopies::warps};
  if (variant.warp_rings) return launch<kRingVariants>(variant, token, head, layer, most, stream);
  launch<kVariants>(variant, token, head, layer, most, stream);
}

std::vector<LayerStages> stages_of(const Model& m, const Buffers& b, uint32_t capacity) {
  const Plan plan = plan_of(m, b, {.capacity = capacity});
  std::vector<LayerStages> all;
  for (size_t i = 0; i < m.layers.size(); ++i) all.push_back(stages_of(plan, m.layers[i], uint32_t(i)));
  return all;
}
int64_t family_stages_bytes(const DecoderSpec& c) {
  if (!is_family(c)) return 0;
  return c.layers * int64_t(has_dense_mlp(c) ? sizeof(DenseLayerStages) : sizeof(MixtureLayerStages));
}
std::vector<char> family_stages_of(const Model& m, const Buffers& b, uint32_t capacity) {
  std::vector<char> all;
  if (!is_family(m.config)) return all;
  const Plan plan = plan_of(m, b, {.capacity = capacity});
  const auto append = [&](auto stages) {
    if (!m.config.mlp_bias) stages.gate_up.bias = nullptr;  // zeros, which need not be read
    const char* const bytes = reinterpret_cast<const char*>(&stages);
    all.insert(all.end(), bytes, bytes + sizeof stages);
  };
  for (size_t i = 0; i < m.layers.size(); ++i)
    has_dense_mlp(m.config) ? append(dense_stages_of(plan, m.layers[i]))
                            : append(mixture_stages_of(plan, m.layers[i], uint32_t(i)));
  return all;
}

namespace {
std::string name_of_grid_barrier(uint32_t number) {
  static constexpr const char* kStages[] = {"queries, keys and values", "attention", "the output", "gate and up",
                                            "down"};
  static_assert(std::size(kStages) == kGridBarriersPerLayer, "a name for each stage");
  return std::string(kStages[number % kGridBarriersPerLayer]) + " of layer " +
         std::to_string(number / kGridBarriersPerLayer);
}
// Names the wait of a WaitRecord: an exchange with a rank, or a grid barrier within this GPU.
std::string name_of_wait(uint32_t number, uint32_t layers) {
  if (number >= wait_for_router(0) && number < wait_for_router(layers))
    return "the router of layer " + std::to_string(number - wait_for_router(0));
  const uint32_t rank = number >> megakernel::kRankShift, grid_barrier = number & ((1u << megakernel::kRankShift) - 1);
  if (rank == 0 && layers > 0 && grid_barrier == layers * kGridBarriersPerLayer)
    return "the lower bounds of the largest logit";
  if (rank == 0) return name_of_grid_barrier(grid_barrier);
  const std::string gpu = "GPU " + std::to_string(rank - 1);
  if (grid_barrier == layers * kGridBarriersPerLayer) return gpu + " and its likeliest id";
  return gpu + " and its part of " + name_of_grid_barrier(grid_barrier);
}
}  // namespace

std::string grid_barrier_report(const gpu::WaitControl& waits, uint32_t layers) {
  std::string text = waits.report();
  constexpr std::string_view kNumbered = " for wait ";
  const size_t at = text.find(kNumbered);
  if (at == std::string::npos) return text;
  const size_t from = at + 5, end = text.find(':', from);
  return text.replace(from, end - from, name_of_wait(uint32_t(std::stoul(text.substr(at + kNumbered.size()))), layers));
}

}  // namespace ingot::decode
