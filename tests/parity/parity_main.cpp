// The native half of the parity test: reads the cases of parity.py, runs the model, and writes the results beside the
// cases. A case is a directory with case.json (config, dtype, looping, the parameters' names and shapes) and raw
// little-endian blobs: numbers as f64, ids as i32. Losses, gradients and logits are written back as f64.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/core/memory/arena.h"
#include "ingot/engines/train/optimizer/optimizer.h"
#include "ingot/engines/train/schedule.h"
#include "ingot/models/gpt/gpt.h"

namespace {

using namespace ingot;
using Path = std::filesystem::path;

std::string read_text(const Path& path) {
  std::ifstream in(path, std::ios::binary);
  INGOT_CHECK(in.good(), "parity: cannot read ", path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T> std::vector<T> read_blob(const Path& path) {
  const std::string bytes = read_text(path);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::copy_n(bytes.data(), values.size() * sizeof(T), reinterpret_cast<char*>(values.data()));
  return values;
}

// An f32 or f64 tensor with its own memory, filled from doubles and written as doubles.
class Numbers {
 public:
  Numbers(DType dtype, Shape shape) : arena_(shape.numel() * size_of(dtype) + 64), tensor_(arena_.take(dtype, shape)) {}
  const Tensor& tensor() const { return tensor_; }
  void fill(const std::vector<double>& from) {
    INGOT_CHECK(int64_t(from.size()) == tensor_.numel(), "parity: found ", from.size(), " numbers, expected ",
                tensor_.numel());
    for (size_t i = 0; i < from.size(); ++i) set(tensor_, int64_t(i), from[i]);
  }
  static void set(const Tensor& t, int64_t i, double x) {
    if (t.dtype == DType::f64)
      t.ptr<double>()[i] = x;
    else
      t.ptr<float>()[i] = float(x);
  }
  static double get(const Tensor& t, int64_t i) {
    return t.dtype == DType::f64 ? t.ptr<double>()[i] : t.ptr<float>()[i];
  }
  static void append(std::vector<double>& out, const Tensor& t) {
    for (int64_t i = 0; i < t.numel(); ++i) out.push_back(get(t, i));
  }

 private:
  Arena arena_;
  Tensor tensor_;
};

void write(const Path& path, const std::vector<double>& values) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(values.data()), std::streamsize(values.size() * sizeof(double)));
  INGOT_CHECK(out.good(), "parity: cannot write ", path.string());
}

// The case's parameters, in its order; names and shapes must be exactly the layout's.
std::vector<Parameter> matched(const nlohmann::json& listed, const ParameterLayout& layout) {
  std::vector<Parameter> out;
  for (const auto& entry : listed) {
    const Parameter& p = layout.find(entry.at("name").get<std::string>());
    const auto dims = entry.at("shape").get<std::vector<int64_t>>();
    const std::vector<int64_t> found(p.shape.dim, p.shape.dim + p.shape.rank);
    INGOT_CHECK(found == dims, "parity: ", p.name, ": found shape ", p.shape, ", expected ", entry.at("shape").dump());
    out.push_back(p);
  }
  INGOT_CHECK(out.size() == layout.all().size(), "parity: found ", layout.all().size(), " parameters, expected ",
              out.size());
  return out;
}

// A case as read: the model's inputs, and the weights as one flat tensor.
struct Case {
  Path dir;
  nlohmann::json meta;
  GptConfig config;
  DType dtype;
  ParameterLayout layout;
  std::vector<Parameter> parameters;
  std::vector<int32_t> tokens, targets, positions, cu;

  explicit Case(const Path& d)
      : dir(d),
        meta(nlohmann::json::parse(read_text(d / "case.json"))),
        config(gpt_config_from_json(meta.at("config").dump(), (d / "case.json").string())),
        dtype(meta.at("dtype") == "f64" ? DType::f64 : DType::f32),
        layout(config),
        parameters(matched(meta.at("parameters"), layout)),
        tokens(read_blob<int32_t>(d / "tokens.i32")),
        targets(read_blob<int32_t>(d / "targets.i32")),
        positions(read_blob<int32_t>(d / "positions.i32")),
        cu(read_blob<int32_t>(d / "cu_seqlens.i32")) {}

