#pragma once
// Thread block clusters: rank, barrier, and stores to the shared memory of a neighbour block. Before sm_90 there are no
// clusters: in the functions for row kernels each block is then its own cluster.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

#include "ingot/gpu/ptx/address.cuh"

namespace ingot::ptx {

__device__ inline uint32_t cluster_rank() {
  uint32_t r = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
  return r;
}
__device__ inline uint32_t cluster_size() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
// The cluster's number in the grid.
__device__ inline uint32_t cluster_index() {
  uint32_t n;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(n));
  return n;
}
__device__ inline void cluster_arrive() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// For threads that publish only mbarriers, released by fence_mbarrier_init(). cluster_arrive() would wait until the
// whole GPU sees all earlier writes of the thread.
__device__ inline void cluster_arrive_relaxed() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes `value` to block `rank`'s copy of `local`. Block `rank` must have started (a cluster barrier) and must not
// have ended (a second barrier after the store).
__device__ inline void cluster_store(float* local, uint32_t rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  *local = value;
#else
  asm volatile(
      "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.f32 [remote], %2;}" ::"r"(
          shared_address(local)),
      "r"(rank), "f"(value)
      : "memory");
#endif
}

// The same for a word with its own ready flag (say, a value and the number of its round): without fence and barrier, so
// this thread does not wait for its earlier stores. A thread polling the word with cluster_load_relaxed sees the whole
// word or nothing.
__device__ inline void cluster_store_relaxed(uint64_t* local, uint32_t rank, uint64_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  *static_cast<volatile uint64_t*>(local) = word;
#else
  asm volatile(
      "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " st.relaxed.cluster.shared::cluster.u64 [remote], %2;}" ::"r"(shared_address(local)),
      "r"(rank), "l"(word)
      : "memory");
#endif
}
__device__ inline uint64_t cluster_load_relaxed(const uint64_t* local) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return *static_cast<const volatile uint64_t*>(local);
#else
  uint64_t word;
  asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(shared_address(local)) : "memory");
  return word;
#endif
}

// The address of block `rank`'s copy of `local`, for the functions below, for remote mbarrier arrivals and for copies
// between blocks.
__device__ inline uint32_t cluster_address(const void* local, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return shared_address(local);
#else
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
#endif
}
__device__ inline void cluster_store(uint32_t address, const uint32_t (&w)[1]) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(w[0]) : "memory");
}
__device__ inline void cluster_store(uint32_t address, const uint32_t (&w)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
#endif
}
// The mask of a multicast to the blocks first, first + 1, ... of the cluster.
constexpr uint16_t multicast_mask(uint32_t first, uint32_t blocks) { return uint16_t(((1u << blocks) - 1) << first); }

}  // namespace ingot::ptx
#endif
