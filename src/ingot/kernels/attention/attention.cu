// Attention on Hopper: the GPU's requirements on the operands, and the forward launch. The kernels are in hopper/.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/clear_uncovered.h"
#include "ingot/kernels/attention/hopper/forward.h"

namespace ingot::cuda {

using namespace attention_hopper;

namespace {
constexpr int kWidest = 256;
constexpr int64_t kKeptBytes = 24 << 20;  // bytes of L2 for data read by many tiles
constexpr double kLog2E = 1.4426950408889634;
}  // namespace

void check_hopper(const char* op, Device device) {
  const gpu::Limits& limits = gpu::limits(device.index);
  if (!limits.hopper)
    fail(ErrorCode::unsupported, op, ": found a GPU of compute capability ", limits.capability / 10, ".",
         limits.capability % 10, ", expected 9.0 (Hopper)");
}

void check_gpu_operands(const char* op, const Tensor& q, const Tensor& v) {
  INGOT_CHECK(q.dtype == DType::bf16 || q.dtype == DType::f16, op, ": found dtype ", q.dtype,
              " on a GPU, expected bf16 or f16");
  INGOT_CHECK(q.size(2) % 8 == 0 && q.size(2) >= 8 && q.size(2) <= kWidest, op, ": found a head size of ", q.size(2),
              " on a GPU, expected a multiple of 8 up to ", kWidest);
  INGOT_CHECK_EQ(v.size(2), q.size(2), op, ": head size of v on a GPU");
}

void check_gpu_vectors(const char* op, const char* name, const Tensor& t) {
  INGOT_CHECK(
      t.numel() == 0 || (reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0),
      op, ": found ", name, " at ", t.data, " with strides ", t.stride[0], " and ", t.stride[1],
      ", expected an address of a multiple of 16 bytes and strides of multiples of 8 elements on a GPU");
}

CUtensorMap head_map(const char* name, const Tensor& t, int rows) {
  return gpu::tensor_map(name, t, {.rows = 1, .cols = 64, .swizzle = tile::Swizzle::b128, .outer = rows});
}

Strides strides_of(const Tensor& t) { return {t.stride[0], t.stride[1]}; }

gpu::Launch walk_launch(const Walk& w, int threads, int64_t smem, Device device) {
  const int64_t items = w.places * w.heads;
  return {.grid = w.slot == kNoCounter ? items : std::min<int64_t>(items, gpu::sm_count(device.index)),
          .block = threads,
          .smem = smem,
          .device = device.index};
}

namespace {
ClaimSlots& claim_slots() {
  static auto* const slots = new ClaimSlots;  // for good: graphs may end after everything else
  return *slots;
}
// Called when the last graph with this launch has ended, also where recording it failed.
void CUDART_CB give_slot_back(void* slot) { claim_slots().give_back(uint32_t(reinterpret_cast<uintptr_t>(slot))); }
}  // namespace

uint32_t claim_slot(Stream stream, Device device) {
  const gpu::DeviceGuard guard(device.index);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  gpu::check_cuda(cudaStreamGetCaptureInfo(handle, &status, &id, &graph), "attention: is the stream recorded?");
  if (status == cudaStreamCaptureStatusNone) {
    gpu::check_cuda(cudaStreamGetId(handle, &id), "attention: the stream");
    return claim_slots().of_stream(id);
  }
  const uint32_t slot = graph != nullptr ? claim_slots().of_recorded() : kNoCounter;
  if (slot == kNoCounter) return slot;
  cudaUserObject_t held{};
  cudaError_t error = cudaUserObjectCreate(&held, reinterpret_cast<void*>(uintptr_t(slot)), give_slot_back, 1,
                                           cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) claim_slots().give_back(slot);
  gpu::check_cuda(error, "attention: what a graph holds");
  error = cudaGraphRetainUserObject(graph, held, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) (void)cudaUserObjectRelease(held, 1);
  gpu::check_cuda(error, "attention: what a graph holds");
  return slot;
}

int heads_in_set(const Tensor& q, const Tensor& k, int64_t segments) {
  const int64_t group = q.size(1) / k.size(1);
  const int64_t head_bytes = std::max<int64_t>(1, k.size(0) / segments * q.size(2) * 4);
  return int(std::min(q.size(1), std::max<int64_t>(1, kKeptBytes / head_bytes) * group));
}

void attention(const Attention& a, Stream stream) {
  const char* op = "attention";
  check_gpu_operands(op, a.q, a.v);
  check_gpu_vectors(op, "out", a.out);
  INGOT_CHECK(a.ring == 0, op, ": found a ring of ", a.ring, " keys on a GPU, expected packed keys");
  if (a.q.size(0) == 0 || a.q.size(1) == 0) return;
  check_hopper(op, a.q.device);
  clear_uncovered("attention: rows of no segment", {.rows = a.out, .cu = a.cu_q, .lse = a.lse}, {}, {}, stream);
  if (a.cu_q.size(0) == 1) return;
  const bool capped = a.softcap > 0 || !(a.scale > 0);
  const int width = int(a.q.size(2));
  const ForwardKernel kernel =
      a.q.dtype == DType::bf16 ? forward_kernel<bf16>(width, capped) : forward_kernel<f16>(width, capped);
  const bool has_keys = a.k.size(0) > 0;  // otherwise no data is prefetched
  const WalkMaps maps{.rows = {head_map("attention: q", a.q, kernel.rows)},
                      .k = head_map("attention: k", has_keys ? a.k : a.q, kernel.keys),
                      .v = head_map("attention: v", has_keys ? a.v : a.q, kernel.keys)};
  ForwardParams p{};
  p.walk = walk_of(a, kernel.rows, stream);
  p.out = a.out.data;
  p.out_strides = strides_of(a.out);
  if (a.lse) p.lse = static_cast<float*>(a.lse.data), p.lse_stride = a.lse.stride[0];
  if (a.sinks) p.sinks = a.sinks.data, p.sinks_f32 = a.sinks.dtype == DType::f32;
  p.width = width;
  p.scale_log2 = float(a.scale * kLog2E);
  p.cap_in = a.softcap > 0 ? float(a.scale / a.softcap) : p.scale_log2;
  p.cap_out = float(a.softcap * kLog2E);
  gpu::launch(op, kernel.kernel, walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream, maps, p);
}

}  // namespace ingot::cuda
