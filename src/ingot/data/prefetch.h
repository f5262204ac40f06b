#pragma once
// A thread that makes batches before their use.
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "ingot/data/packer.h"

namespace ingot {

// Delivers make(first), make(first + 1), ... in order, with at most `ahead` batches waiting. If make() throws for a
// batch, the call of next() for this batch throws the exception, and so does every later call.
class Prefetch {
 public:
  Prefetch(std::function<void(int64_t, Batch&)> make, int64_t first, int ahead = 3);
  Prefetch(std::shared_ptr<const Packer> packer, int64_t first, int ahead = 3);
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;
  // Exchanges the caller's batch (whose memory is reused) for the next batch.
  void next(Batch& batch);

 private:
  void run(int64_t k);

  std::function<void(int64_t, Batch&)> make_;
  std::mutex mutex_;
  std::condition_variable filled_, emptied_;
  std::deque<Batch> ready_, spare_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ingot
