#include "ingot/engines/train/run/train_checkpoint.h"

#include "ingot/core/check.h"
#include "ingot/core/progress.h"
#include "ingot/core/version.h"
#include "ingot/io/json.h"

namespace ingot {

CheckpointContent checkpoint_content(const TrainState& state, const HostState& here, const RunProgress& at,
                                     const RunData& data) {
  CheckpointContent c;
  c.model = named_tensors(state.layout, here.result.tensor());
  if (state.optimizer.average())
    for (NamedTensor& t : named_tensors(state.layout, here.weights.tensor(), "weights."))
      c.optimizer.push_back(std::move(t));
  for (const auto& [name, copy] : here.state) c.optimizer.push_back({name, copy.tensor()});
  OrderedJson json;
  json["step"] = at.step;
  json["trained_seconds"] = at.trained_seconds;
  json["looping"] = at.looping();
  json["data_fingerprint"] = data.train->fingerprint();
  json["tokenizer_hash"] = data.tokenizer->hash();
  json["parameter_hash"] = parameter_hash(state.layout, here.result.tensor());
  json["version"] = version();
  c.state_json = write_json(json, 2) + "\n";
  return c;
}

std::string note_of_slow_save(int64_t step, const CheckpointContent& content, double seconds) {
  constexpr double kNoticed = 5;
  if (seconds < kNoticed) return "";
  int64_t bytes = 0;
  for (const auto* tensors : {&content.model, &content.optimizer})
    for (const NamedTensor& t : *tensors) bytes += t.tensor.bytes();
  return detail::concat("saving step ", step, " took ", format_duration(seconds), ", ", format_bytes(double(bytes)),
                        " at ", format_bytes(double(bytes) / seconds), "/s, for which training waited");
}

void resume_from(const Checkpoint& found, const TrainState& state, RunProgress& at, const RunData& data) {
  const std::string where = found.path() + "/state.json";
  const Json json = parse_json(found.state_json(), where);
  Fields fields(json, where);
  std::string fingerprint;
  uint32_t hash = 0;
  fields.require("step", at.step);
  fields.require("trained_seconds", at.trained_seconds);
  fields.require("data_fingerprint", fingerprint);
  fields.require("looping", at.looped);
  fields.require("tokenizer_hash", hash);
  if (fingerprint != data.train->fingerprint())
    fail(ErrorCode::bad_data, where, ": found a run on other data (", fingerprint, "), expected ",
         data.train->fingerprint(), " of ", data.train->name());
  const HostState here(state);
  CheckpointContent c = checkpoint_content(state, here, at, data);
  found.load_model(c.model);
  found.load_optimizer(c.optimizer);
  here.write_back();
}

}  // namespace ingot
