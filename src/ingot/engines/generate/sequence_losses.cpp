#include "ingot/engines/generate/sequence_losses.h"

#include <algorithm>
#include <cmath>

namespace ingot {
namespace {

// log(sum exp(row)) - row[target]
template <class T> double loss_of(const T* row, int64_t vocab, int32_t target) {
  const T top = *std::max_element(row, row + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(double(row[v]) - double(top));
  return std::log(sum) + double(top) - double(row[target]);
}

}  // namespace

std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled) {
  std::vector<double> losses;
  Sequence sequence(decoder);
  const int64_t n = int64_t(ids.size());
  for (int64_t at = 0; at + 1 < n;) {
    if (cancelled && cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
    const int64_t count = std::min(decoder.batch(), n - at);
    const auto take = [&](int64_t first, const Tensor& logits) {
      for (int64_t i = 0; i < logits.size(0) && first + i + 1 < n; ++i) {
        const int32_t target = ids[size_t(first + i + 1)];
        if (target < 0 || target >= decoder.vocab())
          fail(ErrorCode::bad_data, "found id ", target, " at position ", first + i + 1, ", expected 0 to ",
               decoder.vocab() - 1);
        losses.push_back(logits.dtype == DType::f64
                             ? loss_of(logits.ptr<double>() + i * decoder.vocab(), decoder.vocab(), target)
                             : loss_of(logits.ptr<float>() + i * decoder.vocab(), decoder.vocab(), target));
      }
    };
    sequence.extend(ids.subspan(size_t(at), size_t(count)), Decoder::Rows::all, take);
    at += count;
  }
  return losses;
}

}  // namespace ingot
