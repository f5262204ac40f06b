#include <memory>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/rng.h"
#include "ingot/engines/train/optimizer/optimizer.h"
#include "ingot/engines/train/run/run_config.h"
#include "ingot/engines/train/schedule.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/models/gpt/gpt.h"
#include "ingot/testing/bench.h"

namespace ingot {
namespace {

RunConfig without_loop(const std::string& preset) {
  RunConfig run = run_config_from_json(preset_text(preset), "preset " + preset);
  run.model.loop_extra = 0;
  return run;
}

// Six operations per weight and token (forward, and two products backward); the embedding counts as the head's matrix.
// Attention is left out.
double step_flops(const RunConfig& run) {
  double weights = double(run.model.vocab * run.model.dim);
  const ParameterLayout layout(run.model);
  for (const MatrixBank& b : layout.banks()) weights += double(b.count * b.rows * b.cols);
  return 6 * weights * double(run.train.batch_tokens);
}

// A whole training step on random tokens: forward, backward, clipping, optimizer, average.
class Step {
 public:
  Step(const std::string& preset, Products products)
      : run_(without_loop(preset)),
        layout_(run_.model),
        memory_(2 * (layout_.padded_count() * 4 + 64)),
        weights_(memory_.take(DType::f32, {layout_.padded_count()})),
        grads_(memory_.take(DType::f32, {layout_.padded_count()})),
        optimizer_(layout_, DType::f32, run_.train.optimizer, run_.train.schedule.ema_horizon > 0),
        model_(run_.model, DType::f32, {.capacity = run_.train.batch_tokens, .training = true, .products = products}),
        products_(products) {
    const int64_t T = run_.train.batch_tokens, context = run_.model.context;
    initialise(run_.model, layout_, weights_, 1);
    optimizer_.start_average(weights_);
    const Rng rng(1, Purpose::data);
    for (int64_t t = 0; t < T; ++t) {
      tokens_.push_back(int32_t(rng.below(uint64_t(t), uint64_t(run_.model.vocab))));
      targets_.push_back(int32_t(rng.below(uint64_t(t + T), uint64_t(run_.model.vocab))));
      positions_.push_back(int32_t(t % context));
      if (t % context == 0) cu_seqlens_.push_back(int32_t(t));
    }
    cu_seqlens_.push_back(int32_t(T));
    loss_.resize(size_t(T));
    dloss_.assign(size_t(T), 1 / float(T));
  }

  void operator()() {
    const int64_t T = run_.train.batch_tokens;
    fill({.to = grads_}, {});
    model_.losses_and_gradients(
        weights_,
        {Tensor(tokens_.data(), {T}), Tensor(targets_.data(), {T}), Tensor(positions_.data(), {T}),
         Tensor(cu_seqlens_.data(), {int64_t(cu_seqlens_.size())})},
        Tensor(dloss_.data(), {T}), Tensor(loss_.data(), {T}), grads_);
    optimizer_.step(weights_, grads_,
                    {.step = ++step_,
                     .ema = optimizer_.average() ? ema_decay(run_.train.schedule, 2000) : 0,
                     .products = products_});
  }

 private:
  RunConfig run_;
  ParameterLayout layout_;
  Arena memory_;
  Tensor weights_, grads_;
  Optimizer optimizer_;
  Gpt model_;
  Products products_;
  std::vector<int32_t> tokens_, targets_, positions_, cu_seqlens_;
  std::vector<float> loss_, dloss_;
  int64_t step_ = 0;
};

}  // namespace

INGOT_BENCH(train_step) {
  std::vector<testing::BenchCase> cases;
  for (const char* preset : {"nano", "golf-small"})
    for (const Products products : {Products::fp32, Products::bf16}) {
      if (products == Products::bf16 && cpu_level() < CpuLevel::avx512_bf16)
        continue;  // this CPU has no bf16 products, so rounding the operands would not save time
      cases.push_back({.suite = "train_step",
                       .name = preset,
                       .shape = "step",
                       .dtype = products == Products::bf16 ? "bf16" : "f32",
                       .flops = step_flops(without_loop(preset)),
                       .limit_flops = testing::fma_bound_f32(),
                       .make = [=] {
                         auto step = std::make_shared<Step>(preset, products);
                         return std::function<void()>([step] { (*step)(); });
                       }});
    }
  return cases;
}

}  // namespace ingot
