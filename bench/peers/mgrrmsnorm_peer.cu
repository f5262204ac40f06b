// MGRrmsnorm behind C functions: `calls` launches over rotated buffers, so that a host call costs nothing. It launches
// on the legacy default stream, which no graph can capture.
#include <cstdint>
#include <type_traits>

#include "rmsnorm_kernel.h"

extern "C" __attribute__((visibility("default"))) int mgrrmsnorm(int bytes_per_element, bool is_bf16, int calls,
                                                                 void** out, void** in, float* inv_rms, const void* w,
                                                                 int rows, int cols, float eps) {
  for (int i = 0; i < calls; ++i) {
    bool ok;
    if (bytes_per_element == 4)
      ok = rmsnorm_cuda_fp32(static_cast<float*>(out[i]), inv_rms, static_cast<const float*>(in[i]),
                             static_cast<const float*>(w), rows, cols, eps);
    else if (is_bf16)
      ok = rmsnorm_cuda_bf16(static_cast<__nv_bfloat16*>(out[i]), inv_rms, static_cast<const __nv_bfloat16*>(in[i]),
                             static_cast<const __nv_bfloat16*>(w), rows, cols, eps);
    else
      ok = rmsnorm_cuda_fp16(static_cast<__half*>(out[i]), inv_rms, static_cast<const __half*>(in[i]),
                             static_cast<const __half*>(w), rows, cols, eps);
    if (!ok) return 1;
  }
  return 0;
}

extern "C" __attribute__((visibility("default"))) int mgrrmsnorm_backward(int bytes_per_element, bool is_bf16,
                                                                          int calls, void** dx, void* dw, void** dy,
                                                                          void** in, const void* w,
                                                                          const float** inv_rms, int rows, int cols) {
  const auto call = [&](auto* type, auto function, int i) {
    using T = std::remove_pointer_t<decltype(type)>;
    return function(static_cast<T*>(dx[i]), static_cast<T*>(dw), static_cast<const T*>(dy[i]),
                    static_cast<const T*>(in[i]), static_cast<const T*>(w), inv_rms[i], rows, cols);
  };
  for (int i = 0; i < calls; ++i) {
    bool ok;
    if (bytes_per_element == 4)
      ok = call(static_cast<float*>(nullptr), rmsnorm_backward_cuda_fp32, i);
    else if (is_bf16)
      ok = call(static_cast<__nv_bfloat16*>(nullptr), rmsnorm_backward_cuda_bf16, i);
    else
      ok = call(static_cast<__half*>(nullptr), rmsnorm_backward_cuda_fp16, i);
    if (!ok) return 1;
  }
  return 0;
}
