// Tests wgmma with every descriptor layout against the product in fp64. Plain code lays out the operands according to
// tile/swizzle.cuh, so a wrong descriptor, swizzle, step or register order shows.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/testing/device_array.h"
#include "ingot/testing/hopper_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using ptx::Major;
using testing::DeviceArray;
using tile::Swizzle;

constexpr int kM = 64, kDepth = 128;  // two panels of b128, so steps cross a panel
constexpr int kThreads = 128;

struct Layout {
  Major major;
  Swizzle swizzle;
  // Panels and their distance for an operand of `extent` rows (M or N).
  constexpr uint32_t panel_bytes(int extent) const {
    const uint32_t rows = major == Major::k ? uint32_t(extent) : kDepth;
    return rows * tile::row_bytes(swizzle);
  }
  constexpr uint32_t bytes(int extent) const {
    const uint32_t along = major == Major::k ? kDepth : uint32_t(extent), per_panel = tile::row_bytes(swizzle) / 2;
    return (along + per_panel - 1) / per_panel * panel_bytes(extent);
  }
};

// The offset of element (row, k).
__device__ uint32_t place(Layout l, int extent, int row, int k) {
  const uint32_t width = tile::row_bytes(l.swizzle), along = l.major == Major::k ? k : row,
                 down = l.major == Major::k ? row : k;
  return along / (width / 2) * l.panel_bytes(extent) +
         tile::swizzled(l.swizzle, down * width + along % (width / 2) * 2);
}
__device__ void fill(char* tile, Layout l, int extent, const uint16_t* from) {
  for (int i = threadIdx.x; i < extent * kDepth; i += kThreads)
    *reinterpret_cast<uint16_t*>(tile + place(l, extent, i / kDepth, i % kDepth)) = from[i];
}

// d (64 x N) = a (64 x K) b (N x K)^T
template <class T, int N, Major kA, Swizzle kSwizzleA, Major kB, Swizzle kSwizzleB, bool kFromRegisters>
__global__ void __launch_bounds__(kThreads) product(const uint16_t* a, const uint16_t* b, float* out) {
  extern __shared__ __align__(1024) char memory[];
  constexpr Layout la{kA, kSwizzleA}, lb{kB, kSwizzleB};
  char* const tile_b = memory + (la.bytes(kM) + 1023) / 1024 * 1024;
  fill(memory, la, kM, a);
  fill(tile_b, lb, N, b);
  ptx::fence_proxy_async_shared();
  __syncthreads();

  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint64_t at_a = tile::operand_descriptor<kA, kSwizzleA>(ptx::shared_address(memory), la.panel_bytes(kM));
  const uint64_t at_b = tile::operand_descriptor<kB, kSwizzleB>(ptx::shared_address(tile_b), lb.panel_bytes(N));
  float d[N / 2];
#pragma unroll
  for (float& x : d) x = NAN;  // the first product must not read d
  uint32_t fragment[kDepth / 16][4];
  if constexpr (kFromRegisters) {
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint16_t* p = a + (16 * warp + g + i % 2 * 8) * kDepth + 16 * k + 2 * t + i / 2 * 8;
        fragment[k][i] = p[0] | uint32_t(p[1]) << 16;
      }
  }
  ptx::fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const uint64_t b_k = at_b + tile::descriptor_step<kB, kSwizzleB>(16 * k, lb.panel_bytes(N));
    if constexpr (kFromRegisters)
      ptx::wgmma<T, N, kB>(d, fragment[k], b_k, k > 0);
    else
      ptx::wgmma<T, N, kA, kB>(d, at_a + tile::descriptor_step<kA, kSwizzleA>(16 * k, la.panel_bytes(kM)), b_k, k > 0);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[(16 * warp + g + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = d[i];
}

template <class T> std::vector<uint16_t> normals(int rows, uint64_t seed) {
  testing::Buffer x(dtype_of<T>, {rows, kDepth});
  testing::fill_normal(x, seed, 2);
  const auto* p = static_cast<const uint16_t*>(x.tensor().data);
  return {p, p + rows * kDepth};
}
template <class T> double value(uint16_t bits) {
  T x;
  x.bits = bits;
  return double(float(x));
}

template <class T, int N, Major kA, Swizzle kSwizzleA, Major kB, Swizzle kSwizzleB, bool kFromRegisters> void check() {
  SCOPED_TRACE(::testing::Message() << dtype_of<T> << " N " << N << " A major " << int(kA) << " swizzle "
                                    << int(kSwizzleA) << " B major " << int(kB) << " swizzle " << int(kSwizzleB)
                                    << (kFromRegisters ? " A from registers" : ""));
  const DeviceArray<uint16_t> a(normals<T>(kM, 1)), b(normals<T>(N, 2));
  DeviceArray<float> d(size_t(kM * N));
  const int64_t smem = (Layout{kA, kSwizzleA}.bytes(kM) + 1023) / 1024 * 1024 + Layout{kB, kSwizzleB}.bytes(N);
  gpu::launch("product", product<T, N, kA, kSwizzleA, kB, kSwizzleB, kFromRegisters>,
              {.grid = 1, .block = kThreads, .smem = smem}, {}, a.device(), b.device(), d.device());
  d.download();
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < N; ++n) {
      double want = 0, size = 0;
      for (int k = 0; k < kDepth; ++k) {
        const double term = value<T>(a.host[size_t(m * kDepth + k)]) * value<T>(b.host[size_t(n * kDepth + k)]);
        want += term;
        size += std::abs(term);
      }
      // Eight additions to the accumulator, each cut to fp32 rather than rounded.
      ASSERT_NEAR(d.host[size_t(m * N + n)], want, 8 * 0x1p-23 * size) << "row " << m << " column " << n;
    }
}

