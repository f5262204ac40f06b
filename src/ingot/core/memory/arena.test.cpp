#include "ingot/core/memory/arena.h"

#include <gtest/gtest.h>

#include "ingot/core/memory/memory.h"
#include "ingot/core/rng.h"
#include "ingot/testing/poisoned_memory.h"

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

TEST(arena, takes_memory_from_its_allocator_and_returns_it_once) {
  testing::PoisonedMemory memory;
  {
    Arena arena(1000, memory), other;
    EXPECT_EQ(memory.taken(), 1024);
    const Tensor t = arena.take(DType::f32, {10});
    EXPECT_NE(t.ptr<float>()[9], t.ptr<float>()[9]) << "poison is NaN";
    other = std::move(arena);
    EXPECT_EQ(other.used(), 64);
    EXPECT_EQ(arena.capacity(), 0);
  }
  EXPECT_EQ(memory.taken(), 0);
}

// An allocator of a second device, never read here.
struct Elsewhere final : Allocator {
  Device device() const override { return {Device::cuda, 3}; }
  void* take(int64_t) override { return this; }
  void give_back(void*, int64_t) noexcept override {}
  int64_t available() const override { return 1000; }
};
TEST(arena, tensors_lie_on_the_device_of_its_allocator) {
  Elsewhere gpu;
  const Arena arena(4096, gpu);
  EXPECT_EQ(arena.at(64, DType::f32, {4}).device, (Device{Device::cuda, 3}));
  try {
    require_memory(4096, "this test", gpu);
    FAIL() << "more than there is was not refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("of memory on cuda:3, found"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ingot
