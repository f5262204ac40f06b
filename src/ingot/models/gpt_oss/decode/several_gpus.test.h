#pragma once
// Tests over as many GPUs as their parameter says, in a build whose GPUs are the emulator's too.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ingot/gpu/device.h"
#include "ingot/models/gpt_oss/decode/device_model.test.h"
#include "ingot/models/gpt_oss/decode/ranked_model.h"
#include "ingot/testing/gpu_test.h"
#ifdef INGOT_EMULATED_DEVICE
#include "ingot/gpu/emulation/grid.h"
#endif

namespace ingot::testing {

class SeveralGpus : public GpuTest<::testing::TestWithParam<int>> {
 protected:
  void SetUp() override {
#ifdef INGOT_EMULATED_DEVICE
    emulation::pretend_devices(ranks());
#endif
    GpuTest<::testing::TestWithParam<int>>::SetUp();
    if (const std::string misfit = gpt_oss_decode::ranks_misfit(ranks()); !misfit.empty()) GTEST_SKIP() << misfit;
  }
#ifdef INGOT_EMULATED_DEVICE
  void TearDown() override { emulation::pretend_devices(1); }
#endif

  static int ranks() { return GetParam(); }
};
inline std::string over_gpus(const ::testing::TestParamInfo<int>& gpus) { return "Over" + std::to_string(gpus.param); }

// Seconds of waiting: threads that stand for GPUs may have to wait for a core.
constexpr double kPatience = kEmulated ? 1000 : 2;

inline gpt_oss_decode::State state_of(const gpt_oss_decode::RankedModel& m, int rank) {
  return download(m.rank(rank).buffers().state, 1)[0];
}
inline std::vector<float> row_of(gpt_oss_decode::RankedModel& m) {
  std::vector<float> row(size_t(m.config().vocab));
  m.logits(1, row.data());
  return row;
}

}  // namespace ingot::testing
