#pragma once
// The counter from which a launch's blocks claim their items (hopper/walk.cuh). Launches that may run at once must not
// share a counter, because items would be skipped:
// - Launches of a stream run in turn and share the stream's counter. A stream's id is never reused, so the counter of
// an ended stream is not used again.
// - A launch recorded by a graph has its own counter as long as any graph contains the launch. Copies of this graph (a
// second instantiation, a child of two graphs) share the counter: the copies must not run at once.
// - A launch has no counter (kNoCounter) when all are in use: it runs one block per item, and claims nothing.
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ingot::cuda::attention_hopper {

constexpr uint32_t kStreamSlots = 4096, kSlots = 1 << 16;
constexpr uint32_t kNoCounter = kSlots - 1;  // means: no counter

class ClaimSlots {
 public:
  uint32_t of_stream(uint64_t id) {
    const std::lock_guard lock(mutex_);
    if (const auto found = streams_.find(id); found != streams_.end()) return found->second;
    if (streams_.size() == kStreamSlots) return kNoCounter;
    return streams_.emplace(id, uint32_t(streams_.size())).first->second;
  }
  // A counter for a recorded launch; the caller returns the counter later, unless the result is kNoCounter.
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
  uint32_t next_ = kStreamSlots;  // the first counter that is still unused
};

}  // namespace ingot::cuda::attention_hopper
