// Each function for an instruction against plain code. wgmma and the copy engine have separate files.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/ptx/prefetch.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/testing/device_array.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::counting;
using testing::DeviceArray;

class PtxCuda : public testing::GpuTest<> {};

// --- memory and conversions

// Every way to read and to write global memory: a cache hint changes no result.
struct LoadStreaming {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const { ptx::load_streaming(p, w); }
};
struct LoadKeeping {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const { ptx::load_keeping(p, w); }
};
struct LoadKeepingL2 {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const { ptx::load_keeping_l2(p, w); }
};
struct LoadDropping {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const { ptx::load_dropping(p, w); }
};
struct LoadByShared {  // on the way through shared memory, by address
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const {
    __shared__ __align__(16) uint32_t there[64];
    const uint32_t at = ptx::shared_address(there + threadIdx.x * 4);
    uint32_t read[4];
    ptx::load_streaming(p, read);
    ptx::store_shared(at, read);
    ptx::load_shared(w, at);
  }
};
struct LoadAsyncKeeping {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const {
    __shared__ __align__(16) uint32_t there[64];
    const uint32_t at = ptx::shared_address(there + threadIdx.x * 4);
    ptx::cp_async_keeping(at, p);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::load_shared(w, at);
  }
};
struct LoadPrefetched {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const {
    ptx::prefetch_to_l2(p, 16);
    ptx::load_streaming(p, w);
  }
};
struct LoadPrefetchedKeeping {
  template <int N> __device__ void operator()(const void* p, uint32_t (&w)[N]) const {
    ptx::prefetch_to_l2_keeping(p, 16);
    ptx::load_keeping(p, w);
  }
};
struct StoreEvictFirst {
  template <int N> __device__ void operator()(void* p, const uint32_t (&w)[N]) const { ptx::store_evict_first(p, w); }
};
struct StoreStreaming {
  template <int N> __device__ void operator()(void* p, const uint32_t (&w)[N]) const { ptx::store_streaming(p, w); }
};

template <int N, class Load, class Store> __global__ void copy_words(const uint32_t* from, uint32_t* to) {
  uint32_t w[N];
  Load{}(from + threadIdx.x * N, w);
  Store{}(to + threadIdx.x * N, w);
}

TEST_F(PtxCuda, LoadsAndStoresWordsSmall) {
  struct Way {
    const char* name;
    int words;
    void (*copy)(const uint32_t*, uint32_t*);
  };
  const Way ways[] = {
      {"streaming", 1, copy_words<1, LoadStreaming, StoreEvictFirst>},
      {"streaming", 2, copy_words<2, LoadStreaming, StoreEvictFirst>},
      {"streaming", 4, copy_words<4, LoadStreaming, StoreEvictFirst>},
      {"stored streaming", 2, copy_words<2, LoadStreaming, StoreStreaming>},
      {"stored streaming", 4, copy_words<4, LoadStreaming, StoreStreaming>},
      {"keeping", 2, copy_words<2, LoadKeeping, StoreEvictFirst>},
      {"keeping", 4, copy_words<4, LoadKeeping, StoreEvictFirst>},
      {"keeping in L2", 2, copy_words<2, LoadKeepingL2, StoreEvictFirst>},
      {"keeping in L2", 4, copy_words<4, LoadKeepingL2, StoreEvictFirst>},
      {"dropping", 4, copy_words<4, LoadDropping, StoreEvictFirst>},
      {"through shared memory", 4, copy_words<4, LoadByShared, StoreEvictFirst>},
      {"asynchronous, keeping", 4, copy_words<4, LoadAsyncKeeping, StoreEvictFirst>},
      {"prefetched", 4, copy_words<4, LoadPrefetched, StoreEvictFirst>},
      {"prefetched, kept", 4, copy_words<4, LoadPrefetchedKeeping, StoreEvictFirst>},
  };
  const DeviceArray<uint32_t> from(counting(128));
  for (const Way& way : ways) {
    DeviceArray<uint32_t> to(128);
    gpu::launch("copy_words", way.copy, {.grid = 1, .block = 16}, {}, from.device(), to.device());
    to.download();
    for (size_t i = 0; i < 128; ++i)
      ASSERT_EQ(to.host[i], i < size_t(16 * way.words) ? from.host[i] : 0xffffffffu) << way.name << " " << way.words;
  }
}

