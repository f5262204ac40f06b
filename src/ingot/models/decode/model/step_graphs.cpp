// The steps of a DeviceModel. Each kind of step is a CUDA graph, recorded at its first use; prompts are launched
// without graphs.
#include <algorithm>

#include "ingot/gpu/limits.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/model/device_model.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE

bool DeviceModel::use_megakernel(bool wanted) {
  const bool takes = !has_head() && supports_megakernel(slots_[0].model, gpu::limits(device_));
  if (takes) megakernel_ = wanted;
  return takes || !wanted;
}

bool DeviceModel::use_row_kernel(RowKernelUse wanted) {
  const bool takes =
      gpu::limits(device_).hopper && row_words_.bytes > 0 && !has_head() && supports_row_kernel(slots_[0].model);
  if (takes) row_kernel_ = wanted;
  return takes || wanted == RowKernelUse::none;
}

void DeviceModel::launch_step(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone) {
  const bool rows = uses_row_kernel(T, RowsOf::one_sequence), persistent = rows || (megakernel_ && T == 1),
             prefiltered = uses_prefilter(T, head_rows, id_alone);
  const RowLaunch row_launch{.layers = slot.stages, .words = row_words_, .watch = waits_->watch()};
  const Step step{.T = T,
                  .head_rows = head_rows,
                  .vocab = vocab,
                  .capacity = uint32_t(context_),
                  .row_kernel = rows ? &row_launch : nullptr,
                  .states = kept_states()};
  if (rows || !persistent) return run(slot.model, slot.buffers, step, *stream_);
  run_megakernel(slot.model, slot.buffers, step,
                 {.layers = slot.stages,
                  .watch = waits_->watch(),
                  .ranks = slot.ranks,
                  .prefiltered = prefiltered,
                  .family_layers = slot.family_stages},
                 *stream_);
}

gpu::Graph& DeviceModel::graph(Slot& slot, uint32_t T, uint32_t head_rows, uint32_t vocab, bool id_alone) {
  const bool persistent = uses_row_kernel(T, RowsOf::one_sequence) || (megakernel_ && T == 1);
  auto& g = slot.graphs[{T, head_rows, vocab, persistent, uses_prefilter(T, head_rows, id_alone)}];
  if (g == nullptr)
    g = std::make_unique<gpu::Graph>(*stream_, [&] { launch_step(slot, T, head_rows, vocab, id_alone); });
  return *g;
}

void DeviceModel::send_noise(Slot& slot, const sampling::RowNoise& noise) {
  if (slot.noise_there == noise) return;
  slot.noise_there = noise;
  gpu::copy_rows({.to = slot.buffers.noise, .from = &noise, .row_bytes = int64_t(sizeof noise), .device = device_},
                 *stream_);
}

void DeviceModel::extend(std::span<const int32_t> ids, uint32_t head_rows, int index, uint32_t vocab, bool id_alone,
                         const sampling::RowNoise& noise) {
  Slot& slot = slots_[size_t(index)];
  const int64_t T = int64_t(ids.size());
  const int64_t most = head_rows <= 1 ? prompt_batch() : head_rows == T ? rows_batch() : batch();
  INGOT_CHECK(1 <= T && T <= most, "decode: found a batch of ", T, " tokens, expected 1 to ", most);
  for (int64_t t = 0; t < T; ++t)
    INGOT_CHECK(ids[size_t(t)] >= 0 && ids[size_t(t)] < config().vocab, "decode: found id ", ids[size_t(t)],
                " at position ", slot.length + t, ", expected 0 to ", config().vocab - 1);
  const gpu::DeviceGuard guard(device_);
  const StepSampling how{.vocab = vocab > 0 ? vocab : uint32_t(config().vocab), .id_alone = id_alone, .noise = noise};
  if (T == 1 && head_rows == 1 && has_ahead(slot, ids[0], how.vocab)) return take_ahead(slot, how.vocab);
  const bool is_ahead = slot.ahead && T == 1 && head_rows == 1 && ids[0] == slot.ahead->token && how == slot.ahead->how;
  if (!is_ahead) drop_ahead(slot);
  grow(slot, T);
  slot.vocab = how.vocab;
  slot.id_alone = uses_prefilter(T, head_rows, id_alone);
  slot.sampled_with = samples_in_head(T, head_rows) ? noise : sampling::RowNoise{};
  if (is_ahead) return slot.ahead.reset();
  const Decoder::Part part{.slot = index, .ids = ids};
  if (T > batch()) {
    gpu::copy_rows({.to = prompt_.ids, .from = ids.data(), .row_bytes = T * 4, .device = device_}, *stream_);
    run_prompt(slot.model, slot.buffers, prompt_,
               {.T = T,
                .position = slot.length - T,
                .head_rows = head_rows,
                .vocab = vocab,
                .capacity = uint32_t(context_),
                .device = device_,
                .states = kept_states()},
               *stream_);
    return feed_head({&part, 1});
  }
  gpu::copy_rows({.to = slot.buffers.state->tokens, .from = ids.data(), .row_bytes = T * 4, .device = device_},
                 *stream_);
  if (samples_in_head(T, head_rows)) send_noise(slot, noise);
  if (is_recorded(T, head_rows))
    graph(slot, uint32_t(T), head_rows, vocab, id_alone).launch(*stream_);
  else
    launch_step(slot, uint32_t(T), head_rows, vocab, id_alone);
  if (samples_in_head(T, head_rows)) slot.noise_there->step += 1;
  feed_head({&part, 1});
}

