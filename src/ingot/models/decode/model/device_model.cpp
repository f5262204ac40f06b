#include "ingot/models/decode/model/device_model.h"

#include <algorithm>

#include "ingot/core/log.h"
#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/megakernel/token_kernel_form.h"
#include "ingot/models/decode/model/no_megakernel.h"
#include "ingot/models/decode/phased/ranks.h"
#include "ingot/models/decode/prefilter/int8_prefilter.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE
namespace {

// tokens that the circular cache of a sliding layer keeps besides its window, for rewinding
constexpr int64_t kStepsBack = 4096;

// Places the int8 copy of the head, if the prefilter is wanted and the model supports it.
void build_prefilter(DeviceBuilder& b, bool wanted, Model& m) {
  if (!wanted || !gpu::current_limits().hopper) return;  // only the megakernel uses the prefilter
  if (!unsupported_reason(m.config, DecodePath::prefilter).empty() || !supports_prefilter(m)) return;
  uint8_t* codes;
  PrefilterRow* rows;
  b.take(codes, prefilter_matrix(m.head, nullptr).matrix_bytes);
  b.take(rows, 16 * int64_t(m.head.row_tiles));
  m.prefilter = {prefilter_matrix(m.head, codes), rows};
}

// Places a slot's cache and activations, which are zeros at first. Returns the address of the activations.
char* build_slot(DeviceBuilder& b, Model& m, int64_t context, int64_t ring, int ranks, LayerStages*& stages,
                 char*& family_stages, Ranks*& of_ranks) {
  const DecoderSpec& c = m.config;
  const int64_t kv_heads = m.kv_heads < 0 ? c.kv_heads : m.kv_heads;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    Layer& y = m.layers[l];
    y.window = uint32_t(c.layer[l].window);
    y.cache_rows = uint32_t(y.window > 0 ? ring : context);
    b.take(y.keys, int64_t(y.cache_rows) * kv_heads * cache_dim(c));
    b.take(y.values, int64_t(y.cache_rows) * kv_heads * cache_dim(c));
  }
  b.take(stages, int64_t(m.layers.size()));
  if (const int64_t bytes = family_stages_bytes(c); bytes > 0) b.take(family_stages, bytes);
  if (ranks > 1) b.take(of_ranks, 1);
  Buffers counted;
  counted.ranks.exchange.ranks = uint32_t(ranks);
  char* memory;
  b.take(memory, lay_out(c, uint32_t(context), nullptr, counted));
  return memory;
}
// Places the memory into which other ranks write.
void build_inbox(DeviceBuilder& b, const DecoderSpec& c, int ranks, uint64_t*& inbox, uint32_t*& epoch) {
  if (ranks == 1) return;
  b.take(inbox, inbox_bytes(c, uint32_t(ranks)) / 8);
  b.take(epoch, 1);
}
// cos and sin of all positions, which slots share: of each table of the spec, and of layers without a rotation.
struct Rotations {
  std::vector<float*> cos, sin;
  bool has_none = false;  // the last table rotates by no angle

  void build(DeviceBuilder& b, const DecoderSpec& c, int64_t context, Model& m) {
    has_none = std::any_of(c.layer.begin(), c.layer.end(), [](const LayerSpec& l) { return l.rope < 0; });
    cos.resize(c.rope.size() + (has_none ? 1 : 0)), sin.resize(cos.size());
    for (size_t i = 0; i < cos.size(); ++i) {
      b.take(cos[i], context * c.head_dim / 2);
      b.take(sin[i], context * c.head_dim / 2);
    }
    for (size_t l = 0; l < m.layers.size(); ++l) {
      const size_t i = c.layer[l].rope < 0 ? cos.size() - 1 : size_t(c.layer[l].rope);
      m.layers[l].cos = cos[i], m.layers[l].sin = sin[i];
    }
  }
  // The tables are computed from the last to the first. If there is a table without a rotation, it is the last one, and
  // its numbers are those with which the arrays begin: cos 1 and sin 0.
  void fill(const DecoderSpec& c, int64_t context) const {
    const Shape shape{context, c.head_dim / 2};
    std::vector<float> of_cos(size_t(shape.numel()), 1), of_sin(of_cos.size(), 0);
    for (size_t i = cos.size(); i-- > 0;) {
      if (i < c.rope.size())
        rope_table(frequencies_of(c, c.rope[i]), Tensor(of_cos.data(), shape), Tensor(of_sin.data(), shape));
      gpu::copy_to_device(cos[i], of_cos.data(), int64_t(of_cos.size()) * 4);
      gpu::copy_to_device(sin[i], of_sin.data(), int64_t(of_sin.size()) * 4);
    }
  }
};