template <class T> __global__ void convert_pairs(const float* x, uint32_t* packed, float* back) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  packed[i] = ptx::pack(T{}, x[2 * i], x[2 * i + 1]);
  ptx::unpack(T{}, packed[i], back[2 * i], back[2 * i + 1]);
}

template <class T> void check_conversions() {
  // Every bit pattern of the 16-bit type and, between neighbours, the midpoints where rounding decides.
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    T t, next;
    t.bits = uint16_t(bits);
    next.bits = uint16_t(bits + 1);
    if (std::isnan(float(t))) continue;
    x.push_back(float(t));
    const float middle = float(double(float(t)) / 2 + double(float(next)) / 2);
    x.push_back(std::isfinite(middle) ? middle : 0.f);
  }
  x.resize((x.size() + 511) / 512 * 512);
  const DeviceArray<float> from(x);
  DeviceArray<uint32_t> packed(x.size() / 2);
  DeviceArray<float> back(x.size());
  gpu::launch("convert_pairs", convert_pairs<T>, {.grid = int64_t(x.size() / 512), .block = 256}, {}, from.device(),
              packed.device(), back.device());
  packed.download();
  back.download();
  for (size_t i = 0; i < x.size(); ++i) {
    const T want(x[i]);
    ASSERT_EQ(packed.host[i / 2] >> (i % 2 * 16) & 0xffff, want.bits) << x[i];
    ASSERT_EQ(back.host[i], float(want)) << x[i];
  }
}
TEST_F(PtxCuda, ConvertsAsTheHostDoes) {
  check_conversions<bf16>();
  check_conversions<f16>();
}

__global__ void special_functions(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = ptx::exp2_approx(x[i]);
  y[n + i] = ptx::log2_approx(fabsf(x[i]));
  y[2 * n + i] = ptx::reciprocal_approx(x[i]);
  y[3 * n + i] = ptx::rsqrt_approx(fabsf(x[i]));
  y[4 * n + i] = ptx::sqrt_approx(fabsf(x[i]));
}
TEST_F(PtxCuda, ApproximatesWithinTheManualsErrors) {
  constexpr int kN = 40000;
  std::vector<float> x(kN);
  for (int i = 0; i < kN; ++i) x[size_t(i)] = float((i - kN / 2) * 0.004 + 0.001);
  const DeviceArray<float> from(x);
  DeviceArray<float> y(5 * kN);
  gpu::launch("special_functions", special_functions, {.grid = (kN + 255) / 256, .block = 256}, {}, from.device(),
              y.device(), kN);
  y.download();
  for (int i = 0; i < kN; ++i) {
    const double v = x[size_t(i)], a = std::abs(v);
    const auto got = [&](int k) { return double(y.host[size_t(k * kN + i)]); };
    ASSERT_NEAR(got(0), std::exp2(v), std::exp2(v - 22)) << v;
    ASSERT_NEAR(got(1), std::log2(a), std::max(0x1p-22, std::abs(std::log2(a)) * 0x1p-22)) << v;
    ASSERT_NEAR(got(2), 1 / v, 0x1p-23 / a) << v;
    ASSERT_NEAR(got(3), 1 / std::sqrt(a), 0x1p-22 / std::sqrt(a)) << v;
    ASSERT_NEAR(got(4), std::sqrt(a), 0x1p-22 * std::sqrt(a)) << v;
  }
}