void DeviceModel::feed_head(std::span<const Decoder::Part> parts) {
  if (!has_head()) return;
  std::vector<DeviceHead::Part> rows;
  for (const auto& [slot, ids] : parts) rows.push_back({slot, length(slot) - int64_t(ids.size()), int64_t(ids.size())});
  head_->place(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (head_->length(rows[i].slot) != rows[i].position) continue;  // after fill_cache_with_random()
    head_->append(rows[i].slot, parts[i].ids);
    head_->compute_rows(rows[i].slot);  // computed here, because the first guess would otherwise wait for it
  }
}

std::vector<int32_t> DeviceModel::guess(int slot, int32_t next, int64_t most) {
  if (!has_head() || length(slot) == 0 || head_->length(slot) != length(slot)) return {};
  return head_->draft(slot, next, std::min(most, DeviceHead::kMostGuesses));
}

// Starts the next step of the slots that go on after the tokens that are being sampled. Returns false, with nothing
// started, if there are none, or if their path takes no step ahead.
bool DeviceModel::start_ahead(std::span<const SlotSample> of) {
  std::vector<SlotSample> going;
  for (const SlotSample& s : of)
    if (s.goes_on && length(s.slot) < context_) going.push_back(s);
  if (going.size() == 1) return start_slot_ahead(going[0]);
  return start_sequences_ahead(going);
}
// The megakernel reads the token from device memory.
bool DeviceModel::start_slot_ahead(const SlotSample& sample) {
  Slot& slot = slots_[size_t(sample.slot)];
  if (!samples_in_head(1, 1)) return false;
  SlotSample next = sample;
  ++next.step;
  const StepSampling how = step_sampling_of(next, config().vocab);
  slot.ahead = {.how = how};
  slot.valid_from = std::max(slot.valid_from, slot.length + 1 - ring_);  // the step writes into the circular caches
  send_noise(slot, how.noise);
  graph(slot, 1, 1, how.vocab, how.id_alone).launch(*stream_);
  slot.noise_there->step += 1;
  return true;
}
// The kernels of a step of several slots read the tokens from device memory, too. If a slot's answer ends with the
// token that is being sampled, the step has computed one row in vain.
bool DeviceModel::start_sequences_ahead(std::span<const SlotSample> going) {
  const int64_t T = int64_t(going.size());
  if (has_head() || T < fewest_together() || T > max_sequences()) return false;
  const SampleOptions& first = *going[0].options;
  const uint32_t vocab = uint32_t(first.vocab > 0 ? first.vocab : config().vocab);
  const SequencesPath path = path_of(T);
  gpu::Graph& g = sequences_graph(uint32_t(T), vocab, path);
  BatchInput input{.count = uint32_t(T)};
  for (size_t j = 0; j < going.size(); ++j) {
    input.slot[j] = uint32_t(going[j].slot), input.token[j] = -1;
    input.appended[j] = 1, input.row[j] = uint32_t(j);
    Slot& slot = slots_[size_t(going[j].slot)];
    slot.ahead = {.how = {.vocab = vocab}, .path = path};
    slot.valid_from = std::max(slot.valid_from, slot.length + 1 - ring_);
  }
  send_input(input);
  g.launch(*stream_);
  return true;
}
// Whether a step of several slots, with this one, was started before the host knew that it appends this token.
bool DeviceModel::has_ahead(const Slot& slot, int32_t token, uint32_t vocab) {
  return slot.ahead && slot.ahead->path && token == slot.ahead->token && vocab == slot.ahead->how.vocab;
}
// Counts the token of that step.
void DeviceModel::take_ahead(Slot& slot, uint32_t vocab) {
  slot.ahead.reset();
  grow(slot, 1);
  slot.vocab = vocab;
  slot.id_alone = false;
  slot.sampled_with = sampling::RowNoise{};
}
void DeviceModel::drop_ahead(Slot& slot) {
  if (!slot.ahead) return;
  synchronize();
  slot.ahead.reset();
  const int32_t at[2] = {int32_t(slot.length), 0};  // position, flaw
  gpu::copy_to_device(&slot.buffers.state->position, at, sizeof at);
}

