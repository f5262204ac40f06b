#pragma once
// The keys and values of generation, with a lifetime beyond a call.
#include <cstdint>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot {

// Keys and values of every layer call for `sequences` sequences of up to `capacity` tokens.
class GptCache {
 public:
  GptCache(const GptConfig& config, const LayerProgram& program, int64_t sequences, int64_t capacity, DType dtype,
           Allocator& memory = system_memory());
  int64_t sequences() const { return int64_t(lengths_.size()); }
  int64_t capacity() const { return capacity_; }
  Device device() const { return arena_.device(); }
  int64_t length(int64_t sequence) const { return lengths_[size_t(sequence)]; }
  void truncate(int64_t sequence, int64_t length);  // forgets tokens beyond `length`
  void advance(int64_t sequence, int64_t tokens);   // after every layer call has written its keys and values
  const Tensor& keys(int layer_call) const { return k_[size_t(layer_call)]; }
  const Tensor& values(int layer_call) const { return v_[size_t(layer_call)]; }

 private:
  Arena arena_;
  int64_t capacity_;
  std::vector<Tensor> k_, v_;  // per layer call (sequences * capacity, Hkv, D)
  std::vector<int64_t> lengths_;
};

// The segments of a call continue sequences of a cache: segment s continues sequence sequences[s].
struct CachedSegments {
  GptCache& cache;
  const std::vector<int64_t>& sequences;
  int64_t window = 0;  // the most visible keys of a token, including the keys of the call; 0: all
};

}  // namespace ingot
