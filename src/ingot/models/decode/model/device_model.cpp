#include "ingot/models/decode/model/device_model.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/log.h"
#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/sampling/adjust.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/model/upload.h"
#include "ingot/models/decode/phased/ranks.h"
#include "ingot/models/decode/prefilter/screen.h"
#include "ingot/models/host_decoder.h"

namespace ingot::decode {

GptOssWeights shapes_of(const GptOssConfig& c, WeightFormat dense, WeightFormat experts) {
  GptOssWeights w;
  const auto vector = [](Shape shape) { return Tensor(nullptr, DType::f32, shape); };
  w.embed = WeightMatrix(Tensor(nullptr, DType::bf16, {c.vocab, c.hidden}));
  for (int64_t l = 0; l < c.layers; ++l) {
    GptOssLayer y;
    y.attn_norm = y.mlp_norm = vector({c.hidden});
    y.qkv = weight_tiles_at(nullptr, dense, 0, c.qkv_width(), c.hidden);
    y.o = weight_tiles_at(nullptr, dense, 0, c.hidden, c.q_width());
    y.router = weight_tiles_at(nullptr, WeightFormat::bf16, 0, c.experts, c.hidden);
    y.gate_up = weight_tiles_at(nullptr, experts, c.experts, 2 * c.intermediate, c.hidden);
    y.down = weight_tiles_at(nullptr, experts, c.experts, c.hidden, c.intermediate);
    y.b_qkv = vector({c.qkv_width()}), y.b_o = vector({c.hidden}), y.b_router = vector({c.experts});
    y.sinks = vector({c.heads});
    y.b_gate_up = vector({c.experts, 2 * c.intermediate}), y.b_down = vector({c.experts, c.hidden});
    w.layers.push_back(y);
  }
  w.norm = vector({c.hidden});
  w.head = weight_tiles_at(nullptr, dense, 0, c.vocab, c.hidden);
  return w;
}

#ifdef INGOT_HAS_CUDA_DECODE
namespace {

constexpr int64_t kStepsBack = 4096;  // tokens that a sliding layer's ring keeps beside its window, to go back by

WeightFormat stored_format(const WeightMatrix& w) { return has_weight_tiles(w.format) ? w.format : WeightFormat::bf16; }

// Gives every part of a model its place, or only counts, and fills it from the host or with random numbers.
class Builder {
 public:
  int64_t bytes = 0;

  Builder(char* memory, const uint64_t* seed, Stream stream, int device)
      : memory_(memory), seed_(seed), stream_(stream), device_(device) {}

  template <class T> void take(T*& p, int64_t n) {
    p = reinterpret_cast<T*>(memory_ + bytes);
    bytes += (n * int64_t(sizeof(T)) + 255) / 256 * 256;
  }
  // `cut`: of the vector only what belongs to its rows.
  void vector(const float*& p, const Tensor& from, double scale, double mean = 0, const Cut* cut = nullptr) {
    float* to;
    const int64_t n = cut == nullptr ? from.numel() : from.numel() / from.size(-1) * cut->row_count();
    take(to, n);
    p = to;
    if (memory_ == nullptr) return;
    if (seed_ != nullptr) return fill_normal(to, DType::f32, n, scale, mean, next_seed(), stream_);
    if (cut == nullptr) return uploader().copy(to, from.data, from.bytes());
    const std::vector<float> part = cut_vector(from, *cut);
    gpu::copy_to_device(to, part.data(), int64_t(part.size()) * 4);
  }
  void embedding(const bf16*& p, const WeightMatrix& from) {
    bf16* to;
    take(to, from.rows() * from.cols());
    p = to;
    if (memory_ == nullptr) return;
    if (seed_ != nullptr) return fill_normal(to, DType::bf16, from.rows() * from.cols(), 1, 0, next_seed(), stream_);
    if (from.format == WeightFormat::bf16) return uploader().copy(to, from.data.data, from.data.bytes());
    const int64_t step = std::max<int64_t>(1, (int64_t(8) << 20) / from.cols());
    for (int64_t r = 0; r < from.rows(); r += step) {
      const std::vector<bf16> rows = rounded(from.row_range(r, std::min(from.rows(), r + step)));
      gpu::copy_to_device(to + r * from.cols(), rows.data(), int64_t(rows.size()) * 2);
    }
  }
  void matrix(Matrix& m, const WeightMatrix& from, double scale) {
    matrix(m, from, scale, {.rows = {{0, from.rows()}}, .cols = {0, from.cols()}});
  }
  void matrix(Matrix& m, const WeightMatrix& from, double scale, const Cut& cut) {
    const WeightFormat f = stored_format(from);
    const int64_t experts = from.is_bank() ? from.data.size(0) : 0;
    uint8_t* to;
    take(to, std::max<int64_t>(1, experts) * cut_bytes(f, cut));
    const WeightMatrix device = weight_tiles_at(to, f, experts, cut.row_count(), cut.cols.size());
    m = matrix_of(device);
    if (memory_ == nullptr) return;
    fill(device, m, from, scale, cut);
    if (m.bands > 0) order_for_device(device, stream_);
  }

