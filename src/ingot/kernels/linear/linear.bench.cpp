#include "ingot/kernels/linear/linear.h"

#include <algorithm>
#include <memory>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/bench.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Buffer;

// The products of one model's training step: T tokens, every (N, K) of its weights. A step multiplies wide matrices by
// blocks of 1,024 tokens (models/gpt/buffers.h), and a head of 8,192 columns by chunks of at most 512 tokens
// (kernels/cross_entropy/cross_entropy.cpp). The case "chunk" has 256 tokens.
struct Model {
  const char* name;
  int64_t tokens;
  std::vector<std::pair<int64_t, int64_t>> weights;
};
const Model kModels[] = {
    {"narrow", 768, {{128, 128}, {512, 128}, {128, 512}, {65, 128}}},
    {"wide", 4096, {{256, 256}, {128, 256}, {1024, 256}, {256, 1024}, {1024, 256}, {8192, 256}}},
    {"block", 1024, {{256, 256}, {128, 256}, {1024, 256}, {256, 1024}}},
    {"chunk", 256, {{8192, 256}}},
};

std::string shape_of(int64_t m, int64_t n, int64_t k) {
  return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
}
std::shared_ptr<Buffer> matrix(int64_t rows, int64_t cols, uint64_t seed) {
  auto b = std::make_shared<Buffer>(DType::f32, Shape{rows, cols});
  testing::fill_normal(*b, seed, 0.1);
  return b;
}

void add_layer(std::vector<BenchCase>& cases, const std::string& model, int64_t t, int64_t n, int64_t k, int threads,
               Products products) {
  const bool narrow = products == Products::bf16;
  const double limit =
      narrow ? std::max(testing::fma_bound_bf16(), testing::fma_bound_f32()) : testing::fma_bound_f32();
  BenchCase c{.suite = "linear",
              .shape = shape_of(t, n, k),
              .dtype = narrow ? "bf16 products" : "f32",
              .flops = 2.0 * double(t) * double(n) * double(k),
              .limit_flops = limit,
              .threads = threads};
  c.name = model + " forward";
  c.make = [=] {
    const auto x = matrix(t, k, 1), w = matrix(n, k, 2), y = matrix(t, n, 3);
    return [=] { linear({.x = *x, .w = *w, .y = *y, .products = products}, {}); };
  };
  cases.push_back(c);
  c.name = model + " dx";
  c.make = [=] {
    const auto dy = matrix(t, n, 3), w = matrix(n, k, 2), dx = matrix(t, k, 4);
    return [=] { linear_backward({.dy = *dy, .w = *w, .dx = *dx, .products = products}, {}); };
  };
  cases.push_back(c);
  c.name = model + " dw";
  c.make = [=] {
    const auto dy = matrix(t, n, 3), x = matrix(t, k, 1), dw = matrix(n, k, 5);
    return [=] { linear_backward({.dy = *dy, .x = *x, .dw = *dw, .products = products}, {}); };
  };
  cases.push_back(c);
}

}  // namespace

INGOT_BENCH(linear) {
  std::vector<BenchCase> cases;
  std::vector<int> thread_counts = {1};
  if (thread_count() > 1) thread_counts.push_back(thread_count());
  for (Products products : {Products::fp32, Products::bf16})
    for (int threads : thread_counts)
      for (const Model& m : kModels)
        for (const auto& [n, k] : m.weights) add_layer(cases, m.name, m.tokens, n, k, threads, products);
  return cases;
}

}  // namespace ingot
