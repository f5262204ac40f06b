// Draft steps of a DeviceModel: the pending tokens and the drafts of one slot or of several are the rows of a step. The
// row kernel computes them, or the kernels of small batches for models that the row kernel does not take. Every step of
// such a slot takes this path, with a draft or without.
#include <algorithm>

#include "ingot/gpu/allocator.h"
#include "ingot/models/decode/model/device_model.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE

gpu::Graph& DeviceModel::draft_graph(uint32_t rows) {
  const bool row_kernel = uses_row_kernel(rows, RowsOf::drafts);
  auto& g = draft_graphs_[{rows, row_kernel}];
  if (g != nullptr) return *g;
  g = std::make_unique<gpu::Graph>(*stream_, [&] {
    const RowLaunch how{.layers = slots_[0].stages, .words = row_words_, .watch = waits_->watch()};
    const Step step{.T = rows,
                    .head_rows = rows,
                    .vocab = 0,
                    .capacity = uint32_t(context_),
                    .sequences = &sequences_,
                    .draft = true,
                    .row_kernel = row_kernel ? &how : nullptr,
                    .states = kept_states()};
    run(slots_[0].model, sequences_buffers_, step, *stream_);
  });
  return *g;
}

void DeviceModel::prepare_drafts(std::span<const DraftStep> steps) {
  const gpu::DeviceGuard guard(device_);
  size_t rows = 0;
  for (const DraftStep& step : steps) rows += step.ids.size();
  if (int64_t(rows) <= draft_rows()) draft_graph(uint32_t(rows));
}

// Starts the computation of the logits of all rows. The slots count all of their rows for now.
void DeviceModel::start_draft_rows(std::span<const DraftStep> steps) {
  const gpu::DeviceGuard guard(device_);
  BatchInput input{.count = 0};
  std::vector<DeviceHead::Part> parts;
  for (const DraftStep& step : steps) {
    const int index = step.samples[0].slot;
    Slot& slot = slots_[size_t(index)];
    drop_ahead(slot);
    parts.push_back({index, slot.length, int64_t(step.ids.size())});
    INGOT_CHECK(int64_t(input.count) + int64_t(step.ids.size()) <= draft_rows(), "decode: found more than ",
                draft_rows(), " rows of draft steps");
    for (const int32_t id : step.ids) {
      INGOT_CHECK(0 <= id && id < config().vocab, "decode: found id ", id, " for slot ", index, ", expected 0 to ",
                  config().vocab - 1);
      const uint32_t row = input.count++;
      input.slot[row] = uint32_t(index), input.token[row] = id;
      input.position[row] = int32_t(slot.length);
      grow(slot, 1);
    }
    slot.vocab = 0, slot.id_alone = true;  // the slot's logits do not belong to its last token
    slot.sampled_with = sampling::RowNoise{};
  }
  send_input(input);
  draft_graph(input.count).launch(*stream_);
  if (has_head()) head_->place(parts);
}

// Rows whose options need the host are not sampled here.
void DeviceModel::start_draft_sampling(std::span<const DraftStep> steps) {
  SampledRows rows;
  int row = 0;
  bool all = true;
  for (const DraftStep& step : steps)
    for (const SlotSample& s : step.samples) {
      const int at = row++;
      const int64_t vocab = s.options->vocab > 0 ? s.options->vocab : config().vocab;
      if (!samples(*s.options)) {
        all = false;
        continue;
      }
      send_adjustments(*s.options, draft_sampling_, at, draft_sent_[size_t(at)]);
      rows.add(s, vocab, at);
      if (s.options->logprobs >= 0) rows.add_logprobs(s, vocab, at);
    }
  if (!all) gpu::fill_bytes(draft_tokens_, 0xff, int64_t(kMostDraftRows) * 4, *stream_);
  const Device device{Device::cuda, device_};
  start_sampling(rows, draft_sampling_,
                 Tensor(sequences_buffers_.logits, {int64_t(kMostDraftRows), config().vocab}, device),
                 Tensor(draft_tokens_, {int64_t(kMostDraftRows)}, device));
}

