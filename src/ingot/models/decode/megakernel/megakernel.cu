#include <algorithm>
#include <array>
#include <utility>

#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/megakernel/token_context.cuh"
#include "ingot/models/decode/phased/decode.h"

namespace ingot::decode {
namespace {

// Every variant that room.cmake instantiates, of models with experts and of models with dense MLPs.
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
constexpr TokenVariant dense_variant(WeightFormat format, uint32_t head_dim, bool traced = false,
                                     bool prefiltered = false) {
  return {.dense = format,
          .experts = format,
          .traced = traced,
          .prefiltered = prefiltered,
          .dense_mlp = true,
          .head_dim = head_dim};
}
constexpr auto kDenseVariants = [] {
  std::array<TokenVariant, 10> all{};
  size_t n = 0;
  for (const uint32_t head_dim : {64u, 128u}) {
    for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
      all[n++] = dense_variant(format, head_dim);
    all[n++] = dense_variant(WeightFormat::bf16, head_dim, true);
    all[n++] = dense_variant(WeightFormat::bf16, head_dim, false, true);
  }
  return all;
}();

template <const auto& kAll, size_t... I, class... Arguments>
bool launch_instance(std::index_sequence<I...>, const TokenVariant& variant, const Arguments&... arguments) {
  return ((kAll[I] == variant && (Megakernel<kAll[I]>::launch(arguments...), true)) || ...);
}
template <const auto& kAll, class... Arguments>
void launch(const TokenVariant& variant, const Arguments&... arguments) {
  const bool found = launch_instance<kAll>(std::make_index_sequence<kAll.size()>(), variant, arguments...);
  INGOT_CHECK(found, "decode token: found no kernel of ", variant.dense, " with experts in ", variant.experts);
}

bool is_dense(const DecoderSpec& c) { return megakernel_path(c) == DecodePath::dense_megakernel; }

// Whether a block's shared memory has room for a token's activations and a ring of weights.
template <TokenVariant V> bool fits_variant(const Model& m) {
  TokenOf<V> token{};
  token.experts = uint32_t(bank_experts(m.config)), token.k = uint32_t(bank_choices(m.config));
  LayerOf<V> layer{};
  layer.qkv.w = m.layers[0].qkv, layer.output.w = m.layers[0].o, layer.down.w = m.layers[0].down;
  place_memory<V>(token, layer, kMostShared);
  return token.stream.ahead > 0;
}
bool fits(const Model& m) {  // the formats do not matter
  if (!is_dense(m.config)) return fits_variant<kVariants[0]>(m);
  return cache_dim(m.config) == 64 ? fits_variant<dense_variant(WeightFormat::bf16, 64)>(m)
                                   : fits_variant<dense_variant(WeightFormat::bf16, 128)>(m);
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

bool supports_megakernel(const Model& m) {
  if (!unsupported_reason(m.config, megakernel_path(m.config)).empty()) return false;
  if (is_dense(m.config)) {
    const bool one_format = std::all_of(m.layers.begin(), m.layers.end(), [&](const Layer& l) {
      return l.qkv.format == m.head.format && l.o.format == m.head.format && l.gate_up.format == m.head.format &&
             l.down.format == m.head.format;
    });
    return one_format && m.kv_heads < 0 && m.config.head_dim % 4 == 0 && m.config.head_dim <= kDenseTokenHeadDim &&
           fits(m);
  }
  const bool formats = std::all_of(m.layers.begin(), m.layers.end(), [&](const Layer& l) {
    return l.qkv.format == m.head.format && l.o.format == m.head.format &&
           l.gate_up.format == m.layers[0].gate_up.format && l.down.format == m.layers[0].gate_up.format;
  });
  return formats && (m.kv_heads < 0 || m.layers[0].down.format == WeightFormat::mxfp4) && m.config.head_dim % 4 == 0 &&
         padded_dim(uint32_t(m.config.head_dim)) <= kTokenHeadDim && fits(m);
}

bool supports_trace(const Model& m) {
  return supports_megakernel(m) &&
         m.layers[0].down.format == (is_dense(m.config) ? WeightFormat::bf16 : WeightFormat::mxfp4);
}

bool supports_prefilter(const Model& m) {
  return supports_megakernel(m) && m.head.format == WeightFormat::bf16 && m.head.row_tiles > 0 &&
         m.layers[0].down.format == (is_dense(m.config) ? WeightFormat::bf16 : WeightFormat::mxfp4);
}

void run_megakernel(const Model& m, const Buffers& b, const Step& step, const Persistent& how, Stream stream) {
  INGOT_CHECK(step.T == 1, "decode token: found ", step.T, " tokens, expected 1");
  const bool dense = is_dense(m.config);
  INGOT_CHECK(supports_megakernel(m), "decode token: found a model of wider heads than ",
              dense ? kDenseTokenHeadDim : kTokenHeadDim,
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
  INGOT_CHECK(!traced || supports_trace(m), "decode token: found ", dense ? "matrices in " : "experts in ",
              m.layers[0].down.format, ", expected ", dense ? "bf16" : "mxfp4", " for a trace");
  INGOT_CHECK(!traced || how.trace.words_of_block() == trace_of(m, 0, nullptr).words_of_block(),
              "decode trace: found room for ", how.trace.words_of_block(), " words, expected ",
              trace_of(m, 0, nullptr).words_of_block());
  PrefilteredHead head{};
  if (how.prefiltered) {
    INGOT_CHECK(supports_prefilter(m) && m.prefilter.rows != nullptr && step.head_rows == 1 && !traced,
                "decode token: found the int8 prefilter requested for a model without one, for ", step.head_rows,
                " rows of logits, or with a trace, expected a greedy token of one row");
    token.head.w = m.prefilter.codes;
    token.head.y = b.own_logits;  // in this GPU's own memory, because the kernel reads the logits again
    head = {m.head, m.prefilter.rows, b.own_logits + plan.vocab, b.lower_bounds};
  }
  if (dense) {
    INGOT_CHECK(!several && how.dense_layers != nullptr,
                "decode token: found several GPUs or no arguments of layers, expected one GPU and dense_layers for "
                "dense MLPs");
    DenseToken of_dense;
    static_cast<Token&>(of_dense) = token;
    of_dense.dense_layers = how.dense_layers;
    return launch<kDenseVariants>(dense_variant(m.head.format, cache_dim(m.config), traced, how.prefiltered), of_dense,
                                  head, dense_stages_of(plan, m.layers[0]), how.blocks, stream);
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
                             .prefiltered = how.prefiltered};
  launch<kVariants>(variant, token, head, layer, how.blocks, stream);
}

std::vector<LayerStages> stages_of(const Model& m, const Buffers& b, uint32_t capacity) {
  const Plan plan = plan_of(m, b, {.capacity = capacity});
  std::vector<LayerStages> all;
  for (size_t i = 0; i < m.layers.size(); ++i) all.push_back(stages_of(plan, m.layers[i], uint32_t(i)));
  return all;
}
std::vector<DenseLayerStages> dense_stages_of(const Model& m, const Buffers& b, uint32_t capacity) {
  const Plan plan = plan_of(m, b, {.capacity = capacity});
  std::vector<DenseLayerStages> all;
  for (const Layer& l : m.layers) {
    all.push_back(dense_stages_of(plan, l));
    if (!m.config.mlp_bias) all.back().gate_up.bias = nullptr;  // zeros, which need not be read
  }
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
  if (rank == 0 && layers > 0 && grid_barrier == layers * kGridBarriersPerLayer) return "the largest logit's least";
  if (rank == 0) return name_of_grid_barrier(grid_barrier);
  const std::string what =
      grid_barrier == layers * kGridBarriersPerLayer ? "its likeliest id" : name_of_grid_barrier(grid_barrier);
  return "GPU " + std::to_string(rank - 1) + " and its part of " + what;
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