std::vector<int> DeviceModel::kernels_of_prompt(int64_t tokens, uint32_t head_rows) const {
  return prompt_kernels(model(), {.T = tokens,
                                  .position = 0,
                                  .head_rows = head_rows,
                                  .vocab = 0,
                                  .capacity = uint32_t(context_),
                                  .device = device_});
}
void DeviceModel::warm_up_prompt(int64_t tokens, uint32_t head_rows, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  // these launches write to the cache rows that the prompt will use
  slot.valid_from = std::max(slot.valid_from, slot.length + tokens - ring_);
  gpu::fill_bytes(waits_->watch().stop, 0xff, 4, *stream_);  // every wait ends at once
  gpu::fill_bytes(prompt_.ids, 0, tokens * 4, *stream_);
  run_prompt(slot.model, slot.buffers, prompt_,
             {.T = tokens,
              .position = slot.length,
              .head_rows = head_rows,
              .vocab = 0,
              .capacity = uint32_t(context_),
              .device = device_,
              .states = kept_states()},
             *stream_);
}

void DeviceModel::prepare(int64_t tokens, uint32_t head_rows, int slot, uint32_t vocab, bool id_alone) {
  const gpu::DeviceGuard guard(device_);
  if (1 <= tokens && tokens <= batch() && is_recorded(tokens, head_rows))
    graph(slots_[size_t(slot)], uint32_t(tokens), head_rows, vocab, id_alone);
}

void DeviceModel::continue_sampling(int64_t n, const sampling::RowNoise& noise, int index, bool id_alone) {
  Slot& slot = slots_[size_t(index)];
  INGOT_CHECK(noise.temperature == 0 || samples_in_head(1, 1),
              "decode: found a temperature for steps in phases, expected the megakernel");
  INGOT_CHECK(!has_head(), "decode: found a draft head, which needs the ids of all tokens");
  const gpu::DeviceGuard guard(device_);
  drop_ahead(slot);
  grow(slot, n);
  slot.vocab = uint32_t(config().vocab);
  slot.id_alone = uses_prefilter(1, 1, id_alone);
  slot.sampled_with = noise;
  slot.sampled_with.step += uint32_t(n) - 1;
  gpu::Graph& g = graph(slot, 1, 1, 0, id_alone);
  if (samples_in_head(1, 1)) {
    send_noise(slot, noise);
    slot.noise_there->step += uint32_t(n);
  }
  for (int64_t i = 0; i < n; ++i) g.launch(*stream_);
}

