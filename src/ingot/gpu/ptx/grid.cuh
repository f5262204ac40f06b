#pragma once
// Programmatic dependent launch: the next kernel of the stream may start its blocks while this kernel ends. Before
// sm_90 kernels do not overlap and these functions do nothing.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
namespace ingot::ptx {

// The next kernel may be scheduled once every block of this kernel has called this function; its
// wait_for_earlier_kernels() still waits for all of this kernel's writes.
__device__ inline void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Called before the first access to memory with possible earlier writes or reads of preceding kernels. Every kernel
// launched with `overlap` must call it in every block, or a kernel two places later could overtake the first.
__device__ inline void wait_for_earlier_kernels() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ingot::ptx
#endif
