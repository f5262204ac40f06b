// The requests of a launch to the device.
#include <gtest/gtest.h>

#include <thread>

#include "ingot/gpu/launch.h"
#include "ingot/testing/device_array.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::DeviceArray;

class SharedMemoryCuda : public testing::GpuTest<> {};

constexpr int kDeclaredWords = 256;

// The sum of 0, 1, ... words - 1, by way of the first and the last word of the dynamic shared memory. `kUse`
// distinguishes kernels without an earlier request.
template <int kUse> __global__ void sum_of_words(uint32_t* sum, uint32_t words) {
  __shared__ uint32_t declared[kDeclaredWords];
  extern __shared__ uint32_t dynamic[];
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) dynamic[i] = i;
  declared[threadIdx.x] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) declared[threadIdx.x] += dynamic[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    *sum = 0;
    for (uint32_t i = 0; i < blockDim.x; ++i) *sum += declared[i];
  }
}

template <int kUse> void ask(int64_t bytes) {
  gpu::allow_smem("sum of words", reinterpret_cast<const void*>(sum_of_words<kUse>), gpu::current_device(), bytes);
}
template <int kUse> uint32_t launched_with(int64_t bytes) {
  ask<kUse>(bytes);
  DeviceArray<uint32_t> sum(1);
  gpu::launch("sum of words", sum_of_words<kUse>, {.grid = 1, .block = kDeclaredWords, .smem = bytes}, {}, sum.device(),
              uint32_t(bytes / 4));
  sum.download();
  return sum.host[0];
}
uint32_t sum_below(int64_t words) { return uint32_t(words * (words - 1) / 2); }

// The error of a launch of a kernel without code for the GPU.
TEST_F(SharedMemoryCuda, AGpuWithoutABuiltKernelIsNamed) {
  try {
    gpu::check_cuda(cudaErrorNoKernelImageForDevice, "rope: launch");
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    const gpu::DeviceInfo info = gpu::device_info();
    EXPECT_EQ(e.code, ErrorCode::unsupported);
    EXPECT_EQ(std::string(e.what()), "rope: launch: found a GPU of compute capability " + std::to_string(info.major) +
                                         '.' + std::to_string(info.minor) +
                                         ", for which this build has no code of the kernel");
  }
}

int64_t most_bytes() { return gpu::limits(gpu::current_device()).smem_per_block - kDeclaredWords * 4; }

// The bandwidths reported by drivers of Hopper GPUs: an H100's 3.35 TB/s, an H200's 4.9, a PCIe card's 2.
TEST_F(SharedMemoryCuda, TheMemorysBandwidthIsKnownAndKept) {
  const double found = gpu::memory_bandwidth(0);
  EXPECT_GT(found, 1e12);
  EXPECT_LT(found, 1e13);
  EXPECT_EQ(gpu::memory_bandwidth(0), found);
}
TEST_F(SharedMemoryCuda, TheLargestAmountOfABlockIsAllowedAndOneByteMoreIsRefused) {
  const int64_t most = most_bytes();
  EXPECT_EQ(launched_with<0>(most), sum_below(most / 4));
  EXPECT_THROW(ask<0>(most + 1), Error);
  EXPECT_THROW(ask<1>(int64_t(1) << 40), Error);
  EXPECT_EQ(launched_with<1>(1024), sum_below(256)) << "a refusal leaves nothing pending";
}

TEST_F(SharedMemoryCuda, ASmallerRequestOfAThreadDoesNotLowerTheLimitOfAnotherThread) {
  const int64_t most = most_bytes(), less = int64_t(40) << 10;
  EXPECT_EQ(launched_with<2>(most), sum_below(most / 4));
  std::thread([&] { EXPECT_EQ(launched_with<2>(less), sum_below(less / 4)); }).join();
  EXPECT_EQ(launched_with<2>(most), sum_below(most / 4)) << "this thread does not ask again";
}

TEST_F(SharedMemoryCuda, KernelsInTurnKeepTheirOwnLimits) {
  const int64_t most = most_bytes();
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(launched_with<3>(most), sum_below(most / 4));
    EXPECT_EQ(launched_with<4>(most), sum_below(most / 4));
  }
}

}  // namespace
}  // namespace ingot
