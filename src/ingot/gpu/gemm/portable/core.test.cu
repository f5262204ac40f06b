// The cases of core_cases.test.h on a GPU of any generation.
#include "ingot/gpu/gemm/portable/core_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::gemm {
namespace {

using Storage = testing::DeviceBuffer;
class PortableCoreCuda : public testing::GpuTest<> {};

TEST_F(PortableCoreCuda, EveryOrderOfOperandsAndEveryTypeSmall) {
  cases::with_both_heights(cases::portable_majors_and_types<Storage>);
}
TEST_F(PortableCoreCuda, AddsToValuesInMemorySmall) { cases::with_both_heights(cases::portable_adds<Storage>); }
TEST_F(PortableCoreCuda, WithoutKTheSumsAreZeroSmall) { cases::with_both_heights(cases::portable_without_k<Storage>); }
TEST_F(PortableCoreCuda, ATriangleIsHalfOfTheWorkSmall) { cases::portable_triangle<Storage>(); }
TEST_F(PortableCoreCuda, PairsOfMatricesSmall) { cases::with_both_heights(cases::portable_pairs<Storage>); }
TEST_F(PortableCoreCuda, RefusesUnalignedOperands) { cases::portable_refuses_unaligned_operands<Storage>(); }

}  // namespace
}  // namespace ingot::gemm