__global__ void halves(const float* x, uint32_t* relu, uint32_t* sums, float* larger, int n) {
  const int i = threadIdx.x;
  if (i >= n) return;
  float low = x[i], high = x[(i + 1) % n];
  relu[i] = ptx::pack_relu(f16{}, low, high);
  uint32_t a = ptx::pack(f16{}, low, high), b = ptx::pack(f16{}, high, 0.75f), c = ptx::pack(f16{}, 0.1f, low);
  ptx::settle(a);
  sums[i] = ptx::multiply_add(f16{}, a, b, c);
  larger[i] = ptx::max_nan(low, high);
}
TEST_F(PtxCuda, RectifiesMultipliesAndComparesHalvesSmall) {
  const std::vector<float> x = {1.0f, -2.5f, 0.333f, -0.0f, 65504, -7e-8f, INFINITY, NAN, 3.14159f, -1000.1f, NAN, 2};
  const DeviceArray<float> from(x);
  DeviceArray<uint32_t> relu(x.size()), sums(x.size());
  DeviceArray<float> larger(x.size());
  gpu::launch("halves", halves, {.grid = 1, .block = 32}, {}, from.device(), relu.device(), sums.device(),
              larger.device(), int(x.size()));
  relu.download();
  sums.download();
  larger.download();
  const auto half_of = [](uint32_t word, bool high) {
    f16 h;
    h.bits = uint16_t(high ? word >> 16 : word);
    return float(h);
  };
  const auto expect_same = [](float found, float expected, size_t i) {
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(found) : found == expected) << i << ": " << found << ", " << expected;
  };
  for (size_t i = 0; i < x.size(); ++i) {
    const float low = x[i], high = x[(i + 1) % x.size()];
    const auto rounded = [](float v) { return float(f16(v)); };
    // A product of two halves and their sum with a third are exact in fp64.
    const auto sum = [&](float a, float b, float c) {
      return rounded(float(double(rounded(a)) * rounded(b) + rounded(c)));
    };
    expect_same(half_of(relu.host[i], false), std::isnan(low) ? NAN : rounded(std::max(low, 0.0f)), i);
    expect_same(half_of(relu.host[i], true), std::isnan(high) ? NAN : rounded(std::max(high, 0.0f)), i);
    expect_same(half_of(sums.host[i], false), sum(low, high, 0.1f), i);
    expect_same(half_of(sums.host[i], true), sum(high, 0.75f, low), i);
    expect_same(larger.host[i], std::isnan(low) || std::isnan(high) ? NAN : std::max(low, high), i);
  }
}

// --- matrices

// Four 8 x 8 matrices of 16-bit elements, numbered 0 to 255: register i of lane 4 g + t is elements (g, 2t), (g, 2t +
// 1) of matrix i, or transposed.
template <int N, bool kTrans> __global__ void move_matrices(const uint32_t* from, uint32_t* registers, uint32_t* to) {
  __shared__ alignas(16) uint32_t tile[128];
  const uint32_t lane = threadIdx.x, address = ptx::shared_address(tile) + lane % (8 * N) * 16;
  for (uint32_t i = lane; i < 128; i += 32) tile[i] = from[i];
  __syncwarp();
  uint32_t r[N];
  if constexpr (kTrans)
    ptx::ldmatrix_trans(r, address);
  else
    ptx::ldmatrix(r, address);
  for (int i = 0; i < N; ++i) registers[i * 32 + lane] = r[i];
  __syncwarp();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  for (uint32_t i = lane; i < 128; i += 32) tile[i] = 0;
  __syncwarp();
  if constexpr (kTrans)
    ptx::stmatrix_trans(address, r);
  else
    ptx::stmatrix(address, r);
  __syncwarp();
#endif
  for (uint32_t i = lane; i < 128; i += 32) to[i] = tile[i];
}

template <int N, bool kTrans> void check_matrices() {
  std::vector<uint32_t> words(128);
  for (uint32_t i = 0; i < 128; ++i) words[i] = 2 * i | (2 * i + 1) << 16;
  const DeviceArray<uint32_t> from(words);
  DeviceArray<uint32_t> registers(N * 32), to(128);
  gpu::launch("move_matrices", move_matrices<N, kTrans>, {.grid = 1, .block = 32}, {}, from.device(),
              registers.device(), to.device());
  registers.download();
  to.download();
  for (uint32_t i = 0; i < N; ++i)
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t g = lane / 4, t = lane % 4;
      const uint32_t low = kTrans ? 2 * t * 8 + g : g * 8 + 2 * t, high = kTrans ? low + 8 : low + 1;
      ASSERT_EQ(registers.host[i * 32 + lane], (64 * i + low) | (64 * i + high) << 16) << N << " lane " << lane;
    }
  // Before Hopper there is no stmatrix, and the tile stays what it was.
  const uint32_t stored = gpu::current_limits().hopper ? 32 * N : 128;
  for (uint32_t i = 0; i < 128; ++i) ASSERT_EQ(to.host[i], i < stored ? from.host[i] : 0) << N;
}
TEST_F(PtxCuda, MovesMatricesBetweenSharedMemoryAndRegistersSmall) {
  check_matrices<1, false>();
  check_matrices<2, false>();
  check_matrices<4, false>();
  check_matrices<1, true>();
  check_matrices<2, true>();
  check_matrices<4, true>();
}

