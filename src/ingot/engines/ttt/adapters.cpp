#include "ingot/engines/ttt/adapters.h"

#include <cmath>

#include "ingot/core/rng.h"
#include "ingot/core/thread_pool.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {

constexpr int64_t kAlign = 64;  // numbers: each matrix begins at a cache line, in any type

struct Place {
  std::string name;
  int64_t in, out;
};
std::vector<Place> places_of(const GptConfig& c, size_t applications) {
  std::vector<Place> all;
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  for (size_t i = 0; i < applications; ++i) {
    const std::string of = "applications." + std::to_string(i) + ".";
    for (const Place& p :
         {Place{"q", c.dim, q}, {"k", c.dim, kv}, {"v", c.dim, kv}, {"o", c.dim, c.dim}, {"mlp", c.dim, c.dim}})
      all.push_back({of + p.name, p.in, p.out});
  }
  all.push_back({"head", c.dim, c.vocab});
  return all;
}
int64_t padded(int64_t numbers) { return (numbers + kAlign - 1) / kAlign * kAlign; }
int64_t numbers_of(const std::vector<Place>& places, int64_t rank) {
  int64_t sum = 0;
  for (const Place& p : places) sum += padded(rank * p.in) + padded(rank * p.out);
  return sum;
}

}  // namespace

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
  const int64_t numbers = documents * numbers_of(places_of(config, program.applications.size()), options.rank);
  const int64_t copy = types.compute != types.master ? Arena::aligned(numbers * size_of(types.compute)) : 0;
  return 3 * Arena::aligned(numbers * size_of(types.master)) + copy;
}

DocumentAdapters::DocumentAdapters(const GptConfig& config, const LayerProgram& program, const AdapterOptions& options,
                                   GptTypes types, int64_t documents, Device device, Stream stream)
    : options_(options),
      types_(types),
      stream_(stream),
      applications_(program.applications.size()),
      documents_(documents) {
  check(options);
  INGOT_CHECK_GE(documents, 1, "adapters: documents");
  const auto add = [&](std::string name, int64_t rows, int64_t cols) {
    pieces_.push_back({std::move(name), numbers_, rows, cols});
    numbers_ += padded(rows * cols);
  };
  for (const Place& p : places_of(config, applications_)) {
    add(p.name + ".a", options.rank, p.in);
    add(p.name + ".b", p.out, options.rank);
  }
  host_memory_ = Arena(Arena::aligned(types.master, {numbers_}));
  begin_ = host_memory_.take(types.master, {numbers_});
  memory_ = Arena(bytes(config, program, options, types, documents), gpu::memory_of(device));
  for (Tensor* t : {&values_, &gradients_, &squares_}) *t = memory_.take(types.master, {documents, numbers_});
  if (types.compute != types.master) compute_ = memory_.take(types.compute, {documents, numbers_});
  fill_zero(begin_);
  parallel_tasks(int64_t(pieces_.size()) / 2, [&](int64_t i) {
    const Piece& a = pieces_[size_t(2 * i)];
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
  reset();
}

void DocumentAdapters::reset() {
  for (int64_t d = 0; d < documents_; ++d) ingot::copy({.from = begin_, .to = values_.row(d)}, stream_);
  if (compute_) ingot::copy({.from = values_, .to = compute_}, stream_);
  fill({.to = squares_}, stream_);
  updates_ = 0;
}

GptAdapters DocumentAdapters::views(const Tensor& flat, int64_t first, int64_t count) const {
  size_t next = 0;
  const auto piece = [&] {
    const Piece& p = pieces_[next++];
    Tensor t = flat.slice(0, first, first + count).slice(1, p.offset, p.offset + p.rows * p.cols);
    t.shape = {count, p.rows, p.cols};
    t.stride[0] = numbers_, t.stride[1] = p.cols, t.stride[2] = 1;
    return t;
  };
  const auto pair = [&] {
    AdapterPair p;
    p.a = piece(), p.b = piece();
    return p;
  };
  GptAdapters all;
  for (size_t i = 0; i < applications_; ++i) {
    ApplicationAdapters of;
    for (AdapterPair* p : {&of.q, &of.k, &of.v, &of.o, &of.mlp}) *p = pair();
    all.applications.push_back(of);
  }
  all.head = pair();
  return all;
}
GptAdapters DocumentAdapters::values(int64_t first, int64_t count) const {
  return views(compute_ ? compute_ : values_, first, count);
}
GptAdapters DocumentAdapters::gradients(int64_t count) const { return views(gradients_, 0, count); }
void DocumentAdapters::zero_gradients(int64_t count) { fill({.to = gradients_.slice(0, 0, count)}, stream_); }

void DocumentAdapters::step(int64_t count) {
  const auto flat = [&](const Tensor& t) { return t.slice(0, 0, count).reshape({count * numbers_}); };
  adamw({.p = flat(values_),
         .g = flat(gradients_),
         .v = flat(squares_),
         .lr = options_.lr,
         .beta1 = 0,
         .beta2 = options_.beta2,
         .eps = options_.eps,
         .weight_decay = options_.weight_decay,
         .step = ++updates_},
        stream_);
  if (compute_) ingot::copy({.from = flat(values_), .to = flat(compute_)}, stream_);
}

DocumentAdapters::Saved DocumentAdapters::saved(int64_t document) const {
  const HostCopy here(values_.row(document), stream_);
  Saved s;
  s.memory.resize(size_t(numbers_));
  for (int64_t i = 0; i < numbers_; ++i)
    s.memory[size_t(i)] =
        types_.master == DType::f64 ? float(here.tensor().ptr<double>()[i]) : here.tensor().ptr<float>()[i];
  for (const Piece& p : pieces_) s.tensors.push_back({p.name, Tensor(s.memory.data() + p.offset, {p.rows, p.cols})});
  return s;
}

void DocumentAdapters::begin_from(const SafetensorsFile& file) {
  std::vector<float> memory(size_t(numbers_), 0);
  std::vector<NamedTensor> tensors;
  for (const Piece& p : pieces_) tensors.push_back({p.name, Tensor(memory.data() + p.offset, {p.rows, p.cols})});
  file.read_all(tensors);
  for (size_t i = 0; i < memory.size(); ++i) {
    if (!std::isfinite(memory[i]))
      fail(ErrorCode::bad_data, file.path(), ": found ", memory[i], " in an adapter, expected finite numbers");
    if (types_.master == DType::f64)
      begin_.ptr<double>()[i] = double(memory[i]);
    else
      begin_.ptr<float>()[i] = memory[i];
  }
  reset();
}

}  // namespace ingot