void build_batched_sequences(DeviceBuilder& b, const DecoderSpec& c, int64_t context, int64_t most,
                             BatchedSequences& sequences, BatchInput*& input, Buffers& buffers) {
  if (most == 1) return;
  char* memory;
  b.take(memory, lay_out(c, uint32_t(context), nullptr, buffers));
  lay_out(c, uint32_t(context), memory, buffers);
  b.take(memory, lay_out(c, most, nullptr, input, sequences));
  lay_out(c, most, memory, input, sequences);
}

void build_draft_sampling(DeviceBuilder& b, const DecoderSpec& c, int64_t rows, SamplingBuffers& sampling,
                          int32_t*& tokens) {
  if (rows == 1) return;
  build_sampling(b, c.vocab, kMostDraftRows, sampling);
  b.take(tokens, int64_t(kMostDraftRows));
}

void build_rows(DeviceBuilder& b, const DecoderSpec& c, int64_t context, int ranks, RowWords& words) {
  if (ranks > 1) return;
  char* memory;
  b.take(memory, lay_out(c, uint32_t(context), nullptr, words));
  lay_out(c, uint32_t(context), memory, words);
}

int64_t ring_of(const DecoderSpec& c, int64_t context) {
  return std::min(context, c.window_reach() + kMostTokens + kStepsBack);
}
static_assert(kPromptTokens <= kStepsBack, "a prompt's keys fit into a ring");
// Whether prompts are computed by the matrix kernels.
bool takes_prompts(const DecoderSpec& c, const DecoderOptions& o) {
  return o.prompt_kernels && unsupported_reason(c, DecodePath::prompt).empty() && prompts_take(c);
}
// The most tokens of extend().
int64_t prompt_tokens_of(const DecoderSpec& c, int64_t context, const DecoderOptions& o) {
  return takes_prompts(c, o) ? std::max<int64_t>(max_step_tokens(c), std::min(context, most_prompt_tokens(c)))
                             : max_step_tokens(c);
}
// The most sequences of a step.
int64_t most_sequences(const DecoderSpec& c, const DecoderOptions& o) {
  if (o.gpus > 1) return 1;
  const int64_t most = takes_prompts(c, o) ? kMostSequences : std::min<int64_t>(kMostSmallBatch, max_step_tokens(c));
  return std::min(o.slots, most);
}
// The most rows of a step of several sequences or of draft steps; 1: there are no such steps.
int64_t most_rows(const DecoderSpec& c, const DecoderOptions& o) {
  return std::max(most_sequences(c, o), std::min<int64_t>(kMostDraftRows, max_step_tokens(c)));
}
// The number of rows of the matrix kernels' buffers; 0: the matrix kernels are not used.
int64_t matrix_rows_of(const DecoderSpec& c, int64_t context, const DecoderOptions& o) {
  if (!takes_prompts(c, o)) return 0;
  const int64_t prompt = prompt_tokens_of(c, context, o), most = most_sequences(c, o);
  return std::max(prompt > max_step_tokens(c) ? prompt : 0, most > 1 ? int64_t(batch_rows(uint32_t(most))) : 0);
}
void build_prompt(DeviceBuilder& b, const DecoderSpec& c, int64_t tokens, int ranks, PromptBuffers& prompt) {
  if (tokens == 0) return;
  char* memory;
  b.take(memory, lay_out(c, tokens, ranks > 1, nullptr, prompt));
  lay_out(c, tokens, ranks > 1, memory, prompt);
}

MegakernelModel megakernel_model_of(const Model& m) {
  const WeightFormat format = m.head.format;
  const bool one_format = std::all_of(m.layers.begin(), m.layers.end(), [&](const Layer& l) {
    return l.qkv.format == format && l.o.format == format && l.gate_up.format == format && l.down.format == format;
  });
  return {.head_dim = m.config.head_dim,
          .cache_dim = cache_dim(m.config),
          .dense_mlp = has_dense_mlp(m.config),
          .shared_by_gpus = m.kv_heads >= 0,
          .one_format = one_format};
}

}  // namespace

DeviceHead::Sizes DeviceModel::head_sizes(const DecoderSpec& c, const DecoderOptions& o) {
  const int64_t context = context_of(o, c.context);
  return {.context = context,
          .slots = o.slots,
          .rows = std::max<int64_t>(prompt_tokens_of(c, context, o), batch_rows(uint32_t(most_sequences(c, o))))};
}

