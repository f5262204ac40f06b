#include "ingot/engines/train/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/muon/muon.h"

namespace ingot {
namespace {

// The number of streams in addition to the caller's stream. A GPT usually has four banks, and no single bank keeps a
// GPU busy.
constexpr int kSideStreams = 3;

}  // namespace

void check(const OptimizerOptions& o) {
  if (o.matrix_optimizer != "muon" && o.matrix_optimizer != "adamw")
    fail(ErrorCode::usage, "train.optimizer.matrix_optimizer: found '", o.matrix_optimizer,
         "', expected muon or adamw");
  const auto nonnegative = [](const char* name, double x) {
    if (!(x >= 0 && std::isfinite(x)))
      fail(ErrorCode::usage, "train.optimizer.", name, ": found ", x, ", expected a finite number of at least 0");
  };
  nonnegative("matrix_lr", o.matrix_lr);
  nonnegative("matrix_decay", o.matrix_decay);
  nonnegative("embed_lr", o.embed_lr);
  nonnegative("embed_decay", o.embed_decay);
  nonnegative("head_lr", o.head_lr);
  nonnegative("head_decay", o.head_decay);
  nonnegative("scalar_lr", o.scalar_lr);
  nonnegative("scalar_decay", o.scalar_decay);
  if (!(o.eps > 0 && std::isfinite(o.eps)))
    fail(ErrorCode::usage, "train.optimizer.eps: found ", o.eps, ", expected a finite number above 0");
  nonnegative("clip", o.clip);
  for (const auto& [name, beta] : {std::pair{"beta1", o.beta1}, {"beta2", o.beta2}})
    if (!(beta >= 0 && beta < 1))
      fail(ErrorCode::usage, "train.optimizer.", name, ": found ", beta, ", expected at least 0 and less than 1");
  if (o.muon_iterations < 1 || o.muon_iterations > 50)
    fail(ErrorCode::usage, "train.optimizer.muon_iterations: found ", o.muon_iterations, ", expected 1 to 50");
}

Optimizer::Optimizer(const ParameterLayout& layout, DType dtype, const OptimizerOptions& options, bool averages,
                     const OptimizerPlace& place)
    : layout_(layout),
      options_(options),
      place_(place),
      graphs_(place.stream, place.graphs && place.device.kind == Device::cuda && place.ranks == nullptr),
      sides_(place.device, kSideStreams) {
  check(options);
  const bool muon = options.matrix_optimizer == "muon" && !layout.banks().empty();
  const int64_t all = layout.padded_count(), matrices = muon ? layout.range(ParameterKind::matrix).count : 0;
  adam_offset_ = matrices;  // matrices come first in the layout
  if (muon) dealt_ = deal_matrices(layout.banks(), place.ranks != nullptr ? place.ranks->world() : 1);
  // Banks that are updated at the same time have separate workspaces. With n workspaces, bank i uses workspace i modulo
  // n.
  const bool at_once = place.device.kind == Device::cuda && place.ranks == nullptr;
  std::vector<int64_t> workspace(muon ? at_once ? kSideStreams + 1 : 1 : 0);
  if (muon)
    for (size_t i = 0; i < layout.banks().size(); ++i) {
      const MatrixBank& b = layout.banks()[i];
      int64_t& bytes = workspace[i % workspace.size()];
      bytes = std::max(bytes, muon_workspace_bytes(b.count, b.rows, b.cols, dtype, place.device));
    }
  const int64_t norm_workspace = sum_of_squares_workspace_bytes(all, place.device);
  const int64_t numbers = matrices + 2 * (all - matrices) + (averages ? all : 0);
  Allocator& memory = place.memory != nullptr ? *place.memory : gpu::memory_of(place.device);
  const int64_t workspaces = std::accumulate(workspace.begin(), workspace.end(), int64_t(0));
  arena_ = Arena(numbers * size_of(dtype) + workspaces + norm_workspace + int64_t(sizeof(Rates)) +
                     (10 + int64_t(workspace.size())) * Arena::kAlign,
                 memory);
  if (matrices > 0) momentum_ = arena_.take(dtype, {matrices});
  m_ = arena_.take(dtype, {all - matrices});
  v_ = arena_.take(dtype, {all - matrices});
  if (averages) average_ = arena_.take(dtype, {all});
  for (const int64_t bytes : workspace) workspaces_.push_back(arena_.take(DType::u8, {bytes}));
  norm_workspace_ = arena_.take(DType::u8, {norm_workspace});
  norm_ = arena_.take(DType::f64, {1});
  factor_ = arena_.take(DType::f64, {1});
  if (graphs_.on()) {
    rates_ = arena_.take(DType::f64, {int64_t(sizeof(Rates) / sizeof(double))});
    staged_ = Staged(rates_.bytes());
  }
  if (memory.gives_zeros()) return;
  for (const NamedState& s : state()) fill({.to = s.tensor}, place.stream);
}

void Optimizer::start_average(const Tensor& weights) {
  if (average_) copy({.from = weights, .to = average_}, place_.stream);
}

std::vector<NamedState> Optimizer::state() const {
  std::vector<NamedState> all;
  if (momentum_) all.push_back({"muon.momentum", momentum_});
  all.push_back({"adamw.m", m_});
  all.push_back({"adamw.v", v_});
  if (average_) all.push_back({"ema.weights", average_});
  return all;
}

namespace {
Tensor bank_of(const Tensor& flat, const MatrixBank& b) {
  return flat.slice(0, b.offset, b.offset + b.count * b.rows * b.cols);
}
}  // namespace

void Optimizer::gather_state() {
  if (place_.ranks == nullptr || !momentum_) return;
  for (size_t i = 0; i < dealt_.size(); ++i) {
    const MatrixBank& b = layout_.banks()[i];
    place_.ranks->all_gather(bank_of(momentum_, b), in_numbers(dealt_[i], b), place_.stream);
  }
}

void Optimizer::sum_over_ranks(const Tensor& grads) {
  Communicator& ranks = *place_.ranks;
  const auto rank = size_t(ranks.rank());
  for (size_t i = 0; i < dealt_.size(); ++i) {
    const MatrixBank& b = layout_.banks()[i];
    const Tensor bank = bank_of(grads, b);
    const Parts parts = in_numbers(dealt_[i], b);
    ranks.reduce_scatter(bank, parts, place_.stream);
    // Each rank counts its own matrices in the norm.
    if (parts[rank] > 0) fill({.to = bank.slice(0, 0, parts[rank])}, place_.stream);
    if (parts[rank + 1] < parts.back()) fill({.to = bank.slice(0, parts[rank + 1], parts.back())}, place_.stream);
  }
  ranks.all_reduce(grads.slice(0, adam_offset_, grads.numel()), place_.stream);  // all further parameters in a single
                                                                                 // call
  // Rank 0 counts the gradients common to all ranks.
  const bool counts_all = dealt_.empty() || rank == 0;
  sum_of_squares(
      {.x = counts_all ? grads : grads.slice(0, 0, adam_offset_), .sum = norm_, .workspace = norm_workspace_},
      place_.stream);
  if (!dealt_.empty()) ranks.all_reduce(norm_, place_.stream);
}

AdamW Optimizer::adamw_of(double lr, double decay, const OptimizerStep& at) const {
  return {.lr = lr * at.lr_factor,
          .beta1 = options_.beta1,
          .beta2 = options_.beta2,
          .eps = options_.eps,
          .weight_decay = decay,
          .factor = factor_,
          .step = at.step};
}

Optimizer::Rates Optimizer::rates_of(const OptimizerStep& at) const {
  const OptimizerOptions& o = options_;
  const auto of = [&](double lr, double decay) { return adamw_rates(adamw_of(lr, decay, at)); };
  return {.muon = {o.matrix_lr * at.lr_factor, at.momentum, o.matrix_decay},
          .matrix = of(o.matrix_lr, o.matrix_decay),
          .embedding = of(o.embed_lr, o.embed_decay),
          .head = of(o.head_lr, o.head_decay),
          .scalar = of(o.scalar_lr, o.scalar_decay),
          .ema = at.ema};
}

Tensor Optimizer::rates(size_t first, int64_t count) const {
  if (!rates_) return {};
  const int64_t begin = int64_t(first / sizeof(double));
  return rates_.slice(0, begin, begin + count);
}

void Optimizer::adamw_range(ParameterRange r, AdamW a, const Tensor& rates, const Tensor& weights,
                            const Tensor& grads) {
  if (r.count == 0) return;
  const auto part = [&](const Tensor& t, int64_t base) {
    return t.slice(0, r.offset - base, r.offset - base + r.count);
  };
  a.p = part(weights, 0), a.g = part(grads, 0);
  a.m = part(m_, adam_offset_), a.v = part(v_, adam_offset_);
  a.rates = rates;
  adamw(a, place_.stream);
}

void Optimizer::step(const GptWeights& weights, const Tensor& grads, const OptimizerStep& at) {
  if (!rates_) return launch(weights, grads, at);
  const Rates now = rates_of(at);
  staged_.begin();
  const Tensor by = staged_.take(DType::f64, rates_.shape);
  std::memcpy(by.data, &now, sizeof now);
  copy({.from = by, .to = rates_}, place_.stream);
  staged_.end(place_.stream);
  // The launches depend only on whether there is an average, because the tensors are the same in every step.
  graphs_.run({.tokens = at.ema >= 0}, [&] { launch(weights, grads, at); });
}

void Optimizer::update_bank(size_t i, const Tensor& weights, const Tensor& grads, const OptimizerStep& at,
                            Stream stream) {
  const size_t rank = place_.ranks != nullptr ? size_t(place_.ranks->rank()) : 0;
  const MatrixBank& b = layout_.banks()[i];
  const auto bank = [&](const Tensor& t) {
    return bank_of(t, b).reshape({b.count, b.rows, b.cols}).slice(0, dealt_[i][rank], dealt_[i][rank + 1]);
  };
  if (bank(weights).size(0) == 0) return;
  muon({.p = bank(weights),
        .g = bank(grads),
        .momentum = bank(momentum_),
        .workspace = workspaces_[i % workspaces_.size()],
        .lr = options_.matrix_lr * at.lr_factor,
        .mu = at.momentum,
        .weight_decay = options_.matrix_decay,
        .factor = factor_,
        .rates = rates(offsetof(Rates, muon), 3),
        .nesterov = options_.muon_nesterov,
        .row_normalise = options_.muon_row_normalise,
        .steps = int(options_.muon_iterations),
        .products = at.products},
       stream);
}

void Optimizer::launch(const GptWeights& all_weights, const Tensor& grads, const OptimizerStep& at) {
  const Tensor& weights = all_weights.master;
  const Stream stream = place_.stream;
  if (place_.ranks != nullptr)
    sum_over_ranks(grads);
  else
    sum_of_squares({.x = grads, .sum = norm_, .workspace = norm_workspace_}, stream);
  clip_factor({.sum_of_squares = norm_, .norm = norm_, .factor = factor_, .max_norm = options_.clip}, stream);
  if (momentum_) {
    const auto banks = int(dealt_.size());
    if (place_.ranks == nullptr)
      sides_.run(banks, stream, [&](int i, Stream on) { update_bank(size_t(i), weights, grads, at, on); });
    else
      for (size_t i = 0; i < dealt_.size(); ++i) {
        update_bank(i, weights, grads, at, stream);
        const MatrixBank& b = layout_.banks()[i];
        place_.ranks->all_gather(bank_of(weights, b), in_numbers(dealt_[i], b), stream);
      }
  } else {
    adamw_range(layout_.range(ParameterKind::matrix), adamw_of(options_.matrix_lr, options_.matrix_decay, at),
                rates(offsetof(Rates, matrix), 3), weights, grads);
  }
  adamw_range(layout_.range(ParameterKind::embedding), adamw_of(options_.embed_lr, options_.embed_decay, at),
              rates(offsetof(Rates, embedding), 3), weights, grads);
  adamw_range(layout_.range(ParameterKind::head), adamw_of(options_.head_lr, options_.head_decay, at),
              rates(offsetof(Rates, head), 3), weights, grads);
  adamw_range(layout_.range(ParameterKind::scalar), adamw_of(options_.scalar_lr, options_.scalar_decay, at),
              rates(offsetof(Rates, scalar), 3), weights, grads);
  if (average_ && at.ema >= 0)
    ema({.p = weights, .average = average_, .decay = at.ema, .factor = factor_, .rate = rates(offsetof(Rates, ema), 1)},
        stream);
  if (all_weights.compute) copy({.from = weights, .to = all_weights.compute}, stream);
}

}  // namespace ingot