 private:
  // As an archive has it.
  void fill(const WeightMatrix& device, const Matrix& m, const WeightMatrix& from, double scale, const Cut& cut) {
    const WeightFormat f = device.format;
    uint8_t* const to = device.data.ptr<uint8_t>();
    const int64_t experts = from.is_bank() ? from.data.size(0) : 0, N = device.rows(), K = device.cols();
    if (seed_ != nullptr) {
      const uint64_t seed = next_seed();  // taken by every rank, so that what all have is the same
      if (m.bands > 0) fill_weight_tiles(device, scale, seed, stream_);
      return;
    }
    const bool all = N == from.rows() && K == from.cols();
    if (all && from.in_weight_tiles()) return uploader().copy(to, from.data.data, from.data.bytes());
    if (m.bands == 0) return;
    if (from.in_weight_tiles() && band_bytes(f, K) <= Uploader::kPiece)
      return upload_cuts(from, cut, to, m.matrix_bytes);
    for (int64_t e = 0; e < std::max<int64_t>(1, experts); ++e) {
      const WeightMatrix one = experts > 0 ? from.at(e) : from;
      if (one.in_weight_tiles())
        upload_cut(one, cut, to + e * m.matrix_bytes);
      else
        upload_rows(one, cut, to + e * m.matrix_bytes, f);
    }
  }
  uint64_t next_seed() { return *seed_ * 65536 + next_++; }
  static std::vector<bf16> rounded(const WeightMatrix& w) {
    std::vector<float> wide(size_t(w.rows() * w.cols()));
    dequantise(w, Tensor(wide.data(), {w.rows(), w.cols()}), {});
    return {wide.begin(), wide.end()};
  }
  Uploader& uploader() {
    if (!uploader_) uploader_ = std::make_unique<Uploader>(device_);
    return *uploader_;
  }
  // What is cut from a matrix, or from each of a bank, some bands at a time.
  void upload_cuts(const WeightMatrix& from, const Cut& cut, uint8_t* to, int64_t matrix_bytes) {
    struct Part {
      int64_t expert;
      Cut cut;
      int64_t at;
    };
    const int64_t band = band_bytes(from.format, cut.cols.size()), rows = Uploader::kPiece / band * kWeightTileRows;
    std::vector<Part> parts;
    for (int64_t e = 0; e < (from.is_bank() ? from.data.size(0) : 1); ++e) {
      int64_t at = e * matrix_bytes;
      for (const SliceRange& range : cut.rows)
        for (int64_t r = range.begin; r < range.end; r += rows) {
          parts.push_back({e, {.rows = {{r, std::min(range.end, r + rows)}}, .cols = cut.cols}, at});
          at += cut_bytes(from.format, parts.back().cut);
        }
    }
    uploader().pieces(int64_t(parts.size()), [&](int64_t i, uint8_t* buffer) {
      const Part& part = parts[size_t(i)];
      cut_weight_tiles(from.is_bank() ? from.at(part.expert) : from, part.cut, buffer);
      return Uploader::Piece{to + part.at, cut_bytes(from.format, part.cut)};
    });
  }
  void upload_cut(const WeightMatrix& from, const Cut& cut, uint8_t* to) {
    cut_.resize(size_t(cut_bytes(from.format, cut)));
    cut_weight_tiles(from, cut, cut_.data());
    gpu::copy_to_device(to, cut_.data(), int64_t(cut_.size()));
  }
  void upload_rows(const WeightMatrix& from, const Cut& cut, uint8_t* to, WeightFormat f) {
    constexpr int64_t kRows = 1024;  // at a time, a multiple of a band's
    const int64_t band = band_bytes(f, from.cols()), cut_band = band_bytes(f, cut.cols.size());
    for (const SliceRange& range : cut.rows)
      for (int64_t r = range.begin; r < range.end; r += kRows) {
        const WeightMatrix rows = from.row_range(r, std::min(range.end, r + kRows));
        std::vector<bf16> narrow;
        WeightMatrix stored = rows;
        if (rows.format != f) {
          narrow = rounded(rows);
          stored = WeightMatrix(Tensor(narrow.data(), DType::bf16, {rows.rows(), rows.cols()}));
        }
        packed_.resize(size_t(weight_tile_bands(rows.rows()) * band));
        const WeightMatrix packed = weight_tiles_at(packed_.data(), f, 0, rows.rows(), rows.cols());
        pack_weight_tiles(stored, packed);
        upload_cut(packed, {.rows = {{0, rows.rows()}}, .cols = cut.cols}, to);
        to += weight_tile_bands(rows.rows()) * cut_band;
      }
  }

