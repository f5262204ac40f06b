// The backward kernels and their launcher on the CPU, where sanitizers see their accesses.
#include <gtest/gtest.h>

#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::roundoff;
using testing::values;

struct Case {
  int64_t rows, cols;
  DType s = DType::bf16, dy = DType::bf16;
  bool rstd = false, dsum = false, accumulate = false;
  int64_t gap = 0;
  cuda::RmsNormBackwardConfig config = {};
  bool chosen = false;  // use `config` instead of the default
};

void check(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c.rows << "x" << c.cols << ' ' << c.s << " dsum " << c.dsum << " accumulate "
                                    << c.accumulate << " gap " << c.gap << " cluster " << c.config.cluster << " stages "
                                    << c.config.stages);
  const Shape matrix{c.rows, c.cols};
  Buffer s(c.s, matrix, c.cols + c.gap), dy(c.dy, matrix), dsum(c.s, matrix), dx(c.s, matrix), w(DType::f32, {c.cols}),
      dw(DType::f32, {c.cols}), rstd(DType::f32, {c.rows}), y(c.s, matrix);
  testing::fill_normal(s, 1, 2);
  testing::fill_normal(dy, 2);
  testing::fill_normal(dsum, 3);
  testing::fill_normal(dx, 4);
  testing::fill_normal(w, 5, 0.5, 1);
  testing::fill_normal(dw, 6);
  gpu::Limits emulated{.sms = 3};
  Buffer workspace(DType::f32, {8, cuda::most_partial_rows(c.rows, c.cols, c.s, emulated), c.cols});
  Buffer s64(DType::f64, matrix), dy64(DType::f64, matrix), dsum64(DType::f64, matrix), dx64(DType::f64, matrix),
      w64(DType::f64, {c.cols}), dw64(DType::f64, {c.cols}), rstd64(DType::f64, {c.rows}), y64(DType::f64, matrix),
      workspace64(DType::f64, {64, c.cols});
  for (auto [to, from] : {std::pair{&s64, &s}, {&dy64, &dy}, {&dsum64, &dsum}, {&dx64, &dx}, {&w64, &w}, {&dw64, &dw}})
    testing::assign(*to, values(*from));
  rmsnorm({.x = s64, .y = y64, .rstd = rstd64}, {});
  testing::assign(rstd, values(rstd64));
  const auto call = [&](const Buffer& s, const Buffer& dy, const Buffer& dsum, const Buffer& dx, const Buffer& w,
                        const Buffer& dw, const Buffer& workspace) {
    RmsNormBackward a{.dy = dy, .s = s, .w = w, .dx = dx, .dw = dw, .workspace = workspace};
    a.scale = 0.75;
    a.unit_offset = c.dsum;
    a.accumulate_dx = c.accumulate;
    if (c.dsum) a.dsum = dsum;
    return a;
  };
  RmsNormBackward a = call(s, dy, dsum, dx, w, dw, workspace);
  if (c.rstd) a.rstd = rstd;
  if (c.chosen)
    cuda::rmsnorm_backward_with(a, {.config = c.config}, {});
  else
    cuda::rmsnorm_backward(a, {});
  rmsnorm_backward(call(s64, dy64, dsum64, dx64, w64, dw64, workspace64), {});
  const auto got = testing::compare(dx, values(dx64), 2e-5, roundoff(c.s) * 1.01);
  EXPECT_TRUE(got.ok) << "dx: " << got.message;
  const auto got_dw = testing::compare(dw, values(dw64), 2e-5 * double(c.rows), 1e-5);
  EXPECT_TRUE(got_dw.ok) << "dw: " << got_dw.message;
  for (const Buffer* b : {&s, &dy, &dsum, &dx, &w, &dw, &rstd, &workspace}) EXPECT_TRUE(b->guards_intact());
}

