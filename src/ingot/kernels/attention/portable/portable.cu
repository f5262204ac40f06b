// The launches of the portable kernels: one block for each work item; the items with the most steps come first.
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/portable/portable.h"

namespace ingot::cuda::attention_portable {
namespace {

// `op` begins the message of an error and ends with the operand's name, as in "attention: q".
Source source_of(const char* op, const Tensor& t) {
  check_gpu_vectors(op, "rows", t);
  return {t.data, strides_of(t)};
}

template <class T>
void launch_backward(const AttentionBackward& a, BackwardArguments p, const gpu::Limits& limits, Stream stream) {
  const int width = p.scores.width;
  const auto launch = [&](const char* name, const BackwardKernel& kernel) {
    gpu::launch(name, kernel.kernel,
                {.grid = p.walk.places * p.walk.heads,
                 .block = kernel.threads,
                 .smem = kernel.smem,
                 .device = a.q.device.index},
                stream, p);
  };
  if (a.q.size(0) > 0) {
    const BackwardKernel kernel = query_gradient_kernel<T>(width, limits);
    p.walk = walk_of(a, kernel.rows);
    launch("attention_backward: dq", kernel);
  }
  if (a.k.size(0) > 0) {
    const BackwardKernel kernel = key_gradient_kernel<T>(width, a.softcap > 0, limits);
    p.walk = key_walk_of(a, kernel.rows);
    launch("attention_backward: dk and dv", kernel);
  }
}

}  // namespace

void forward(const Attention& a, const gpu::Limits& limits, Stream stream) {
  const int width = int(a.q.size(2));
  const ForwardKernel kernel =
      a.q.dtype == DType::bf16 ? forward_kernel<bf16>(width, limits) : forward_kernel<f16>(width, limits);
  const ForwardArguments p{.common = forward_params(a, kernel.rows),
                           .q = source_of("attention: q", a.q),
                           .k = source_of("attention: k", a.k),
                           .v = source_of("attention: v", a.v)};
  gpu::launch("attention", kernel.kernel,
              {.grid = p.common.walk.places * p.common.walk.heads,
               .block = kernel.threads,
               .smem = kernel.smem,
               .device = a.q.device.index},
              stream, p);
}

void backward(const AttentionBackward& a, float* delta, const gpu::Limits& limits, Stream stream) {
  BackwardArguments p{};
  p.scores = score_params(a, delta, a.q.size(0));
  p.q = source_of("attention_backward: q", a.q), p.k = source_of("attention_backward: k", a.k);
  p.v = source_of("attention_backward: v", a.v), p.dout = source_of("attention_backward: dout", a.dout);
  p.dq = a.dq.data, p.dq_strides = strides_of(a.dq);
  p.dk = a.dk.data, p.dk_strides = strides_of(a.dk);
  p.dv = a.dv.data, p.dv_strides = strides_of(a.dv), p.add_dv = a.add_dv;
  if (a.q.dtype == DType::bf16)
    launch_backward<bf16>(a, p, limits, stream);
  else
    launch_backward<f16>(a, p, limits, stream);
}

}  // namespace ingot::cuda::attention_portable