  char* memory_;
  const uint64_t* seed_;
  Stream stream_;
  uint64_t next_ = 0;
  std::vector<char> packed_;
  std::vector<uint8_t> cut_;
  int device_;
  std::unique_ptr<Uploader> uploader_;
};

void build_layer(Builder& b, const GptOssConfig& c, const GptOssLayer& w, const Slice& s, Layer& y) {
  const int64_t group = c.heads / c.kv_heads;
  const Cut qkv = qkv_cut(c, s), gate_up = gate_up_cut(c, s),
            heads{.rows = {{s.kv_heads.begin * group, s.kv_heads.end * group}}, .cols = {0, 1}};
  const double in = 1 / std::sqrt(double(c.hidden));
  b.vector(y.attn_norm, w.attn_norm, 0.1, 1);
  b.vector(y.mlp_norm, w.mlp_norm, 0.1, 1);
  b.vector(y.b_router, w.b_router, 0.5);
  b.vector(y.sinks, w.sinks, 1, 0, &heads);
  b.vector(y.b_gate_up, w.b_gate_up, 0.2, 0, &gate_up);
  b.vector(y.b_down, w.b_down, 0.1);
  y.b_qkv = y.b_o = nullptr;
  if (c.attention_bias) b.vector(y.b_qkv, w.b_qkv, 0.2, 0, &qkv), b.vector(y.b_o, w.b_o, 0.1);
  // Of sums that ranks share, one adds the bias.
  if (s.kv_heads.begin > 0 || s.kv_heads.size() == 0) y.b_o = nullptr;
  if (s.channels.begin > 0 || s.channels.size() == 0) y.b_down = nullptr;
  b.matrix(y.qkv, w.qkv, in, qkv);
  b.matrix(y.o, w.o, 1 / std::sqrt(double(c.q_width())), output_cut(c, s));
  b.matrix(y.router, w.router, 2 * in);
  b.matrix(y.gate_up, w.gate_up, in, gate_up);
  b.matrix(y.down, w.down, 1 / std::sqrt(double(c.intermediate)), down_cut(c, s));
}
void build_weights(Builder& b, const GptOssConfig& c, const GptOssWeights& w, const Slice& s, Model& m) {
  m.config = c;
  if (s != whole(c)) m.kv_heads = s.kv_heads.size();
  m.layers.resize(w.layers.size());
  b.embedding(m.embed, w.embed);
  for (size_t l = 0; l < w.layers.size(); ++l) build_layer(b, c, w.layers[l], s, m.layers[l]);
  b.vector(m.norm, w.norm, 0.1, 1);
  b.matrix(m.head, w.head, 2 / std::sqrt(double(c.hidden)), head_cut(c, s));
}

// Room for a head in 8 bits, where one is wanted and serves.
void build_screen(Builder& b, bool wanted, Model& m) {
  if (!wanted || !screen_takes(m)) return;
  uint8_t* codes;
  ScreenRow* rows;
  b.take(codes, screen_matrix(m.head, nullptr).matrix_bytes);
  b.take(rows, 16 * int64_t(m.head.bands));
  m.screen = {screen_matrix(m.head, codes), rows};
}

// A slot's cache and activations: zeros at first. Returns where the activations lie.
char* build_slot(Builder& b, Model& m, int64_t context, int64_t ring, int ranks, LayerStages*& stages,
                 Ranks*& of_ranks) {
  const GptOssConfig& c = m.config;
  const int64_t kv_heads = m.kv_heads < 0 ? c.kv_heads : m.kv_heads;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    Layer& y = m.layers[l];
    y.window = c.sliding[l] ? uint32_t(c.window) : 0;
    y.cache_rows = uint32_t(c.sliding[l] ? ring : context);
    b.take(y.keys, int64_t(y.cache_rows) * kv_heads * cache_dim(c));
    b.take(y.values, int64_t(y.cache_rows) * kv_heads * cache_dim(c));
  }
  b.take(stages, int64_t(m.layers.size()));
  if (ranks > 1) b.take(of_ranks, 1);
  Buffers counted;
  counted.ranks.exchange.ranks = uint32_t(ranks);
  char* memory;
  b.take(memory, lay_out(c, uint32_t(context), nullptr, counted));
  return memory;
}
// What other ranks write to.
void build_inbox(Builder& b, const GptOssConfig& c, int ranks, uint64_t*& inbox, uint32_t*& epoch) {
  if (ranks == 1) return;
  b.take(inbox, inbox_bytes(c, uint32_t(ranks)) / 8);
  b.take(epoch, 1);
}
// cos and sin of all positions, which slots share.
void build_table(Builder& b, const GptOssConfig& c, int64_t context, float*& cos, float*& sin) {
  b.take(cos, context * c.head_dim / 2);
  b.take(sin, context * c.head_dim / 2);
}

void build_draw(Builder& b, const GptOssConfig& c, DrawBuffers& draw) {
  b.take(draw.adjusted, c.vocab);
  b.take(draw.allowed, (c.vocab + 31) / 32);
  b.take(draw.bias_ids, kMostBiases);
  b.take(draw.biases, kMostBiases);
  b.take(draw.top, kMostLogprobs);
  b.take(draw.logprobs, 1 + kMostLogprobs);
  b.take(draw.workspace, logprobs_workspace_bytes(c.vocab, kMostLogprobs, {Device::cuda, 0}));
}

void build_streams(Builder& b, const GptOssConfig& c, int64_t context, int64_t slots, int ranks, Streams& streams,
                   StreamsInput*& input, Buffers& buffers) {
  if (slots == 1 || ranks > 1) return;
  char* memory;
  b.take(memory, lay_out(c, uint32_t(context), nullptr, buffers));
  lay_out(c, uint32_t(context), memory, buffers);
  b.take(memory, lay_out(c, nullptr, input, streams));
  lay_out(c, memory, input, streams);
}

int64_t context_of(const GptOssConfig& c, const DeviceModelOptions& o) {
  if (o.context < 0 || o.context > c.context)
    fail(ErrorCode::usage, "context: found ", o.context, ", expected 1 to ", c.context, ", or 0 for the model's");
  return o.context == 0 ? c.context : o.context;
}
int64_t ring_of(const GptOssConfig& c, int64_t context) {
  return std::min(context, c.window - 1 + kColumns + kStepsBack);
}
static_assert(kPromptTokens <= kStepsBack, "a prompt's keys fit into a ring");
// Tokens that extend() takes at most.
int64_t prompt_tokens_of(const GptOssConfig& c, int64_t context, const DeviceModelOptions& o) {
  return o.prompts && prompts_take(c) ? std::max<int64_t>(max_columns(c), std::min(context, kPromptTokens))
                                      : max_columns(c);
}
void build_prompt(Builder& b, const GptOssConfig& c, int64_t tokens, int ranks, PromptBuffers& prompt) {
  if (tokens <= max_columns(c)) return;
  char* memory;
  b.take(memory, lay_out(c, tokens, ranks > 1, nullptr, prompt));
  lay_out(c, tokens, ranks > 1, memory, prompt);
}

}  // namespace