void DeviceModel::limit_small_batch(int64_t sequences) {
  const int64_t most = std::min<int64_t>(kMostSmallBatch, batch());
  most_small_batch_ = prompt_.ids == nullptr ? most : std::min(most, sequences);
}
// There is a graph for each number of sequences of a small batch, and one for each element of kBatchRows.
gpu::Graph& DeviceModel::sequences_graph(uint32_t sequences, uint32_t vocab, SequencesPath path) {
  const bool matrix_kernels = path == SequencesPath::matrix_kernels;
  const uint32_t rows = matrix_kernels ? batch_rows(sequences) : sequences, capacity = uint32_t(context_);
  auto& g = sequences_graphs_[{rows, vocab, path}];
  if (g != nullptr) return *g;
  g = std::make_unique<gpu::Graph>(*stream_, [&] {
    const Slot& first = slots_[0];
    if (matrix_kernels)
      return run_prompt(first.model, first.buffers, prompt_,
                        {.T = int64_t(rows),
                         .position = 0,
                         .head_rows = rows,
                         .vocab = vocab,
                         .capacity = capacity,
                         .device = device_,
                         .sequences = &sequences_,
                         .states = kept_states()},
                        *stream_);
    const RowLaunch how{.layers = first.stages, .words = row_words_, .watch = waits_->watch()};
    const Step step{.T = rows,
                    .head_rows = rows,
                    .vocab = vocab,
                    .capacity = capacity,
                    .sequences = &sequences_,
                    .row_kernel = path == SequencesPath::row_kernel ? &how : nullptr,
                    .states = kept_states()};
    run(first.model, sequences_buffers_, step, *stream_);
  });
  return *g;
}

void DeviceModel::start_sequences(std::span<const int> slots, std::span<const int32_t> ids, int64_t n, uint32_t vocab,
                                  SequencesPath path) {
  const int64_t T = int64_t(slots.size());
  INGOT_CHECK(1 <= T && T <= max_sequences(), "decode: found ", T, " slots of one step, expected 1 to ",
              max_sequences());
  INGOT_CHECK(!has_head() || (n == 1 && !ids.empty()), "decode: found a draft head, which needs the ids of all tokens");
  const gpu::DeviceGuard guard(device_);
  for (const int slot : slots) check_room(slot, n);
  BatchInput input{.count = uint32_t(T)};
  for (size_t j = 0; j < slots.size(); ++j) {
    input.slot[j] = uint32_t(slots[j]);
    input.token[j] = ids.empty() ? -1 : ids[j];
    input.appended[j] = 1, input.row[j] = uint32_t(j);
    Slot& slot = slots_[size_t(slots[j])];
    drop_ahead(slot);
    grow(slot, n);
    slot.vocab = vocab > 0 ? vocab : uint32_t(config().vocab);
    slot.id_alone = false;
    slot.sampled_with = sampling::RowNoise{};
  }
  send_input(input);
  gpu::Graph& g = sequences_graph(uint32_t(T), vocab, path);
  for (int64_t i = 0; i < n; ++i) g.launch(*stream_);
  std::vector<Decoder::Part> parts;
  for (size_t j = 0; has_head() && j < slots.size(); ++j) parts.push_back({slots[j], ids.subspan(j, 1)});
  feed_head(parts);
}
void DeviceModel::send_input(const BatchInput& input) {
  gpu::copy_rows({.to = sequences_input_, .from = &input, .row_bytes = int64_t(sizeof input), .device = device_},
                 *stream_);
}

