#include "ingot/models/gpt_oss/forms.h"

#include <vector>

#include "ingot/core/memory/memory.h"

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

int64_t experts_of(const WeightMatrix& m) { return m.is_bank() ? m.data.size(0) : 1; }

WeightMatrix narrowed(const WeightMatrix& from, WeightFormat f, Arena& arena) {
  const int64_t experts = experts_of(from), rows = from.rows(), cols = from.cols(), all = experts * rows;
  const Tensor data = f == WeightFormat::bf16    ? arena.take(DType::bf16, {experts, rows, cols})
                      : f == WeightFormat::mxfp4 ? arena.take(DType::u8, {experts, rows, cols / kMxBlock, kMxBlock / 2})
                                                 : arena.take(DType::u8, {experts, rows, cols});
  Tensor scales;
  if (f == WeightFormat::fp8) scales = arena.take(DType::f32, {experts, rows});
  if (f == WeightFormat::mxfp4) scales = arena.take(DType::u8, {experts, rows, cols / kMxBlock});
  const WeightMatrix bank(f, data, scales);
  std::vector<float> wide(size_t(all / experts * cols));
  for (int64_t e = 0; e < experts; ++e) {
    const Tensor numbers(wide.data(), {rows, cols});
    dequantise(from.is_bank() ? from.at(e) : from, numbers, {});
    quantise(numbers, bank.at(e), {});
  }
  return from.is_bank() ? bank : bank.at(0);
}

}  // namespace

GptOssWeights with_components(const GptOssWeights& w, const GptOssComponents& forms) {
  GptOssWeights out;
  out.embed = w.embed, out.head = w.head, out.norm = w.norm, out.layers = w.layers, out.mapping = w.mapping;
  int64_t bytes = 0;
  visit_changed(out, forms, [&](const WeightMatrix& m, WeightFormat f) {
    if (f == WeightFormat::mxfp4 && m.cols() % kMxBlock != 0)
      fail(ErrorCode::unsupported, "found rows of ", m.cols(), " numbers, expected a multiple of ", kMxBlock,
           " for mxfp4");
    bytes += Arena::aligned(weight_bytes(f, experts_of(m) * m.rows(), m.cols())) +
             Arena::kAlign;  // data and scales are aligned separately
  });
  require_memory(bytes, "the model in another form");
  out.arena = Arena(bytes);
  visit_changed(out, forms, [&](WeightMatrix& m, WeightFormat f) { m = narrowed(m, f, out.arena); });
  return out;
}

}  // namespace ingot
