#include "ingot/kernels/cross_entropy/cross_entropy.h"

#include <memory>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/bench.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Buffer;

// The head of a training step: T tokens, V columns, C features.
struct Head {
  int64_t T, V, C;
};

struct Operands {
  explicit Operands(const Head& h, Products products)
      : x(DType::f32, {h.T, h.C}),
        w(DType::f32, {h.V, h.C}),
        dx(DType::f32, {h.T, h.C}),
        dw(DType::f32, {h.V, h.C}),
        loss(DType::f32, {h.T}),
        dloss(DType::f32, {h.T}),
        targets(DType::i32, {h.T}),
        workspace(DType::u8, {linear_cross_entropy_workspace_bytes(h.T, h.C, h.V, DType::f32, products, {})}) {
    testing::fill_normal(x, 1);
    testing::fill_normal(w, 2, 0.1);
    testing::fill_normal(dloss, 3, 1e-3);
    fill_zero(dw);
    for (int64_t t = 0; t < h.T; ++t) targets.tensor().ptr<int32_t>()[t] = int32_t(t * 7919 % h.V);
  }
  Buffer x, w, dx, dw, loss, dloss, targets, workspace;
};

BenchCase head_case(const Head& h, int threads, Products products) {
  const bool narrow = products == Products::bf16;
  BenchCase c{
      .suite = "cross_entropy",
      .name = "head",
      .shape = std::to_string(h.T) + "x" + std::to_string(h.V) + "x" + std::to_string(h.C),
      .dtype = narrow ? "bf16 products" : "f32",
      .flops = 6.0 * double(h.T) * double(h.V) * double(h.C),
      .limit_flops = narrow ? std::max(testing::fma_bound_bf16(), testing::fma_bound_f32()) : testing::fma_bound_f32(),
      .threads = threads};
  c.make = [=] {
    const auto o = std::make_shared<Operands>(h, products);
    return [=] {
      linear_cross_entropy({.x = o->x,
                            .w = o->w,
                            .targets = o->targets,
                            .loss = o->loss,
                            .dloss = o->dloss,
                            .dx = o->dx,
                            .dw = o->dw,
                            .workspace = o->workspace,
                            .softcap = 30,
                            .products = products},
                           {});
    };
  };
  return c;
}

}  // namespace

// The bound is the time of the three products: the time of the loss and of memory counts as lost.
INGOT_BENCH(cross_entropy) {
  std::vector<BenchCase> cases;
  std::vector<int> thread_counts = {1};
  if (thread_count() > 1) thread_counts.push_back(thread_count());
  for (Products products : {Products::fp32, Products::bf16})
    for (int threads : thread_counts)
      for (const Head& h : {Head{768, 65, 128}, {4096, 1024, 256}, {4096, 8192, 512}})
        cases.push_back(head_case(h, threads, products));
  return cases;
}

}  // namespace ingot
