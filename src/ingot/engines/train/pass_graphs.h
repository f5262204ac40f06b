#pragma once
// The launches of a pass, forward and backward, as CUDA graphs: there are hundreds, and small models wait for the host.
#include <functional>
#include <map>
#include <memory>

#include "ingot/gpu/device.h"

namespace ingot {

// What decides which launches a pass makes, next to the model it is of.
struct PassKey {
  int64_t tokens = 0, segments = 0;
  auto operator<=>(const PassKey&) const = default;
};

// A pass of a key runs as it is the first time, is recorded the second time, and replayed from then on: what is rare is
// never recorded, and what a first call prepares (handles, kernels' code) is there before a recording, which could not
// wait for it. All that a pass reads and writes stays where it is until clear().
class PassGraphs {
 public:
  PassGraphs(Stream stream, bool on) : stream_(stream), on_(on) {}
  // Puts the work of `pass` into the stream. A pass that cannot be recorded is said once, and all run as they are.
  void run(const PassKey& key, const std::function<void()>& pass);
  void clear() { graphs_.clear(); }
  int64_t replays() const { return replays_; }
  bool on() const { return on_; }

 private:
  bool record(std::unique_ptr<gpu::Graph>& into, const std::function<void()>& pass);

  Stream stream_;
  bool on_;
  std::map<PassKey, std::unique_ptr<gpu::Graph>> graphs_;  // null: seen once
  int64_t replays_ = 0;
};

// Segments of a batch of so many tokens, empty ones added so that few numbers occur: at most a quarter more, or to a
// multiple of eight.
int64_t segment_bucket(int64_t segments, int64_t tokens);

}  // namespace ingot
