#include "ingot/kernels/copy/copy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "ingot/kernels/copy/copy_cases.test.h"
#include "ingot/kernels/copy/copy_plan.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

template <class Call> std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(Copy, ConvertsBetweenFloatingTypesAndWritesNothingElse) {
  for (DType s : kFloats)
    for (DType d : kFloats)
      for (const CopyCase& c : kCopyCases) {
        Buffer from(s, {c.rows, c.cols}, c.cols + c.gap_from), to(d, {c.rows, c.cols}, c.cols + c.gap_to);
        testing::fill_normal(from, 1, 3);
        copy({.from = from, .to = to}, {});
        auto want = values(from);
        for (double& x : want) x = rounded(x, d);
        EXPECT_EQ(values(to), want) << s << " to " << d << ' ' << c.rows << 'x' << c.cols;
        EXPECT_TRUE(from.guards_intact() && to.guards_intact());
      }
}

TEST(Copy, RowsGoWhereANumberSays) {
  copies_rows_at_a_place<Buffer>();
  Buffer rows(DType::f32, {2, 3}), other(DType::f32, {2, 4}), place(DType::i32, {1});
  EXPECT_NE(
      error_of([&] { copy_at({.from = rows, .to = other, .at = place}, {}); }).find("copy_at: found rows of shapes"),
      std::string::npos);
  EXPECT_NE(error_of([&] { copy_at({.from = rows, .to = rows, .at = rows}, {}); }).find("copy_at: found at of shape"),
            std::string::npos);
}

TEST(Copy, FillsAnyTypeWithAValueInItsRange) {
  for (DType t :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u32, DType::u16, DType::u8})
    for (double v : {0.0, 7.0, 255.0}) {
      Buffer to(t, {3, 5}, 9);
      fill({.to = to, .value = v}, {});
      EXPECT_EQ(values(to), std::vector<double>(15, v)) << t;
      EXPECT_TRUE(to.guards_intact());
    }
  Buffer third(DType::bf16, {4}), all(DType::f32, {2});
  fill({.to = third, .value = 1.0 / 3}, {});
  EXPECT_EQ(values(third), std::vector<double>(4, rounded(1.0 / 3, DType::bf16)));
  fill({.to = all, .value = -0.0}, {});
  EXPECT_TRUE(std::signbit(all.tensor().ptr<float>()[1]));
}

TEST(Copy, FillReachesTransposedAndRank4Views) {
  Buffer whole(DType::i32, {4, 6});
  fill({.to = whole}, {});
  Tensor t = whole;
  std::swap(t.shape.dim[0], t.shape.dim[1]), std::swap(t.stride[0], t.stride[1]);
  fill({.to = t.slice(0, 2, 3), .value = 5}, {});  // the third column
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(whole.tensor().ptr<int32_t>()[i], i % 6 == 2 ? 5 : 0) << i;
  Buffer wide(DType::i32, {2, 3, 4, 6});
  fill({.to = wide}, {});
  fill({.to = wide.tensor().slice(1, 1, 3).slice(3, 0, 2), .value = 1}, {});
  double sum = 0;
  for (double x : values(wide)) sum += x;
  EXPECT_EQ(sum, 2 * 2 * 4 * 2);
}

