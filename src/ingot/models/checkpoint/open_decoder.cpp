#include "ingot/models/checkpoint/open_decoder.h"

#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"

namespace ingot {

DecoderPlacement place_decoder(const DecoderSpec& spec, const DecoderOptions& asked,
                               const std::function<std::string(const DecoderOptions&)>& no_room) {
  DecoderPlacement p{.options = asked};
  DecoderOptions& o = p.options;
  if (o.layers > spec.layers)
    fail(ErrorCode::usage, "--layers: found ", o.layers, ", expected at most ", spec.layers, ", the model's");
  if (o.context > spec.context)
    fail(ErrorCode::usage, "found ", o.context, " tokens, expected at most ", spec.context, ", the model's context");
  // No prompt is longer than the context, so a batch need not be longer either.
  o.batch = std::min(o.batch, o.context > 0 ? o.context : spec.context);
  if (o.gpus > 1)
    if (const std::string reason = gpus_unsupported_reason(spec, o); !reason.empty())
      fail(ErrorCode::unsupported, "--gpus ", o.gpus, ": ", reason);
  p.unsupported_reason = o.device == DeviceChoice::cpu ? "the CPU was asked for" : gpus_unsupported_reason(spec, o);
  if (p.unsupported_reason.empty()) p.unsupported_reason = no_room(o);
  p.on_gpu = o.device == DeviceChoice::cuda || o.gpus > 1 || p.unsupported_reason.empty();
  if (p.on_gpu && !p.unsupported_reason.empty()) fail(ErrorCode::unsupported, "device cuda: ", p.unsupported_reason);
  if (!p.on_gpu) o = with_default_slots(o, spec.context);
  return p;
}

namespace {
void add_note(OpenedModel& m, const std::string& note) { m.note += (m.note.empty() ? "" : "; ") + note; }
}  // namespace

std::optional<draft::DraftHead> load_head(const DecoderSpec& spec, const DecoderWeights& shapes,
                                          const DecoderPlacement& p) {
  const DecoderOptions& o = p.options;
  if (o.draft_head.empty()) return {};
  draft::HeadOptions options{.layers = o.draft_layers, .window = o.draft_window};
  if (!o.draft_dense.empty()) options.format = archive_format_named(o.draft_dense);
  draft::DraftHead head = draft::load_draft_head(o.draft_head, spec, int64_t(shapes.layers.size()), options);
  if (!p.on_gpu) return head;
  if (const std::string reason = gpu_unsupported_reason(spec, shapes, o, &head); !reason.empty())
    fail(ErrorCode::unsupported, "--draft on a GPU: ", reason);
  return head;
}

void add_head_note(OpenedModel& m, const draft::DraftHead& head) {
  std::string layers;
  for (const int64_t b : head.config.boundaries) layers += (layers.empty() ? "" : ", ") + std::to_string(b);
  add_note(m, ingot::detail::concat("a draft head over the hidden states behind layers ", layers, ", in ",
                                    head.weights.fc.format));
}

void add_placement_notes(OpenedModel& m, const DecoderPlacement& p, const DecoderSpec& spec,
                         const std::string& rounding) {
  if (p.options.device == DeviceChoice::automatic && !p.unsupported_reason.empty() && gpu::device_count() > 0)
    add_note(m, "on the CPU: " + p.unsupported_reason);
  if (!p.on_gpu) return;
  if (const std::string missing = gpu_missing_paths(spec); !missing.empty()) add_note(m, "on the GPU: " + missing);
  if (!rounding.empty()) add_note(m, "on the GPU: " + rounding);
  if (p.options.e4m3_experts)
    add_note(m, std::string(rounding.empty() ? "on the GPU: " : "") +
                    "tokens by a launch a phase for --quant, not by the megakernel");
}

OpenedModel open_decoder(const DecoderSpec& given, const WeightSource& source, const DecoderOptions& asked) {
  DecoderSpec spec = given;
  spec.e4m3_inputs = asked.e4m3_experts;
  const int64_t layers = asked.layers > 0 ? asked.layers : spec.layers;
  const DecoderPlacement p = place_decoder(
      spec, asked, [&](const DecoderOptions& o) { return gpu_unsupported_reason(spec, source.shapes(layers), o); });
  const DecoderOptions& o = p.options;
  struct Memory {
    DecoderWeights weights;
    std::optional<draft::DraftHead> head;
  };
  const auto memory = std::make_shared<Memory>();
  if (!o.draft_head.empty()) memory->head = load_head(spec, source.shapes(layers), p);
  const draft::DraftHead* head = memory->head ? &*memory->head : nullptr;
  memory->weights = source.load(layers, p.on_gpu ? 0 : decoder_bytes(spec, layers, o, head), p.on_gpu);
  const DecoderWeights* weights = &memory->weights;
  OpenedModel m;
  m.decoder = p.on_gpu ? make_gpu_decoder(spec, *weights, o, head) : make_decoder(spec, *weights, o, head);
  if (head != nullptr) add_head_note(m, *head);
  add_placement_notes(m, p, spec, p.on_gpu ? gpu_rounding(*weights) : std::string());
  if (p.on_gpu && !o.e4m3_experts) {
    const std::string reason = head != nullptr ? "the megakernel keeps no hidden states for a draft head"
                                               : unsupported_reason(spec, megakernel_path(spec));
    if (!reason.empty()) add_note(m, "on the GPU: a launch for each phase of a layer: " + reason);
  }
  m.end_ids.assign(spec.end_tokens.begin(), spec.end_tokens.end());
  m.weight_bytes = weights->bytes();
  if (m.decoder->device().kind == Device::cpu) m.memory = memory;  // a GPU has its own copy of the weights
  return m;
}

}  // namespace ingot
