#pragma once
// The ranks of a run, as a process sees them: alone it is rank 0 of one, and all of this costs nothing.
#include <algorithm>
#include <functional>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/engines/train/run/run_data.h"

namespace ingot {

constexpr double kLoadSeconds = 1800;  // that ranks may differ in reading their data, and that a save may take

class RunRanks {
 public:
  explicit RunRanks(Communicator* ranks) : ranks_(ranks != nullptr && ranks->world() > 1 ? ranks : nullptr) {}

  Communicator* communicator() const { return ranks_; }  // null: this process alone
  explicit operator bool() const { return ranks_ != nullptr; }
  int64_t world() const { return ranks_ != nullptr ? ranks_->world() : 1; }
  int64_t rank() const { return ranks_ != nullptr ? ranks_->rank() : 0; }
  // Of a step, by this rank. A step's passes are dealt in blocks, so that sums in the order of ranks are in theirs.
  int64_t passes_of(const TrainOptions& o) const { return o.accumulation / world(); }

  // Before anything is written: all are in the same run of the same program.
  void meet(const RunConfig& config, const RunData& data, Device device) const;
  // Calls refuse(rank) for the first rank that differs from rank 0.
  void check_same(uint64_t mine, const std::function<void(int64_t)>& refuse) const;
  bool anyone(bool mine) const;
  template <class T> T as_rank_0(T mine) const {
    if (ranks_ != nullptr) ranks_->broadcast_bytes(&mine, sizeof mine, 0);
    return mine;
  }
  // The value that every rank gives, in the order of ranks.
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
