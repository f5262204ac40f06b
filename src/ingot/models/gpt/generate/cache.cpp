#include "ingot/models/gpt/generate/cache.h"

#include "ingot/core/check.h"

namespace ingot {

GptCache::GptCache(const GptConfig& config, const LayerProgram& program, int64_t sequences, int64_t capacity,
                   DType dtype, Allocator& memory)
    : capacity_(capacity), lengths_(size_t(sequences), 0) {
  INGOT_CHECK(sequences >= 1 && capacity >= 1, "gpt cache: found ", sequences, " sequences of ", capacity,
              " tokens, expected at least 1 of 1");
  const Shape shape{sequences * capacity, config.kv_heads, config.head_dim};
  const int64_t each = Arena::aligned(dtype, shape);
  arena_ = Arena(2 * each * int64_t(program.layer_calls.size()), memory);
  for (size_t i = 0; i < program.layer_calls.size(); ++i) {
    k_.push_back(arena_.take(dtype, shape));
    v_.push_back(arena_.take(dtype, shape));
  }
}

void GptCache::truncate(int64_t sequence, int64_t length) {
  int64_t& n = lengths_.at(size_t(sequence));
  INGOT_CHECK(length >= 0 && length <= n, "gpt cache: asked to keep ", length, " tokens, expected at most the ", n,
              " it has");
  n = length;
}
void GptCache::advance(int64_t sequence, int64_t tokens) { lengths_.at(size_t(sequence)) += tokens; }

}  // namespace ingot
