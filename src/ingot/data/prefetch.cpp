#include "ingot/data/prefetch.h"

#include <signal.h>

#include <string>
#include <system_error>

namespace ingot {

Prefetch::Prefetch(std::function<void(int64_t, Batch&)> make, int64_t first, int ahead) : make_(std::move(make)) {
  INGOT_CHECK_GE(ahead, 1, "prefetch: batches ahead");
  spare_.resize(size_t(ahead));
  // The main thread handles signals, so this thread starts with all signals blocked.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string refused;
  try {
    thread_ = std::thread([this, first] { run(first); });
  } catch (const std::system_error& e) { refused = e.what(); }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!thread_.joinable()) fail(ErrorCode::io, "prefetch: found no room for a thread (", refused, ")");
}

Prefetch::Prefetch(std::shared_ptr<const Packer> packer, int64_t first, int ahead)
    : Prefetch([packer = std::move(packer)](int64_t k, Batch& into) { packer->fill(k, into); }, first, ahead) {}

Prefetch::~Prefetch() {
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    stop_ = true;
  }
  emptied_.notify_all();
  thread_.join();
}

void Prefetch::run(int64_t k) {
  for (;; ++k) {
    Batch batch;
    {
      std::unique_lock<std::mutex> hold(mutex_);
      emptied_.wait(hold, [&] { return stop_ || !spare_.empty(); });
      if (stop_) return;
      batch = std::move(spare_.front());
      spare_.pop_front();
    }
    std::exception_ptr error;
    try {
      make_(k, batch);
    } catch (...) { error = std::current_exception(); }
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      if (error)
        error_ = error;
      else
        ready_.push_back(std::move(batch));
    }
    filled_.notify_one();
    if (error) return;
  }
}

void Prefetch::next(Batch& batch) {
  {
    std::unique_lock<std::mutex> hold(mutex_);
    filled_.wait(hold, [&] { return !ready_.empty() || error_; });
    if (ready_.empty()) std::rethrow_exception(error_);
    std::swap(batch, ready_.front());
    spare_.push_back(std::move(ready_.front()));
    ready_.pop_front();
  }
  emptied_.notify_one();
}

}  // namespace ingot
