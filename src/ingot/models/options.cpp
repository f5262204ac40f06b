#include "ingot/models/options.h"

#include <algorithm>

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

DecoderOptions with_default_slots(DecoderOptions o, int64_t model_context) {
  if (!o.fit_slots) return o;
  if (o.slots == 0) o.slots = kDefaultSlots;
  if (o.context == 0) o.context = std::min(kDefaultContext, model_context);
  return o;
}

DecoderOptions choose_slots(DecoderOptions o, int64_t model_context,
                            const std::function<bool(int64_t slots, int64_t context)>& fits) {
  if (!o.fit_slots || (o.slots > 0 && o.context > 0)) return o;
  const int64_t most = o.slots > 0 ? o.slots : kMostSlots, wanted = o.slots > 0 ? o.slots : kManySlots;
  const auto slots_of = [&](int64_t context) {  // the most slots of this context that fit, by bisection
    int64_t fitting = 0;
    for (int64_t too_many = most + 1; too_many - fitting > 1;) {
      const int64_t middle = (fitting + too_many) / 2;
      (fits(middle, context) ? fitting : too_many) = middle;
    }
    return fitting;
  };
  constexpr int64_t kLeastContext = 1024;
  const int64_t default_context = std::min(kDefaultContext, model_context);
  int64_t context = o.context > 0 ? o.context : model_context, slots = slots_of(context);
  const auto shorten = [&](int64_t least, int64_t enough) {
    while (o.context == 0 && slots < enough && context > least)
      context = std::max(least, context / 2), slots = slots_of(context);
  };
  shorten(default_context, wanted);
  shorten(std::min(kLeastContext, default_context), o.slots > 0 ? o.slots : 1);
  o.context = slots > 0 ? context : o.context > 0 ? o.context : default_context;
  o.slots = o.slots > 0 ? o.slots : std::max<int64_t>(slots, 1);
  return o;
}

}  // namespace ingot