class WgmmaCuda : public testing::HopperTest<> {};

template <Swizzle S, bool kFromRegisters, Major kA, Major kB> void check_majors() {
  check<bf16, 24, kA, S, kB, S, kFromRegisters>();
  check<bf16, 136, kA, S, kB, S, kFromRegisters>();
}
template <Swizzle S> void check_layouts() {
  check_majors<S, false, Major::k, Major::k>();
  check_majors<S, false, Major::k, Major::mn>();
  check_majors<S, false, Major::mn, Major::k>();
  check_majors<S, false, Major::mn, Major::mn>();
  check_majors<S, true, Major::k, Major::k>();
  check_majors<S, true, Major::k, Major::mn>();
}

TEST_F(WgmmaCuda, ReadsPanelsOf128BytesSmall) { check_layouts<Swizzle::b128>(); }
TEST_F(WgmmaCuda, ReadsPanelsOf64BytesSmall) { check_layouts<Swizzle::b64>(); }
TEST_F(WgmmaCuda, ReadsPanelsOf32BytesSmall) { check_layouts<Swizzle::b32>(); }
TEST_F(WgmmaCuda, ReadsUnswizzledPanelsSmall) { check_layouts<Swizzle::none>(); }

TEST_F(WgmmaCuda, MixesLayoutsOfTheTwoOperandsSmall) {
  check<bf16, 64, Major::k, Swizzle::b128, Major::mn, Swizzle::b64, false>();
  check<bf16, 64, Major::mn, Swizzle::none, Major::k, Swizzle::b32, false>();
}

TEST_F(WgmmaCuda, MultipliesF16Small) {
  check<f16, 64, Major::k, Swizzle::b128, Major::k, Swizzle::b128, false>();
  check<f16, 96, Major::mn, Swizzle::b128, Major::mn, Swizzle::b128, false>();
  check<f16, 128, Major::k, Swizzle::b128, Major::mn, Swizzle::b128, true>();
  check<f16, 200, Major::k, Swizzle::b64, Major::k, Swizzle::b64, true>();
}

TEST_F(WgmmaCuda, HasEveryWidthFrom8To256) {
  [&]<int... kEights>(std::integer_sequence<int, kEights...>) {
    (check<bf16, 8 * (kEights + 1), Major::k, Swizzle::b128, Major::k, Swizzle::b128, kEights % 4 == 3>(), ...);
  }
  (std::make_integer_sequence<int, 32>{});
}

}  // namespace
}  // namespace ingot
