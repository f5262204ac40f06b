// Ranks with a GPU each, as threads of a process.
#include "ingot/gpu/nccl.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/comm/ranks.test.h"
#include "ingot/gpu/device.h"

namespace ingot {
namespace {

constexpr double kDeadline = 60;

// Skips the test, and says why, without several GPUs or without NCCL.
class NcclCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu::device_count() < 2) GTEST_SKIP() << "found " << gpu::device_count() << " GPUs, expected at least 2";
    if (!gpu::nccl_available()) GTEST_SKIP() << gpu::nccl_version();
  }
  static int world() { return gpu::device_count(); }
};

template <class T> std::vector<T> numbers_of(int rank, int64_t n) {
  std::vector<T> x(static_cast<size_t>(n));
  uint64_t state = 0x9e3779b97f4a7c15 * uint64_t(rank + 1);
  for (T& v : x) {
    state = state * 6364136223846793005 + 1442695040888963407;
    v = T(double(state >> 11) * 0x1p-53 - 0.5);
  }
  return x;
}

// Numbers of this rank on its GPU.
template <class T> class OnGpu {
 public:
  OnGpu(int rank, int64_t n) : memory_(std::max<int64_t>(1, n * int64_t(sizeof(T)))), n_(n), device_(rank) {
    const std::vector<T> x = numbers_of<T>(rank, n);
    gpu::copy_to_device(memory_.data(), x.data(), n * int64_t(sizeof(T)));
  }
  Tensor tensor() const { return Tensor(static_cast<T*>(memory_.data()), {n_}, {Device::cuda, device_}); }
  std::vector<T> host() const {
    std::vector<T> x(static_cast<size_t>(n_));
    gpu::copy_to_host(x.data(), memory_.data(), n_ * int64_t(sizeof(T)));
    return x;
  }

 private:
  gpu::DeviceMemory memory_;
  int64_t n_;
  int device_;
};

// A sum of W numbers of at most 1/2, in any order, differs from the exact sum by at most W - 1 roundings of numbers of
// at most W / 2. Two numbers have a single order.
template <class T> void check_calls(int world) {
  const double ulp = sizeof(T) == 4 ? 0x1p-24 : 0x1p-53;
  const double bound = world == 2 ? 0 : world * world / 2.0 * ulp;
  for (const int64_t n : {int64_t(0), int64_t(1), int64_t(4096), int64_t(100003)}) {
    std::vector<T> sum = numbers_of<T>(0, n);
    for (int r = 1; r < world; ++r) {
      const std::vector<T> x = numbers_of<T>(r, n);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
    }
    std::vector<std::vector<T>> results(static_cast<size_t>(world));
    const std::vector<std::string> errors = testing::run_ranks(world, kDeadline, [&](SocketCommunicator& sockets) {
      const int rank = sockets.rank();
      const gpu::DeviceGuard guard(rank);
      gpu::NcclCommunicator ranks(sockets, rank);
      gpu::OwnedStream stream;
      const OnGpu<T> whole(rank, n), shared(rank, n), sent(rank, n);
      ranks.all_reduce(whole.tensor(), stream);
      // Both code paths: parts of equal length where the length divides, and a part with nearly all numbers.
      Parts parts = even_parts(n, world);
      if (n % 2 == 1) parts = Parts(static_cast<size_t>(world), 0), parts.push_back(n);
      ranks.reduce_scatter(shared.tensor(), parts, stream);
      ranks.all_gather(shared.tensor(), parts, stream);
      ranks.broadcast(sent.tensor(), world - 1, stream);
      ranks.wait(stream);
      results[size_t(rank)] = whole.host();
      const std::vector<T> gathered = shared.host();
      for (size_t i = 0; i < sum.size(); ++i) {
        ASSERT_NEAR(results[size_t(rank)][i], sum[i], bound) << i;
        ASSERT_NEAR(gathered[i], sum[i], bound) << i;
      }
      EXPECT_EQ(sent.host(), numbers_of<T>(world - 1, n));
    });
    for (const std::string& e : errors) EXPECT_EQ(e, "");
    for (const auto& r : results) EXPECT_EQ(r, results[0]) << n;  // the same bits on each
  }
}

TEST_F(NcclCuda, SumsPartsAndBroadcastsEqualTheHosts) {
  check_calls<float>(world());
  check_calls<double>(world());
}

TEST_F(NcclCuda, ARankThatEndsAlsoEndsTheWaitsOfTheRemainingRanks) {
  const std::vector<std::string> errors = testing::run_ranks(2, kDeadline, [&](SocketCommunicator& sockets) {
    const gpu::DeviceGuard guard(sockets.rank());
    gpu::NcclCommunicator ranks(sockets, sockets.rank());
    gpu::OwnedStream stream;
    const OnGpu<float> x(sockets.rank(), 1 << 20);
    ranks.all_reduce(x.tensor(), stream);
    ranks.wait(stream);
    if (sockets.rank() == 1) throw Error(ErrorCode::io, "this rank's end");
    ranks.all_reduce(x.tensor(), stream);
    ranks.wait(stream);
  });
  EXPECT_EQ(errors[1], "this rank's end");
  EXPECT_NE(errors[0].find("rank 1 went away"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace ingot
