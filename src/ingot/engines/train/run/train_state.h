#pragma once
// All numbers of a run that outlive a step, and the results of a step, on the device of the run.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/engines/train/optimizer/optimizer.h"
#include "ingot/engines/train/run/run_ranks.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/host_copy.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {

struct TrainState {
  TrainState(const RunConfig& config, Device where, const RunRanks& ranks);

  GptWeights all_weights() const { return {weights, compute}; }
  const Tensor& step_grads() const { return total ? total : grads; }
  Tensor result_weights() const { return optimizer.average() ? optimizer.average() : weights; }
  void initialise_weights() const;
  // Copies the weights of another run with the same tokenizer and configuration.
  void take_weights(const TrainedModel& other, const std::string& path) const;
  void renew_compute() const;  // from the weights
  // Copies the state of rank 0, read from a checkpoint or from an earlier run, to all ranks.
  void share(const RunRanks& ranks) const;
  // The first parameter, over all ranks, whose gradient is not finite.
  std::string broken_tensor(const RunRanks& ranks) const;

  const RunConfig& config;
  const int64_t passes;  // of a step on this rank
  ParameterLayout layout;
  Device device;                                 // of all tensors of a step
  std::unique_ptr<gpu::OwnedStream> own_stream;  // a GPU's: the default stream cannot be recorded
  Stream stream;
  GptTypes types;
  Arena memory;
  Tensor weights, grads;
  Tensor compute;      // the weights in the type of matrix products, if this type differs
  Tensor loss, dloss;  // (T), for one pass
  Tensor loss_sum;     // (1) f64: the sum over one pass
  Tensor pass_losses;  // (passes of this rank) f64
  Tensor total;        // the sum of the gradients of earlier passes, if a step has several: each pass begins at zero
  Optimizer optimizer;

 private:
  int64_t compute_bytes() const;
  int64_t total_bytes() const { return passes > 1 ? layout.padded_count() * 4 : 0; }
};

// Everything a checkpoint holds, in host memory.
struct HostState {
  explicit HostState(const TrainState& s);
  void write_back() const;
  HostCopy weights, result;
  std::vector<std::pair<std::string, HostCopy>> state;
};

}  // namespace ingot
