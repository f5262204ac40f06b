// The native half of the parity test: reads cases that parity.py wrote, runs the model, writes what it computed beside
// them. A case is a directory with case.json (config, dtype, looping, the parameters' names and shapes) and raw
// little-endian blobs: numbers as f64, ids as i32. Losses, gradients and logits are written back as f64.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ingot/core/arena.h"
#include "ingot/core/check.h"
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

// An f32 or f64 tensor in an arena of its own, filled from and written as doubles.
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

void run_case(const Path& dir) {
  const auto meta = nlohmann::json::parse(read_text(dir / "case.json"));
  const GptConfig config = gpt_config_from_json(meta.at("config").dump(), (dir / "case.json").string());
  const DType dtype = meta.at("dtype") == "f64" ? DType::f64 : DType::f32;
  const ParameterLayout layout(config);
  const std::vector<Parameter> parameters = matched(meta.at("parameters"), layout);

  auto tokens = read_blob<int32_t>(dir / "tokens.i32"), targets = read_blob<int32_t>(dir / "targets.i32");
  auto positions = read_blob<int32_t>(dir / "positions.i32"), cu = read_blob<int32_t>(dir / "cu_seqlens.i32");
  const int64_t T = int64_t(tokens.size());
  const Shape row{T};
  const TokenBatch batch{Tensor(tokens.data(), row), Tensor(targets.data(), row), Tensor(positions.data(), row),
                         Tensor(cu.data(), Shape{int64_t(cu.size())})};

  Numbers weights(dtype, {layout.padded_count()}), grads(dtype, {layout.padded_count()});
  Numbers dloss(dtype, row), loss(dtype, row), plain_loss(dtype, row), logits(dtype, {T, config.vocab});
  const std::vector<double> given = read_blob<double>(dir / "weights.f64");
  size_t next = 0;
  for (const Parameter& p : parameters) {
    const Tensor view = layout.view(weights.tensor(), p);
    for (int64_t i = 0; i < view.numel(); ++i) Numbers::set(view, i, given.at(next++));
  }
  dloss.fill(read_blob<double>(dir / "dloss.f64"));

  Gpt model(config, dtype,
            {.capacity = T, .max_segments = int64_t(cu.size()) - 1, .looping = meta.at("looping"), .training = true});
  model.losses_and_gradients(weights.tensor(), batch, dloss.tensor(), loss.tensor(), grads.tensor());
  model.losses(weights.tensor(), batch, plain_loss.tensor());
  std::vector<int32_t> rows(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) rows[size_t(t)] = int32_t(t);
  model.logits(weights.tensor(), batch, Tensor(rows.data(), row), logits.tensor());

  std::vector<double> out;
  for (const Parameter& p : parameters) Numbers::append(out, layout.view(grads.tensor(), p));
  write(dir / "out_grads.f64", out);
  for (const auto& [name, numbers] :
       {std::pair{"out_loss.f64", &loss}, {"out_plain_loss.f64", &plain_loss}, {"out_logits.f64", &logits}}) {
    out.clear();
    Numbers::append(out, numbers->tensor());
    write(dir / name, out);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    try {
      run_case(argv[i]);
    } catch (const std::exception& e) {
      std::cerr << argv[i] << ": " << e.what() << "\n";
      return 1;
    }
  }
  return 0;
}
