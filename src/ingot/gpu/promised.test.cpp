#include "ingot/gpu/promised.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

TEST(promised, a_gpu_is_known_by_its_driver_s_name) {
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA H200"), 989.4e12);
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA H100 80GB HBM3"), 989.4e12);
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA GH200 480GB"), 989.4e12);
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(gpu::promised_bf16_flops("NVIDIA H20"), 148e12);
  EXPECT_EQ(gpu::promised_bf16_flops("an emulated GPU"), 0);
}

}  // namespace
}  // namespace ingot
