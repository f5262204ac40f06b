#pragma once
// Batches that score a whole token source once. Every token is a target exactly once, except the source's first token
// and, if the tokenizer has no bos, the first token of each document. With bos, the next document's bos is the last
// target of a document. The last batch is shorter.
#include <cstdint>
#include <memory>
#include <vector>

#include "ingot/data/packer.h"

namespace ingot {

struct EvaluationOptions {
  int64_t tokens = 0;      // most tokens of a batch
  int64_t context = 2048;  // most tokens of a segment, at most `tokens`
  // 0: segments do not overlap. Otherwise segments of `context` tokens advance by `stride` inside a document, and each
  // target is scored in its first segment: with at least context - stride tokens before the target, or all earlier
  // tokens of the document.
  int64_t stride = 0;
  // false: a batch holds whole segments, and the result does not depend on `tokens`. true: batches of exactly `tokens`
  // tokens, which may begin inside a document (the rule of parameter-golf); the result then depends a little on
  // `tokens`.
  bool flat = false;
};

class EvaluationBatches {
 public:
  EvaluationBatches(std::shared_ptr<const TokenSource> source, const EvaluationOptions& options);
  int64_t count() const { return int64_t(firsts_.size()) - 1; }
  int64_t targets() const;
  int64_t documents() const { return documents_; }
  // Batch i; Batch::documents names each segment's document. Thread-safe.
  void fill(int64_t i, Batch& into) const;

 private:
  struct Segment {
    int64_t begin;
    int32_t length, unscored;  // the first `unscored` targets belong to an earlier segment
    int32_t before;            // how many earlier tokens of the document are in Batch::before
    int32_t document;
  };
  void cut_document(int64_t begin, int64_t end, int32_t document);
  void add_segment(int64_t begin, int64_t length, int64_t unscored, int64_t document_begin, int64_t document);
  int64_t inputs_end(const std::vector<int64_t>& begins, size_t d) const;
  void cut_flat(const std::vector<int64_t>& begins);

  std::shared_ptr<const TokenSource> source_;
  EvaluationOptions options_;
  int64_t documents_ = 0;
  std::vector<Segment> segments_;
  std::vector<int64_t> firsts_;  // first segment of each batch, and the number of segments
};

// The bytes of text that target t in segment s stands for; bos and control tokens stand for none. Their sum over all
// scored targets is the denominator of bits per byte.
int64_t target_bytes(const Tokenizer& tokenizer, const Batch& batch, int64_t s, int64_t t);
int64_t target_bytes(const Tokenizer& tokenizer, const Batch& batch);  // of all scored targets
// The same sum for all documents of a source, which have `document_bytes` bytes together. Without bos, the first token
// of each document is no target, and its bytes are not in the sum.
int64_t expected_bytes(int64_t document_bytes, const Tokenizer& tokenizer, const TokenSource& source);
// bits per byte = sum of losses (natural logarithm) / ln 2 / bytes
double bits_per_byte(double loss_sum, int64_t bytes);

}  // namespace ingot
