#pragma once
// The ranks of a run from the view of one process. In a run of a single process, rank 0 of 1, all functions return at
// once.
#include <algorithm>
#include <functional>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/engines/train/run/run_data.h"

namespace ingot {

constexpr double kLoadSeconds =
    1800;  // seconds by which ranks may differ in reading their data, and that a save may take

class RunRanks {
 public:
  explicit RunRanks(Communicator* ranks) : ranks_(ranks != nullptr && ranks->world() > 1 ? ranks : nullptr) {}

  Communicator* communicator() const { return ranks_; }  // null: this process alone
  explicit operator bool() const { return ranks_ != nullptr; }
  int64_t world() const { return ranks_ != nullptr ? ranks_->world() : 1; }
  int64_t rank() const { return ranks_ != nullptr ? ranks_->rank() : 0; }
  // This rank's passes of a step. Passes are assigned in blocks, so that sums in the order of ranks are sums in the
  // order of passes.
  int64_t passes_of(const TrainOptions& o) const { return o.accumulation / world(); }

  // Call before any file is written: refuses ranks of a different run or program.
  void meet(const RunConfig& config, const RunData& data, Device device) const;
  // Calls refuse(rank) for the first rank with a value different from rank 0's.
  void check_same(uint64_t mine, const std::function<void(int64_t)>& refuse) const;
  bool anyone(bool mine) const;
  template <class T> T as_rank_0(T mine) const {
    if (ranks_ != nullptr) ranks_->broadcast_bytes(&mine, sizeof mine, 0);
    return mine;
  }
  // The values of all ranks, in the order of ranks.
  template <class T> std::vector<T> gather(const T& mine) const {
    std::vector<T> all(size_t(world()), mine);
    if (ranks_ != nullptr) ranks_->gather_bytes(&mine, sizeof mine, all.data());
    return all;
  }
  void wait(Stream stream) const {
    if (ranks_ != nullptr) ranks_->wait(stream);
  }

 private:
  Communicator* ranks_;
};

}  // namespace ingot
