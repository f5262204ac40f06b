// The row kernel on a GPU: a row has the same bits beside any other rows of its step, and differs from the phased path
// by roundings only.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/testing/hopper_test.h"

namespace ingot {
namespace {

using decode::DeviceModel;

class RowKernelCuda : public testing::HopperTest<> {};

std::vector<float> row_of(DeviceModel& gpu, int slot) {
  std::vector<float> row(static_cast<size_t>(gpu.config().vocab));
  gpu.logits(1, row.data(), slot);
  return row;
}
double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t v = 0; v < want.size(); ++v)
    error += std::pow(double(got[v]) - double(want[v]), 2), size += std::pow(double(want[v]), 2);
  return std::sqrt(error / size);
}

TEST_F(RowKernelCuda, SequencesOfThePublishedShapesRepeatBitForBitBesideAnyOtherSequences) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr int kSlots = 8, kRuns = 30;
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(name_of(dense));
    const GptOssConfig c = testing::published_config(4, 32, 2000);
    DeviceModel gpu(c, decode::shapes_of(c, dense, WeightFormat::mxfp4),
                    {.context = 4096, .slots = kSlots, .megakernel = false}, 5);
    std::vector<int32_t> ids(kSlots);
    testing::fill_ids(Tensor(ids.data(), {kSlots}), 4, c.vocab);
    const auto step = [&](const std::vector<int>& slots) {
      std::vector<int32_t> first;
      for (const int slot : slots) gpu.fill_cache_with_random(1 + 431 * slot, slot), first.push_back(ids[size_t(slot)]);
      gpu.extend_sequences(slots, first);
    };
    const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
    step(all);
    std::vector<std::vector<float>> phased;
    for (const int slot : all) phased.push_back(row_of(gpu, slot));
    ASSERT_TRUE(gpu.use_row_kernel(decode::RowKernelUse::all));
    std::map<int, std::vector<float>> seen;
    for (const int T : {8, 5, 4, 3, 2})
      for (int run = 0; run < kRuns; ++run) {
        std::vector<int> slots;
        for (int j = 0; j < T; ++j) slots.push_back((5 * j + T + run) % kSlots);
        step(slots);
        for (const int slot : slots) {
          const std::vector<float> row = row_of(gpu, slot), &before = seen.try_emplace(slot, row).first->second;
          ASSERT_EQ(std::memcmp(row.data(), before.data(), row.size() * 4), 0)
              << "slot " << slot << " in a step of " << T << ", run " << run;
          EXPECT_EQ(gpu.likeliest(slot), std::max_element(row.begin(), row.end()) - row.begin());
        }
      }
    std::vector<double> errors;
    for (const int slot : all) errors.push_back(relative_error(seen.at(slot), phased[size_t(slot)]));
    std::sort(errors.begin(), errors.end());
    std::printf("dense %s: of the phased path the rows differ by %.4f in the median, %.4f at most\n", name_of(dense),
                errors[kSlots / 2], errors.back());
    EXPECT_LT(errors[kSlots / 2], 0.03);  // a near tie may choose another expert for some row
  }
}

// Tokens of one sequence, in steps of different sizes.
TEST_F(RowKernelCuda, TokensOfOneSequenceDoNotDependOnHowTheyAreDividedAmongSteps) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(4, 32, 2000);
  DeviceModel gpu(c, decode::shapes_of(c, WeightFormat::bf16, WeightFormat::mxfp4), {.context = 4096}, 5);
  std::vector<int32_t> ids(16);
  testing::fill_ids(Tensor(ids.data(), {16}), 4, c.vocab);
  ASSERT_TRUE(gpu.use_row_kernel(decode::RowKernelUse::all));
  std::vector<float> want;
  for (const std::vector<size_t>& sizes :
       std::vector<std::vector<size_t>>{{8, 8}, {2, 3, 4, 7}, {5, 6, 3, 2}, {2, 2, 2, 2, 2, 2, 2, 2}}) {
    gpu.fill_cache_with_random(1000);
    std::vector<float> rows;
    size_t at = 0;
    for (const size_t n : sizes) {
      gpu.extend(std::span(ids).subspan(at, n), uint32_t(n));
      std::vector<float> some(n * size_t(c.vocab));
      gpu.logits(uint32_t(n), some.data());
      rows.insert(rows.end(), some.begin(), some.end());
      at += n;
    }
    if (want.empty()) want = rows;
    EXPECT_EQ(std::memcmp(rows.data(), want.data(), rows.size() * 4), 0)
        << "steps of " << ::testing::PrintToString(sizes);
  }
}

}  // namespace
}  // namespace ingot
#endif