int64_t DeviceModel::bytes(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o, int rank,
                           const draft::DraftHead* head) {
  const int64_t context = context_of(o, c.context);
  const int gpus = int(o.gpus);
  Model m;
  DeviceBuilder counter(nullptr, nullptr, {}, rank);
  build_weights(counter, c, w, slices_of(c, gpus, o.split)[size_t(rank)], m);
  build_prefilter(counter, o.int8_prefilter, m);
  Rotations().build(counter, c, context, m);
  uint64_t* inbox;
  uint32_t* epoch;
  build_inbox(counter, c, gpus, inbox, epoch);
  LayerStages* stages;
  char* family_stages;
  Ranks* ranks;
  for (int64_t s = 0; s < o.slots; ++s)
    build_slot(counter, m, context, ring_of(c, context), gpus, stages, family_stages, ranks);
  PromptBuffers prompt;
  build_prompt(counter, c, matrix_rows_of(c, context, o), gpus, prompt);
  SamplingBuffers sampling;
  State* states;
  build_sampling(counter, c.vocab, o.slots, sampling);
  counter.take(states, o.slots);
  int32_t* tokens;
  build_draft_sampling(counter, c, rank == 0 ? most_rows(c, o) : 1, sampling, tokens);
  BatchedSequences sequences;
  BatchInput* input;
  Buffers buffers;
  buffers.ranks.exchange.ranks = uint32_t(gpus);
  build_batched_sequences(counter, c, context, most_rows(c, o), sequences, input, buffers);
  RowWords words;
  build_rows(counter, c, context, gpus, words);
  return counter.bytes + (head != nullptr && rank == 0 ? DeviceHead::bytes(*head, head_sizes(c, o)) : 0);
}

DecoderOptions DeviceModel::fit_to_memory(const DecoderSpec& c, const DecoderWeights& w, DecoderOptions o,
                                          const draft::DraftHead* head) {
  // Graphs and the code of kernels take memory later, so an int8 prefilter must leave some memory free.
  constexpr int64_t kSpare = int64_t(1) << 29;
  if (head != nullptr) o.int8_prefilter = false;  // only the megakernel uses the prefilter
  for (int r = 0; r < int(o.gpus) && o.int8_prefilter; ++r) {
    const int64_t free = gpu::device_memory(r).available();
    o.int8_prefilter = free < 0 || bytes(c, w, o, r, head) + kSpare <= free;
  }
  return o;
}

DeviceModel::DeviceModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o,
                         const draft::DraftHead* head)
    : DeviceModel(c, w, o, 0, nullptr, head) {}
DeviceModel::DeviceModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o, uint64_t seed)
    : DeviceModel(c, w, o, 0, &seed) {}
