#include "ingot/models/gpt_oss/forms.h"

#include "ingot/core/memory/memory.h"
#include "ingot/models/checkpoint/matrix_format.h"

namespace ingot {
namespace {

// Visits every matrix that is converted, once.
template <class Visit> void visit_changed(GptOssWeights& w, const GptOssComponents& f, Visit&& visit) {
  const auto one = [&](WeightMatrix& m, const std::optional<WeightFormat>& to) {
    if (to && *to != m.format) visit(m, *to);
  };
  for (GptOssLayer& l : w.layers) {
    one(l.qkv, f.qkv), one(l.o, f.o), one(l.router, f.router);
    one(l.gate_up, f.gate_up), one(l.down, f.down);
  }
  one(w.head, f.head);
}

}  // namespace

GptOssWeights with_components(const GptOssWeights& w, const GptOssComponents& forms) {
  GptOssWeights out;
  out.embed = w.embed, out.head = w.head, out.norm = w.norm, out.layers = w.layers, out.mapping = w.mapping;
  int64_t bytes = 0;
  visit_changed(out, forms, [&](const WeightMatrix& m, WeightFormat f) { bytes += bytes_in_format(m, f); });
  require_memory(bytes, "the model in another form");
  out.arena = Arena(bytes);
  visit_changed(out, forms, [&](WeightMatrix& m, WeightFormat f) { m = in_format(m, f, out.arena); });
  return out;
}

}  // namespace ingot