TEST(RmsNormBackwardEmulated, AgreesWithTheFp64LoopUnderItsOwnConfigurations) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (int64_t cols : {7, 64, 72, 1000, 2056}) {
      check({.rows = 5, .cols = cols, .s = type, .dy = type, .dsum = true});
      check({.rows = 5, .cols = cols, .s = type, .dy = type, .rstd = true, .accumulate = true});
      check({.rows = 5, .cols = cols, .s = type, .dy = type, .rstd = true, .gap = 1});
    }
  for (DType s : {DType::f32, DType::bf16})
    for (DType dy : {DType::f32, DType::f16}) check({.rows = 5, .cols = 200, .s = s, .dy = dy, .dsum = true});
  check({.rows = 201, .cols = 64});  // every block takes several rows
}

TEST(RmsNormBackwardEmulated, AgreesInClustersAndWithAnyRing) {
  for (int cluster : {1, 2, 8})
    for (int stages : {1, 2, 3, 4})
      for (bool rstd : {false, true})
        check({.rows = 11,
               .cols = 1000,
               .rstd = rstd,
               .dsum = rstd,
               .config = {.group = cluster == 1 ? 64 : 32,
                          .cluster = cluster,
                          .threads = cluster == 1 ? 128 : 32,
                          .stages = stages,
                          .blocks = 2},
               .chosen = true});
}

TEST(RmsNormBackwardEmulated, AgreesWithSeveralRowsAtOnceAndOddGroups) {
  for (bool dsum : {false, true})
    for (int64_t cols : {64, 760})
      check({.rows = 13,
             .cols = cols,
             .rstd = true,
             .dsum = dsum,
             .config = {.group = cols == 64 ? 8 : 96, .threads = 96 * 2, .blocks = 2, .columns = 8, .rows_at_once = 2},
             .chosen = true});
  check({.rows = 9,
         .cols = 1504,
         .rstd = true,
         .config = {.group = 64, .cluster = 2, .threads = 64, .blocks = 2, .columns = 16, .rows_at_once = 2},
         .chosen = true});
}

TEST(RmsNormBackwardEmulated, TakesHeadsInsideAWiderRow) {
  constexpr int64_t T = 7, H = 3;
  for (int64_t d : {64, 21}) {
    Buffer s(DType::bf16, {T, 5 * d}), dy(DType::bf16, {T, 4 * d}), dx(DType::bf16, {T, 4 * d}), dw(DType::f32, {d}),
        workspace(DType::f32, {8, cuda::most_partial_rows(T * H, d, DType::bf16, {.sms = 3}), d});
    Buffer s64(DType::f64, {T, H, d}), dy64(DType::f64, {T, H, d}), dx64(DType::f64, {T, H, d}), dw64(DType::f64, {d}),
        workspace64(DType::f64, {64, d});
    testing::fill_normal(s, 1, 2);
    testing::fill_normal(dy, 2);
    testing::fill_normal(dx, 3);
    testing::fill_normal(dw, 4);
    const auto heads = [&](const Tensor& t, int64_t first) {
      return t.slice(1, first * d, (first + H) * d).split_last(H);
    };
    testing::assign(s64, values(heads(s, 2)));
    testing::assign(dy64, values(heads(dy, 1)));
    testing::assign(dw64, values(dw));
    rmsnorm_backward({.dy = dy64, .s = s64, .dx = dx64, .dw = dw64, .workspace = workspace64}, {});
    const auto rest = values(dx.tensor().slice(1, 3 * d, 4 * d));
    const RmsNormBackward a{.dy = heads(dy, 1), .s = heads(s, 2), .dx = heads(dx, 0), .dw = dw, .workspace = workspace};
    cuda::rmsnorm_backward(a, {});
    const auto got = testing::compare(heads(dx, 0), values(dx64), 2e-5, roundoff(DType::bf16) * 1.01);
    EXPECT_TRUE(got.ok) << "dx: " << got.message;
    const auto got_dw = testing::compare(dw, values(dw64), 4e-4, 1e-5);
    EXPECT_TRUE(got_dw.ok) << "dw: " << got_dw.message;
    EXPECT_EQ(values(dx.tensor().slice(1, 3 * d, 4 * d)), rest);
    for (const Buffer* b : {&s, &dy, &dx, &dw, &workspace}) EXPECT_TRUE(b->guards_intact());
  }
}

}  // namespace
}  // namespace ingot
