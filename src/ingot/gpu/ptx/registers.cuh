#pragma once
// Moves registers from copying warps to multiplying warps. N: registers per thread, a multiple of 8 from 24 to 256. All
// warps of a warpgroup call the function, each role in a branch of a single if/else, in a kernel with
// __launch_bounds__(threads, 1); otherwise ptxas ignores the request and reports C7508.
namespace ingot::ptx {

template <int N> __device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace ingot::ptx
