#pragma once
// An EAGLE-3 draft head in a GPU's memory, beside the slots of a DeviceModel; the matrices keep the formats of the
// given weights (draft/head/head_rows.h says which row follows from which token). A step of the target leaves its
// hidden states in states(); place() turns them into the features of tokens, which the head keeps in bf16, and draft()
// guesses.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ingot/models/decode/draft_head/head_launches.h"
#include "ingot/models/draft/head/head_weights.h"

namespace ingot::decode {

class DeviceHead {
 public:
  struct Sizes {
    int64_t context = 0, slots = 1;  // tokens of a slot
    int64_t rows = kHeadRows;        // the most rows of a step of the target
  };
  // Why a GPU does not compute this head, in one line; empty: a GPU computes it.
  static std::string unsupported_reason(const draft::HeadConfig& config);
  // The bytes of GPU memory that the head needs.
  static int64_t bytes(const draft::DraftHead& head, const Sizes& sizes);
  // Copies the weights; those of f32 are rounded to bf16. `target` gives the embedding and the output matrix where the
  // head has none; their memory must outlive the object. Error{unsupported} with unsupported_reason().
  DeviceHead(const draft::DraftHead& head, const Model& target, const Sizes& sizes, Stream stream, int device);
  ~DeviceHead();

  const KeptStates& states() const;
  int64_t length(int slot) const;
  // Rows of a step of the target, which belong to consecutive tokens of a slot.
  struct Part {
    int slot;
    int64_t position, rows;  // of the first row
  };
  // Computes the features of the last step's rows from its hidden states.
  void place(std::span<const Part> parts);
  // Counts tokens whose features have been placed behind the slot's tokens.
  void append(int slot, std::span<const int32_t> ids);
  // Computes the keys and values of all tokens but the last, so that few remain for draft().
  void compute_rows(int slot);
  void truncate(int slot, int64_t length);
  void copy(int from, int to, int64_t length);  // the first tokens of another slot
  // Guesses `count` tokens one after another, each the likeliest, after the slot's tokens and `next`. `count` is at
  // most kMostGuesses, and length() + count at most the context. Waits for the GPU. The slot's tokens do not change.
  static constexpr int64_t kMostGuesses = 15;
  std::vector<int32_t> draft(int slot, int32_t next, int64_t count);
  std::vector<float> last_logits() const;  // (ids of the head): of the last guess. Waits for the GPU

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::decode