int64_t DeviceModel::bytes(const GptOssConfig& c, const GptOssWeights& w, const DeviceModelOptions& o) {
  const int64_t context = context_of(c, o);
  Model m;
  float *cos, *sin;
  Builder counter(nullptr, nullptr, {}, o.device);
  build_weights(counter, c, w, slices_of(c, o.ranks, o.split)[size_t(o.rank)], m);
  build_screen(counter, o.screen, m);
  build_table(counter, c, context, cos, sin);
  uint64_t* inbox;
  uint32_t* epoch;
  build_inbox(counter, c, o.ranks, inbox, epoch);
  LayerStages* stages;
  Ranks* ranks;
  for (int64_t s = 0; s < o.slots; ++s) build_slot(counter, m, context, ring_of(c, context), o.ranks, stages, ranks);
  PromptBuffers prompt;
  build_prompt(counter, c, prompt_tokens_of(c, context, o), o.ranks, prompt);
  DrawBuffers draw;
  build_draw(counter, c, draw);
  Streams streams;
  StreamsInput* input;
  Buffers buffers;
  build_streams(counter, c, context, o.slots, o.ranks, streams, input, buffers);
  return counter.bytes;
}

DeviceModelOptions DeviceModel::roomy(const GptOssConfig& c, const GptOssWeights& w, DeviceModelOptions o) {
  // Graphs and the code of kernels take memory later, which a screen must not have taken.
  constexpr int64_t kSpare = int64_t(1) << 29;
  for (int r = 0; r < o.ranks && o.screen; ++r) {
    const DeviceModelOptions own = o.of_rank(r);
    const int64_t free = gpu::device_memory(own.device).available();
    o.screen = free < 0 || bytes(c, w, own) + kSpare <= free;
  }
  return o;
}

DeviceModel::DeviceModel(const GptOssConfig& c, const GptOssWeights& w, const DeviceModelOptions& o)
    : DeviceModel(c, w, o, nullptr) {}
DeviceModel::DeviceModel(const GptOssConfig& c, const GptOssWeights& w, const DeviceModelOptions& o, uint64_t seed)
    : DeviceModel(c, w, o, &seed) {}
