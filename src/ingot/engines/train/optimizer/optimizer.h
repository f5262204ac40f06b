#pragma once
// The optimizer of a model: Muon on the banks of matrices (or AdamW), AdamW on everything else, global clipping, and an
// exponential average of the weights. All state is flat and named, for checkpoints.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/memory/arena.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/engines/train/staged.h"
#include "ingot/gpu/side_streams.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot {

struct OptimizerOptions {
  std::string matrix_optimizer = "muon";  // or adamw
  double matrix_lr = 0.022, matrix_decay = 0.095;
  double embed_lr = 0.03, embed_decay = 0.085;
  double head_lr = 0.03, head_decay = 0.085;
  double scalar_lr = 0.02, scalar_decay = 0.02;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double clip = 0.3;  // of the global gradient norm; 0: none
  bool muon_nesterov = true, muon_row_normalise = true;
  int64_t muon_iterations = 5;
};
void check(const OptimizerOptions& o);

struct OptimizerStep {
  int64_t step = 1;  // counts from 1
  double lr_factor = 1, momentum = 0.95;
  double ema = -1;  // decay of the average: at 0 the average becomes the weights; negative: the average does not change
  Products products = Products::fp32;
};

// The memory of the state, and the stream of the work.
struct OptimizerPlace {
  Device device;
  Stream stream;
  Allocator* memory = nullptr;    // null: the device's allocator
  Communicator* ranks = nullptr;  // the ranks of a step; null: this process alone
  bool graphs = false;            // on a GPU and without ranks, steps are recorded once and replayed
};

struct NamedState {
  std::string name;
  Tensor tensor;
};

class Optimizer {
 public:
  Optimizer(const ParameterLayout& layout, DType dtype, const OptimizerOptions& options, bool averages,
            const OptimizerPlace& place = {});
  // Updates the weights from `grads` (flat, in the layout's order), and the copy of the weights in the products' type,
  // if any. If the gradient's norm is not finite, nothing changes. The call waits only for other ranks. With ranks,
  // `grads` is this rank's part of a sum and is overwritten; each rank updates its own matrices, and afterwards all
  // ranks have all weights.
  void step(const GptWeights& weights, const Tensor& grads, const OptimizerStep& at);
  // (1) f64 on the device: the norm of the last step's gradient before clipping
  const Tensor& gradient_norm() const { return norm_; }
  void start_average(const Tensor& weights);   // the average begins at these weights
  Tensor average() const { return average_; }  // empty if there is no average
  std::vector<NamedState> state() const;       // everything a checkpoint must hold
  // Each rank holds the momentum of its own matrices. After this call state() has the momentum of all matrices on every
  // rank.
  void gather_state();
  int64_t bytes() const { return arena_.capacity(); }

 private:
  // The rates of a step, in their order on a GPU.
  struct Rates {
    std::array<double, 3> muon, matrix, embedding, head, scalar;
    double ema = 0;
  };
  Rates rates_of(const OptimizerStep& at) const;
  void launch(const GptWeights& weights, const Tensor& grads, const OptimizerStep& at);
  // Sums the gradients over ranks, for this rank's matrices, and computes the norm of the sum.
  void sum_over_ranks(const Tensor& grads);
  AdamW adamw_of(double lr, double decay, const OptimizerStep& at) const;
  // Muon on this rank's matrices of bank i.
  void update_bank(size_t i, const Tensor& weights, const Tensor& grads, const OptimizerStep& at, Stream stream);
  void adamw_range(ParameterRange range, AdamW a, const Tensor& rates, const Tensor& weights, const Tensor& grads);
  Tensor rates(size_t first, int64_t count) const;  // a part of rates_; empty if the rates are arguments of each launch

  const ParameterLayout& layout_;
  OptimizerOptions options_;
  OptimizerPlace place_;
  Arena arena_;
  Tensor momentum_, m_, v_, average_, norm_workspace_;
  std::vector<Tensor> workspaces_;  // of Muon; bank i uses workspace i modulo their number
  Tensor norm_, factor_;            // (1) f64: of the gradient
  Tensor rates_;                    // on a GPU, read by graphs
  Staged staged_;
  PassGraphs graphs_;
  gpu::SideStreams sides_;    // for the banks
  int64_t adam_offset_ = 0;   // AdamW's m and v begin here in the flat layout
  std::vector<Parts> dealt_;  // the matrices of each bank that each rank updates
};

}  // namespace ingot
