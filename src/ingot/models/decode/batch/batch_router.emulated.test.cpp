// The kernel of norm, router, choice and places has the bits of the kernels that do each of these alone.
#pragma GCC diagnostic ignored "-Wunused-function"  // the header's other kernels
#include "ingot/models/decode/batch/batch_router.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "ingot/gpu/launch.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using namespace decode::prompts;

struct Sizes {
  uint32_t T, count, C, E, k;
  bool halves;
};
// The operands and the results of one of the two forms.
struct Step {
  Sizes s;
  uint32_t tiles, stride, S;
  std::vector<float> x, down, norm_weight, bias, logits, weights;
  std::vector<uint8_t> router;
  std::vector<bf16> y, gathered;
  std::vector<uint32_t> chosen, arrived;
  std::vector<int32_t> place, offsets, half_rows;
  std::vector<float> ones;

  explicit Step(const Sizes& s) : s(s) {
    tiles = (s.C + 63) / 64, stride = tiles * 64, S = s.T * s.k;
    const auto normal = [](std::vector<float>& v, size_t n, uint64_t seed, double scale, double mean = 0) {
      v.resize(n);
      testing::fill_normal(Tensor(v.data(), {int64_t(n)}), seed, scale, mean);
    };
    normal(x, s.T * stride, 1, 3), normal(down, 2 * s.T * s.C, 2, 1), normal(norm_weight, s.C, 3, 0.3, 1);
    normal(bias, s.E, 4, 0.1);
    const size_t row_tiles = (s.E + 15) / 16;
    std::vector<float> w;
    normal(w, row_tiles * tiles * 16 * 64, 5, 0.05);
    router.resize(w.size() * 2);
    for (size_t i = 0; i < w.size(); ++i) reinterpret_cast<bf16*>(router.data())[i] = bf16(w[i]);
    y.assign(s.T * stride, bf16(NAN)), gathered.assign(S * stride, bf16(NAN));
    logits.assign(s.T * s.E, NAN), weights.assign(S, NAN), chosen.assign(S, ~0u), arrived.assign(s.T / 16 + 1, 0);
    place.assign(S, -1), offsets.assign(s.E + 1, -1);
    for (uint32_t t = 0; t < s.T; ++t) half_rows.push_back(int32_t(t)), half_rows.push_back(int32_t(s.T + t));
    ones.assign(2 * s.T, 1);
  }
  Norm norm() {
    return {.x = x.data(), .y = y.data(), .stride = stride, .weight = norm_weight.data(), .C = s.C, .eps = 1e-5f};
  }
  Choose choose() { return {logits.data(), chosen.data(), weights.data(), s.T, s.E, s.k}; }
  Route route() {
    return {.x = y.data(),
            .w = router.data(),
            .bias = bias.data(),
            .logits = logits.data(),
            .stride = stride,
            .row_tile_bytes = int64_t(tiles) * 2048,
            .T = s.T,
            .E = s.E,
            .C = s.C,
            .weight_tiles = tiles,
            .arrived = arrived.data(),
            .choose = choose()};
  }
  Places places() {
    return {.chosen = chosen.data(),
            .place = place.data(),
            .offsets = offsets.data(),
            .S = S,
            .E = s.E,
            .count = &s.count,
            .k = s.k};
  }
  void place_and_gather() {
    gpu::launch("places", place_and_gather_kernel, {.grid = s.T, .block = kThreads}, {},
                PlaceAndGather{places(), Gather{y.data(), gathered.data(), place.data(), stride, s.k}});
  }
  void run_kernels() {
    Norm n = norm();
    if (s.halves) n.down = down.data(), n.place = half_rows.data(), n.weights = ones.data(), n.k = 2;
    gpu::launch("norm", norm_kernel, {.grid = s.T, .block = kThreads}, {}, n);
    const int64_t blocks = (s.E + kRouted - 1) / kRouted * ((s.T + kRouted - 1) / kRouted);
    gpu::launch("router", route_kernel, {.grid = blocks, .block = kRouteThreads}, {}, route());
    place_and_gather();
  }
  void run_cluster() {
    const bool one = s.T <= kRouted;
    gpu::launch(
        "router", route_rows_kernel,
        {.grid = (s.T + kRouted - 1) / kRouted * kRouteCluster, .block = kRouteRowsThreads, .cluster = kRouteCluster},
        {}, RouteRows{norm(), s.halves ? down.data() : nullptr, route(), places(), one ? gathered.data() : nullptr});
    if (!one) place_and_gather();
  }
  std::vector<float> row(uint32_t at) const {
    std::vector<float> v;
    for (uint32_t c = 0; c < s.C; ++c) v.push_back(float(gathered[size_t(at) * stride + c]));
    return v;
  }
};

TEST(BatchRouterEmulated, OneKernelOfClustersHasTheBitsOfTheKernelsOfEachPart) {
  const Sizes cases[] = {
      {16, 16, 2880, 32, 4, true},                               // GPT-OSS-20B
      {16, 13, 2880, 128, 4, true},  {13, 9, 196, 12, 2, true},  // columns beyond C, experts beyond E, rows beyond T
      {1, 1, 96, 6, 2, false},                                   // one row and fewer weight tiles than parts of K
      {24, 17, 2048, 128, 8, false},                             // two clusters
      {35, 35, 3072, 40, 16, true},
  };
  for (const Sizes& s : cases) {
    SCOPED_TRACE(::testing::Message() << s.T << " rows of " << s.C << " columns, " << s.E << " experts");
    Step want(s), got(s);
    want.run_kernels(), got.run_cluster();
    EXPECT_EQ(got.x, want.x);
    EXPECT_EQ(got.chosen, want.chosen);
    EXPECT_EQ(got.weights, want.weights);
    EXPECT_EQ(got.place, want.place);
    EXPECT_EQ(got.offsets, want.offsets);
    EXPECT_EQ(got.offsets[s.E], int32_t(s.count * s.k));
    for (uint32_t i = 0; i < want.S; ++i) ASSERT_EQ(got.row(i), want.row(i)) << "row " << i;
  }
}

TEST(BatchRouter, SizesBeyondTheClustersSharedMemoryAreRefused) {
  EXPECT_TRUE(takes_route_rows(2880, 2880, 128, 4));
  EXPECT_TRUE(takes_route_rows(3072, 3072, 128, 16));
  EXPECT_FALSE(takes_route_rows(3136, 3136, 32, 4));
  EXPECT_FALSE(takes_route_rows(2880, 2880, 129, 4));
  EXPECT_FALSE(takes_route_rows(2880, 2880, 32, 17));
  EXPECT_FALSE(takes_route_rows(2882, 2944, 32, 4));
}

}  // namespace
}  // namespace ingot
