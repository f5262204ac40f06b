#pragma once
// Batches of a fixed number of tokens, packed from documents of any length. Batch k is a pure function of the data, the
// options and k, so a run resumes from a single number.
//
//   tokens      x_0 .. x_{T-1}
//   targets     x_1 .. x_T; at a document's end bos, or -1 (not scored) where the tokenizer has no bos
//   positions   restart at each cut
//   cu_seqlens  0, the cuts, T
// A segment is cut where a document begins, and every max_segment tokens after this beginning. For a document that
// began in an earlier batch the tokens are counted from the start of this batch.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ingot/data/token_source.h"

namespace ingot {

struct Batch {
  std::vector<int32_t> tokens, targets, positions;  // T; targets of -1 are not scored
  std::vector<int32_t> cu_seqlens;                  // segments + 1
  std::vector<int32_t> documents;                   // the document of each segment; only evaluation fills this
  // Per segment, the tokens of its document before it, at most Tokenizer::kContext. Only evaluation fills this.
  std::vector<std::vector<int32_t>> before;
  std::vector<int32_t> last;  // per segment: how many of its last tokens have targets; only adaptation fills this
  int64_t size() const { return int64_t(tokens.size()); }
  int64_t segments() const { return int64_t(cu_seqlens.size()) - 1; }
};

//   sequential  shards in order, each from its first bos. Each rank gets spans of T + 1 tokens, without common tokens;
//               the rest of a shard after the last whole step is dropped.
//   shuffled    documents in a new order each epoch. Consecutive batches share a token, so that every token is a
//               target once.
//   segments    documents are cut into segments of at most max_segment tokens, in a new order each epoch: a batch has
//               tokens of many documents even where documents are long.
//   windows     T / max_segment windows at random offsets, which ignore the documents' boundaries: the text is a
//               single stream, and every token a target, as in nanoGPT.
enum class BatchOrder { sequential, shuffled, segments, windows };
BatchOrder batch_order(const std::string& name);
const char* name_of(BatchOrder order);

struct PackOptions {
  BatchOrder order = BatchOrder::shuffled;
  int64_t tokens = 0;  // T, per rank
  int64_t max_segment = 2048;
  uint64_t seed = 1;
  int rank = 0, world = 1;
};

class Packer {
 public:
  Packer(std::shared_ptr<const TokenSource> source, const PackOptions& options);
  // Makes batch k. Thread-safe; reuses the memory of `into`.
  void fill(int64_t k, Batch& into) const;
  // How many targets of batch k are scored. Some tokens of a batch have no target only if the tokenizer has no bos.
  int64_t targets(int64_t k) const;
  double batches_per_epoch() const;  // whole in sequential order
  const TokenSource& source() const { return *source_; }
  const PackOptions& options() const { return options_; }

 private:
  // Documents, or segments, in the order of an epoch.
  struct Epoch {
    int64_t number = -1;
    std::vector<int64_t> pieces;  // in this epoch's order
    std::vector<int64_t> begins;  // where each piece begins in the epoch's row of tokens; the row's length comes last
  };
  struct Piece {
    int64_t begin, length;
    bool ends_document;
  };
  // Calls body(piece, offset in the piece, tokens taken, tokens before these) for the pieces of batch k's first
  // `length` tokens, in the epochs' orders.
  template <class Body> void for_each_piece(int64_t k, int64_t length, Body&& body) const;
  bool ends_are_scored() const { return source_->bos() >= 0 || options_.order == BatchOrder::windows; }
  std::pair<size_t, int64_t> sequential_span(int64_t k) const;  // the part, and the span's first token
  void plan_sequential();
  void plan_pieces(int64_t longest);
  std::shared_ptr<const Epoch> epoch(int64_t number) const;
  void fill_sequential(int64_t k, Batch& into) const;
  void fill_shuffled(int64_t k, Batch& into) const;
  void fill_segments(int64_t k, Batch& into) const;
  void fill_windows(int64_t k, Batch& into) const;

  std::shared_ptr<const TokenSource> source_;
  PackOptions options_;
  std::vector<int64_t> part_begins_, part_steps_;  // sequential: first bos, and steps before each part
  std::vector<int64_t> document_begins_;           // sequential without bos
  std::vector<Piece> pieces_;                      // shuffled: documents; segments: their pieces
  int64_t epoch_tokens_ = 0;                       // sum of the pieces' lengths
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Epoch> recent_[2];
};

// Splits `row` (T + 1 tokens) into tokens and targets, and cuts the row at `starts` (ascending offsets below T) and
// max_segment.
void pack_row(const std::vector<int32_t>& row, const std::vector<int32_t>& starts, int64_t max_segment, Batch& into);

}  // namespace ingot
