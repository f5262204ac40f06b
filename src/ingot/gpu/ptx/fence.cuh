#pragma once
// Fences. The async proxy is the copy engine and the tensor cores' view of memory: what ordinary stores wrote needs a
// barrier and a proxy fence on its way to wgmma or a bulk copy. The fence stands in each writing thread before the
// barrier, or, for a copy that one thread asks for, in that thread after it.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
namespace ingot::ptx {

__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_proxy_async_cluster() { asm volatile("fence.proxy.async.shared::cluster;" ::: "memory"); }
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }  // all state spaces

__device__ inline void fence_acq_rel_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace ingot::ptx
#endif
