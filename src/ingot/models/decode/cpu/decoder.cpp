#include "ingot/models/decode/cpu/decoder.h"

#include <algorithm>
#include <optional>

#include "ingot/models/draft/head/cpu_head.h"
#include "ingot/models/host_decoder.h"

namespace ingot {
namespace {

constexpr int64_t kLogitNumbers = 16 << 20;  // numbers of a block of logit rows: 64 MB
constexpr size_t kSnapshots = 8;             // checkpoints of a slot; each holds the windows of the sliding layers

// A slot: the cache, and the snapshots of its checkpoints.
struct CpuSlot {
  decode::KeyValueCache cache;
  std::vector<decode::KeyValueCache::Snapshot> snapshots;  // of growing length, all of this sequence

  int64_t rewind(int64_t length) {
    if (!cache.can_rewind(length))
      for (const auto& s : snapshots)
        if (cache.leads_to(s, length)) {
          cache.restore(s);
          break;
        }
    while (!snapshots.empty() && snapshots.back().length > length) snapshots.pop_back();
    if (cache.can_rewind(length))
      cache.rewind(length);
    else if (!snapshots.empty())
      cache.restore(snapshots.back());
    else
      cache.rewind(0);
    return cache.length();
  }
  void checkpoint() {
    if (!snapshots.empty() && snapshots.back().length == cache.length()) return;
    // Drops the oldest snapshot except the first: the first is often a system prompt shared by all conversations.
    if (snapshots.size() == kSnapshots) snapshots.erase(snapshots.begin() + 1);
    snapshots.push_back(cache.snapshot());
  }
};

class CpuDecoder final : public HostDecoder {
 public:
  CpuDecoder(const DecoderSpec& c, const DecoderWeights& weights, const DecoderOptions& o, const draft::DraftHead* head)
      : HostDecoder(o.slots), spec_(c), model_(c, weights, {.batch = o.batch, .positions = context_of(o, c.context)}) {
    const int64_t context = context_of(o, c.context);
    for (int64_t s = 0; s < o.slots; ++s)
      slots_.push_back({decode::KeyValueCache(c, model_.layers(), context, o.batch), {}});
    if (head == nullptr) return;
    head_.emplace(*head, weights, o.batch, context);
    for (int64_t s = 0; s < o.slots; ++s) head_caches_.emplace_back(head->config, context);
    boundaries_ = {head->config.boundaries, head_->hidden_states()};
  }

  int64_t vocab() const override { return spec_.vocab; }
  int64_t context() const override { return slots_[0].cache.capacity(); }
  int64_t batch() const override { return model_.batch(); }
  int64_t draft_rows() const override { return std::min(batch(), decode::CpuModel::kStepRows); }
  bool has_draft_head() const override { return head_.has_value(); }

 private:
  void clear(int slot) override {
    slots_[size_t(slot)].cache.rewind(0);
    slots_[size_t(slot)].snapshots.clear();
    if (head_) head_caches_[size_t(slot)].truncate(0);
  }
  int64_t cached_length(int slot) const override { return slots_[size_t(slot)].cache.length(); }
  int64_t truncate(int slot, int64_t length) override {
    const int64_t kept = slots_[size_t(slot)].rewind(length);
    if (head_) head_caches_[size_t(slot)].truncate(kept);
    return kept;
  }
  void save_checkpoint(int slot) override { slots_[size_t(slot)].checkpoint(); }
  bool copy_tokens(int from, int to, int64_t length) override {
    const CpuSlot& source = slots_[size_t(from)];
    if (!source.cache.can_rewind(length)) return false;
    slots_[size_t(to)].snapshots.clear();
    slots_[size_t(to)].cache.copy_from(source.cache, length);
    if (head_) head_caches_[size_t(to)].copy_from(head_caches_[size_t(from)], length);
    return true;
  }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    const int64_t begin = cached_length(slot);
    const Tensor normed = model_.extend(ids, slots_[size_t(slot)].cache, kept_states());
    if (head_) {
      head_->append(ids, head_caches_[size_t(slot)]);
      // The rows are computed now; otherwise the first guess would have to wait for them.
      head_->compute_rows(head_caches_[size_t(slot)]);
    }
    give_logits(normed, begin, rows, take);
  }
  void extend_draft(int slot, std::span<const int32_t> ids, const Take& take) override {
    const int64_t begin = cached_length(slot);
    const Tensor normed = model_.extend_rows(ids, slots_[size_t(slot)].cache, kept_states());
    if (head_) head_->append(ids, head_caches_[size_t(slot)]);
    give_logits(normed, begin, Rows::all, take);
  }
  std::vector<int32_t> guess_after(int slot, int32_t pending, int64_t most) override {
    return head_->draft(head_caches_[size_t(slot)], pending, most);
  }
  const decode::CpuModel::Boundaries* kept_states() const { return head_ ? &boundaries_ : nullptr; }
  void give_logits(const Tensor& normed, int64_t begin, Rows rows, const Take& take) {
    const int64_t n = normed.size(0);
    const int64_t block = std::max<int64_t>(1, kLogitNumbers / spec_.vocab);
    for (int64_t t = rows == Rows::all ? 0 : n - 1; t < n; t += block) {
      const int64_t count = std::min(block, n - t);
      logits_.resize(std::max(logits_.size(), size_t(count * spec_.vocab)));
      const Tensor logits(logits_.data(), {count, spec_.vocab});
      model_.logits(normed.slice(0, t, t + count), logits);
      take(begin + t, logits);
    }
  }

  DecoderSpec spec_;
  decode::CpuModel model_;
  std::vector<CpuSlot> slots_;
  std::vector<float> logits_;
  std::optional<draft::CpuHead> head_;
  std::vector<draft::HeadCache> head_caches_;  // of each slot, where there is a head
  decode::CpuModel::Boundaries boundaries_;    // the hidden states that the head reads
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(const DecoderSpec& spec, const DecoderWeights& weights,
                                      const DecoderOptions& options, const draft::DraftHead* head) {
  return std::make_unique<CpuDecoder>(spec, weights, options, head);
}

int64_t decoder_bytes(const DecoderSpec& c, int64_t layers, const DecoderOptions& o, const draft::DraftHead* head) {
  const int64_t context = context_of(o, c.context);
  const int64_t of_head = head == nullptr ? 0
                                          : draft::CpuHead::workspace_bytes(head->config, o.batch, context) +
                                                o.slots * draft::HeadCache::bytes(head->config, context);
  return decode::CpuModel::workspace_bytes(c, {.batch = o.batch, .positions = context}) +
         o.slots * decode::KeyValueCache::bytes(c, layers, context, o.batch) + std::max(c.vocab, kLogitNumbers) * 4 +
         of_head;
}

}  // namespace ingot
