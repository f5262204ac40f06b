// The function that bench/peers/bpe.py times: the shipped tokenizer behind plain C functions. Returns -1 with the
// reason in bpe_error().
#include <algorithm>
#include <string>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/text/byte_bpe.h"

namespace {
thread_local std::string last_error;

template <class Use> int64_t guarded(Use&& use) {
  try {
    return use();
  } catch (const std::exception& e) {
    last_error = e.what();
    return -1;
  }
}
}  // namespace

extern "C" {
const char* bpe_error() { return last_error.c_str(); }

// `text` holds the documents one after another, document i ending at ends[i].
int64_t bpe_train(const char* text, const int64_t* ends, int64_t documents, int vocab, int threads, int o200k,
                  const char* path) {
  return guarded([&]() -> int64_t {
    ingot::set_thread_count(threads);
    std::vector<std::string_view> views;
    for (int64_t i = 0, at = 0; i < documents; at = ends[i++]) views.emplace_back(text + at, size_t(ends[i] - at));
    ingot::BpeTrainOptions options;
    if (o200k != 0) options = {.pattern = ingot::WordPattern::o200k, .special_tokens = {}};
    ingot::train_bpe(views, vocab, options).save(path);
    return 0;
  });
}
void* bpe_load(const char* path) {
  ingot::Tokenizer* t = nullptr;
  guarded([&]() -> int64_t { return t = ingot::load_tokenizer(path).release(), 0; });
  return t;
}
// Returns the number of ids. The ids are written to `ids`, which has space for one id per byte of text.
int64_t bpe_encode(const void* tokenizer, const char* text, int64_t bytes, int32_t* ids) {
  return guarded([&] {
    const auto out = static_cast<const ingot::Tokenizer*>(tokenizer)->encode({text, size_t(bytes)});
    std::copy(out.begin(), out.end(), ids);
    return int64_t(out.size());
  });
}
}
