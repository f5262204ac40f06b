#include "ingot/engines/generate/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace ingot {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void check(const SessionOptions& o, std::span<const int32_t> prompt, const Decoder& d) {
  ingot::check(o.sampling);
  INGOT_CHECK_GE(o.tokens, int64_t(0), "generate: tokens");
  INGOT_CHECK(o.vocab >= 0 && o.vocab <= d.vocab(), "generate: found a vocabulary of ", o.vocab, ", expected at most ",
              d.vocab(), ", the model's");
  if (prompt.empty()) fail(ErrorCode::usage, "found an empty prompt, expected at least one token");
  for (size_t i = 0; i < prompt.size(); ++i)
    if (prompt[i] < 0 || prompt[i] >= d.vocab())
      fail(ErrorCode::usage, "found id ", prompt[i], " at position ", i, " of the prompt, expected 0 to ",
           d.vocab() - 1);
  if (!o.slide && int64_t(prompt.size()) > d.context())
    fail(ErrorCode::usage, "found a prompt of ", prompt.size(), " tokens, expected at most ", d.context(),
         ", the context");
}

}  // namespace

const char* name_of(Finish f) {
  switch (f) {
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    case Finish::context: return "context";
    case Finish::cancelled: return "cancelled";
  }
  return "?";
}

// Appends ids in batches; `take` gets the last one's logits. False: cancelled on the way.
bool Session::tell(std::span<const int32_t> ids, const SessionOptions& o, const Decoder::Take& take) {
  const size_t batch = size_t(decoder_.batch());
  for (size_t at = 0; at < ids.size();) {
    if (o.cancelled && o.cancelled()) return false;
    const auto part = ids.subspan(at, std::min(batch, ids.size() - at));
    at += part.size();
    decoder_.extend(
        part, Decoder::Rows::last, at == ids.size() ? take : [](int64_t, const Tensor&) {});
    told_.insert(told_.end(), part.begin(), part.end());
    if (o.on_prompt && ids.size() > 1) o.on_prompt(int64_t(at), int64_t(ids.size()));
  }
  return true;
}

void Session::forget() {
  decoder_.rewind(0);
  told_.clear();
}

Answer Session::generate(std::span<const int32_t> prompt, const SessionOptions& o) {
  check(o, prompt, decoder_);
  const int64_t context = decoder_.context(), vocab = o.vocab > 0 ? o.vocab : decoder_.vocab();
  if (int64_t(prompt.size()) > context) prompt = prompt.last(size_t(context));
  Answer answer{.prompt = int64_t(prompt.size())};
  std::vector<char> row;  // the last token's logits
  DType dtype = DType::f32;
  const Decoder::Take keep = [&](int64_t, const Tensor& logits) {
    dtype = logits.dtype;
    row.resize(size_t(logits.bytes()));
    std::memcpy(row.data(), logits.data, row.size());
  };
  try {
    auto start = std::chrono::steady_clock::now();
    // The last token is always told anew: its logits are wanted.
    const auto differ = std::mismatch(told_.begin(), told_.end(), prompt.begin(), prompt.end() - 1);
    answer.reused = decoder_.rewind(differ.first - told_.begin());
    told_.resize(size_t(answer.reused));
    const bool ready = tell(prompt.subspan(size_t(answer.reused)), o, keep);
    answer.prompt_seconds = seconds_since(start);
    answer.finish = ready ? Finish::length : Finish::cancelled;
    if (ready) decoder_.mark();
    start = std::chrono::steady_clock::now();
    for (int64_t i = 0; ready && i < o.tokens; ++i) {
      if (o.cancelled && o.cancelled()) {
        answer.finish = Finish::cancelled;
        break;
      }
      int32_t token = 0;
      sample({.logits = Tensor(row.data(), dtype, {1, vocab}),
              .tokens = Tensor(&token, {1}),
              .options = o.sampling,
              .seed = o.seed,
              .step = uint32_t(i)},
             {});
      if (std::find(o.stop_ids.begin(), o.stop_ids.end(), token) != o.stop_ids.end()) {
        answer.finish = Finish::stop;
        answer.stop_id = token;
        break;
      }
      answer.tokens.push_back(token);
      if (o.on_token && !o.on_token(token)) {
        answer.finish = Finish::cancelled;
        break;
      }
      if (i + 1 == o.tokens) break;
      std::vector<int32_t> next{token};
      if (decoder_.length() == context) {
        if (!o.slide) {
          answer.finish = Finish::context;
          break;
        }
        const int64_t kept = std::max<int64_t>(1, context / 2);
        next.assign(told_.end() - (kept - 1), told_.end());
        next.push_back(token);
        forget();
      }
      tell(next, {}, keep);
    }
    answer.token_seconds = seconds_since(start);
  } catch (...) {
    forget();
    throw;
  }
  return answer;
}

}  // namespace ingot
