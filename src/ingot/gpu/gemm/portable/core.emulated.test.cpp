// The cases of core_cases.test.h on the CPU, under sanitizers.
#include "ingot/gpu/gemm/portable/core_cases.test.h"
#include "ingot/testing/emulated_buffer.h"

namespace ingot::gemm {
namespace {

using Storage = testing::EmulatedBuffer;

TEST(PortableCoreEmulated, EveryOrderOfOperandsAndEveryType) {
  cases::with_both_heights(cases::portable_majors_and_types<Storage>);
}
TEST(PortableCoreEmulated, AddsToValuesInMemory) { cases::with_both_heights(cases::portable_adds<Storage>); }
TEST(PortableCoreEmulated, WithoutKTheSumsAreZero) { cases::with_both_heights(cases::portable_without_k<Storage>); }
TEST(PortableCoreEmulated, ATriangleIsHalfOfTheWork) { cases::portable_triangle<Storage>(); }
TEST(PortableCoreEmulated, PairsOfMatrices) { cases::with_both_heights(cases::portable_pairs<Storage>); }
TEST(PortableCoreEmulated, ABlockComputesTwoTilesWhereThatTakesLessTime) {
  const auto pairs = [](const Problem& size, const gpu::Limits& limits) {
    return portable::pairs_tiles(Grid::of(size, kPortableTile), 144 * 1024, limits);
  };
  const gpu::Limits hopper = gpu::limits_of("9.0");
  const Problem square{4096, 4096, 4096};  // 3.9 waves
  for (const char* capability : {"8.0", "10.0"})
    EXPECT_TRUE(pairs(square, gpu::imitate(hopper, gpu::limits_of(capability)))) << capability;
  for (const char* capability : {"8.6", "8.9", "12.0"})  // 99 KB of shared memory
    EXPECT_FALSE(pairs(square, gpu::limits_of(capability))) << capability;
  EXPECT_FALSE(pairs({128, 128 * 500, 4096}, hopper));  // a single row of tiles
  EXPECT_FALSE(pairs({4096, 4096, 1024}, hopper));      // the epilogue counts
  EXPECT_FALSE(pairs({1024, 1024, 4096}, hopper));      // a block of one tile for each multiprocessor
  EXPECT_FALSE(pairs({384, 128 * 200, 4096}, hopper));  // half of every second block would be empty
}
TEST(PortableCoreEmulated, RefusesUnalignedOperands) { cases::portable_refuses_unaligned_operands<Storage>(); }

}  // namespace
}  // namespace ingot::gemm
