#pragma once
// The optimizer of a model: Muon on the banks of matrices (or AdamW), AdamW on everything else, global clipping, and an
// exponential average of the weights. All state is flat and named, so that checkpoints hold it.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/memory/arena.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/engines/train/staged.h"
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
  double ema = -1;  // decay of the average: at 0 it becomes the weights; below, it stays what it was
  Products products = Products::fp32;
};

// Where the state lies and the work is put.
struct OptimizerPlace {
  Device device;
  Stream stream;
  Allocator* memory = nullptr;    // null: that of the device
  Communicator* ranks = nullptr;  // that share the step; null: this process alone
  bool graphs = false;            // a GPU's steps of a process alone are recorded once and replayed
};

struct NamedState {
  std::string name;
  Tensor tensor;
};

class Optimizer {
 public:
  Optimizer(const ParameterLayout& layout, DType dtype, const OptimizerOptions& options, bool averages,
            const OptimizerPlace& place = {});
  // Updates weights from grads (flat, as the layout), and the weights' copy in the products' type where there is one.
  // A gradient whose norm is not finite changes nothing. Waits for nothing but other ranks: with them grads are this
  // rank's part of a sum and are used up, each rank updates its matrices, and all have all weights afterwards.
  void step(const GptWeights& weights, const Tensor& grads, const OptimizerStep& at);
  const Tensor& gradient_norm() const { return norm_; }  // (1) f64 on the device: of the last step, before clipping
  void start_average(const Tensor& weights);             // the average begins at these weights
  Tensor average() const { return average_; }            // empty when there is none
  std::vector<NamedState> state() const;                 // everything a checkpoint must hold
  // Ranks hold the momentum of their own matrices: after this all of it is in state(), on each.
  void gather_state();
  int64_t bytes() const { return arena_.capacity(); }

 private:
  // Of a step, as they lie together on a GPU.
  struct Rates {
    std::array<double, 3> muon, matrix, embedding, head, scalar;
    double ema = 0;
  };
  Rates rates_of(const OptimizerStep& at) const;
  void launch(const GptWeights& weights, const Tensor& grads, const OptimizerStep& at);
  // The sum of gradients over ranks, where this one uses it, and its norm.
  void sum_over_ranks(const Tensor& grads);
  AdamW adamw_of(double lr, double decay, const OptimizerStep& at) const;
  void adamw_range(ParameterRange range, AdamW a, const Tensor& rates, const Tensor& weights, const Tensor& grads);
  Tensor rates(size_t first, int64_t count) const;  // of rates_; empty where they are given with each launch

  const ParameterLayout& layout_;
  OptimizerOptions options_;
  OptimizerPlace place_;
  Arena arena_;
  Tensor momentum_, m_, v_, average_, workspace_, norm_workspace_;
  Tensor norm_, factor_;  // (1) f64: of the gradient
  Tensor rates_;          // on a GPU, where graphs read them
  Staged staged_;
  PassGraphs graphs_;
  int64_t adam_offset_ = 0;   // m and v begin here in the flat layout
  std::vector<Parts> dealt_;  // matrices of each bank, by rank
};

}  // namespace ingot