DeviceModel::DeviceModel(const GptOssConfig& c, const GptOssWeights& w, const DeviceModelOptions& o,
                         const uint64_t* seed)
    : context_(context_of(c, o)),
      ring_(ring_of(c, context_)),
      prompt_tokens_(prompt_tokens_of(c, context_, o)),
      slice_(slices_of(c, o.ranks, o.split)[size_t(o.rank)]),
      device_(o.device) {
  check_supported(c);
  const gpu::DeviceGuard guard(device_);
  const int64_t total = bytes(c, w, o);
  require_memory(total, "GPT-OSS with a context of " + std::to_string(context_) + " tokens",
                 gpu::device_memory(device_));
  arena_ = Arena(total, gpu::device_memory(device_));
  stream_ = std::make_unique<gpu::OwnedStream>();
  char* const memory = static_cast<char*>(arena_.at(0, DType::u8, {total}).data);
  Builder builder(memory, seed, *stream_, device_);
  Model model;
  float *cos, *sin;
  build_weights(builder, c, w, slice_, model);
  weight_bytes_ = builder.bytes;
  build_screen(builder, o.screen, model);
  build_table(builder, c, context_, cos, sin);
  build_inbox(builder, c, o.ranks, inbox_, epoch_);
  model.cos = cos, model.sin = sin;
  gpu::fill_bytes(memory + weight_bytes_, 0, total - weight_bytes_, *stream_);
  if (model.screen.rows != nullptr) make_screen(model.head, model.screen, *stream_);
  stream_->synchronize();
  waits_ = std::make_unique<gpu::WaitControl>(o.wait_limit);
  for (int64_t s = 0; s < o.slots; ++s) {
    Slot& slot = slots_.emplace_back();
    slot.model = model;
    char* const activations = build_slot(builder, slot.model, context_, ring_, o.ranks, slot.stages, slot.ranks);
    slot.buffers.ranks.exchange.rank = uint32_t(o.rank), slot.buffers.ranks.exchange.ranks = uint32_t(o.ranks);
    lay_out(c, uint32_t(context_), activations, slot.buffers);
    slot.buffers.stop = waits_->watch().stop, slot.buffers.watch = waits_->watch();
    const std::vector<LayerStages> stages = stages_of(slot.model, slot.buffers, uint32_t(context_));
    gpu::copy_to_device(slot.stages, stages.data(), int64_t(stages.size() * sizeof(LayerStages)));
  }
  build_prompt(builder, c, prompt_tokens_, o.ranks, prompt_);
  build_draw(builder, c, draw_);
  build_streams(builder, c, context_, o.slots, o.ranks, streams_, streams_input_, streams_buffers_);
  if (most_streams() > 1) {
    const auto address = [&](int64_t s) { return reinterpret_cast<const char*>(buffers(int(s)).state); };
    streams_.slot_bytes = address(1) - address(0);
    for (int64_t s = 2; s < o.slots; ++s)
      INGOT_CHECK(address(s) - address(s - 1) == streams_.slot_bytes, "gpt-oss: slots lie at uneven distances");
    streams_.state = buffers().state, streams_.logits = buffers().logits;
    streams_buffers_.stop = buffers().stop, streams_buffers_.watch = buffers().watch;
  }
  use_megakernel(o.megakernel);
  std::vector<float> host_cos(size_t(context_ * c.head_dim / 2)), host_sin(host_cos.size());
  rope_table(rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling),
             Tensor(host_cos.data(), {context_, c.head_dim / 2}), Tensor(host_sin.data(), {context_, c.head_dim / 2}));
  gpu::copy_to_device(cos, host_cos.data(), int64_t(host_cos.size()) * 4);
  gpu::copy_to_device(sin, host_sin.data(), int64_t(host_sin.size()) * 4);
}

bool DeviceModel::use_megakernel(bool wanted) {
  const bool takes = megakernel_takes(slots_[0].model);
  if (takes) megakernel_ = wanted;
  return takes || !wanted;
}

gpu::Graph& DeviceModel::graph(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone) {
  const bool persistent = megakernel_ && T == 1, screened = screens(T, head_rows, id_alone);
  auto& g = slot.graphs[{T, head_rows, vocab, persistent, screened}];
  if (g != nullptr) return *g;
  const Step step{.T = T, .head_rows = head_rows, .vocab = vocab, .capacity = uint32_t(context_)};
  g = std::make_unique<gpu::Graph>(*stream_, [&] {
    if (!persistent) return run(slot.model, slot.buffers, step, *stream_);
    run_megakernel(slot.model, slot.buffers, step,
                   {.layers = slot.stages, .watch = waits_->watch(), .ranks = slot.ranks, .screened = screened},
                   *stream_);
  });
  return *g;
}

void DeviceModel::connect(std::span<const std::unique_ptr<DeviceModel>> all) {
  const gpu::DeviceGuard guard(device_);
  for (size_t s = 0; s < slots_.size(); ++s) {
    Slot& slot = slots_[s];
    Ranks& r = slot.buffers.ranks;
    r.exchange.words = inbox_words(config()), r.exchange.epoch = epoch_;
    r.heads = r.channels = r.ids = 0;
    for (size_t q = 0; q < all.size(); ++q) {
      const DeviceModel& other = *all[q];
      r.exchange.inbox[q] = other.inbox_;
      r.exchange.stop[q] = other.waits_->watch().stop;
      if (other.slice_.kv_heads.size() > 0) r.heads |= 1u << q;
      if (other.slice_.channels.size() > 0) r.channels |= 1u << q;
      if (other.slice_.ids.size() > 0) r.ids |= 1u << q;
    }
    r.first_id = uint32_t(slice_.ids.begin);
    // A wait for another GPU gives up before those for the blocks that do: its record says which GPU it was.
    r.watch = waits_->watch();
    r.watch.limit_ns = r.watch.limit_ns / 4 * 3;
    slot.buffers.logits = all[0]->slots_[s].buffers.logits + r.first_id;
    gpu::copy_to_device(slot.ranks, &r, sizeof r);
  }
  if (prompt_.ids == nullptr) return;
  prompt_.logits = all[0]->prompt_.logits + slice_.ids.begin;
  for (size_t q = 0; q < all.size(); ++q)
    for (int sums = 0; sums < 2; ++sums) prompt_.parts[sums][q] = all[q]->prompt_.part[sums];
}

