// Compares an adapter whose first product is joined to other adapters' products with the same adapters one by one.
#include "ingot/models/gpt/adapters/adapter.h"

#include <gtest/gtest.h>

#include "ingot/testing/testing.h"

namespace ingot::detail {
namespace {

struct Made {
  explicit Made(Shape shape, uint64_t seed = 0) : memory(size_t(shape.numel()), NAN), t(memory.data(), shape) {
    if (seed > 0) testing::fill_normal(t, seed, 1);
  }
  std::vector<double> memory;
  Tensor t;
};

// W has the rows of two adapters; the rider has a different output.
struct Case {
  static constexpr int64_t kIn = 6, kOut = 8, kSplit = 5, kRiderOut = 7, kRank = 3, kWide = kOut + 5;
  std::vector<int32_t> cu = {0, 12, 24, 33};
  int64_t S = 3, T = 33;
  Made x{{T, kIn}, 1}, w{{kOut, kIn}, 2}, dy{{T, kWide}, 3}, drider{{T, kRiderOut}, 4};
  Made a1{{S, kRank, kIn}, 5}, b1{{S, kSplit, kRank}, 6}, a2{{S, kRank, kIn}, 7}, b2{{S, kOut - kSplit, kRank}, 8};
  Made ar{{S, kRank, kIn}, 9}, br{{S, kRiderOut, kRank}, 10};
  AdapterPair first{a1.t, b1.t}, second{a2.t, b2.t}, rider{ar.t, br.t};

  struct Found {
    Made y{{33, kWide}}, out{{33, kRiderOut}, 11}, dx{{33, kIn}}, low{{33, kRank}}, low_grad{{33, kRank}};
    Made da1{{3, kRank, kIn}}, db1{{3, kSplit, kRank}}, da2{{3, kRank, kIn}}, db2{{3, kOut - kSplit, kRank}};
    Made dar{{3, kRank, kIn}}, dbr{{3, kRiderOut, kRank}};
    std::vector<double> of_w;  // the columns of y that belong to W
  };
  // keeps: the backward pass uses the folded matrices of the forward pass; of_input: dx is requested.
  Found run(bool rides, bool keeps = false, bool of_input = true) {
    Found f;
    Made scratch({T, kRank}), scratch_grad({T, kRank}), folded({S * (kOut + kRank) * kIn});
    Made folded_again({S * (kOut + kRank) * kIn});
    AdapterPair g1{f.da1.t, f.db1.t}, g2{f.da2.t, f.db2.t}, gr{f.dar.t, f.dbr.t};
    const auto call = [&](AdapterPair& pair, AdapterPair& grad) {
      return AdapterCall{.pair = &pair,
                         .grad = &grad,
                         .cu = cu,
                         .low = scratch.t,
                         .low_grad = scratch_grad.t,
                         .write_grad = true,
                         .folded = folded.t};
    };
    AdapterCall both[] = {call(first, g1), call(second, g2)};
    EXPECT_TRUE(adapters_fold(both[0], w.t, kRank));
    EXPECT_FALSE(adapters_fold(both[0], w.t, kRank + 1)) << "there is no room for more";
    AdapterCall beside = call(rider, gr);
    beside.low = f.low.t, beside.low_grad = f.low_grad.t, beside.low_kept = true;
    Made dys = dy;
    dys.t = Tensor(dys.memory.data(), {T, kWide});
    const auto columns = [&](Made& m, int64_t n) { return m.t.slice(1, 0, n); };
    if (rides) {
      beside.rides = true;
      beside.low = f.y.t.slice(1, kOut, kOut + kRank), beside.low_grad = dys.t.slice(1, kOut, kOut + kRank);
    }
    const int64_t wide = rides ? kOut + kRank : kOut;
    adapted_linear(both, x.t, w.t, columns(f.y, wide), rides ? &rider : nullptr);
    adapter_forward(beside, x.t, f.out.t, true);
    if (keeps) both[0].kept = folded.t, both[0].folded = both[1].folded = folded_again.t;
    const Tensor dx = of_input ? f.dx.t : Tensor();
    if (rides) adapter_backward(beside, x.t, drider.t, dx, true);
    adapted_linear_backward(both, x.t, w.t, Tensor(), columns(dys, wide), dx, false, rides ? &beside : nullptr);
    if (!rides) adapter_backward(beside, x.t, drider.t, dx, true);
    for (int64_t t = 0; t < T; ++t)
      f.of_w.insert(f.of_w.end(), f.y.memory.begin() + t * kWide, f.y.memory.begin() + t * kWide + kOut);
    return f;
  }
};

TEST(gpt_adapter, an_adapter_computed_with_others_gives_the_same_results_and_gradients) {
  Case k;
  const Case::Found alone = k.run(false), riding = k.run(true);
  const auto near = [](const char* what, const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-11) << what << " at " << i;
  };
  near("y", riding.of_w, alone.of_w);
  near("the rider's output", riding.out.memory, alone.out.memory);
  near("dx", riding.dx.memory, alone.dx.memory);
  near("dA", riding.da1.memory, alone.da1.memory), near("dA", riding.da2.memory, alone.da2.memory);
  near("dB", riding.db1.memory, alone.db1.memory), near("dB", riding.db2.memory, alone.db2.memory);
  near("the rider's dA", riding.dar.memory, alone.dar.memory);
  near("the rider's dB", riding.dbr.memory, alone.dbr.memory);
  for (const double v : riding.dar.memory) ASSERT_TRUE(std::isfinite(v));
}

TEST(gpt_adapter, kept_weights_and_an_unread_gradient_change_no_bit_of_the_other_gradients) {
  Case k;
  for (const bool rides : {false, true}) {
    const Case::Found plain = k.run(rides), kept = k.run(rides, true), unread = k.run(rides, true, false),
                      formed = k.run(rides, false, false);
    EXPECT_EQ(kept.dx.memory, plain.dx.memory);
    for (const Case::Found* f : {&kept, &unread, &formed})
      for (const auto gradient : {&Case::Found::da1, &Case::Found::da2, &Case::Found::db1, &Case::Found::db2,
                                  &Case::Found::dar, &Case::Found::dbr})
        EXPECT_EQ((f->*gradient).memory, (plain.*gradient).memory);
    for (const double v : unread.dx.memory) ASSERT_TRUE(std::isnan(v));
  }
}

}  // namespace
}  // namespace ingot::detail
