#pragma once
// GPT-OSS: a decoder with sliding and full attention in turn, sinks, YaRN, and a mixture of experts in every layer.
// spec/gpt_oss.py defines what is computed. Everything between the weights and the logits is fp32.
//   x = embed[token]
//   each layer:  x += Wo attention(rope(Wqkv norm(x) + b)) + bo        x += experts(norm(x))
//   logits = head norm(x)
#include <memory>
#include <span>

#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

// Keys and values of one sequence. Full layers keep every token; sliding layers keep a ring of the window and the
// longest batch, so that a batch's first token still sees the window before it.
class GptOssCache {
 public:
  // Room for `capacity` tokens, added in batches of at most `batch`.
  GptOssCache(const GptOssConfig& config, int64_t layers, int64_t capacity, int64_t batch,
              Allocator& memory = system_memory());
  static int64_t bytes(const GptOssConfig& config, int64_t layers, int64_t capacity, int64_t batch);
  int64_t capacity() const { return capacity_; }
  int64_t batch() const { return batch_; }
  int64_t length() const { return length_; }

  // Whether tokens after the first `length` can be forgotten: what the window before them needs may be overwritten.
  bool can_rewind(int64_t length) const;
  void rewind(int64_t length);
  // The windows of the sliding layers as they are now, and a few tokens more. As long as the first `length` tokens stay
  // in the cache, restore() leads back to them from anywhere, and rewind() from there to as many as leads_to() says.
  struct Snapshot {
    int64_t length = 0, begin = 0;  // tokens begin to length are kept
    Arena memory;                   // where the cache itself lies
    std::vector<Tensor> windows;
  };
  Snapshot snapshot() const;
  bool leads_to(const Snapshot& s, int64_t length) const;
  void restore(const Snapshot& s);

  // The model's side. Rows of layer l; where the rows of the next tokens begin; what a batch of them sees.
  const Tensor& keys(int64_t layer) const { return keys_[size_t(layer)]; }
  const Tensor& values(int64_t layer) const { return values_[size_t(layer)]; }
  int64_t rows(int64_t layer) const { return keys_[size_t(layer)].size(0); }
  void advance(int64_t tokens);

 private:
  void copy_windows(const Snapshot& s, bool out) const;
  Allocator* allocator_;
  Arena arena_;
  int64_t capacity_, batch_, window_, length_ = 0;
  int64_t valid_from_ = 0;  // rings hold the tokens from here to length_
  std::vector<bool> sliding_;
  std::vector<Tensor> keys_, values_;  // (rows, Hkv, D) f32
};

struct GptOssOptions {
  int64_t batch = 512;    // most tokens of one extend()
  int64_t positions = 0;  // positions that may occur; 0: the config's context
};

class GptOss {
 public:
  // The weights must outlive the model. Runs as many layers as they have.
  GptOss(const GptOssConfig& config, const GptOssWeights& weights, const GptOssOptions& options = {});
  ~GptOss();
  GptOss(GptOss&&) noexcept;
  static int64_t workspace_bytes(const GptOssConfig& config, const GptOssOptions& options);

  const GptOssConfig& config() const;
  int64_t layers() const;
  int64_t batch() const;
  // Appends tokens to the cache. Returns (T, C): the last norm's output, which logits() takes; valid until the next
  // call.
  Tensor extend(std::span<const int32_t> ids, GptOssCache& cache);
  void logits(const Tensor& normed, const Tensor& logits);  // (N, C), (N, V)

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