std::string DeviceModel::wait() {
  const gpu::DeviceGuard guard(device_);
  stream_->synchronize();
  return grid_barrier_report(*waits_, uint32_t(config().layers));
}

int DeviceModel::reset() {
  const gpu::DeviceGuard guard(device_);
  int first = 0;
  for (int i = int(slots_.size()) - 1; i >= 0; --i) {
    Slot& slot = slots_[size_t(i)];
    State s;
    gpu::copy_to_host(&s, slot.buffers.state, sizeof s);
    if (slot.length != s.position) first = i;
    slot.length = s.position;
    gpu::fill_bytes(slot.buffers.grid_barrier, 0, slot.buffers.handover_bytes, *stream_);
  }
  if (most_streams() > 1) gpu::fill_bytes(streams_buffers_.grid_barrier, 0, streams_buffers_.handover_bytes, *stream_);
  if (inbox_ != nullptr) {
    gpu::fill_bytes(inbox_, 0, inbox_bytes(config(), slots_[0].buffers.ranks.exchange.ranks), *stream_);
    gpu::fill_bytes(epoch_, 0, 4, *stream_);
  }
  waits_->reset(*stream_);
  stream_->synchronize();
  return first;
}

std::string DeviceModel::place_in(int slot) const {
  return ingot::detail::concat("position ", length(slot),
                               slots_.size() > 1 ? ingot::detail::concat(" of slot ", slot) : std::string());
}

void DeviceModel::synchronize() {
  const std::string found = wait();
  if (!found.empty()) fail(ErrorCode::interrupted, "gpt-oss: the GPU gave up after ", place_in(reset()), ": ", found);
}

void DeviceModel::grow(Slot& slot, int64_t tokens) {
  if (slot.length + tokens > context_)
    fail(ErrorCode::usage, "found ", slot.length + tokens, " tokens, expected at most ", context_, ", the context");
  slot.length += tokens;
  slot.valid_from = std::max(slot.valid_from, slot.length - ring_);
}

void DeviceModel::extend(std::span<const int32_t> ids, uint32_t head_rows, int index, uint32_t vocab, bool id_alone) {
  Slot& slot = slots_[size_t(index)];
  const int64_t T = int64_t(ids.size());
  const int64_t most = head_rows <= 1 ? prompt_batch() : head_rows == T ? rows_batch() : batch();
  INGOT_CHECK(1 <= T && T <= most, "gpt-oss: found a batch of ", T, " tokens, expected 1 to ", most);
  for (int64_t t = 0; t < T; ++t)
    INGOT_CHECK(ids[size_t(t)] >= 0 && ids[size_t(t)] < config().vocab, "gpt-oss: found id ", ids[size_t(t)],
                " at position ", slot.length + t, ", expected 0 to ", config().vocab - 1);
  const gpu::DeviceGuard guard(device_);
  grow(slot, T);
  slot.vocab = vocab > 0 ? vocab : uint32_t(config().vocab);
  slot.id_alone = screens(T, head_rows, id_alone);
  if (T > batch()) {
    gpu::copy_rows({.to = prompt_.ids, .from = ids.data(), .row_bytes = T * 4, .device = device_}, *stream_);
    return run_prompt(slot.model, slot.buffers, prompt_,
                      {.T = T,
                       .position = slot.length - T,
                       .head_rows = head_rows,
                       .vocab = vocab,
                       .capacity = uint32_t(context_),
                       .device = device_},
                      *stream_);
  }
  gpu::copy_rows({.to = slot.buffers.state->tokens, .from = ids.data(), .row_bytes = T * 4, .device = device_},
                 *stream_);
  graph(slot, uint32_t(T), head_rows, vocab, id_alone).launch(*stream_);
}

std::vector<int> DeviceModel::kernels_of_prompt(int64_t tokens, uint32_t head_rows) const {
  return prompt_kernels(model(), {.T = tokens,
                                  .position = 0,
                                  .head_rows = head_rows,
                                  .vocab = 0,
                                  .capacity = uint32_t(context_),
                                  .device = device_});
}
void DeviceModel::rehearse_prompt(int64_t tokens, uint32_t head_rows, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  slot.valid_from = std::max(slot.valid_from, slot.length + tokens - ring_);  // it writes where the prompt will
  gpu::fill_bytes(waits_->watch().stop, 0xff, 4, *stream_);                   // no wait lasts
  gpu::fill_bytes(prompt_.ids, 0, tokens * 4, *stream_);
  run_prompt(slot.model, slot.buffers, prompt_,
             {.T = tokens,
              .position = slot.length,
              .head_rows = head_rows,
              .vocab = 0,
              .capacity = uint32_t(context_),
              .device = device_},
             *stream_);
}

void DeviceModel::prepare(int64_t tokens, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone) {
  const gpu::DeviceGuard guard(device_);
  if (1 <= tokens && tokens <= batch()) graph(slots_[size_t(slot)], uint32_t(tokens), head_rows, vocab, id_alone);
}

