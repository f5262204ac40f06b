// The portable kernels on the CPU, under sanitizers: every format and width, with and without a gate.
#include <numeric>

#include "ingot/kernels/grouped/grouped_cases.test.h"
#include "ingot/kernels/grouped/launch.h"
#include "ingot/kernels/grouped/portable/portable.h"
#include "ingot/testing/emulated_buffer.h"

namespace ingot {
namespace {

using grouped_cases::Form;

void check(WeightFormat f, const std::vector<int32_t>& offsets, int64_t n, int64_t k, Form form) {
  grouped_cases::check<testing::EmulatedBuffer>(f, offsets, n, k, form);
}

class GroupedEmulated : public ::testing::TestWithParam<WeightFormat> {};
INSTANTIATE_TEST_SUITE_P(, GroupedEmulated,
                         ::testing::Values(WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Of every GPU from compute capability 8.0 on; the smallest have 99 KB.
TEST_P(GroupedEmulated, EveryWidthFitsTheSharedMemoryOfEveryGpu) {
  using namespace cuda::grouped_portable;
  const WeightFormat f = GetParam();
  for (const int width : {16, 48, 96, 128, 176})
    for (const bool gated : {false, true}) {
      const Kernel kernel = f == WeightFormat::bf16  ? kernel_of<WeightFormat::bf16>(width, gated)
                            : f == WeightFormat::fp8 ? kernel_of<WeightFormat::fp8>(width, gated)
                                                     : kernel_of<WeightFormat::mxfp4>(width, gated);
      EXPECT_LE(kernel.smem, gpu::limits_of("8.6").smem_per_block) << width << " rows, gated " << gated;
    }
}

// Groups without rows, more row tiles than a tile has, and steps that end beyond the matrix.
TEST_P(GroupedEmulated, EveryWidthAgreesWithFp64) {
  const WeightFormat f = GetParam();
  check(f, {0, 0, 5, 22, 22, 30}, 40, 96, Form::adds);  // 16 rows of x
  check(f, {0, 20, 43, 43}, 264, 64, Form::gated);      // 48
  check(f, {0, 50, 150}, 24, 224, Form::plain);         // 96, and a ring that wraps around
  check(f, {0, 13}, 40, 32, Form::gated);
  check(f, {0, 100}, 40, 96, Form::gated);
  check(f, {0, 400, 760}, 24, 160, Form::adds);  // the widest
  check(f, {0, 390, 780}, 40, 96, Form::gated);
}

// A ring goes on from tile to tile, a tile without some of its rows follows and precedes a whole one, and blocks claim
// the tiles of several groups.
TEST_P(GroupedEmulated, BlocksComputeSeveralTiles) {
  const WeightFormat f = GetParam();
  gpu::Limits few = gpu::current_limits();
  few.sms = 2;
  const auto check_few = [&](const std::vector<int32_t>& offsets, int64_t n, int64_t k, Form form) {
    grouped_cases::check<testing::EmulatedBuffer>(
        f, offsets, n, k, form, [&](const GroupedLinear& a, Stream stream) { grouped::launch(a, few, stream); });
  };
  check_few({0, 400, 400, 1203}, 264, 224, Form::gated);
  check_few({0, 400, 400, 1203}, 264, 32, Form::adds);  // a single step
  check_few({0, 530}, 264, 160, Form::plain);
  check_few({0, 20, 50, 150, 190}, 520, 96, Form::gated);
  std::vector<int32_t> many(300);  // more offsets than shared memory holds
  std::iota(many.begin(), many.end(), 0);
  check_few(many, 24, 96, Form::plain);
}

}  // namespace
}  // namespace ingot
