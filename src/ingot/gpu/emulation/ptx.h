#pragma once
// gpu/ptx for code compiled for the CPU: the functions for row kernels, and for further kernels without wgmma and
// tensor copies.
#include <array>
#include <bit>
#include <stdexcept>

#include "ingot/core/dtype.h"
#include "ingot/gpu/emulation/cuda.h"

namespace ingot::ptx {

// --- memory.cuh, convert.cuh, math.cuh

template <int N> void load_streaming(const void* p, uint32_t (&w)[N]) {
  emulation::check_aligned(p, 4 * N);
  std::memcpy(w, p, sizeof(w));
}
template <int N> void load_keeping(const void* p, uint32_t (&w)[N]) { load_streaming(p, w); }
template <int N> void load_keeping_l2(const void* p, uint32_t (&w)[N]) { load_streaming(p, w); }
inline void load_dropping(const void* p, uint32_t (&w)[4]) { load_streaming(p, w); }
template <int N> void store_evict_first(void* p, const uint32_t (&w)[N]) {
  emulation::check_aligned(p, 4 * N);
  std::memcpy(p, w, sizeof(w));
}
template <int N> void load_shared(uint32_t (&w)[N], uint32_t address) {
  const void* const from = emulation::at_shared_address(address, sizeof(w));
  emulation::check_aligned(from, sizeof(w));
  std::memcpy(w, from, sizeof(w));
}
template <int N> void store_shared(uint32_t address, const uint32_t (&w)[N]) {
  void* const to = emulation::at_shared_address(address, sizeof(w));
  emulation::check_aligned(to, sizeof(w));
  std::memcpy(to, w, sizeof(w));
}

inline void prefetch_to_l2(const void*, uint32_t) {}
inline void prefetch_to_l2_keeping(const void* p, uint32_t bytes) {
  emulation::check_aligned(p, 16);
  emulation::check_aligned(reinterpret_cast<const void*>(uintptr_t(bytes)), 16);
}

template <class T> uint32_t pack(T, float low, float high) { return T(low).bits | uint32_t(T(high).bits) << 16; }
template <class T> void unpack(T, uint32_t w, float& low, float& high) {
  T t;
  t.bits = uint16_t(w);
  low = float(t);
  t.bits = uint16_t(w >> 16);
  high = float(t);
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  float low[2], high[2];
  unpack(bf16{}, a, low[0], high[0]);
  unpack(bf16{}, b, low[1], high[1]);
  return pack(bf16{}, low[0] * low[1], high[0] * high[1]);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float rsqrt_approx(float x) { return __frsqrt_rn(x); }
inline float max_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::max(x, y); }

// --- grid.cuh, cluster.cuh, barrier.cuh, thread.cuh, fence.cuh

inline void let_next_kernel_start() {}
inline void wait_for_earlier_kernels() {}

inline uint32_t shared_address(const void* p) { return emulation::shared_address(p); }
inline uint32_t cluster_rank() { return emulation::cluster_rank(); }
inline uint32_t cluster_size() { return emulation::cluster_size(); }
inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_arrive_relaxed() { emulation::cluster_arrive(); }
inline void cluster_wait(emulation::Where at = emulation::Where::current()) { emulation::cluster_wait(at); }
inline uint32_t cluster_address(const void* local, uint32_t rank) {
  return emulation::cluster_address(shared_address(local), rank);
}
template <int N> void cluster_store(uint32_t address, const uint32_t (&w)[N]) {
  std::memcpy(emulation::at_shared_address(address, sizeof(w)), w, sizeof(w));
}
inline void cluster_store(float* local, uint32_t rank, float value) {
  std::memcpy(emulation::at_shared_address(cluster_address(local, rank), 4), &value, 4);
}
inline void cluster_store_relaxed(uint64_t* local, uint32_t rank, uint64_t word) {
  std::memcpy(emulation::at_shared_address(cluster_address(local, rank), 8), &word, 8);
}
inline uint64_t cluster_load_relaxed(const uint64_t* local) {
  emulation::yield();  // a polling thread lets other threads run
  return *static_cast<const volatile uint64_t*>(local);
}
constexpr uint16_t multicast_mask(uint32_t first, uint32_t blocks) { return uint16_t(((1u << blocks) - 1) << first); }

inline void barrier_sync(uint32_t id, uint32_t threads, emulation::Where at = emulation::Where::current()) {
  emulation::sync_named(id, threads, true, at);
}
inline void barrier_sync_unaligned(uint32_t id, uint32_t threads, emulation::Where at = emulation::Where::current()) {
  emulation::sync_named(id, threads, true, at);
}
inline void barrier_arrive(uint32_t id, uint32_t threads, emulation::Where at = emulation::Where::current()) {
  emulation::sync_named(id, threads, false, at);
}

inline uint64_t global_timer() { return emulation::clock_ns(); }
inline bool elect_one(emulation::Where at = emulation::Where::current()) {
  emulation::sync_warp(~0u, at);
  return emulation::lane() == 0;
}
inline void sleep(uint32_t nanoseconds) { __nanosleep(nanoseconds); }
inline void trap() { __trap(); }

inline void fence_proxy_async_shared() {}
inline void fence_proxy_async() {}
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

// --- atomics.cuh: polls give way to the awaited thread

template <class T> T load_relaxed(const T* p) {
  emulation::yield();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void load_relaxed(const uint64_t* p, uint64_t (&v)[2]) {
  emulation::check_aligned(p, 16);
  v[0] = load_relaxed(p), v[1] = load_relaxed(p + 1);
}
inline void load_relaxed_16(const void* p, uint64_t& low, uint64_t& high) {
  emulation::check_aligned(p, 16);
  emulation::yield();  // no other thread runs between the read and the write
  low = __atomic_load_n(static_cast<const uint64_t*>(p), __ATOMIC_RELAXED);
  high = __atomic_load_n(static_cast<const uint64_t*>(p) + 1, __ATOMIC_RELAXED);
}
inline void store_relaxed_16(void* p, uint64_t low, uint64_t high) {
  emulation::check_aligned(p, 16);
  emulation::maybe_yield();
  __atomic_store_n(static_cast<uint64_t*>(p), low, __ATOMIC_RELAXED);
  __atomic_store_n(static_cast<uint64_t*>(p) + 1, high, __ATOMIC_RELAXED);
}
template <class T> T load_acquire(const T* p) {
  emulation::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// For words written by kernels on other CPU threads: these threads get time to run.
template <class T> T load_acquire_system(const T* p) {
  emulation::yield_to_others();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T> T load_relaxed_system(const T* p) {
  emulation::yield_to_others();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T, class V> void store_relaxed(T* p, V v) {
  emulation::maybe_yield();
  __atomic_store_n(p, T(v), __ATOMIC_RELAXED);
}
template <class T, class V> void store_relaxed_system(T* p, V v) { store_relaxed(p, v); }
template <class T, class V> void store_release(T* p, V v) {
  emulation::maybe_yield();
  __atomic_store_n(p, T(v), __ATOMIC_RELEASE);
}
template <class T, class V> void store_release_system(T* p, V v) { store_release(p, v); }
inline uint32_t fetch_add_relaxed(uint32_t* p, uint32_t v) {
  emulation::maybe_yield();
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline uint32_t fetch_add_release(uint32_t* p, uint32_t v) {
  emulation::maybe_yield();
  return __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
inline uint32_t fetch_add_acq_rel(uint32_t* p, uint32_t v) {
  emulation::maybe_yield();
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline void add_relaxed(uint32_t* p, uint32_t v) { (void)fetch_add_relaxed(p, v); }
inline void add_relaxed(uint64_t* p, uint64_t v) {
  emulation::maybe_yield();
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline void add_release(uint32_t* p, uint32_t v) { (void)fetch_add_release(p, v); }
inline uint32_t compare_exchange_acq_rel(uint32_t* p, uint32_t expected, uint32_t desired) {
  emulation::maybe_yield();
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}

// --- cp_async.cuh

template <int kBytes> void cp_async(uint32_t to, const void* from, uint32_t valid = kBytes) {
  if (valid > 0) emulation::check_aligned(from, kBytes);
  emulation::copy_async(emulation::at_shared_address(to, kBytes), from, valid, kBytes);
}
inline void cp_async_keeping(uint32_t to, const void* from) { cp_async<16>(to, from); }
inline void cp_async_commit_group() { emulation::commit_copies(); }
template <int N> void cp_async_wait_group() { emulation::wait_for_copies(N); }

// --- mbarrier.cuh, tma.cuh's linear loads: done at once

struct Mbarrier {
  uint16_t expected, pending;  // arrivals of a phase, and the number still missing
  int32_t bytes : 31;          // bytes of copies still to arrive
  uint32_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8, "what an mbarrier takes");
// Atomic only for the sanitizers, because no fiber switches inside these functions.
template <class Change> void change_mbarrier(uint64_t* barrier, Change&& change) {
  Mbarrier b = std::bit_cast<Mbarrier>(__atomic_load_n(barrier, __ATOMIC_ACQUIRE));
  change(b);
  if (b.pending == 0 && b.bytes == 0) {
    b.phase = b.phase ^ 1;
    b.pending = b.expected;
  }
  __atomic_store_n(barrier, std::bit_cast<uint64_t>(b), __ATOMIC_RELEASE);
}
inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  *barrier = std::bit_cast<uint64_t>(Mbarrier{uint16_t(arrivals), uint16_t(arrivals), 0, 0});
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  emulation::maybe_yield();
  change_mbarrier(barrier, [&](Mbarrier& b) {
    if (b.pending == 0) __trap();
    b.bytes = int32_t(b.bytes + int32_t(bytes));
    --b.pending;
  });
}
inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  emulation::yield();
  return std::bit_cast<Mbarrier>(__atomic_load_n(barrier, __ATOMIC_ACQUIRE)).phase != parity;
}
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulation::check_aligned(to, 16);
  emulation::check_aligned(from, 16);
  emulation::check_aligned(reinterpret_cast<const void*>(uintptr_t(bytes)), 16);
  std::memcpy(to, from, bytes);
  change_mbarrier(barrier, [&](Mbarrier& b) { b.bytes = int32_t(b.bytes - int32_t(bytes)); });
}
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  bulk_load(to, from, bytes, barrier);
}

// --- ldmatrix.cuh, stmatrix.cuh, mma.cuh

template <int N> void move_matrices_in(uint32_t (&r)[N], uint32_t address, bool trans, emulation::Where at) {
  const auto rows = emulation::exchange(~0u, address, at);
  const uint32_t g = emulation::lane() / 4, t = emulation::lane() % 4;
  const auto element = [&](int i, uint32_t row, uint32_t col) {
    const auto* p = static_cast<const uint16_t*>(emulation::at_shared_address(uint32_t(rows.value[8 * i + row]), 16));
    return uint32_t(p[col]);
  };
  for (int i = 0; i < N; ++i)
    r[i] = trans ? element(i, 2 * t, g) | element(i, 2 * t + 1, g) << 16
                 : element(i, g, 2 * t) | element(i, g, 2 * t + 1) << 16;
}
template <int N> void move_matrices_out(uint32_t address, const uint32_t (&r)[N], bool trans, emulation::Where at) {
  const auto rows = emulation::exchange(~0u, address, at);
  const uint32_t g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < N; ++i)
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t row = trans ? 2 * t + k : g, col = trans ? g : 2 * t + k;
      auto* p = static_cast<uint16_t*>(emulation::at_shared_address(uint32_t(rows.value[8 * i + int(row)]), 16));
      p[col] = uint16_t(r[i] >> 16 * k);
    }
}
template <int N> void ldmatrix(uint32_t (&r)[N], uint32_t address, emulation::Where at = emulation::Where::current()) {
  move_matrices_in(r, address, false, at);
}
template <int N>
void ldmatrix_trans(uint32_t (&r)[N], uint32_t address, emulation::Where at = emulation::Where::current()) {
  move_matrices_in(r, address, true, at);
}
template <int N>
void stmatrix(uint32_t address, const uint32_t (&r)[N], emulation::Where at = emulation::Where::current()) {
  move_matrices_out(address, r, false, at);
}
template <int N>
void stmatrix_trans(uint32_t address, const uint32_t (&r)[N], emulation::Where at = emulation::Where::current()) {
  move_matrices_out(address, r, true, at);
}

// d += a b, four elements of a lane, with the fragments of all lanes at hand. value(word, half) decodes.
template <int kHalves, class Value>
void multiply_fragments(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Value value,
                        emulation::Where at) {
  std::array<emulation::Lanes, 3> lanes;
  lanes[0] = emulation::exchange(~0u, a[0] | uint64_t(a[1]) << 32, at);
  lanes[1] = emulation::exchange(~0u, a[2] | uint64_t(a[3]) << 32, at);
  lanes[2] = emulation::exchange(~0u, b[0] | uint64_t(b[1]) << 32, at);
  const uint32_t g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = i / 2, col = 2 * t + i % 2;
    float sum = d[i];
    for (uint32_t half = 0; half < 2; ++half)  // registers a[0..1], b[0], then a[2..3], b[1]
      for (uint32_t k = 0; k < 4; ++k)
        for (int part = 0; part < kHalves; ++part)
          sum += value(uint32_t(lanes[half].value[4 * g + k] >> 32 * row), part) *
                 value(uint32_t(lanes[2].value[4 * col + k] >> 32 * half), part);
    d[i] = sum;
  }
}
template <class T>
void mma_m16n8k16(T, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  emulation::Where at = emulation::Where::current()) {
  multiply_fragments<2>(
      d, a, b,
      [](uint32_t w, int half) {
        T t;
        t.bits = uint16_t(w >> 16 * half);
        return float(t);
      },
      at);
}

}  // namespace ingot::ptx
