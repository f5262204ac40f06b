// The forward kernels and their launcher on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::roundoff;
using testing::values;

struct Case {
  int64_t rows, cols;
  DType type = DType::bf16;
  bool residual = false;
  int64_t gap = 0;
  cuda::RmsNormConfig config = {};
  bool chosen = false;  // use `config` instead of the default
  bool weights = true;
};

void check(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c.rows << "x" << c.cols << ' ' << c.type << " residual " << c.residual << " gap "
                                    << c.gap << " threads " << c.config.threads << " cluster " << c.config.cluster);
  const Shape matrix{c.rows, c.cols};
  Buffer x(c.type, matrix, c.cols + c.gap), residual(c.type, matrix), sum(c.type, matrix), y(c.type, matrix),
      w(DType::f32, {c.cols}), rstd(DType::f32, {c.rows});
  testing::fill_normal(x, 1, 2);
  testing::fill_normal(residual, 2);
  testing::fill_normal(w, 3, 0.5, 1);
  RmsNorm a{.x = x, .y = y, .rstd = rstd, .scale = 0.75, .unit_offset = c.residual};
  if (c.weights) a.w = w;
  if (c.residual) a.residual = residual, a.sum = sum;
  if (c.chosen)
    cuda::rmsnorm_with(a, {.config = c.config}, {});
  else
    cuda::rmsnorm(a, {});
  Buffer exact(DType::f64, matrix), exact_w(DType::f64, {c.cols}), want(DType::f64, matrix),
      want_rstd(DType::f64, {c.rows});
  testing::assign(exact, values(c.residual ? sum : x));
  testing::assign(exact_w, values(w));
  RmsNorm loop{.x = exact, .y = want, .rstd = want_rstd, .scale = a.scale, .unit_offset = a.unit_offset};
  if (c.weights) loop.w = exact_w;
  rmsnorm(loop, {});
  // Half the spacing of the type's smallest numbers; the roundings of the sum and of the products.
  const double tiny = c.type == DType::f16 ? std::ldexp(1, -25) : 1e-30;
  const auto got = testing::compare(y, values(want), tiny, roundoff(c.type) + 100 * roundoff(DType::f32));
  EXPECT_TRUE(got.ok) << got.message;
  const auto got_rstd = testing::compare(rstd, values(want_rstd), 0, 100 * roundoff(DType::f32));
  EXPECT_TRUE(got_rstd.ok) << "rstd: " << got_rstd.message;
  for (const Buffer* b : {&x, &residual, &sum, &y, &w, &rstd}) EXPECT_TRUE(b->guards_intact());
}

TEST(RmsNormEmulated, AgreesWithTheFp64LoopUnderItsOwnConfigurations) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (bool residual : {false, true})
      for (int64_t cols : {7, 64, 72, 200, 1024, 4104}) {
        check({.rows = 5, .cols = cols, .type = type, .residual = residual});
        check({.rows = 3, .cols = cols, .type = type, .residual = residual, .gap = 1});
      }
  check({.rows = 41, .cols = 64});
  check({.rows = 0, .cols = 64});
}

// Weights are loaded after the sum where a thread holds more than two vectors: two vectors of f32 weights at a time, or
// one where a thread holds eight vectors.
TEST(RmsNormEmulated, AgreesWithSeveralVectorsAThread) {
  struct Held {
    int vecs, rows;
  };
  for (bool weights : {false, true})
    for (const auto& [vecs, rows] : {Held{2, 1}, {1, 4}, {2, 2}, {4, 1}, {8, 1}})
      for (bool residual : {false, true})
        if (vecs < 8 || !residual)
          check({.rows = 13,
                 .cols = (8 * vecs - 3) * 8,  // lanes with a vector less
                 .residual = residual,
                 .config = {.vecs_per_thread = vecs, .rows_per_group = rows, .group = 8, .threads = 32},
                 .chosen = true,
                 .weights = weights});
}

TEST(RmsNormEmulated, AgreesInClusters) {
  for (int cluster : {2, 4, 8})
    check({.rows = 3,
           .cols = 1024,
           .config = {.vecs_per_thread = 2, .rows_per_group = 1, .group = 32, .cluster = cluster, .threads = 32},
           .chosen = true});
}

// Rows kept in registers, or read twice where there is a residual.
TEST(RmsNormEmulated, AgreesAsForTensorsLargerThanL2) {
  for (bool residual : {false, true})
    for (int vecs : {2, 3, 4})
      for (int group : {8, 32, 96})
        if (vecs == 2 || !residual)
          check({.rows = 13,
                 .cols = (group == 96 ? 704 : group * 7) * vecs,
                 .type = DType::f16,
                 .residual = residual,
                 .config = {.vecs_per_thread = vecs,
                            .rows_per_group = 1,
                            .group = group,
                            .threads = 96,
                            .kept = !residual,
                            .reread = residual},
                 .chosen = true});
}

TEST(RmsNormEmulated, AgreesWithTwoNarrowRowsAThread) {
  for (int64_t rows : {1, 13, 32})
    for (int64_t cols : {8, 72, 128})
      check({.rows = rows,
             .cols = cols,
             .type = DType::f16,
             .config = {.vecs_per_thread = 1,
                        .rows_per_group = cuda::kRowPair,
                        .group = int(cuda::round_up_pow2(cols / 8)),
                        .threads = 64,
                        .kept = true},
             .chosen = true});
}

TEST(RmsNormEmulated, AgreesWhenClustersWalkOverRows) {
  for (const auto& [cluster, rows] : {std::pair{2, 13}, {8, 57}})  // a cluster takes three rows: more than a ring holds
    check({.rows = rows,
           .cols = 5000,
           .type = DType::f32,
           .config = {.vecs_per_thread = cuda::kWalkVecs,
                      .group = cuda::kWalkThreads,
                      .cluster = cluster,
                      .threads = cuda::kWalkThreads,
                      .walk = true},
           .chosen = true});
}

TEST(RmsNormEmulated, TakesHeadsInsideAWiderRow) {
  constexpr int64_t T = 7, H = 3;
  for (int64_t d : {64, 21}) {
    Buffer wide(DType::bf16, {T, 5 * d}), out(DType::bf16, {T, 4 * d}), exact(DType::f64, {T, H, d}),
        want(DType::f64, {T, H, d});
    testing::fill_normal(wide, 1, 2);
    testing::fill_normal(out, 2);
    const auto heads = [&](const Tensor& t, int64_t first) {
      return t.slice(1, first * d, (first + H) * d).split_last(H);
    };
    testing::assign(exact, values(heads(wide, 2)));
    rmsnorm({.x = exact, .y = want}, {});
    const auto rest = values(out.tensor().slice(1, 0, d));
    const RmsNorm a{.x = heads(wide, 2), .y = heads(out, 1)};
    cuda::rmsnorm(a, {});
    const auto got = testing::compare(heads(out, 1), values(want), 1e-30, roundoff(DType::bf16) * 1.01);
    EXPECT_TRUE(got.ok) << got.message;
    EXPECT_EQ(values(out.tensor().slice(1, 0, d)), rest);
    EXPECT_TRUE(wide.guards_intact() && out.guards_intact());
  }
}

}  // namespace
}  // namespace ingot
