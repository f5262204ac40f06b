#pragma once
// The launches of a forward and backward pass as CUDA graphs: a pass has hundreds of launches, and without graphs the
// GPU waits for the host if the model is small.
#include <functional>
#include <map>
#include <memory>

#include "ingot/gpu/device.h"

namespace ingot {

// The numbers which, beside the model, determine the launches of a pass.
struct PassKey {
  int64_t tokens = 0, segments = 0;
  auto operator<=>(const PassKey&) const = default;
};

// The first pass of a key runs directly, the second pass is recorded, and later passes are replayed. A key that occurs
// only once is therefore never recorded. The first pass also makes the preparations of a first call (handles, loading
// the kernels' code), which are not possible during a recording. All memory of a pass keeps its address until clear().
class PassGraphs {
 public:
  PassGraphs(Stream stream, bool on) : stream_(stream), on_(on) {}
  // Puts the work of `pass` into the stream. If a pass cannot be recorded, this is reported once, and all passes run
  // directly.
  void run(const PassKey& key, const std::function<void()>& pass);
  void clear() { graphs_.clear(); }
  int64_t replays() const { return replays_; }
  bool on() const { return on_; }

 private:
  bool record(std::unique_ptr<gpu::Graph>& into, const std::function<void()>& pass);

  Stream stream_;
  bool on_;
  std::map<PassKey, std::unique_ptr<gpu::Graph>> graphs_;  // null: the key has occurred once
  int64_t replays_ = 0;
};

// The number of segments, empty ones included, for running a batch of `tokens` tokens: at most a quarter more, or the
// next multiple of eight, so few different numbers occur.
int64_t segment_bucket(int64_t segments, int64_t tokens);

}  // namespace ingot
