#pragma once
// Which counter a launch's blocks claim their items from (hopper/walk.cuh). Launches that may run at once must not
// share one, or an item would be left out:
//   - launches of one stream run one after the other and share the stream's, which it keeps: a stream's id is never
//     another's, so one that has ended leaves its counter to nobody;
//   - a launch that a graph records has its own as long as a graph holds it. Copies of that graph (a second
//     instantiation, a child of two others) share it: they must not run at once;
//   - where all are given away a launch has none (kNoCounter): it takes a block an item, of which nothing is claimed.
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ingot::cuda::attention_hopper {

constexpr uint32_t kStreamSlots = 4096, kSlots = 1 << 16;
constexpr uint32_t kNoCounter = kSlots - 1;  // a counter that nobody reads anything from

class ClaimSlots {
 public:
  uint32_t of_stream(uint64_t id) {
    const std::lock_guard lock(mutex_);
    if (const auto found = streams_.find(id); found != streams_.end()) return found->second;
    if (streams_.size() == kStreamSlots) return kNoCounter;
    return streams_.emplace(id, uint32_t(streams_.size())).first->second;
  }
  // To be given back, unless it is kNoCounter.
  uint32_t of_recorded() {
    const std::lock_guard lock(mutex_);
    if (!given_back_.empty()) {
      const uint32_t slot = given_back_.back();
      given_back_.pop_back();
      return slot;
    }
    return next_ == kNoCounter ? kNoCounter : next_++;
  }
  void give_back(uint32_t slot) {
    const std::lock_guard lock(mutex_);
    given_back_.push_back(slot);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, uint32_t> streams_;
  std::vector<uint32_t> given_back_;
  uint32_t next_ = kStreamSlots;  // the first that no launch has had
};

}  // namespace ingot::cuda::attention_hopper
