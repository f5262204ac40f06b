// The portable kernels on the CPU, under sanitizers: every format and width, with and without a gate.
#include "ingot/kernels/grouped/grouped_cases.test.h"
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

// Groups without rows, more row tiles than a tile has, and steps that end beyond the matrix.
TEST_P(GroupedEmulated, EveryWidthAgreesWithFp64) {
  const WeightFormat f = GetParam();
  check(f, {0, 0, 5, 22, 22, 30}, 40, 96, Form::adds);  // 16 rows of x
  check(f, {0, 20, 43, 43}, 264, 64, Form::gated);      // 48
  check(f, {0, 50, 150}, 24, 224, Form::plain);         // 96, and a ring that wraps around
  check(f, {0, 13}, 40, 32, Form::gated);
  check(f, {0, 100}, 40, 96, Form::gated);
  check(f, {0, 400}, 24, 160, Form::adds);  // 192, except for bf16
  check(f, {0, 390}, 40, 96, Form::gated);
}

}  // namespace
}  // namespace ingot