// A warp computes d (16 x 8) = c + a (16 x K) b (8 x K)^T with the fragments of mma.cuh.
template <class T> __global__ void warp_product(const T* a, const T* b, float* d) {
  constexpr int kK = 16;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto pair = [](const T* p) { return p[0].bits | uint32_t(p[1].bits) << 16; };
  uint32_t ra[4], rb[2];
  float rd[4];
  for (int i = 0; i < 4; ++i) {
    ra[i] = pair(a + (g + i % 2 * 8) * kK + 2 * t + i / 2 * 8);
    rd[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  }
  for (int i = 0; i < 2; ++i) rb[i] = pair(b + g * kK + 2 * t + i * 8);
  ptx::mma_m16n8k16(T{}, rd, ra, rb);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = rd[i];
}

template <class T> std::vector<T> normals(int rows, int cols, uint64_t seed) {
  testing::Buffer x(dtype_of<T>, {rows, cols});
  testing::fill_normal(x, seed, 2);
  const T* p = x.tensor().ptr<T>();
  return {p, p + rows * cols};
}
template <class T> void check_warp_product() {
  constexpr int kK = 16;
  const DeviceArray<T> a(normals<T>(16, kK, 1)), b(normals<T>(8, kK, 2));
  DeviceArray<float> d(normals<float>(16, 8, 3));
  const std::vector<float> c = d.host;
  gpu::launch("warp_product", warp_product<T>, {.grid = 1, .block = 32}, {}, a.device(), b.device(), d.device());
  d.download();
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      double want = c[size_t(m * 8 + n)], size = std::abs(want);
      for (int k = 0; k < kK; ++k) {
        const double term = double(float(a.host[size_t(m * kK + k)])) * double(float(b.host[size_t(n * kK + k)]));
        want += term;
        size += std::abs(term);
      }
      // sums are truncated, not rounded
      ASSERT_NEAR(d.host[size_t(m * 8 + n)], want, 0x1p-22 * size) << m << ", " << n;
    }
}
TEST_F(PtxCuda, MultipliesInWarpsSmall) {
  check_warp_product<bf16>();
  check_warp_product<f16>();
}

// --- threads and blocks

constexpr uint64_t kWideStep = 0x100000001;  // in both halves of a word

__global__ void atomic_words(uint32_t* counter, uint64_t* wide, uint32_t* answers) {
  ptx::add_relaxed(counter, 1);
  ptx::add_release(counter + 1, 2);
  const uint32_t place = ptx::fetch_add_relaxed(counter + 2, 1);
  answers[16 + place] = 1;  // each index is handed out once
  ptx::fetch_add_release(counter + 3, 3);
  ptx::fetch_add_acq_rel(counter + 4, 4);
  if (ptx::compare_exchange_acq_rel(counter + 5, 0, 100 + threadIdx.x) == 0) ptx::add_relaxed(counter + 6, 1);
  ptx::add_release(wide + 1, kWideStep);
  if (ptx::fetch_add_relaxed(wide + 2, kWideStep) == 0) ptx::add_relaxed(counter + 7, 1);
  if (ptx::compare_exchange_relaxed(wide + 3, 0, kWideStep + threadIdx.x) == 0) ptx::add_relaxed(counter + 7, 1);
  ptx::fence_acq_rel_gpu();
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  ptx::store_relaxed(answers, 11);
  ptx::store_release(answers + 1, 12);
  ptx::store_release_system(answers + 2, 13);
  ptx::store_release(wide, 0x123456789abcdef0);
  answers[3] = ptx::load_relaxed(answers);
  answers[4] = ptx::load_acquire(answers + 1);
  answers[5] = ptx::load_acquire_system(answers + 2);
  answers[6] = ptx::load_acquire(wide) == 0x123456789abcdef0;
}
TEST_F(PtxCuda, CountsAtomicallyAcrossBlocks) {
  DeviceArray<uint32_t> counter(std::vector<uint32_t>(8)), answers(std::vector<uint32_t>(16 + 50 * 96));
  DeviceArray<uint64_t> wide(std::vector<uint64_t>(4));
  gpu::launch("atomic_words", atomic_words, {.grid = 50, .block = 96}, {}, counter.device(), wide.device(),
              answers.device());
  counter.download();
  wide.download();
  answers.download();
  constexpr uint32_t kAll = 50 * 96;
  for (uint32_t i = 0; i < 5; ++i) EXPECT_EQ(counter.host[i], i == 2 ? kAll : kAll * (i < 2 ? i + 1 : i)) << i;
  EXPECT_GE(counter.host[5], 100u);
  EXPECT_EQ(counter.host[6], 1u) << "one exchange succeeds";
  EXPECT_EQ(wide.host[1], kAll * kWideStep);
  EXPECT_EQ(wide.host[2], kAll * kWideStep);
  EXPECT_GE(wide.host[3], kWideStep);
  EXPECT_EQ(counter.host[7], 2u) << "one addition finds zero, and one exchange";
  EXPECT_EQ(answers.host[3], 11u);
  EXPECT_EQ(answers.host[4], 12u);
  EXPECT_EQ(answers.host[5], 13u);
  EXPECT_EQ(answers.host[6], 1u);
  for (uint32_t i = 0; i < kAll; ++i) ASSERT_EQ(answers.host[16 + i], 1u) << i;
}

