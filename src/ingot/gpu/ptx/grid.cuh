#pragma once
// Programmatic dependent launch: the next kernel of the stream may start its blocks while this one ends. Before sm_90
// nothing overlaps and there is nothing to say.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
namespace ingot::ptx {

// The next kernel may be scheduled once every block of this one has said so; its wait_for_earlier_kernels() still waits
// for all of this kernel's writes.
__device__ inline void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Before the first access to memory that an earlier kernel may write or still read. Every kernel launched with
// `overlap` must call it in every block, or a kernel two places later could overtake the first.
__device__ inline void wait_for_earlier_kernels() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ingot::ptx
#endif
