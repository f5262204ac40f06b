#pragma once
// Keys and values of a sequence in host memory. Layers without a window keep every token. Layers with a window keep a
// circular cache as long as the longest window and the longest batch together, so that the first token of a batch still
// sees its whole window.
#include "ingot/core/memory/arena.h"
#include "ingot/models/spec.h"

namespace ingot::decode {

class KeyValueCache {
 public:
  // Space for `capacity` tokens, added in batches of at most `batch` tokens.
  KeyValueCache(const DecoderSpec& spec, int64_t layers, int64_t capacity, int64_t batch,
                Allocator& memory = system_memory());
  static int64_t bytes(const DecoderSpec& spec, int64_t layers, int64_t capacity, int64_t batch);
  int64_t capacity() const { return capacity_; }
  int64_t batch() const { return batch_; }
  int64_t length() const { return length_; }

  // Whether the sequence can be shortened to `length` tokens: later tokens may have overwritten the window before
  // `length`.
  bool can_rewind(int64_t length) const;
  void rewind(int64_t length);
  // A copy of the circular caches. As long as the first `length` tokens stay in the cache, restore() returns to these
  // tokens from any later state, and rewind() can then shorten the sequence to the lengths for which leads_to() is
  // true.
  struct Snapshot {
    int64_t length = 0, begin = 0;  // tokens begin to length are kept
    Arena memory;                   // in the memory in which the cache lies
    std::vector<Tensor> windows;
  };
  Snapshot snapshot() const;
  bool leads_to(const Snapshot& s, int64_t length) const;
  void restore(const Snapshot& s);
  // Copies the first `length` tokens of another cache of the same sizes, so that rewind() to `length` works. Requires
  // from.can_rewind(length).
  void copy_from(const KeyValueCache& from, int64_t length);

  // For the model: the rows of layer l, and the call after a batch has been stored.
  const Tensor& keys(int64_t layer) const { return keys_[size_t(layer)]; }
  const Tensor& values(int64_t layer) const { return values_[size_t(layer)]; }
  int64_t rows(int64_t layer) const { return keys_[size_t(layer)].size(0); }
  void advance(int64_t tokens);

 private:
  void copy_windows(const Snapshot& s, bool out) const;
  Allocator* allocator_;
  Arena arena_;
  int64_t capacity_, batch_, length_ = 0;
  int64_t window_;                     // the longest window; 0: no layer has a circular cache
  int64_t valid_from_ = 0;             // the circular caches hold the tokens from here to length_
  std::vector<bool> ring_;             // by layer
  std::vector<Tensor> keys_, values_;  // (rows, Hkv, D) f32
};

}  // namespace ingot::decode
