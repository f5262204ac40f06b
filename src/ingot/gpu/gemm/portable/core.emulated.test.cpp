// The cases of core_cases.test.h on the CPU, under sanitizers.
#include "ingot/gpu/gemm/portable/core_cases.test.h"
#include "ingot/testing/emulated_buffer.h"

namespace ingot::gemm {
namespace {

using Storage = testing::EmulatedBuffer;

TEST(PortableCoreEmulated, EveryOrderOfOperandsAndEveryType) { cases::portable_majors_and_types<Storage>(); }
TEST(PortableCoreEmulated, AddsToValuesInMemory) { cases::portable_adds<Storage>(); }
TEST(PortableCoreEmulated, WithoutKTheSumsAreZero) { cases::portable_without_k<Storage>(); }
TEST(PortableCoreEmulated, ATriangleIsHalfOfTheWork) { cases::portable_triangle<Storage>(); }
TEST(PortableCoreEmulated, PairsOfMatrices) { cases::portable_pairs<Storage>(); }
TEST(PortableCoreEmulated, RefusesUnalignedOperands) { cases::portable_refuses_unaligned_operands<Storage>(); }

}  // namespace
}  // namespace ingot::gemm
