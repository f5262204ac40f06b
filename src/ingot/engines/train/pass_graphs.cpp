#include "ingot/engines/train/pass_graphs.h"

#include <algorithm>
#include <bit>

#include "ingot/core/log.h"

namespace ingot {

int64_t segment_bucket(int64_t segments, int64_t tokens) {
  const int64_t step = std::max<int64_t>(8, int64_t(std::bit_floor(uint64_t(segments))) / 4);
  const int64_t rounded = (segments + step - 1) / step * step;
  return std::max(segments, std::min(rounded, tokens));
}

void PassGraphs::run(const PassKey& key, const std::function<void()>& pass) {
  if (!on_) return pass();
  const auto [at, first] = graphs_.try_emplace(key);
  std::unique_ptr<gpu::Graph>& graph = at->second;
  if (first || (!graph && !record(graph, pass))) return pass();
  graph->launch(stream_);
  ++replays_;
}

bool PassGraphs::record(std::unique_ptr<gpu::Graph>& into, const std::function<void()>& pass) {
  try {
    into = std::make_unique<gpu::Graph>(stream_, pass);
    return true;
  } catch (const Error& e) {
    log_warn("training goes on without CUDA graphs: ", e.what());
    on_ = false;
    return false;
  }
}

}  // namespace ingot
