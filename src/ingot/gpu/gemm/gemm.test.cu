// The core with every tile, every order of the operands in memory, every source and every kind of output, against the
// product in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <tuple>

#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/core.cuh"
#include "ingot/gpu/gemm/gemm_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/hopper_test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot::gemm {
namespace {

using cases::check;
using cases::dot;
using cases::Expected;
using testing::DeviceBuffer;
using Matrix = cases::Matrix<DeviceBuffer>;

constexpr Tile kWide{.n = 256, .team = Team::cooperative, .cluster = 2};
constexpr Tile kWideAlone{.n = 256, .team = Team::cooperative, .cluster = 1};

template <class T, Tile kTileOf, Major kMajorA, Major kMajorB, class Out, class Order = Grid, Pair kPairA = Pair::none,
          Pair kPairB = Pair::none>
struct Product {
  using Type = T;
  static constexpr Tile kTile = kTileOf;
  using A = Operand<T, kMajorA, kTileM, false, kPairA>;
  using B = Operand<T, kMajorB, kTile.n, true, kPairB>;
  using Schedule = Order;
  using Epilogue = Store<Out>;
};

// The operands and the result of a product are kept, because tests use few products many times.
const std::vector<Expected>& product_of(const Matrix& a, const Matrix& b, DType t, const Problem& s) {
  static std::map<std::tuple<DType, int64_t, int64_t, int64_t, int64_t>, std::vector<Expected>> known;
  std::vector<Expected>& all = known[{t, s.batch, s.m, s.n, s.k}];
  if (all.empty())
    for (int64_t i = 0; i < s.batch * s.m * s.n; ++i) all.push_back(dot(a, b, i / (s.m * s.n), i / s.n % s.m, i % s.n));
  return all;
}

class GemmCore : public testing::HopperTest<> {};

template <class P, class Out> void run(const Problem& s, int64_t blocks = 0, bool add = false) {
  SCOPED_TRACE(::testing::Message() << s.batch << " x " << s.m << " x " << s.n << " x " << s.k << ", tile "
                                    << P::kTile.n << " team " << int(P::kTile.team) << " cluster " << P::kTile.cluster
                                    << " majors " << int(P::A::kMajor) << int(P::B::kMajor));
  constexpr DType kType = dtype_of<typename P::Type>;
  constexpr int kCluster = P::kTile.cluster;
  const Matrix a(kType, P::A::kMajor, s.batch, s.m, s.k, 1), b(kType, P::B::kMajor, s.batch, s.n, s.k, 2);
  DeviceBuffer c(dtype_of<Out>, {s.batch, s.m, s.n}, s.n + 8);
  std::vector<double> before(size_t(s.batch * s.m * s.n), 0);
  if (add) {
    testing::fill_normal(c.host(), 3);
    before = testing::values(c.host());
  }
  c.upload();
  const auto schedule = P::Schedule::of(s, P::kTile);
  launch<P>("gemm_test",
            {.a = P::A::template params<kCluster>("gemm_test: a", a.stored),
             .b = P::B::template params<kCluster>("gemm_test: b", b.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("gemm_test: c", c, add)},
            0, {}, schedule.tiles, blocks);
  const std::vector<Expected>& product = product_of(a, b, kType, s);
  check(c, s.k, [&](int64_t batch, int64_t m, int64_t n) {
    const size_t i = size_t((batch * s.m + m) * s.n + n);
    const Expected e = product[i];
    const double old = before[i];
    return Expected{e.sum + old, e.size + std::fabs(old)};
  });
}

const Problem kShapes[] = {{128, 256, 64},       // a single tile, a single step
                           {128, 256, 128},      // two steps
                           {256, 512, 512},      // the ring wraps around
                           {8, 8, 8},            // the smallest
                           {300, 520, 200},      // ragged everywhere
                           {130, 136, 1032, 2},  // two products
                           {700, 800, 72}};

template <class T, Tile kTile, Major kA, Major kB, class Out> void run_all() {
  for (const Problem& s : kShapes) {
    run<Product<T, kTile, kA, kB, Out>, Out>(s);
    if (::testing::Test::HasFailure()) return;
  }
  run<Product<T, kTile, kA, kB, Out>, Out>({700, 800, 72}, 4);  // each block many tiles
}
template <Tile kTile> void run_majors() {
  run_all<bf16, kTile, Major::k, Major::k, float>();
  run_all<bf16, kTile, Major::k, Major::mn, float>();
  run_all<bf16, kTile, Major::mn, Major::k, float>();
  run_all<bf16, kTile, Major::mn, Major::mn, float>();
}

TEST_F(GemmCore, CooperativeInPairsOfBlocks) { run_majors<kWide>(); }
TEST_F(GemmCore, CooperativeAlone) { run_majors<kWideAlone>(); }
TEST_F(GemmCore, PingPongOf192InPairsOfBlocks) { run_majors<kTurns192>(); }
TEST_F(GemmCore, PingPongOf128Alone) { run_majors<kTurns128>(); }
TEST_F(GemmCore, PingPongOf128InPairsOfBlocks) { run_majors<kPairs128>(); }
TEST_F(GemmCore, WritesItsOwnType) {
  run_all<bf16, kWide, Major::k, Major::k, bf16>();
  run_all<f16, kWide, Major::k, Major::k, f16>();
  run_all<bf16, kTurns192, Major::k, Major::k, bf16>();
  run_all<f16, kTurns128, Major::mn, Major::mn, f16>();
}
TEST_F(GemmCore, AddsToTheEarlierResult) {
  for (int64_t blocks : {0, 2}) {
    run<Product<bf16, kWide, Major::mn, Major::mn, float>, float>({300, 520, 264}, blocks, true);
    run<Product<bf16, kTurns128, Major::mn, Major::mn, float>, float>({300, 520, 264}, blocks, true);
  }
}
TEST_F(GemmCore, WithoutKTheSumsAreZero) {
  // A tensor map cannot describe an empty matrix: a different operand takes its place, unread by any step.
  using P = Product<bf16, kWide, Major::k, Major::k, float>;
  const Matrix a(DType::bf16, Major::k, 1, 130, 64, 1), b(DType::bf16, Major::k, 1, 264, 64, 2);
  DeviceBuffer c(DType::f32, {1, 130, 264});
  c.upload();
  const Grid schedule = Grid::of({130, 264, 0}, P::kTile);
  launch<P>("gemm_test",
            {.a = P::A::params<2>("a", a.stored),
             .b = P::B::params<2>("b", b.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("c", c)},
            0, {}, schedule.tiles);
  check(c, 0, [](int64_t, int64_t, int64_t) { return Expected{0, 0}; });
}

TEST_F(GemmCore, RowsThatWouldHarmTheirNeighboursAreRefusedByName) {
  DeviceBuffer ragged(DType::bf16, {128, 68}, 72), whole(DType::bf16, {128, 72}, 72);
  using testing::error_of;
  const std::string m = error_of([&] { Store<bf16>::params("gemm_test: c", ragged); });
  for (const char* part : {"gemm_test: c", "rows of 68 elements of bf16", "expected a multiple of 16 bytes"})
    EXPECT_NE(m.find(part), m.npos) << m;
  EXPECT_EQ(error_of([&] { Store<bf16>::params("gemm_test: c", whole); }), "");
  EXPECT_EQ(error_of([&] { padded_store_map<bf16>("gemm_test: c", ragged); }), "");
  DeviceBuffer close(DType::f32, {128, 6}, 6);
  EXPECT_NE(error_of([&] { padded_store_map<float>("gemm_test: c", close); }), "");
}

// Only tiles on or below the diagonal are written.
TEST_F(GemmCore, ATriangleIsHalfOfTheWork) {
  using P = Product<bf16, kTurns128, Major::k, Major::k, float, Triangle>;
  const Matrix a(DType::bf16, Major::k, 3, 400, 200, 1);
  DeviceBuffer c(DType::f32, {3, 400, 400});
  testing::fill_normal(c.host(), 3);
  const std::vector<double> before = testing::values(c.host());
  c.upload();
  const Triangle schedule = Triangle::of({400, 400, 200, 3}, P::kTile);
  launch<P>("gemm_test",
            {.a = P::A::params<1>("a", a.stored),
             .b = P::B::params<1>("b", a.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("c", c)},
            0, {}, schedule.tiles, 5);
  check(c, 200, [&](int64_t batch, int64_t m, int64_t n) {
    if (n / 128 <= m / 128) return dot(a, a, batch, m, n);
    const double old = before[size_t((batch * 400 + m) * 400 + n)];
    return Expected{old, std::fabs(old)};
  });
}

// Two matrices B in a tile: columns 0 to n / 2 - 1 of each tile belong to the first, the rest to the second.
template <Tile kTile, Major kB> void run_stacked() {
  using P = Product<bf16, kTile, Major::k, kB, float, Grid, Pair::none, Pair::stacked>;
  constexpr int64_t kHalf = kTile.n / 2, kRows = 2 * kHalf + 40, kTiles = 3;
  const Matrix a(DType::bf16, Major::k, 1, 300, 200, 1), first(DType::bf16, kB, 1, kRows, 200, 2),
      second(DType::bf16, kB, 1, kRows, 200, 3);
  DeviceBuffer c(DType::f32, {1, 300, kTiles * kTile.n});
  c.upload();
  const Grid schedule = Grid::of({300, kTiles * kTile.n, 200}, P::kTile);
  launch<P>("gemm_test",
            {.a = P::A::template params<kTile.cluster>("a", a.stored),
             .b = P::B::template params<kTile.cluster>("b", first.stored, second.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("c", c)},
            0, {}, schedule.tiles);
  check(c, 200, [&](int64_t, int64_t m, int64_t n) {
    const int64_t row = n / kTile.n * kHalf + n % kHalf;
    return row < kRows ? dot(a, n % kTile.n < kHalf ? first : second, 0, m, row) : Expected{0, 0};
  });
}
TEST_F(GemmCore, TwoMatricesStackedInATile) {
  run_stacked<kWide, Major::k>();
  run_stacked<kWide, Major::mn>();
  run_stacked<kWideAlone, Major::mn>();
  run_stacked<kTurns192, Major::k>();
}

TEST_F(GemmCore, TwoProductsChainedAlongK) {
  using P = Product<bf16, kWide, Major::k, Major::mn, float, Grid, Pair::chained, Pair::chained>;
  const Matrix a0(DType::bf16, Major::k, 1, 300, 200, 1), a1(DType::bf16, Major::k, 1, 300, 200, 2),
      b0(DType::bf16, Major::mn, 1, 264, 200, 3), b1(DType::bf16, Major::mn, 1, 264, 200, 4);
  DeviceBuffer c(DType::f32, {1, 300, 264});
  c.upload();
  Grid schedule = Grid::of({300, 264, 200}, P::kTile);
  schedule.k_steps *= 2;
  launch<P>("gemm_test",
            {.a = P::A::params<2>("a", a0.stored, a1.stored),
             .b = P::B::params<2>("b", b0.stored, b1.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("c", c)},
            0, {}, schedule.tiles);
  check(c, 400, [&](int64_t, int64_t m, int64_t n) {
    const Expected x = dot(a0, b0, 0, m, n), y = dot(a1, b1, 0, m, n);
    return Expected{x.sum + y.sum, x.size + y.size};
  });
}

TEST_F(GemmCore, TwoMatricesByBatch) {
  using P = Product<bf16, kWide, Major::mn, Major::mn, float, Grid, Pair::by_batch>;
  const Matrix a0(DType::bf16, Major::mn, 1, 300, 200, 1), a1(DType::bf16, Major::mn, 1, 300, 200, 2),
      b(DType::bf16, Major::mn, 2, 264, 200, 3);
  DeviceBuffer c(DType::f32, {2, 300, 264});
  c.upload();
  const Grid schedule = Grid::of({300, 264, 200, 2}, P::kTile);
  launch<P>("gemm_test",
            {.a = P::A::params<2>("a", a0.stored, a1.stored),
             .b = P::B::params<2>("b", b.stored),
             .schedule = schedule,
             .epilogue = P::Epilogue::params("c", c)},
            0, {}, schedule.tiles);
  check(c, 200,
        [&](int64_t batch, int64_t m, int64_t n) { return dot((batch ? a1 : a0).row(0, m), b.row(batch, n), 200); });
}

// The same product twice has the same bits, for any number of blocks.
TEST_F(GemmCore, RepeatsBitForBit) {
  using P = Product<bf16, kWide, Major::k, Major::k, float>;
  const Problem s{1000, 1000, 1000};
  const Matrix a(DType::bf16, Major::k, 1, s.m, s.k, 1), b(DType::bf16, Major::k, 1, s.n, s.k, 2);
  std::vector<double> first;
  for (int64_t blocks : {0, 0, 6}) {
    DeviceBuffer c(DType::f32, {1, s.m, s.n});
    c.upload();
    const Grid schedule = Grid::of(s, P::kTile);
    launch<P>("gemm_test",
              {.a = P::A::params<2>("a", a.stored),
               .b = P::B::params<2>("b", b.stored),
               .schedule = schedule,
               .epilogue = P::Epilogue::params("c", c)},
              0, {}, schedule.tiles, blocks);
    c.download();
    if (first.empty()) first = testing::values(c.host());
    EXPECT_EQ(testing::values(c.host()), first);
  }
}

}  // namespace
}  // namespace ingot::gemm