// The sampled tokens of a step up to the first that differs from the draft. The host samples the rows that the device
// has not sampled, and rows with NaN logits, for which the host reports the error.
std::vector<SlotSampled> DeviceModel::sampled_rows(const DraftStep& step, size_t first_row, const int32_t* tokens) {
  std::vector<SlotSampled> found;
  std::vector<float> logits;
  for (size_t i = 0; i < step.ids.size(); ++i) {
    const SlotSample& sample = step.samples[i];
    const int64_t row = int64_t(first_row + i);
    SlotSampled& here = found.emplace_back();
    here.token.token = tokens[row];
    if (samples(*sample.options) && tokens[row] >= 0) {
      if (sample.options->logprobs >= 0) here.token.logprobs = fetch_logprobs(sample, draft_sampling_, row);
    } else {
      logits.resize(size_t(config().vocab));
      gpu::copy_to_host(logits.data(), sequences_buffers_.logits + row * config().vocab, config().vocab * 4);
      here = sample_row(Tensor(logits.data(), {config().vocab}), sample);
    }
    if (here.error || i + 1 == step.ids.size() || here.token.token != step.ids[i + 1]) break;
  }
  return found;
}

std::vector<std::vector<SlotSampled>> DeviceModel::sample_drafts(std::span<const DraftStep> steps) {
  start_draft_rows(steps);
  return sample_draft_rows(steps);
}

std::vector<std::vector<SlotSampled>> DeviceModel::sample_draft_rows(std::span<const DraftStep> steps) {
  const gpu::DeviceGuard guard(device_);
  start_draft_sampling(steps);
  keep_accepted(sequences_, draft_tokens_, buffers().stop, *stream_);
  constexpr int64_t kBytes = int64_t(kMostDraftRows) * 4;
  if (host_tokens_.capacity() == 0) host_tokens_ = Arena(kBytes, gpu::pinned_memory());
  auto* const tokens = static_cast<int32_t*>(host_tokens_.at(0, DType::u8, {kBytes}).data);
  gpu::copy_rows({.to = tokens, .from = draft_tokens_, .row_bytes = kBytes, .device = device_}, *stream_);
  synchronize();
  std::vector<std::vector<SlotSampled>> found;
  size_t first_row = 0;
  for (const DraftStep& step : steps) {
    const int32_t* const of_step = tokens + first_row;
    found.push_back(sampled_rows(step, first_row, tokens));
    const size_t kept = found.back().size();
    first_row += step.ids.size();
    Slot& slot = slots_[size_t(step.samples[0].slot)];
    slot.length -= int64_t(step.ids.size() - kept);
    if (const int at = step.samples[0].slot; has_head() && head_->length(at) == slot.length - int64_t(kept))
      head_->append(at, step.ids.first(kept));
    if (std::none_of(of_step, of_step + kept, [](int32_t token) { return token < 0; })) continue;
    const auto position = int32_t(slot.length);  // the GPU did not sample all of these tokens
    gpu::copy_to_device(&slot.buffers.state->position, &position, sizeof position);
  }
  return found;
}

void DeviceModel::keep_draft_rows(std::span<const DraftStep> steps, std::span<const std::vector<SlotSampled>> sampled) {
  const gpu::DeviceGuard guard(device_);
  for (size_t i = 0; i < steps.size(); ++i) {
    Slot& slot = slots_[size_t(steps[i].samples[0].slot)];
    slot.length -= int64_t(steps[i].ids.size() - sampled[i].size());
    const int32_t token = std::max(sampled[i].back().token.token, 0), position = int32_t(slot.length);
    gpu::copy_to_device(slot.buffers.state->tokens, &token, sizeof token);
    gpu::copy_to_device(&slot.buffers.state->position, &position, sizeof position);
  }
}

#endif

}  // namespace ingot::decode