TEST(Copy, RefusesTensorsThatDoNotFitAndNamesBothShapes) {
  Buffer a(DType::f32, {2, 3}), b(DType::f32, {3, 2}), i(DType::i32, {2, 3}), small(DType::u8, {2});
  EXPECT_NE(error_of([&] { copy({.from = a, .to = b}, {}); }).find("found from of shape (2, 3), expected (3, 2)"),
            std::string::npos);
  EXPECT_NE(error_of([&] { copy({.from = a, .to = i}, {}); }).find("f32 and i32"), std::string::npos);
  EXPECT_NE(error_of([&] { copy({.to = a}, {}); }).find("no from"), std::string::npos);
  for (double v : {256.0, -1.0, 0.5, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_NE(error_of([&] { fill({.to = small, .value = v}, {}); }).find("fill: found value"), std::string::npos) << v;
}

TEST(Copy, RefusesOverlappingOperandsAndAcceptsNeighbours) {
  Buffer m(DType::f32, {6, 16});
  fill({.to = m, .value = 1}, {});
  const Tensor t = m;
  const auto refused = [](const Tensor& from, const Tensor& to) {
    return error_of([&] { copy({.from = from, .to = to}, {}); }).find("share memory") != std::string::npos;
  };
  EXPECT_TRUE(refused(t, t));
  EXPECT_TRUE(refused(t.slice(0, 0, 4), t.slice(0, 2, 6)));
  EXPECT_TRUE(refused(t.slice(1, 0, 8), t.slice(1, 7, 15)));
  EXPECT_TRUE(refused(t.slice(1, 7, 15), t.slice(1, 0, 8)));
  EXPECT_FALSE(refused(t.slice(1, 0, 8), t.slice(1, 8, 16)));
  EXPECT_FALSE(refused(t.slice(1, 8, 16), t.slice(1, 0, 8)));
  EXPECT_FALSE(refused(t.slice(0, 0, 3), t.slice(0, 3, 6)));
  EXPECT_FALSE(refused(t.slice(0, 0, 0), t.slice(0, 0, 0)));  // an empty tensor shares no memory
}

// Brute force over all views of a small matrix: accepted pairs never share an element.
TEST(Copy, OverlapIsFoundAtEveryOffset) {
  Buffer m(DType::u8, {5, 6});
  const Tensor t = m;
  std::vector<Tensor> views;
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t c = 0; c < 5; ++c)
      for (int64_t rows = 1; rows <= 2; ++rows)
        for (int64_t cols = 1; cols <= 2; ++cols) views.push_back(t.slice(0, r, r + rows).slice(1, c, c + cols));
  const auto bytes = [](const Tensor& v) {
    std::set<const void*> all;
    for (int64_t r = 0; r < v.rows(); ++r)
      for (int64_t c = 0; c < v.cols(); ++c) all.insert(v.ptr<uint8_t>() + r * v.row_stride() + c);
    return all;
  };
  for (const Tensor& a : views)
    for (const Tensor& b : views) {
      if (a.shape != b.shape) continue;
      bool shared = false;
      for (const void* p : bytes(a)) shared = shared || bytes(b).count(p) > 0;
      if (shared) EXPECT_TRUE(detail::may_overlap(a, b));
      if (!shared && a.rows() > 1) EXPECT_FALSE(detail::may_overlap(a, b));
    }
}

TEST(Copy, LoopsAreMergedWhereBothOperandsAreContiguous) {
  Buffer a(DType::f32, {2, 3, 4, 5}), b(DType::f32, {2, 3, 4, 5});
  const detail::Strided one = detail::strided(a, b);
  EXPECT_EQ(one.dim[3], 120);
  EXPECT_EQ(one.dim[2], 1);
  const detail::Strided two = detail::strided(a.tensor().slice(1, 0, 2), b.tensor().slice(1, 0, 2));
  EXPECT_EQ(two.dim[3], 40);
  EXPECT_EQ(two.dim[2], 2);
  EXPECT_EQ(two.from[2], 60);
}

#if !defined(INGOT_CUDA_BUILD) && !defined(INGOT_EMULATED_DEVICE)
TEST(Copy, EveryTensorOnAGpuIsRefusedByNameWithoutCuda) {
  Buffer a(DType::f32, {2, 3}), b(DType::f32, {2, 3});
  const auto copies = [](const Copy& c, Stream s) { copy(c, s); };
  EXPECT_EQ(testing::device_not_checked<Copy>({.from = a, .to = b}, {&Copy::from, &Copy::to}, copies), "");
  const auto fills = [](const Fill& f, Stream s) { fill(f, s); };
  EXPECT_EQ(testing::device_not_checked<Fill>({.to = b}, {&Fill::to}, fills), "");
}
#endif

}  // namespace
}  // namespace ingot
