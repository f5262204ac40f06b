#pragma once
// An EAGLE-3 draft head on the CPU, in fp32 (spec/eagle.py). Row p of the head combines token p + 1 of a sequence with
// the features of token p; after the target has computed tokens 0 to n - 1 and token n is known, row n - 1 gives the
// first guess. The rows of later guesses, which take the head's own state for the features, are provisional: once the
// target has computed these tokens, their keys and values are written again from the target's features.
#include <memory>
#include <span>

#include "ingot/models/draft/head/head_rows.h"
#include "ingot/models/draft/head/head_weights.h"

namespace ingot::draft {

// The head's memory of a sequence: the features of every token, from which each row can be computed again after a
// truncation, and the keys and values of the rows.
class HeadCache {
 public:
  HeadCache(const HeadConfig& config, int64_t capacity);  // of so many tokens
  static int64_t bytes(const HeadConfig& config, int64_t capacity);
  int64_t length() const { return rows_.length(); }
  void truncate(int64_t length);
  void copy_from(const HeadCache& from, int64_t length);  // its first tokens; both caches have the same sizes

 private:
  friend class CpuHead;
  Arena arena_;
  Tensor features_;       // (capacity, C)
  Tensor keys_, values_;  // (capacity, Hkv, D)
  HeadRows rows_;
};

class CpuHead {
 public:
  // `head` and `target` must outlive the object. For up to `batch` tokens at a time, and positions below `positions`.
  CpuHead(const DraftHead& head, const DecoderWeights& target, int64_t batch, int64_t positions);
  ~CpuHead();
  static int64_t workspace_bytes(const HeadConfig& config, int64_t batch, int64_t positions);

  const HeadConfig& config() const;
  // (batch, n C): the target's hidden states at the boundaries of the tokens of the next append(), which uses them up.
  const Tensor& hidden_states() const;
  // Appends tokens that the target has computed.
  void append(std::span<const int32_t> ids, HeadCache& cache);
  // Computes the rows whose token is in the cache, so that few rows remain for draft().
  void compute_rows(HeadCache& cache);
  // Guesses `count` tokens one after another, each the likeliest, after the cache's tokens and `next`. length() + count
  // is at most the capacity. The cache's tokens do not change.
  std::vector<int32_t> draft(HeadCache& cache, int32_t next, int64_t count);
  const Tensor& last_logits() const;  // (1, ids of the head): of the last guess

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::draft
