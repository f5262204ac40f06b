#pragma once
// The bulk copy engine. A single thread issues a copy; loads complete on an mbarrier (with their bytes expected),
// stores and reductions in the thread's bulk groups. Linear copies: 16-byte aligned addresses, sizes in multiples of
// 16. Tensor copies: a CUtensorMap (tma_map.h) passed as `const __grid_constant__`; coordinates in elements, innermost
// first, the innermost a multiple of 16 bytes. Elements outside of the tensor are loaded as zeros (their bytes count)
// and not stored; loads may begin before 0, stores and additions must not. A copy that breaks one of the two rules on
// coordinates ends with the error "illegal instruction". Stores respect the end of a row only to a multiple of 16
// bytes, so write only to tensors whose rows are whole multiples of 16 bytes. Shared memory written by ordinary stores
// needs fence_proxy_async_shared() before the engine reads it.
#include <cstdint>

#include "ingot/gpu/ptx/address.cuh"

namespace ingot::ptx {

// L2 cache hints, in createpolicy's encoding for a fraction of 1.
constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// --- linear copies

// Global -> this block's shared memory.
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(hint)
      : "memory");
}
// This block's shared memory -> a peer's; completes on the peer's barrier. Both addresses from cluster_address().
__device__ inline void bulk_copy_to_cluster(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// --- the thread's bulk groups

__device__ inline void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most N groups are left whose writes are not done.
template <int N> __device__ inline void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Waits until at most N groups still read shared memory: the buffers of the earlier groups may be reused.
template <int N> __device__ inline void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// --- tensor copies
// `map` is the address of a CUtensorMap kernel parameter.

__device__ inline void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void tensor_load(void* to, const void* map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}
__device__ inline void tensor_load(void* to, const void* map, int x, int y, uint64_t* barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(hint)
      : "memory");
}
__device__ inline void tensor_load_3d(void* to, const void* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
__device__ inline void tensor_load_3d(void* to, const void* map, int x, int y, int z, uint64_t* barrier,
                                      uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(hint)
      : "memory");
}
// Loads to the same address in every block of `mask`; completes on each block's barrier at the same address.
__device__ inline void tensor_load_multicast(void* to, const void* map, int x, int y, uint64_t* barrier,
                                             uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
}
__device__ inline void tensor_load_multicast(void* to, const void* map, int x, int y, uint64_t* barrier, uint16_t mask,
                                             uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(mask), "l"(hint)
      : "memory");
}
__device__ inline void tensor_load_3d_multicast(void* to, const void* map, int x, int y, int z, uint64_t* barrier,
                                                uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
}
__device__ inline void tensor_prefetch(const void* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

__device__ inline void tensor_store(const void* map, int x, int y, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
               "r"(y), "r"(shared_address(from))
               : "memory");
}
__device__ inline void tensor_store(const void* map, int x, int y, const void* from, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(map),
      "r"(x), "r"(y), "r"(shared_address(from)), "l"(hint)
      : "memory");
}
__device__ inline void tensor_store_3d(const void* map, int x, int y, int z, const void* from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(shared_address(from))
               : "memory");
}
// global += shared, in the map's type.
__device__ inline void tensor_add_3d(const void* map, int x, int y, int z, const void* from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(from))
      : "memory");
}

}  // namespace ingot::ptx
