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
                                    const std::function<bool()>& cancelled, int64_t first) {
  INGOT_CHECK(first >= 1, "losses: found ", first, " as the first scored token, expected at least 1");
  std::vector<double> losses;
  Sequence sequence(decoder);
  const int64_t fed = int64_t(ids.size()) - 1,
                quiet = std::min(fed, first - 1);  // tokens before the first scored token
  for (int64_t at = 0; at < fed;) {
    if (cancelled && cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
    const int64_t count = std::min(decoder.batch(), (at < quiet ? quiet : fed) - at);
    const auto take = [&](int64_t position, const Tensor& logits) {
      for (int64_t i = 0; i < logits.size(0); ++i) {
        const int32_t target = ids[size_t(position + i + 1)];
        if (target < 0 || target >= decoder.vocab())
          fail(ErrorCode::bad_data, "found id ", target, " at position ", position + i + 1, ", expected 0 to ",
               decoder.vocab() - 1);
        losses.push_back(logits.dtype == DType::f64
                             ? loss_of(logits.ptr<double>() + i * decoder.vocab(), decoder.vocab(), target)
                             : loss_of(logits.ptr<float>() + i * decoder.vocab(), decoder.vocab(), target));
      }
    };
    const std::span<const int32_t> piece = ids.subspan(size_t(at), size_t(count));
    if (at < quiet)
      sequence.extend(piece);
    else
      sequence.extend(piece, Decoder::Rows::all, take);
    at += count;
  }
  return losses;
}

std::vector<Window> windows_of(int64_t tokens, int64_t context, int64_t stride) {
  INGOT_CHECK(context >= 1 && stride >= 0 && stride <= context, "windows: found a stride of ", stride,
              ", expected 0 to the context of ", context);
  const int64_t step = stride == 0 ? context : stride;
  std::vector<Window> windows;
  for (int64_t scored = 1; scored < tokens;) {
    const int64_t end = std::min(tokens, scored == 1 ? 1 + context : scored + step);
    const int64_t begin = stride == 0 ? scored - 1 : std::max<int64_t>(0, end - 1 - context);
    windows.push_back({begin, end, scored});
    scored = end;
  }
  return windows;
}

}  // namespace ingot