void DeviceModel::continue_greedily(int64_t n, int index, bool id_alone) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  grow(slot, n);
  slot.vocab = uint32_t(config().vocab);
  slot.id_alone = screens(1, 1, id_alone);
  gpu::Graph& g = graph(slot, 1, 1, 0, id_alone);
  for (int64_t i = 0; i < n; ++i) g.launch(*stream_);
}

void DeviceModel::start_streams(std::span<const int> slots, std::span<const int32_t> ids, int64_t n, uint32_t vocab) {
  const int64_t T = int64_t(slots.size());
  INGOT_CHECK(1 <= T && T <= most_streams(), "gpt-oss: found ", T, " slots of one step, expected 1 to ",
              most_streams());
  const gpu::DeviceGuard guard(device_);
  for (const int slot : slots)
    if (length(slot) + n > context_)
      fail(ErrorCode::usage, "found ", length(slot) + n, " tokens, expected at most ", context_, ", the context");
  StreamsInput input{};
  for (size_t j = 0; j < slots.size(); ++j) {
    input.slot[j] = uint32_t(slots[j]);
    input.token[j] = ids.empty() ? -1 : ids[j];
    Slot& slot = slots_[size_t(slots[j])];
    grow(slot, n);
    slot.vocab = vocab > 0 ? vocab : uint32_t(config().vocab);
    slot.id_alone = false;
  }
  gpu::copy_rows({.to = streams_input_, .from = &input, .row_bytes = int64_t(sizeof input), .device = device_},
                 *stream_);
  auto& g = streams_graphs_[{uint32_t(T), vocab}];
  if (g == nullptr) {
    const Step step{.T = uint32_t(T),
                    .head_rows = uint32_t(T),
                    .vocab = vocab,
                    .capacity = uint32_t(context_),
                    .streams = &streams_};
    g = std::make_unique<gpu::Graph>(*stream_, [&] { run(slots_[0].model, streams_buffers_, step, *stream_); });
  }
  for (int64_t i = 0; i < n; ++i) g->launch(*stream_);
}
void DeviceModel::extend_streams(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab) {
  INGOT_CHECK_EQ(ids.size(), slots.size(), "gpt-oss: ids of a step of several slots");
  for (size_t j = 0; j < ids.size(); ++j)
    INGOT_CHECK(ids[j] >= 0 && ids[j] < config().vocab, "gpt-oss: found id ", ids[j], " for slot ", slots[j],
                ", expected 0 to ", config().vocab - 1);
  start_streams(slots, ids, 1, vocab);
}
void DeviceModel::continue_streams(std::span<const int> slots, int64_t n) { start_streams(slots, {}, n, 0); }
void DeviceModel::prepare_trace(const megakernel::Trace& trace, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  slot.traced = std::make_unique<gpu::Graph>(*stream_, [&] {
    run_megakernel(slot.model, slot.buffers, {.capacity = uint32_t(context_)},
                   {.layers = slot.stages, .watch = waits_->watch(), .ranks = slot.ranks, .trace = trace}, *stream_);
  });
}
void DeviceModel::continue_traced(int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  grow(slot, 1);
  slot.id_alone = false;
  slot.traced->launch(*stream_);
}

int32_t DeviceModel::likeliest(int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  State s;
  gpu::copy_to_host(&s, buffers(slot).state, sizeof s);
  if (s.flaw == 0 && s.tokens[0] >= 0) return s.tokens[0];
  fail(ErrorCode::numeric, "gpt-oss: found ", (s.flaw & 1) != 0 ? "a NaN logit" : "only -inf logits",
       " before position ", s.position, ", expected numbers");
}

bool DeviceModel::can_draw(const DrawOptions& o) {
  return int64_t(o.bias.size()) <= kMostBiases && o.logprobs <= kMostLogprobs;
}
void DeviceModel::send_adjustments(const DrawOptions& o) {
  const auto send = [&](void* to, const void* from, size_t bytes) {
    gpu::copy_rows({.to = to, .from = from, .row_bytes = int64_t(bytes), .device = device_}, *stream_);
  };
  const auto same = [](const LogitBias& a, const LogitBias& b) { return a.id == b.id && a.bias == b.bias; };
  if (const std::vector<LogitBias> bias = in_order(o.bias);
      !std::equal(bias.begin(), bias.end(), bias_sent_.begin(), bias_sent_.end(), same)) {
    std::vector<int32_t> ids;
    std::vector<float> biases;
    for (const LogitBias& b : bias) ids.push_back(b.id), biases.push_back(b.bias);
    if (!bias.empty())
      send(draw_.bias_ids, ids.data(), ids.size() * 4), send(draw_.biases, biases.data(), ids.size() * 4);
    bias_sent_ = bias;
  }
  if (o.allowed.empty() || std::equal(o.allowed.begin(), o.allowed.end(), allowed_sent_.begin(), allowed_sent_.end()))
    return;
  send(draw_.allowed, o.allowed.data(), o.allowed.size_bytes());
  allowed_sent_.assign(o.allowed.begin(), o.allowed.end());
}

void DeviceModel::check_logits(const Slot& slot) const {
  INGOT_CHECK(!slot.id_alone, "gpt-oss: found a step that was asked for the likeliest id alone, expected its logits");
}

