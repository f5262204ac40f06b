#pragma once
// CUDA's names for code compiled for the CPU (INGOT_EMULATE): the language features used by Ingot's kernels, the
// built-in variables and functions. Shared memory is requested through tile/shared.cuh.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "ingot/gpu/emulation/grid.h"

#define __host__
#define __device__
// static, because the host stub of the real kernel, with the same name, may be in the program
#define __global__ static
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define threadIdx (::ingot::emulation::place().thread)
#define blockIdx (::ingot::emulation::place().block)
#define blockDim (::ingot::emulation::place().block_dim)
#define gridDim (::ingot::emulation::place().grid_dim)

constexpr int warpSize = 32;
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- threads

inline void __syncthreads(ingot::emulation::Where at = ingot::emulation::Where::current()) {
  (void)ingot::emulation::sync_block(false, at);
}
inline int __syncthreads_count(int vote, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return int(ingot::emulation::sync_block(vote != 0, at));
}
inline int __syncthreads_and(int vote, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::sync_block(vote == 0, at) == 0;
}
inline int __syncthreads_or(int vote, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::sync_block(vote != 0, at) != 0;
}
inline void __syncwarp(uint32_t mask = ~0u, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  ingot::emulation::sync_warp(mask, at);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(uint32_t ns) {
  (void)ingot::emulation::clock_ns(ns);
  ingot::emulation::yield();
}

namespace ingot::emulation {

// A GPU refuses misaligned accesses; x86 allows them.
inline void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) misaligned(p, bytes);
}
// The value of lane `from`, or the lane's own value where `from` lies outside the segment of `width` lanes.
template <class T> T shuffle(uint32_t mask, T v, int from, int width, Where at) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  const Lanes lanes = exchange(mask, bits, at);
  const int me = int(lane()), first = me / width * width;
  if (from < first || from >= first + width || !(lanes.mask >> from & 1)) return v;
  std::memcpy(&v, &lanes.value[from], sizeof(T));
  return v;
}
template <class T, class Op> T reduce_lanes(uint32_t mask, T v, Op op, Where at) {
  const Lanes lanes = exchange(mask, uint64_t(v), at);
  bool first = true;
  for (int i = 0; i < 32; ++i)
    if (lanes.mask >> i & 1) {
      v = first ? T(lanes.value[i]) : op(v, T(lanes.value[i]));
      first = false;
    }
  return v;
}

}  // namespace ingot::emulation

template <class T>
T __shfl_sync(uint32_t mask, T v, int lane, int width = 32,
              ingot::emulation::Where at = ingot::emulation::Where::current()) {
  const int first = int(ingot::emulation::lane()) / width * width;
  return ingot::emulation::shuffle(mask, v, first + (lane & (width - 1)), width, at);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32,
                  ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::shuffle(mask, v, int(ingot::emulation::lane()) ^ bits, width, at);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, unsigned by, int width = 32,
                   ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::shuffle(mask, v, int(ingot::emulation::lane() + by), width, at);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32,
                 ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::shuffle(mask, v, int(ingot::emulation::lane()) - int(by), width, at);
}
inline uint32_t __ballot_sync(uint32_t mask, int vote,
                              ingot::emulation::Where at = ingot::emulation::Where::current()) {
  const auto lanes = ingot::emulation::exchange(mask, vote != 0, at);
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) all |= uint32_t((lanes.mask >> i & 1) && lanes.value[i] != 0) << i;
  return all;
}
inline int __any_sync(uint32_t mask, int vote, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return __ballot_sync(mask, vote, at) != 0;
}
inline int __all_sync(uint32_t mask, int vote, ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return __ballot_sync(mask, !vote, at) == 0;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t v,
                                  ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::reduce_lanes(
      mask, v, [](uint32_t a, uint32_t b) { return a + b; }, at);
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t v,
                                  ingot::emulation::Where at = ingot::emulation::Where::current()) {
  return ingot::emulation::reduce_lanes(
      mask, v, [](uint32_t a, uint32_t b) { return std::max(a, b); }, at);
}

// --- atomics

template <class T> T atomicAdd(T* p, T v) {
  ingot::emulation::maybe_yield();
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  } else {  // a fiber is not interrupted between two switches
    const T old = *p;
    *p = old + v;
    return old;
  }
}
template <class T> T atomicMax(T* p, T v) {
  ingot::emulation::maybe_yield();
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}
template <class T> T atomicOr(T* p, T v) {
  ingot::emulation::maybe_yield();
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <class T> T atomicExch(T* p, T v) {
  ingot::emulation::maybe_yield();
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
template <class T> T atomicCAS(T* p, T expected, T desired) {
  ingot::emulation::maybe_yield();
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// --- arithmetic and memory

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int64_t __float2ll_rn(float x) { return std::isnan(x) ? INT64_MIN : std::llrint(x); }
inline float __ll2float_rn(int64_t x) { return float(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return float(1 / std::sqrt(double(a))); }
inline float rsqrtf(float a) { return __frsqrt_rn(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __saturatef(float a) { return std::isnan(a) ? 0 : std::clamp(a, 0.f, 1.f); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(uint32_t(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(uint32_t(x)) + 1; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
// The smaller of each pair of halves.
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16;
}
// Byte i of the result is byte (selector >> 4 i) % 8 of y and x, x in the lower bytes.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }
inline void __trap() { throw std::runtime_error("a kernel trapped"); }

using std::max;
using std::min;
