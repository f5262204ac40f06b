// Attention on a GPU: the choice of a variant, and the requirements on the operands. The kernels are in hopper/ and
// portable/.
#include <algorithm>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/generation.h"
#include "ingot/gpu/l2.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/clear_uncovered.h"
#include "ingot/kernels/attention/delta.h"
#include "ingot/kernels/attention/hopper/launch.h"
#include "ingot/kernels/attention/portable/portable.h"
#include "ingot/kernels/attention/variant.h"

namespace ingot::cuda {

using namespace attention_parts;

namespace {

constexpr int kWidest = 256;
constexpr double kLog2E = 1.4426950408889634;

AttentionVariant variant_on(const char* op, Device device) {
  const gpu::Limits& limits = gpu::device_limits(device);
  gpu::check_generation(op, limits);
#ifdef INGOT_EMULATE
  return AttentionVariant::portable;  // the emulator has neither wgmma nor tensor copies
#else
  return attention_variant(limits);
#endif
}

void check_gpu_operands(const char* op, const Tensor& q, const Tensor& v) {
  INGOT_CHECK(q.dtype == DType::bf16 || q.dtype == DType::f16, op, ": found dtype ", q.dtype,
              " on a GPU, expected bf16 or f16");
  INGOT_CHECK(q.size(2) % 8 == 0 && q.size(2) >= 8 && q.size(2) <= kWidest, op, ": found a head size of ", q.size(2),
              " on a GPU, expected a multiple of 8 up to ", kWidest);
  INGOT_CHECK_EQ(v.size(2), q.size(2), op, ": head size of v on a GPU");
}

}  // namespace

void check_gpu_vectors(const char* op, const char* name, const Tensor& t) {
  INGOT_CHECK(
      t.numel() == 0 || (reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0),
      op, ": found ", name, " at ", t.data, " with strides ", t.stride[0], " and ", t.stride[1],
      ", expected an address of a multiple of 16 bytes and strides of multiples of 8 elements on a GPU");
}

int heads_in_set(const Tensor& q, const Tensor& k, int64_t segments) {
  const int64_t group = q.size(1) / k.size(1);
  const int64_t head_bytes = std::max<int64_t>(1, k.size(0) / segments * q.size(2) * 4);
  const int64_t kept_bytes = gpu::kept_in_l2_bytes(gpu::device_limits(q.device));
  return int(std::min(q.size(1), std::max<int64_t>(1, kept_bytes / head_bytes) * group));
}

Walk key_walk_of(const AttentionBackward& a, int keys) {
  Walk w = walk_of(a, keys);
  w.heads /= w.group;
  w.heads_in_set = std::max(1, w.heads_in_set / w.group);
  w.places = detail::tile_places(a.k.size(0), w.segments, keys);
  return w;
}

ForwardParams forward_params(const Attention& a, int rows) {
  ForwardParams p{};
  p.walk = walk_of(a, rows);
  p.out = a.out.data;
  p.out_strides = strides_of(a.out);
  if (a.lse) p.lse = static_cast<float*>(a.lse.data), p.lse_stride = a.lse.stride[0];
  if (a.sinks) p.sinks = a.sinks.data, p.sinks_f32 = a.sinks.dtype == DType::f32;
  p.width = int(a.q.size(2));
  p.scale_log2 = float(a.scale * kLog2E);
  p.cap_in = a.softcap > 0 ? float(a.scale / a.softcap) : p.scale_log2;
  p.cap_out = float(a.softcap * kLog2E);
  return p;
}

ScoreParams score_params(const AttentionBackward& a, const float* delta, int64_t stride) {
  return {.lse = static_cast<const float*>(a.lse.data),
          .delta = delta,
          .lse_stride = a.lse.stride[0],
          .delta_stride = stride,
          .scale = float(a.scale),
          .scale_log2 = float(a.scale * kLog2E),
          .cap_in = float(a.softcap > 0 ? a.scale / a.softcap : a.scale * kLog2E),
          .cap_out = float(a.softcap * kLog2E),
          .width = int(a.q.size(2))};
}

void attention(const Attention& a, Stream stream) {
  const char* op = "attention";
  check_gpu_operands(op, a.q, a.v);
  check_gpu_vectors(op, "out", a.out);
  INGOT_CHECK(a.ring == 0, op, ": found a ring of ", a.ring, " keys on a GPU, expected packed keys");
  if (a.q.size(0) == 0 || a.q.size(1) == 0) return;
  [[maybe_unused]] const AttentionVariant variant = variant_on(op, a.q.device);
  clear_uncovered("attention: rows of no segment", {.rows = a.out, .cu = a.cu_q, .lse = a.lse}, {}, {}, stream);
  if (a.cu_q.size(0) == 1) return;
#ifndef INGOT_EMULATE
  if (variant == AttentionVariant::hopper) return attention_hopper::forward(a, stream);
#endif
  attention_portable::forward(a, gpu::device_limits(a.q.device), stream);
}

namespace {

int64_t delta_bytes(const AttentionBackward& a) {
  return (a.q.size(0) * a.q.size(1) * int64_t(sizeof(float)) + 15) / 16 * 16;
}
int64_t backward_bytes([[maybe_unused]] const AttentionBackward& a) {
#ifdef INGOT_EMULATE
  return 0;
#else
  const int64_t bytes = attention_hopper::backward_bytes(a);
  return bytes > 0 && attention_variant(gpu::device_limits(a.q.device)) == AttentionVariant::hopper ? bytes : 0;
#endif
}

}  // namespace

int64_t attention_backward_workspace_bytes(const AttentionBackward& a) { return delta_bytes(a) + backward_bytes(a); }

void attention_backward(const AttentionBackward& a, Stream stream) {
  const char* op = "attention_backward";
  check_gpu_operands(op, a.q, a.v);
  for (auto [name, t] : {std::pair{"dq", &a.dq}, {"dk", &a.dk}, {"dv", &a.dv}, {"out", &a.out}, {"dout", &a.dout}})
    check_gpu_vectors(op, name, *t);
  if (a.q.size(1) == 0) return;
  [[maybe_unused]] const AttentionVariant variant = variant_on(op, a.q.device);
  const Tensor& cu_k = a.cu_k ? a.cu_k : a.cu_q;
  clear_uncovered("attention_backward: rows of no segment", {.rows = a.dq, .cu = a.cu_q}, {.rows = a.dk, .cu = cu_k},
                  {.rows = a.add_dv ? Tensor{} : a.dv, .cu = cu_k}, stream);
  if (a.cu_q.size(0) == 1) return;
  float* delta = static_cast<float*>(a.workspace.data);
  if (a.q.size(0) > 0) attention_row_sums(a, delta, a.q.size(0), stream);
#ifndef INGOT_EMULATE
  if (variant == AttentionVariant::hopper) {
    void* const memory = backward_bytes(a) == 0 ? nullptr : static_cast<char*>(a.workspace.data) + delta_bytes(a);
    return attention_hopper::backward(a, delta, memory, stream);
  }
#endif
  attention_portable::backward(a, delta, gpu::device_limits(a.q.device), stream);
}

}  // namespace ingot::cuda
