#include "ingot/models/host_decoder.h"

#include <algorithm>
#include <cstring>

#include "ingot/kernels/sampling/adjust.h"
#include "ingot/kernels/sampling/logprobs.h"

namespace ingot {
std::vector<LogitBias> in_order(std::span<const LogitBias> bias) {
  std::vector<LogitBias> sorted(bias.begin(), bias.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return sorted;
}

int32_t draw_from(const Tensor& row, const DrawOptions& o, uint32_t step) {
  const int64_t vocab = o.vocab > 0 ? o.vocab : row.numel();
  std::vector<char> changed;
  void* logits = row.data;
  if (!o.bias.empty() || !o.allowed.empty()) {
    changed.resize(size_t(vocab * size_of(row.dtype)));
    logits = changed.data();
    std::vector<int32_t> ids;
    std::vector<float> biases;
    for (const LogitBias& b : in_order(o.bias)) ids.push_back(b.id), biases.push_back(b.bias);
    const int64_t n = int64_t(ids.size());
    adjust_logits({.logits = Tensor(row.data, row.dtype, {vocab}),
                   .adjusted = Tensor(logits, row.dtype, {vocab}),
                   .bias_ids = n > 0 ? Tensor(ids.data(), {n}) : Tensor(),
                   .biases = n > 0 ? Tensor(biases.data(), {n}) : Tensor(),
                   .allowed = o.allowed.empty() ? Tensor() : Tensor(o.allowed.data(), {int64_t(o.allowed.size())})},
                  {});
  }
  int32_t token = 0;
  sample({.logits = Tensor(logits, row.dtype, {1, vocab}),
          .tokens = Tensor(&token, {1}),
          .options = o.sampling,
          .seed = o.seed,
          .step = step},
         {});
  return token;
}

TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t drawn, int64_t top) {
  std::vector<int32_t> ids(size_t(top), -1);
  std::vector<double> values(size_t(1 + top));
  logprobs({.logits = Tensor(row.data, row.dtype, {vocab}),
            .token = Tensor(&drawn, {1}),
            .top = top > 0 ? Tensor(ids.data(), {top}) : Tensor(),
            .values = Tensor(values.data(), {1 + top})},
           {});
  return logprobs_of(ids, values);
}
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values) {
  TokenLogprobs all{.drawn = values[0]};
  for (size_t i = 0; i < top.size(); ++i) all.top.push_back({top[i], values[1 + i]});
  return all;
}

bool HostDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  Row& kept = rows_[size_t(slot)];
  kept.is_there = rows == Rows::last && !take && extend_there(slot, ids, 0);
  if (!kept.is_there) tell(slot, ids, rows, take);
  return true;
}

void HostDecoder::keep_last(int slot, const Tensor& logits) {
  Row& kept = rows_[size_t(slot)];
  const Tensor row = logits.row(logits.size(0) - 1);
  kept.dtype = row.dtype;
  kept.bytes.resize(size_t(row.bytes()));
  std::memcpy(kept.bytes.data(), row.data, kept.bytes.size());
}

// Keeps the last token's logits on the way to `take`.
void HostDecoder::tell(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  const int64_t last = held(slot) + int64_t(ids.size()) - 1;
  extend_slot(slot, ids, rows, [&](int64_t position, const Tensor& logits) {
    if (position + logits.size(0) - 1 == last) keep_last(slot, logits);
    if (take) take(position, logits);
  });
}

Tensor HostDecoder::row(int slot) {
  Row& kept = rows_[size_t(slot)];
  return Tensor(kept.bytes.data(), kept.dtype, {vocab()});
}

// Tells the token that waits, if one does, and draws the next.
DrawnToken HostDecoder::token_after(int slot, int32_t waiting, const DrawOptions& o, uint32_t step) {
  Row& kept = rows_[size_t(slot)];
  const int64_t drawable = o.vocab > 0 ? o.vocab : vocab();
  if (waiting >= 0) {
    if (o.bias.empty() && o.allowed.empty() && o.logprobs < 0)
      if (const int32_t token = drawn_after(slot, waiting, drawable, o.sampling, o.seed, step); token >= 0)
        return {.token = token};
    kept.is_there = extend_there(slot, {&waiting, 1}, drawable);
    if (!kept.is_there) tell(slot, {&waiting, 1}, Rows::last, {});
  }
  if (kept.is_there) {
    if (const std::optional<DrawnToken> drawn = draw_there(slot, o, step)) return *drawn;
    bring_there(slot, [&](int64_t, const Tensor& logits) { keep_last(slot, logits); });
    kept.is_there = false;
  }
  DrawnToken drawn{.token = draw_from(row(slot), o, step)};
  if (o.logprobs >= 0) drawn.logprobs = logprobs_of(row(slot), drawable, drawn.token, o.logprobs);
  return drawn;
}

Drawn HostDecoder::draw_one(int slot, int32_t waiting, const DrawOptions& o, int64_t n) {
  Drawn d;
  for (int64_t i = 0; i < n; ++i) {
    if (cancelled(slot)) {
      d.finish = Finish::cancelled;
      break;
    }
    if (waiting >= 0) {
      if (held(slot) == context()) {
        d.finish = Finish::context;
        break;
      }
    }
    DrawnToken drawn = token_after(slot, waiting, o, o.step + uint32_t(i));
    const int32_t token = drawn.token;
    if (std::find(o.stop_ids.begin(), o.stop_ids.end(), token) != o.stop_ids.end()) {
      d.finish = Finish::stop;
      d.stop_id = token;
      break;
    }
    d.tokens.push_back(token);
    if (o.logprobs >= 0) d.logprobs.push_back(std::move(drawn.logprobs));
    waiting = token;
    if (o.on_token && !o.on_token(token)) {
      d.finish = Finish::cancelled;
      break;
    }
  }
  return d;
}

}  // namespace ingot
