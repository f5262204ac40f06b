#pragma once
// The base of decoders that compute their logits without a model, for tests of code that uses a decoder.
#include <vector>

#include "ingot/models/host_decoder.h"

namespace ingot::testing {

// Keeps the tokens of each slot. A fake derives its logits from these tokens in extend_slot(), which appends.
class FakeDecoder : public HostDecoder {
 public:
  struct Sizes {
    int64_t vocab = 0, context = 1000, batch = 1000, slots = 1;
  };
  explicit FakeDecoder(const Sizes& sizes) : HostDecoder(sizes.slots), sizes_(sizes), fed_(size_t(sizes.slots)) {}
  int64_t vocab() const override { return sizes_.vocab; }
  int64_t context() const override { return sizes_.context; }
  int64_t batch() const override { return sizes_.batch; }
  const std::vector<int32_t>& fed(int slot = 0) const { return fed_[size_t(slot)]; }

 protected:
  void append_ids(int slot, std::span<const int32_t> ids) {
    fed_[size_t(slot)].insert(fed_[size_t(slot)].end(), ids.begin(), ids.end());
  }

 private:
  void clear(int slot) override { fed_[size_t(slot)].clear(); }
  int64_t cached_length(int slot) const override { return int64_t(fed(slot).size()); }
  int64_t truncate(int slot, int64_t length) override {
    fed_[size_t(slot)].resize(size_t(length));
    return length;
  }
  Sizes sizes_;
  std::vector<std::vector<int32_t>> fed_;
};

}  // namespace ingot::testing