DeviceModel::DeviceModel(const DecoderSpec& c, const DecoderWeights& w, const DecoderOptions& o, int rank,
                         const uint64_t* seed, const draft::DraftHead* head)
    : context_(context_of(o, c.context)),
      ring_(ring_of(c, context_)),
      prompt_tokens_(prompt_tokens_of(c, context_, o)),
      max_sequences_(most_sequences(c, o)),
      slice_(slices_of(c, int(o.gpus), o.split)[size_t(rank)]),
      device_(rank) {
  check(c, "decode");
  if (const std::string reason = unsupported_reason(c, DecodePath::phased); !reason.empty())
    fail(ErrorCode::unsupported, "decode on a GPU: ", reason);
  check_supported(c);
  const int gpus = int(o.gpus);
  const gpu::DeviceGuard guard(device_);
  const int64_t total = bytes(c, w, o, rank);
  require_memory(total, "a model with a context of " + std::to_string(context_) + " tokens",
                 gpu::device_memory(device_));
  arena_ = Arena(total, gpu::device_memory(device_));
  stream_ = std::make_unique<gpu::OwnedStream>();
  char* const memory = static_cast<char*>(arena_.at(0, DType::u8, {total}).data);
  DeviceBuilder builder(memory, seed, *stream_, device_);
  Model model;
  build_weights(builder, c, w, slice_, model);
  weight_bytes_ = builder.bytes;
  build_prefilter(builder, o.int8_prefilter, model);
  Rotations rotations;
  rotations.build(builder, c, context_, model);
  build_inbox(builder, c, gpus, inbox_, epoch_);
  gpu::fill_bytes(memory + weight_bytes_, 0, total - weight_bytes_, *stream_);
  if (model.prefilter.rows != nullptr) make_prefilter(model.head, model.prefilter, *stream_);
  stream_->synchronize();
  waits_ = std::make_unique<gpu::WaitControl>(o.wait_limit);
  for (int64_t s = 0; s < o.slots; ++s) {
    Slot& slot = slots_.emplace_back();
    slot.model = model;
    char* const activations =
        build_slot(builder, slot.model, context_, ring_, gpus, slot.stages, slot.family_stages, slot.ranks);
    slot.buffers.ranks.exchange.rank = uint32_t(rank), slot.buffers.ranks.exchange.ranks = uint32_t(gpus);
    lay_out(c, uint32_t(context_), activations, slot.buffers);
    slot.buffers.stop = waits_->watch().stop, slot.buffers.watch = waits_->watch();
    const std::vector<LayerStages> stages = stages_of(slot.model, slot.buffers, uint32_t(context_));
    gpu::copy_to_device(slot.stages, stages.data(), int64_t(stages.size() * sizeof(LayerStages)));
    if (slot.family_stages != nullptr) {
      const std::vector<char> of_family = family_stages_of(slot.model, slot.buffers, uint32_t(context_));
      gpu::copy_to_device(slot.family_stages, of_family.data(), int64_t(of_family.size()));
    }
  }
  build_prompt(builder, c, matrix_rows_of(c, context_, o), gpus, prompt_);
  build_sampling(builder, c.vocab, o.slots, sampling_);
  builder.take(states_together_, o.slots);
  build_draft_sampling(builder, c, rank == 0 ? most_rows(c, o) : 1, draft_sampling_, draft_tokens_);
  sequences_buffers_.ranks.exchange.rank = uint32_t(rank), sequences_buffers_.ranks.exchange.ranks = uint32_t(gpus);
  build_batched_sequences(builder, c, context_, most_rows(c, o), sequences_, sequences_input_, sequences_buffers_);
  build_rows(builder, c, context_, gpus, row_words_);
  for (int s = 1; s < int(o.slots); ++s)
    INGOT_CHECK(reinterpret_cast<const char*>(buffers(s).state) - reinterpret_cast<const char*>(buffers(s - 1).state) ==
                    bytes_between_slots(),
                "decode: slots lie at uneven distances");
  if (sequences_input_ != nullptr) {
    sequences_.slot_bytes = bytes_between_slots();
    sequences_.state = buffers().state, sequences_.logits = buffers().logits;
    sequences_buffers_.stop = buffers().stop, sequences_buffers_.watch = buffers().watch;
  }
  if (head != nullptr && rank == 0)
    head_ = std::make_unique<DeviceHead>(*head, slots_[0].model, head_sizes(c, o), *stream_, device_);
  limit_small_batch(small_batch_sequences(gpu::limits(device_).hopper, c.experts > 0));
  const bool as_wanted = use_megakernel(prefers_token_kernel(gpu::limits(device_)) && head == nullptr && o.megakernel);
  if (megakernel_) use_row_kernel(RowKernelUse::where_faster);
  if (!as_wanted && gpu::limits(device_).hopper && megakernel_path(c) == DecodePath::family_megakernel &&
      unsupported_reason(c, DecodePath::family_megakernel).empty())
    log_warn("decode: found ", no_megakernel_reason(megakernel_model_of(slots_[0].model)),
             ", which the megakernel does not take: a token takes a launch for each phase of a layer");
  rotations.fill(c, context_);
}

void DeviceModel::connect(std::span<const std::unique_ptr<DeviceModel>> all) {
  const gpu::DeviceGuard guard(device_);
  const auto connect_buffers = [&](Buffers& buffers, const Buffers& of_first) {
    Ranks& r = buffers.ranks;
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
    // A wait for another GPU gives up earlier than the waits for blocks of this GPU that depend on it, so the report
    // names the other GPU.
    r.watch = waits_->watch();
    r.watch.limit_ns = r.watch.limit_ns / 4 * 3;
    buffers.logits = of_first.own_logits + r.first_id;
  };
  for (size_t s = 0; s < slots_.size(); ++s) {
    connect_buffers(slots_[s].buffers, all[0]->slots_[s].buffers);
    gpu::copy_to_device(slots_[s].ranks, &slots_[s].buffers.ranks, sizeof(Ranks));
  }
  if (sequences_input_ != nullptr) connect_buffers(sequences_buffers_, all[0]->sequences_buffers_);
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

void DeviceModel::check_waits() {
  if (!grid_barrier_report(*waits_, uint32_t(config().layers)).empty()) synchronize();
}

void DeviceModel::synchronize() {
  const std::string found = wait();
  if (!found.empty()) fail(ErrorCode::interrupted, "decode: the GPU gave up after ", place_in(reset()), ": ", found);
}

#endif

}  // namespace ingot::decode