  int64_t count() const { return int64_t(positions.size()); }
  Shape flat() const { return {layout.padded_count()}; }
  Shape row() const { return {count()}; }
  // Batch number `i` of the file; all have the same documents' lengths.
  TokenBatch batch(int64_t i) {
    return {Tensor(tokens.data() + i * count(), row()), Tensor(targets.data() + i * count(), row()),
            Tensor(positions.data(), row()), Tensor(cu.data(), Shape{int64_t(cu.size())})};
  }
  Gpt model(bool looping) const { return {config, dtype, {.capacity = count(), .looping = looping, .training = true}}; }
  void load(const Tensor& weights) const {
    const std::vector<double> given = read_blob<double>(dir / "weights.f64");
    size_t next = 0;
    for (const Parameter& p : parameters) {
      const Tensor view = layout.view(weights, p);
      for (int64_t i = 0; i < view.numel(); ++i) Numbers::set(view, i, given.at(next++));
    }
  }
  void save(const char* name, const Tensor& t) const {
    std::vector<double> out;
    Numbers::append(out, t);
    write(dir / name, out);
  }
};

void gradients(Case& c) {
  const int64_t T = c.count();
  Numbers weights(c.dtype, c.flat()), grads(c.dtype, c.flat()), dloss(c.dtype, c.row()), loss(c.dtype, c.row());
  Numbers logits(c.dtype, {T, c.config.vocab});
  c.load(weights.tensor());
  dloss.fill(read_blob<double>(c.dir / "dloss.f64"));
  Gpt model = c.model(c.meta.at("looping"));
  model.losses_and_gradients(weights.tensor(), c.batch(0), dloss.tensor(), loss.tensor(), grads.tensor());
  c.save("out_loss.f64", loss.tensor());
  model.losses(weights.tensor(), c.batch(0), loss.tensor());
  c.save("out_plain_loss.f64", loss.tensor());
  std::vector<int32_t> rows(static_cast<size_t>(T));
  std::iota(rows.begin(), rows.end(), 0);
  model.logits(weights.tensor(), c.batch(0), Tensor(rows.data(), c.row()), logits.tensor());
  c.save("out_logits.f64", logits.tensor());
  std::vector<double> out;
  for (const Parameter& p : c.parameters) Numbers::append(out, c.layout.view(grads.tensor(), p));
  write(c.dir / "out_grads.f64", out);
}

OptimizerOptions optimizer_options(const nlohmann::json& r) {
  OptimizerOptions o;
  o.matrix_optimizer = r.at("matrix_optimizer");
  o.matrix_lr = r.at("matrix_lr"), o.matrix_decay = r.at("matrix_decay");
  o.embed_lr = r.at("embed_lr"), o.embed_decay = r.at("embed_decay");
  o.head_lr = r.at("head_lr"), o.head_decay = r.at("head_decay");
  o.scalar_lr = r.at("scalar_lr"), o.scalar_decay = r.at("scalar_decay");
  o.beta1 = r.at("beta1"), o.beta2 = r.at("beta2"), o.eps = r.at("eps"), o.clip = r.at("clip");
  o.muon_row_normalise = r.at("muon_row_normalise"), o.muon_iterations = r.at("muon_iterations");
  return o;
}
ScheduleOptions schedule_options(const nlohmann::json& r) {
  ScheduleOptions o;
  o.warmup_steps = r.at("warmup_steps"), o.decay = r.at("decay"), o.warmdown = r.at("warmdown"),
  o.min_lr = r.at("min_lr");
  o.momentum_start = r.at("momentum_start"), o.momentum_end = r.at("momentum_end");
  o.momentum_warmup = r.at("momentum_warmup"), o.ema_horizon = r.at("ema_horizon");
  return o;
}

// The mean loss over the counted targets, and its gradients if `grads` is given.
double mean_loss(const Case& c, Gpt& model, const Tensor& weights, const TokenBatch& batch, const Tensor& grads) {
  Numbers loss(c.dtype, c.row()), dloss(c.dtype, c.row());
  const int32_t* target = batch.targets.ptr<int32_t>();
  int64_t counted = 0;
  for (int64_t t = 0; t < c.count(); ++t) counted += target[t] >= 0;
  for (int64_t t = 0; t < c.count(); ++t) Numbers::set(dloss.tensor(), t, 1.0 / double(counted));
  if (grads) {
    fill_zero(grads);
    model.losses_and_gradients(weights, batch, dloss.tensor(), loss.tensor(), grads);
  } else {
    model.losses(weights, batch, loss.tensor());
  }
  double sum = 0;
  for (int64_t t = 0; t < c.count(); ++t) sum += Numbers::get(loss.tensor(), t);
  return sum / double(counted);
}

// The first steps of a run: the loss before each, and at the end the loss of the averaged weights.
void training(Case& c) {
  const auto& run = c.meta.at("training");
  const int64_t steps = run.at("steps"), executed = run.at("executed"), loop_from = run.at("loop_from");
  const ScheduleOptions schedule = schedule_options(run.at("recipe"));
  Numbers weights(c.dtype, c.flat()), grads(c.dtype, c.flat());
  c.load(weights.tensor());
  Optimizer optimizer(c.layout, c.dtype, optimizer_options(run.at("recipe")), schedule.ema_horizon > 0);
  optimizer.start_average(weights.tensor());
  Gpt plain = c.model(false), looped = c.model(true);
  std::vector<double> out;
  for (int64_t step = 0; step < executed; ++step) {
    Gpt& model = step >= loop_from ? looped : plain;
    out.push_back(mean_loss(c, model, weights.tensor(), c.batch(step), grads.tensor()));
    const double progress = double(step) / double(steps);
    optimizer.step(weights.tensor(), grads.tensor(),
                   {.step = step + 1,
                    .lr_factor = learning_rate_factor(schedule, progress, step, steps),
                    .momentum = muon_momentum(schedule, progress),
                    .ema = schedule.ema_horizon > 0 ? ema_decay(schedule, double(steps)) : 0});
  }
  const Tensor averaged = optimizer.average() ? optimizer.average() : weights.tensor();
  out.push_back(mean_loss(c, looped, averaged, c.batch(0), {}));
  write(c.dir / "out_training.f64", out);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    try {
      Case c(argv[i]);
      gradients(c);
      training(c);
    } catch (const std::exception& e) {
      std::cerr << argv[i] << ": " << e.what() << "\n";
      return 1;
    }
  }
  return 0;
}
