#include "ingot/core/arena.h"

#include <gtest/gtest.h>

#include "ingot/core/rng.h"

namespace ingot {
namespace {

TEST(arena_plan, buffers_alive_together_never_overlap) {
  const Rng rng(7, Purpose::test);
  for (uint64_t round = 0; round < 50; ++round) {
    ArenaPlan plan;
    struct Life {
      int64_t bytes;
      int first, last;
    };
    std::vector<Life> lives;
    for (uint64_t i = 0; i < 60; ++i) {
      const uint64_t at = round * 1000 + i * 3;
      const int first = int(rng.below(at, 40));
      lives.push_back({int64_t(rng.below(at + 1, 5000)) + 1, first, first + int(rng.below(at + 2, 15))});
      plan.add(lives.back().bytes, first, lives.back().last);
    }
    plan.solve();
    EXPECT_LE(plan.total_bytes(), plan.sum_of_sizes());
    for (int a = 0; a < int(lives.size()); ++a) {
      EXPECT_LE(plan.offset(a) + lives[size_t(a)].bytes, plan.total_bytes());
      for (int b = 0; b < a; ++b) {
        const Life &x = lives[size_t(a)], &y = lives[size_t(b)];
        if (x.first > y.last || y.first > x.last) continue;
        EXPECT_TRUE(plan.offset(a) + x.bytes <= plan.offset(b) || plan.offset(b) + y.bytes <= plan.offset(a));
      }
    }
  }
}

TEST(arena, refuses_to_go_beyond_its_bound) {
  Arena arena(1024);
  const Tensor t = arena.take(DType::f32, {10, 10});
  EXPECT_EQ(t.ptr<float>()[99], 0);
  EXPECT_THROW(arena.take(DType::f64, {100}), Error);
}

}  // namespace
}  // namespace ingot
