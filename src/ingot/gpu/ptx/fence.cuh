#pragma once
// Fences. The async proxy is the copy engine's and the tensor cores' view of memory: data of ordinary stores needs a
// barrier and a proxy fence before wgmma or a bulk copy reads it. Each writing thread executes the fence before the
// barrier; for a copy from a single thread, the issuing thread may execute the fence after the barrier.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
namespace ingot::ptx {

__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }  // all state spaces

__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace ingot::ptx
#endif
