#include "ingot/models/options.h"

#include "ingot/core/check.h"

namespace ingot {

DeviceChoice device_named(const std::string& name) {
  if (name == "auto") return DeviceChoice::automatic;
  if (name == "cpu") return DeviceChoice::cpu;
  if (name == "cuda") return DeviceChoice::cuda;
  fail(ErrorCode::usage, "device: found '", name, "', expected auto, cpu or cuda");
}

const char* name_of(Split split) { return split == Split::tensor ? "tensor" : "attention-experts"; }

int64_t context_of(const DecoderOptions& o, int64_t model_context) {
  if (o.context < 0 || o.context > model_context)
    fail(ErrorCode::usage, "context: found ", o.context, ", expected 1 to ", model_context, ", or 0 for the model's");
  return o.context == 0 ? model_context : o.context;
}

}  // namespace ingot
