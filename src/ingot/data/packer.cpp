#include "ingot/data/packer.h"

#include <algorithm>
#include <numeric>

#include "ingot/core/rng.h"

namespace ingot {
namespace {

void push_segment(int64_t begin, int64_t end, Batch& into) {
  into.cu_seqlens.push_back(int32_t(end));
  for (int64_t t = begin; t < end; ++t) into.positions[size_t(t)] = int32_t(t - begin);
}

// The row of T + 1 tokens of a batch. Each thread keeps its row, so that the steady state allocates nothing.
struct Row {
  std::vector<int32_t> tokens, starts;
};
Row& thread_row(int64_t size) {
  thread_local Row row;
  row.tokens.resize(size_t(size));
  row.starts.clear();
  return row;
}

}  // namespace

BatchOrder batch_order(const std::string& name) {
  for (const BatchOrder order :
       {BatchOrder::sequential, BatchOrder::shuffled, BatchOrder::segments, BatchOrder::windows})
    if (name == name_of(order)) return order;
  fail(ErrorCode::usage, "batch order: found \"", name, "\", expected sequential, shuffled, segments or windows");
}

const char* name_of(BatchOrder order) {
  switch (order) {
    case BatchOrder::sequential: return "sequential";
    case BatchOrder::shuffled: return "shuffled";
    case BatchOrder::segments: return "segments";
    case BatchOrder::windows: return "windows";
  }
  return "?";
}

void pack_row(const std::vector<int32_t>& row, const std::vector<int32_t>& starts, int64_t max_segment, Batch& into) {
  const int64_t n = int64_t(row.size()) - 1;
  into.tokens.assign(row.begin(), row.end() - 1);
  into.targets.assign(row.begin() + 1, row.end());
  into.positions.resize(size_t(n));
  into.cu_seqlens.assign(1, 0);
  into.documents.clear();
  int64_t begin = 0;
  const auto close_document = [&](int64_t end) {
    for (; begin < end; begin = std::min(end, begin + max_segment))
      push_segment(begin, std::min(end, begin + max_segment), into);
  };
  for (const int32_t start : starts) close_document(start);
  close_document(n);
}

Packer::Packer(std::shared_ptr<const TokenSource> source, const PackOptions& options)
    : source_(std::move(source)), options_(options) {
  INGOT_CHECK_GE(options.tokens, 1, "packer: tokens of a batch");
  INGOT_CHECK_LT(options.tokens, INT32_MAX, "packer: tokens of a batch");
  INGOT_CHECK_GE(options.max_segment, 1, "packer: max_segment");
  INGOT_CHECK(options.world >= 1 && options.rank >= 0 && options.rank < options.world, "packer: found rank ",
              options.rank, " of ", options.world);
  const int64_t size = source_->size();
  switch (options.order) {
    case BatchOrder::sequential: plan_sequential(); break;
    case BatchOrder::shuffled: plan_pieces(size); break;
    case BatchOrder::segments: plan_pieces(options.max_segment); break;
    case BatchOrder::windows:
      INGOT_CHECK(options.tokens % options.max_segment == 0, "packer: found ", options.tokens,
                  " tokens of a batch, expected a multiple of the window, ", options.max_segment);
      if (size <= options.max_segment)
        fail(ErrorCode::bad_data, source_->name(), ": found ", size, " tokens, expected more than the window of ",
             options.max_segment);
      break;
  }
}

void Packer::plan_sequential() {
  const std::vector<int64_t> bounds = source_->part_bounds();
  const int64_t step = (options_.tokens + 1) * options_.world;
  part_steps_.push_back(0);
  if (source_->bos() < 0) document_begins_ = source_->document_begins();
  std::vector<int32_t> piece;
  for (size_t part = 0; part + 1 < bounds.size(); ++part) {
    // The first bos is usually in the first piece read. A shard without any bos is used from its beginning.
    int64_t first = bounds[part];
    for (int64_t at = first; source_->bos() >= 0 && at < bounds[part + 1]; at += int64_t(piece.size())) {
      piece.resize(size_t(std::min(bounds[part + 1] - at, int64_t(1) << 16)));
      source_->read(at, piece);
      const auto found = std::find(piece.begin(), piece.end(), source_->bos());
      if (found == piece.end()) continue;
      first = at + (found - piece.begin());
      break;
    }
    part_begins_.push_back(first);
    part_steps_.push_back(part_steps_.back() + (bounds[part + 1] - first) / step);
  }
  if (part_steps_.back() == 0)
    fail(ErrorCode::bad_data, source_->name(), ": found ", source_->size(), " tokens, expected at least ", step,
         " in one shard for a batch of ", options_.tokens, " on ", options_.world,
         options_.world == 1 ? " process" : " processes");
}

// Documents cut into pieces of at most `longest` tokens.
void Packer::plan_pieces(int64_t longest) {
  std::vector<int64_t> begins = source_->document_begins();
  begins.push_back(source_->size());
  for (size_t d = 0; d + 1 < begins.size(); ++d)
    for (int64_t at = begins[d], end = begins[d + 1]; at < end; at += longest)
      pieces_.push_back({at, std::min(longest, end - at), at + longest >= end});
  for (const Piece& p : pieces_) epoch_tokens_ += p.length;
  if (epoch_tokens_ == 0) fail(ErrorCode::bad_data, source_->name(), ": found no tokens, expected at least 1");
  if (!ends_are_scored() && epoch_tokens_ + 1 == int64_t(begins.size()))
    fail(ErrorCode::bad_data, source_->name(), ": found documents of one token and none longer, expected one of two ",
         "tokens: the tokenizer has no token that starts a document, so a document's first token is no target");
}

double Packer::batches_per_epoch() const {
  if (options_.order == BatchOrder::sequential) return double(part_steps_.back());
  const int64_t tokens = options_.order == BatchOrder::windows ? source_->size() : epoch_tokens_;
  return double(tokens) / double(options_.tokens) / options_.world;
}

void Packer::fill(int64_t k, Batch& into) const {
  INGOT_CHECK_GE(k, 0, "packer: batch number");
  switch (options_.order) {
    case BatchOrder::sequential: return fill_sequential(k, into);
    case BatchOrder::shuffled: return fill_shuffled(k, into);
    case BatchOrder::segments: return fill_segments(k, into);
    case BatchOrder::windows: return fill_windows(k, into);
  }
}

std::pair<size_t, int64_t> Packer::sequential_span(int64_t k) const {
  const int64_t step = k % part_steps_.back();
  const size_t part = size_t(std::upper_bound(part_steps_.begin(), part_steps_.end(), step) - part_steps_.begin()) - 1;
  const int64_t spans = (step - part_steps_[part]) * options_.world + options_.rank;
  return {part, part_begins_[part] + spans * (options_.tokens + 1)};
}

void Packer::fill_sequential(int64_t k, Batch& into) const {
  const int64_t n = options_.tokens, first = sequential_span(k).second;
  Row& row = thread_row(n + 1);
  source_->read(first, row.tokens);
  if (source_->bos() >= 0) {
    for (int64_t t = 1; t < n; ++t)
      if (row.tokens[size_t(t)] == source_->bos()) row.starts.push_back(int32_t(t));
    return pack_row(row.tokens, row.starts, options_.max_segment, into);
  }
  auto begin = std::upper_bound(document_begins_.begin(), document_begins_.end(), first);
  for (auto at = begin; at != document_begins_.end() && *at < first + n; ++at)
    row.starts.push_back(int32_t(*at - first));
  pack_row(row.tokens, row.starts, options_.max_segment, into);
  for (; begin != document_begins_.end() && *begin <= first + n; ++begin) into.targets[size_t(*begin - first - 1)] = -1;
}

int64_t Packer::targets(int64_t k) const {
  const int64_t n = options_.tokens;
  if (ends_are_scored()) return n;
  int64_t unscored = 0;
  if (options_.order == BatchOrder::sequential) {
    const int64_t first = sequential_span(k).second;
    unscored = std::upper_bound(document_begins_.begin(), document_begins_.end(), first + n) -
               std::upper_bound(document_begins_.begin(), document_begins_.end(), first);
  } else {
    for_each_piece(k, n, [&](const Piece& piece, int64_t offset, int64_t take, int64_t) {
      if (piece.ends_document && offset + take == piece.length) ++unscored;
    });
  }
  return n - unscored;
}

std::shared_ptr<const Packer::Epoch> Packer::epoch(int64_t number) const {
  const std::lock_guard<std::mutex> hold(mutex_);
  std::shared_ptr<const Epoch>& slot = recent_[number & 1];  // a batch can end in the next epoch
  if (slot && slot->number == number) return slot;
  auto made = std::make_shared<Epoch>();
  made->number = number;
  const size_t n = pieces_.size();
  made->pieces.resize(n);
  std::iota(made->pieces.begin(), made->pieces.end(), int64_t(0));
  const Rng rng(options_.seed, Purpose::data, uint32_t(number));
  for (size_t i = n; i > 1; --i) std::swap(made->pieces[i - 1], made->pieces[rng.below(i, i)]);
  made->begins.push_back(0);
  for (const int64_t p : made->pieces) made->begins.push_back(made->begins.back() + pieces_[size_t(p)].length);
  slot = made;
  return made;
}

template <class Body> void Packer::for_each_piece(int64_t k, int64_t length, Body&& body) const {
  // Epochs follow each other in an endless row of tokens.
  for (int64_t done = 0; done < length;) {
    const int64_t at = (k * options_.world + options_.rank) * options_.tokens + done;
    const std::shared_ptr<const Epoch> order = epoch(at / epoch_tokens_);
    const int64_t in_epoch = at % epoch_tokens_;
    const size_t i =
        size_t(std::upper_bound(order->begins.begin(), order->begins.end(), in_epoch) - order->begins.begin()) - 1;
    const Piece& piece = pieces_[size_t(order->pieces[i])];
    const int64_t offset = in_epoch - order->begins[i], take = std::min(piece.length - offset, length - done);
    body(piece, offset, take, done);
    done += take;
  }
}

void Packer::fill_shuffled(int64_t k, Batch& into) const {
  const int64_t n = options_.tokens;
  Row& row = thread_row(n + 1);
  thread_local std::vector<int64_t> unscored;
  unscored.clear();
  for_each_piece(k, n + 1, [&](const Piece& piece, int64_t offset, int64_t take, int64_t done) {
    source_->read(piece.begin + offset, std::span(row.tokens).subspan(size_t(done), size_t(take)));
    if (offset > 0 || done == 0) return;
    if (done < n) row.starts.push_back(int32_t(done));
    if (!ends_are_scored()) unscored.push_back(done - 1);
  });
  pack_row(row.tokens, row.starts, options_.max_segment, into);
  for (const int64_t t : unscored) into.targets[size_t(t)] = -1;
}

// Like fill_shuffled, but the target of a token belongs to the token's own piece. A piece cut at a batch's end
// continues in the next batch with positions from 0.
void Packer::fill_segments(int64_t k, Batch& into) const {
  const int64_t n = options_.tokens;
  into.tokens.resize(size_t(n));
  into.targets.resize(size_t(n));
  into.positions.resize(size_t(n));
  into.cu_seqlens.assign(1, 0);
  into.documents.clear();
  for_each_piece(k, n, [&](const Piece& piece, int64_t offset, int64_t take, int64_t done) {
    const bool ends = piece.ends_document && offset + take == piece.length;
    Row& row = thread_row(ends ? take : take + 1);
    source_->read(piece.begin + offset, row.tokens);
    row.tokens.resize(size_t(take) + 1, source_->bos());  // after a document's end comes bos, or -1: not scored
    std::copy_n(row.tokens.begin(), take, into.tokens.begin() + done);
    std::copy_n(row.tokens.begin() + 1, take, into.targets.begin() + done);
    push_segment(done, done + take, into);
  });
}

void Packer::fill_windows(int64_t k, Batch& into) const {
  const int64_t n = options_.tokens, window = options_.max_segment, windows = n / window;
  const Rng rng(options_.seed, Purpose::data, uint32_t(k));
  Row& row = thread_row(window + 1);
  into.tokens.resize(size_t(n));
  into.targets.resize(size_t(n));
  into.positions.resize(size_t(n));
  into.cu_seqlens.assign(1, 0);
  into.documents.clear();
  for (int64_t w = 0; w < windows; ++w) {
    const uint64_t draw = uint64_t(options_.rank * windows + w);
    source_->read(int64_t(rng.below(draw, uint64_t(source_->size() - window))), row.tokens);
    std::copy_n(row.tokens.begin(), window, into.tokens.begin() + w * window);
    std::copy_n(row.tokens.begin() + 1, window, into.targets.begin() + w * window);
    push_segment(w * window, (w + 1) * window, into);
  }
}

}  // namespace ingot