// The parts of one token come first, so that one kernel computes their attention (prompt.h).
void DeviceModel::extend_parts(std::span<const Decoder::Part> given) {
  std::vector<Decoder::Part> parts(given.begin(), given.end());
  const auto first_prompt =
      std::stable_partition(parts.begin(), parts.end(), [](const Decoder::Part& part) { return part.ids.size() == 1; });
  INGOT_CHECK(takes_parts() && 1 <= parts.size() && int64_t(parts.size()) <= std::min(max_sequences_, kMostParts),
              "decode: found ", parts.size(), " parts of prompts, expected 1 to ", max_sequences_);
  const gpu::DeviceGuard guard(device_);
  BatchInput input{.count = uint32_t(parts.size())};
  std::vector<PromptPart> of_slots;
  std::vector<int32_t> ids;
  for (const auto& [index, of_part] : parts) {
    const int64_t T = int64_t(of_part.size());
    for (const int32_t id : of_part)
      INGOT_CHECK(0 <= id && id < config().vocab, "decode: found id ", id, " for slot ", index, ", expected 0 to ",
                  config().vocab - 1);
    check_room(index, T);
    ids.insert(ids.end(), of_part.begin(), of_part.end());
    const size_t j = of_slots.size();
    input.slot[j] = uint32_t(index), input.appended[j] = uint32_t(T), input.row[j] = uint32_t(ids.size() - 1);
    of_slots.push_back({&slots_[size_t(index)].model, T, length(index)});
  }
  const int64_t T = int64_t(ids.size());
  INGOT_CHECK(T <= prompt_batch(), "decode: found a batch of ", T, " tokens, expected 1 to ", prompt_batch());
  for (const auto& [index, of_part] : parts) {
    Slot& slot = slots_[size_t(index)];
    drop_ahead(slot);
    grow(slot, int64_t(of_part.size()));
    slot.vocab = uint32_t(config().vocab), slot.id_alone = false;
    slot.sampled_with = sampling::RowNoise{};
  }
  send_input(input);
  input.count = uint32_t(first_prompt - parts.begin());
  gpu::copy_rows({.to = prompt_.single_tokens, .from = &input, .row_bytes = int64_t(sizeof input), .device = device_},
                 *stream_);
  gpu::copy_rows({.to = prompt_.ids, .from = ids.data(), .row_bytes = T * 4, .device = device_}, *stream_);
  run_prompt(slots_[0].model, slots_[0].buffers, prompt_,
             {.T = T,
              .position = 0,
              .head_rows = 1,
              .vocab = 0,
              .capacity = uint32_t(context_),
              .device = device_,
              .sequences = &sequences_,
              .parts = of_slots,
              .states = kept_states()},
             *stream_);
  feed_head(parts);
}

void DeviceModel::extend_sequences(std::span<const int> slots, std::span<const int32_t> ids, uint32_t vocab) {
  INGOT_CHECK_EQ(ids.size(), slots.size(), "decode: ids of a step of several slots");
  for (size_t j = 0; j < ids.size(); ++j)
    INGOT_CHECK(ids[j] >= 0 && ids[j] < config().vocab, "decode: found id ", ids[j], " for slot ", slots[j],
                ", expected 0 to ", config().vocab - 1);
  for (const int slot : slots) check_room(slot, 1);
  const gpu::DeviceGuard guard(device_);
  const uint32_t of_ids = vocab > 0 ? vocab : uint32_t(config().vocab);
  const SequencesPath path = path_of(int64_t(slots.size()));
  std::vector<size_t> ahead, others;
  for (size_t j = 0; j < slots.size(); ++j) {
    const Slot& slot = slots_[size_t(slots[j])];
    (has_ahead(slot, ids[j], of_ids) && slot.ahead->path == path ? ahead : others).push_back(j);
  }
  // The small-batch kernels and the row kernel compute at least two rows.
  if (others.size() == 1 && !ahead.empty() && path != SequencesPath::matrix_kernels)
    others.push_back(ahead.back()), ahead.pop_back();
  for (const size_t j : ahead) take_ahead(slots_[size_t(slots[j])], of_ids);
  if (others.empty() && !slots.empty()) return;
  std::vector<int> slots_of_others;
  std::vector<int32_t> ids_of_others;
  for (const size_t j : others) slots_of_others.push_back(slots[j]), ids_of_others.push_back(ids[j]);
  start_sequences(slots_of_others, ids_of_others, 1, vocab, path);
}
void DeviceModel::continue_sequences(std::span<const int> slots, int64_t n) {
  start_sequences(slots, {}, n, 0, path_of(int64_t(slots.size())));
}
void DeviceModel::prepare_trace(const megakernel::Trace& trace, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  slot.traced = std::make_unique<gpu::Graph>(*stream_, [&] {
    run_megakernel(slot.model, slot.buffers, {.capacity = uint32_t(context_)},
                   {.layers = slot.stages,
                    .watch = waits_->watch(),
                    .ranks = slot.ranks,
                    .trace = trace,
                    .family_layers = slot.family_stages},
                   *stream_);
  });
}
void DeviceModel::continue_traced(int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  drop_ahead(slot);
  grow(slot, 1);
  slot.id_alone = false;
  slot.sampled_with = sampling::RowNoise{};
  send_noise(slot, {});
  slot.traced->launch(*stream_);
}

bool DeviceModel::takes_trace() const { return gpu::limits(device_).hopper && !has_head() && supports_trace(model()); }

#endif

}  // namespace ingot::decode