// The first kernel lets the second start, and writes only then.
__global__ void write_late(uint32_t* words, uint32_t round) {
  ptx::let_next_kernel_start();
  for (int i = 0; i < 40; ++i) ptx::sleep(2000);
  words[blockIdx.x * blockDim.x + threadIdx.x] = round * 1000 + blockIdx.x;
}
__global__ void read_after(const uint32_t* words, uint32_t* out, uint64_t* started) {
  if (blockIdx.x == 0 && threadIdx.x == 0) started[0] = ptx::global_timer();
  ptx::wait_for_earlier_kernels();
  if (blockIdx.x == 0 && threadIdx.x == 0) started[1] = ptx::global_timer();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = words[i];
}
TEST_F(PtxCuda, ADependentKernelWaitsForAllEarlierWrites) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "launches overlap on Hopper alone";
  constexpr uint32_t kBlocks = 8, kWords = kBlocks * 64;
  DeviceArray<uint32_t> words(kWords), out(kWords);
  DeviceArray<uint64_t> started(std::vector<uint64_t>(2));
  int early = 0;
  for (uint32_t round = 1; round <= 10; ++round) {
    gpu::launch("write_late", write_late, {.grid = kBlocks, .block = 64}, {}, words.device(), round);
    gpu::launch("read_after", read_after, {.grid = kBlocks, .block = 64, .overlap = true}, {}, words.device(),
                out.device(), started.device());
    out.download();
    started.download();
    for (uint32_t i = 0; i < kWords; ++i) ASSERT_EQ(out.host[i], round * 1000 + i / 64) << "round " << round;
    early += started.host[1] - started.host[0] > 20'000;  // the result was visible while the first kernel still slept
  }
  EXPECT_GT(early, 0) << "the second kernel never started before the first had ended";
}

__global__ void stop_here(uint32_t* out) {
  out[0] = 1;
  ptx::trap();
}
TEST_F(PtxCuda, TrapEndsTheProcessesKernelsWithAnError) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a process of its own, whose GPU context is lost
  EXPECT_EXIT(
      {
        DeviceArray<uint32_t> out(1);
        gpu::launch("stop_here", stop_here, {.grid = 1, .block = 1}, {}, out.device());
        try {
          gpu::synchronize();
        } catch (const Error& e) {
          std::fputs(e.what(), stderr);
          std::_Exit(3);
        }
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(3), "found cuda");
}