// A step that found no numbers says so in `flaw`, which a draw leaves alone.
DrawnToken DeviceModel::draw(const DrawOptions& o, uint32_t step, int index) {
  INGOT_CHECK(can_draw(o), "gpt-oss: found ", o.bias.size(), " biases and logprobs of ", o.logprobs,
              " ids, expected at most ", kMostBiases, " and ", kMostLogprobs);
  const gpu::DeviceGuard guard(device_);
  const Buffers& b = buffers(index);
  const Device device{Device::cuda, device_};
  const int64_t vocab = o.vocab > 0 ? o.vocab : config().vocab;
  const bool adjusts = !o.bias.empty() || !o.allowed.empty();
  const Tensor row(b.logits, {vocab}, device), token(b.state->tokens, {1}, device);
  if (adjusts) {
    send_adjustments(o);
    const int64_t n = int64_t(o.bias.size());
    adjust_logits({.logits = row,
                   .adjusted = Tensor(draw_.adjusted, {vocab}, device),
                   .bias_ids = n > 0 ? Tensor(draw_.bias_ids, {n}, device) : Tensor(),
                   .biases = n > 0 ? Tensor(draw_.biases, {n}, device) : Tensor(),
                   .allowed = o.allowed.empty() ? Tensor() : Tensor(draw_.allowed, {(vocab + 31) / 32}, device)},
                  *stream_);
  }
  const Slot& slot = slots_[size_t(index)];
  // Of a greedy draw the step has found the token.
  const bool found = !adjusts && o.sampling.temperature <= 0 && slot.vocab == uint32_t(vocab);
  if (!found || o.logprobs >= 0) check_logits(slot);
  if (!found)
    sample({.logits = Tensor(adjusts ? draw_.adjusted : b.logits, {1, vocab}, device),
            .tokens = token,
            .options = o.sampling,
            .seed = o.seed,
            .step = step},
           *stream_);
  const int64_t top = std::max<int64_t>(0, o.logprobs);
  const Tensor values(draw_.logprobs, {1 + top}, device);
  if (o.logprobs >= 0)
    logprobs({.logits = row,
              .token = token,
              .top = top > 0 ? Tensor(draw_.top, {top}, device) : Tensor(),
              .values = values,
              .workspace = Tensor(draw_.workspace, DType::u8, {logprobs_workspace_bytes(vocab, top, device)}, device)},
             *stream_);
  DrawnToken drawn{.token = likeliest(index)};
  if (o.logprobs < 0) return drawn;
  std::vector<int32_t> ids(static_cast<size_t>(top));
  std::vector<double> numbers(size_t(1 + top));
  gpu::copy_to_host(numbers.data(), draw_.logprobs, int64_t(numbers.size()) * 8);
  if (top > 0) gpu::copy_to_host(ids.data(), draw_.top, top * 4);
  drawn.logprobs = logprobs_of(ids, numbers);
  return drawn;
}

void DeviceModel::logits(uint32_t rows, float* to, int slot) {
  const gpu::DeviceGuard guard(device_);
  synchronize();
  check_logits(slots_[size_t(slot)]);
  const float* const from = int64_t(rows) > batch() ? prompt_.logits : buffers(slot).logits;
  gpu::copy_to_host(to, from, int64_t(rows) * config().vocab * 4);
}

bool DeviceModel::can_rewind(int64_t length, int index) const {
  const Slot& slot = slots_[size_t(index)];
  return 0 <= length && length <= slot.length &&
         (length == 0 || std::max<int64_t>(0, length - (config().window - 1)) >= slot.valid_from);
}
void DeviceModel::rewind(int64_t length, int index) {
  Slot& slot = slots_[size_t(index)];
  INGOT_CHECK(can_rewind(length, index), "gpt-oss: found a cache of ", slot.length, " tokens that cannot go back to ",
              length);
  const gpu::DeviceGuard guard(device_);
  synchronize();
  slot.length = length;
  if (length == 0) slot.valid_from = 0;
  const int32_t at[2] = {int32_t(length), 0};  // position, flaw
  gpu::copy_to_device(&slot.buffers.state->position, at, sizeof at);
}

bool DeviceModel::takes_trace() const {
  return megakernel_takes(model()) && model().layers[0].down.format == WeightFormat::mxfp4;
}

void DeviceModel::pretend(int64_t length, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  rewind(0, index);
  grow(slot, length);
  const GptOssConfig& c = config();
  uint64_t seed = 1;
  const int64_t kv_heads = slice_.kv_heads.size();
  for (const Layer& l : slot.model.layers)
    for (bf16* rows : {l.keys, l.values})
      if (!slot.pretends && kv_heads > 0)
        fill_normal(rows, DType::bf16, kv_heads * int64_t(l.cache_rows) * cache_dim(c), 1, 0, ++seed, *stream_);
  slot.pretends = true;
  const State state{.tokens = {}, .position = int32_t(length), .flaw = 0};
  gpu::copy_to_device(slot.buffers.state, &state, sizeof state);
}

#endif

}  // namespace ingot::decode
