#include "ingot/models/checkpoint/matrix_format.h"

#include <vector>

namespace ingot {
namespace {
int64_t experts_of(const WeightMatrix& m) { return m.is_bank() ? m.data.size(0) : 1; }
}  // namespace

int64_t bytes_in_format(const WeightMatrix& w, WeightFormat to) {
  if (to == WeightFormat::mxfp4 && w.cols() % kMxBlock != 0)
    fail(ErrorCode::unsupported, "found rows of ", w.cols(), " numbers, expected a multiple of ", kMxBlock,
         " for mxfp4");
  // Data and scales are aligned separately.
  return Arena::aligned(weight_bytes(to, experts_of(w) * w.rows(), w.cols())) + Arena::kAlign;
}

WeightMatrix in_format(const WeightMatrix& from, WeightFormat to, Arena& arena) {
  const int64_t experts = experts_of(from), rows = from.rows(), cols = from.cols();
  const Tensor data = to == WeightFormat::bf16 ? arena.take(DType::bf16, {experts, rows, cols})
                      : to == WeightFormat::mxfp4
                          ? arena.take(DType::u8, {experts, rows, cols / kMxBlock, kMxBlock / 2})
                          : arena.take(DType::u8, {experts, rows, cols});
  Tensor scales;
  if (to == WeightFormat::fp8) scales = arena.take(DType::f32, {experts, rows});
  if (to == WeightFormat::mxfp4) scales = arena.take(DType::u8, {experts, rows, cols / kMxBlock});
  const WeightMatrix bank(to, data, scales);
  std::vector<float> wide(size_t(rows * cols));
  for (int64_t e = 0; e < experts; ++e) {
    const Tensor numbers(wide.data(), {rows, cols});
    dequantise(from.is_bank() ? from.at(e) : from, numbers, {});
    quantise(numbers, bank.at(e), {});
  }
  return from.is_bank() ? bank : bank.at(0);
}

}  // namespace ingot