// Warps 0 and 1 exchange words on barrier 1; warp 2 only arrives on barrier 2, where warp 3 waits for its word. All
// warps meet on barrier 3, reached by the warps of each half from a separate branch.
__global__ void named_barriers(uint32_t* out) {
  __shared__ uint32_t word[128], later[64];
  const uint32_t t = threadIdx.x, warp = t / 32;
  if (warp == 2) ptx::sleep(20000);
  word[t] = 1000 + t;
  if (warp < 2) {
    ptx::barrier_sync(1, 64);
    out[t] = word[(t + 32) % 64];
  } else if (warp == 2) {
    ptx::barrier_arrive(2, 64);
  } else {
    ptx::barrier_sync(2, 64);
    out[t] = word[t - 32];
  }
  if (warp < 2) {
    ptx::barrier_sync_unaligned(3, 128);
    out[128 + t] = later[63 - t];
  } else {
    if (warp == 3) ptx::sleep(20000);
    later[t - 64] = 2000 + t;
    ptx::barrier_sync_unaligned(3, 128);
  }
}
TEST_F(PtxCuda, NamedBarriersJoinSomeWarpsSmall) {
  DeviceArray<uint32_t> out(192);
  gpu::launch("named_barriers", named_barriers, {.grid = 1, .block = 128}, {}, out.device());
  out.download();
  for (uint32_t t = 0; t < 64; ++t) {
    ASSERT_EQ(out.host[t], 1000 + (t + 32) % 64);
    ASSERT_EQ(out.host[128 + t], 2000 + 127 - t);
  }
  for (uint32_t t = 96; t < 128; ++t) ASSERT_EQ(out.host[t], 1000 + t - 32);
}

__global__ void ask_the_thread(uint64_t* out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (const bool elected = ptx::elect_one(); elected) {
    out[8 + threadIdx.x / 32] = threadIdx.x % 32;
    atomicAdd(reinterpret_cast<unsigned long long*>(out), 1ull);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint64_t start = ptx::global_timer();
  for (int i = 0; i < 100; ++i) ptx::sleep(2000);
  out[1] = ptx::global_timer() - start;
#endif
}
TEST_F(PtxCuda, ElectsOneLaneAndTellsTheTimeSmall) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "the election of a lane needs Hopper";
  DeviceArray<uint64_t> out(std::vector<uint64_t>(16));
  gpu::launch("ask_the_thread", ask_the_thread, {.grid = 1, .block = 128}, {}, out.device());
  out.download();
  EXPECT_EQ(out.host[0], 4u) << "one lane of each warp";
  EXPECT_EQ(out.host[8], out.host[11]) << "the same lane";
  EXPECT_GT(out.host[1], 10'000u) << "100 sleeps of about 2 us, in nanoseconds";
  EXPECT_LT(out.host[1], 100'000'000u);
}

// More registers than 65536 / 384 would allow: possible only with the registers given up by the second warpgroup.
__global__ void __launch_bounds__(384, 1) move_registers(float* out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (threadIdx.x < 128) {
    ptx::decrease_registers<40>();
    out[threadIdx.x] = float(threadIdx.x);
  } else {
    ptx::increase_registers<232>();
    float sum[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) sum[i] = out[384 + i];
    for (int round = 0; round < 3; ++round)
#pragma unroll
      for (int i = 0; i < 200; ++i) sum[i] = sum[i] * 1.5f + sum[(i + 1) % 200];
    float all = 0;
#pragma unroll
    for (int i = 0; i < 200; ++i) all += sum[i];
    out[threadIdx.x] = all;
  }
#endif
}
TEST_F(PtxCuda, MovesRegistersBetweenWarpgroupsSmall) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "setmaxnreg needs Hopper";
  std::vector<float> start(584);
  for (size_t i = 384; i < 584; ++i) start[i] = float(i % 7);
  DeviceArray<float> out(start);
  gpu::launch("move_registers", move_registers, {.grid = 2, .block = 384}, {}, out.device());
  out.download();
  std::vector<float> sum(start.begin() + 384, start.end());
  for (int round = 0; round < 3; ++round)
    for (size_t i = 0; i < 200; ++i) sum[i] = sum[i] * 1.5f + sum[(i + 1) % 200];
  const double all = std::accumulate(sum.begin(), sum.end(), 0.0);
  for (size_t t = 0; t < 384; ++t) ASSERT_NEAR(out.host[t], t < 128 ? double(t) : all, t < 128 ? 0 : 1e-5 * all);
}

}  // namespace
}  // namespace ingot
