#pragma once
// Opens a decoder-only transformer on its device: shared by all kinds of such models.
#include <functional>
#include <optional>
#include <string>

#include "ingot/models/decoder_weights.h"
#include "ingot/models/draft/head/head_weights.h"
#include "ingot/models/registry.h"
#include "ingot/models/spec.h"

namespace ingot {

// Where a model runs, as the options and the machine allow.
struct DecoderPlacement {
  DecoderOptions options;
  bool on_gpu = false;
  std::string unsupported_reason;  // why no GPU was taken, or empty
};
// `no_room`: gpu_unsupported_reason() of the weights' shapes, so a model too large is refused before reading.
DecoderPlacement place_decoder(const DecoderSpec& spec, const DecoderOptions& asked,
                               const std::function<std::string(const DecoderOptions&)>& no_room);
// Adds notes about where and how the model runs, if a user might expect a different device or faster kernels.
void add_placement_notes(OpenedModel& m, const DecoderPlacement& p, const DecoderSpec& spec,
                         const std::string& rounding);
// The draft head of the options, if there is one. `placement` of the model, with shapes of its weights: a head that the
// device does not compute, or has no room for, is Error{unsupported}.
std::optional<draft::DraftHead> load_head(const DecoderSpec& spec, const DecoderWeights& shapes,
                                          const DecoderPlacement& placement);
void add_head_note(OpenedModel& m, const draft::DraftHead& head);

// The functions that describe or load a model's weights, of the first `layers` layers.
struct WeightSource {
  // The shapes of the weights, from the files' headers alone, to find out whether a device has room.
  std::function<DecoderWeights(int64_t layers)> shapes;
  // `other_bytes`: memory needed beside the weights. `passed_on`: to a device.
  std::function<DecoderWeights(int64_t layers, int64_t other_bytes, bool passed_on)> load;
};
OpenedModel open_decoder(const DecoderSpec& spec, const WeightSource& source, const DecoderOptions& options);

}  // namespace ingot
