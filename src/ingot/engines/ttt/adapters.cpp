#include "ingot/engines/ttt/adapters.h"

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/rng.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
void check(const AdapterOptions& o) {
  const auto positive = [](double value, const char* name) {
    if (!(value > 0) || !std::isfinite(value))
      fail(ErrorCode::usage, "adapters: found ", name, " ", value, ", expected it positive");
  };
  positive(double(o.rank), "rank"), positive(o.lr, "lr"), positive(o.eps, "eps");
  if (!(o.beta2 >= 0 && o.beta2 < 1))
    fail(ErrorCode::usage, "adapters: found beta2 ", o.beta2, ", expected it in [0, 1)");
  if (!(o.weight_decay >= 0) || !std::isfinite(o.weight_decay))
    fail(ErrorCode::usage, "adapters: found weight_decay ", o.weight_decay, ", expected at least 0");
}

int64_t DocumentAdapters::bytes(const GptConfig& config, const LayerProgram& program, const AdapterOptions& options,
                                GptTypes types, int64_t documents) {
  const int64_t of_one = AdapterLayout(config, program, options.rank).numbers(), numbers = documents * of_one;
  const int64_t copy = types.compute != types.master ? Arena::aligned(numbers * size_of(types.compute)) : 0;
  const int64_t begin = Arena::aligned(of_one * size_of(types.master));
  return 3 * Arena::aligned(numbers * size_of(types.master)) + copy + begin;
}

DocumentAdapters::DocumentAdapters(const GptConfig& config, const LayerProgram& program, const AdapterOptions& options,
                                   GptTypes types, int64_t documents, Device device, Stream stream)
    : options_(options), types_(types), stream_(stream), layout_(config, program, options.rank), documents_(documents) {
  check(options);
  INGOT_CHECK_GE(documents, 1, "adapters: documents");
  host_memory_ = Arena(Arena::aligned(types.master, {numbers()}));
  begin_ = host_memory_.take(types.master, {numbers()});
  memory_ = Arena(bytes(config, program, options, types, documents), gpu::memory_of(device));
  if (device.kind != Device::cpu) device_begin_ = memory_.take(types.master, {numbers()});
  for (Tensor* t : {&values_, &gradients_, &squares_}) *t = memory_.take(types.master, {documents, numbers()});
  if (types.compute != types.master) compute_ = memory_.take(types.compute, {documents, numbers()});
  fill_zero(begin_);
  parallel_tasks(int64_t(layout_.pieces().size()) / 2, [&](int64_t i) {
    const AdapterLayout::Piece& a = layout_.pieces()[size_t(2 * i)];
    const Rng rng(options_.seed, Purpose::adapter, uint32_t(i));
    const double bound = 1 / std::sqrt(double(a.cols));
    for (int64_t n = 0; n < a.rows * a.cols; ++n) {
      const double x = bound * (2 * rng.uniform(uint64_t(n)) - 1);
      if (types_.master == DType::f64)
        begin_.ptr<double>()[a.offset + n] = x;
      else
        begin_.ptr<float>()[a.offset + n] = float(x);
    }
  });
  bring_beginning();
}

void DocumentAdapters::bring_beginning() {
  if (device_begin_) ingot::copy({.from = begin_, .to = device_begin_}, stream_);
  reset();
}

void DocumentAdapters::reset(int64_t count) {
  if (count < 0) count = documents_;
  const auto first = [&](const Tensor& t) { return t.slice(0, 0, count); };
  const Tensor& begin = device_begin_ ? device_begin_ : begin_;
  for (int64_t d = 0; d < count; ++d) ingot::copy({.from = begin, .to = values_.row(d)}, stream_);
  if (compute_) ingot::copy({.from = first(values_), .to = first(compute_)}, stream_);
  for (const Tensor& t : {gradients_, squares_}) fill({.to = first(t)}, stream_);
  updates_ = 0;
}

GptAdapters DocumentAdapters::values(int64_t first, int64_t count) const {
  return layout_.views((compute_ ? compute_ : values_).slice(0, first, first + count));
}
GptAdapters DocumentAdapters::gradients(int64_t count) const {
  GptAdapters g = layout_.views(gradients_.slice(0, 0, count));
  g.written = true;
  return g;
}

void DocumentAdapters::step(int64_t count) {
  const auto flat = [&](const Tensor& t) { return t.slice(0, 0, count).reshape({count * numbers()}); };
  adamw({.p = flat(values_),
         .g = flat(gradients_),
         .v = flat(squares_),
         .copy = compute_ ? flat(compute_) : Tensor(),
         .lr = options_.lr,
         .beta1 = 0,
         .beta2 = options_.beta2,
         .eps = options_.eps,
         .weight_decay = options_.weight_decay,
         .step = ++updates_},
        stream_);
}

DocumentAdapters::Saved DocumentAdapters::saved(int64_t document) const {
  const HostCopy here(values_.row(document), stream_);
  Saved s;
  s.memory.resize(size_t(numbers()));
  for (int64_t i = 0; i < numbers(); ++i)
    s.memory[size_t(i)] =
        types_.master == DType::f64 ? float(here.tensor().ptr<double>()[i]) : here.tensor().ptr<float>()[i];
  s.tensors = layout_.named(Tensor(s.memory.data(), {numbers()}));
  return s;
}

void DocumentAdapters::begin_from(const SafetensorsFile& file) {
  std::vector<float> memory(static_cast<size_t>(numbers()));
  read_adapters(file, layout_, Tensor(memory.data(), {numbers()}));
  for (size_t i = 0; i < memory.size(); ++i)
    if (types_.master == DType::f64)
      begin_.ptr<double>()[i] = double(memory[i]);
    else
      begin_.ptr<float>()[i] = memory[i];
  bring_beginning();
}

}  // namespace ingot
