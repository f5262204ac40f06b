// Attention on Hopper: what a GPU asks of the operands, and the forward launch. The kernels stand in hopper/.
#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/hopper/forward.h"

namespace ingot::cuda {

using namespace attention_hopper;

namespace {
constexpr int kWidest = 256;
constexpr int64_t kKeptBytes = 24 << 20;  // of L2, for what many tiles read
constexpr double kLog2E = 1.4426950408889634;
}  // namespace

void check_hopper(const char* op, Device device) {
  int major = 0;
  gpu::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index), op,
                  ": compute capability of ", device);
  INGOT_CHECK(major == 9, op, ": found a GPU of compute capability ", major, ".x, expected 9.0 (Hopper)");
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

int64_t persistent_grid(int64_t items, Device device) { return std::min<int64_t>(items, gpu::sm_count(device.index)); }

// Launches of one stream run one after the other and share a slot. Those that a graph records may be replayed beside
// anything, so each has its own, until the slots have been gone through.
uint32_t claim_slot(Stream stream, Device device) {
  constexpr uint32_t kStreams = 4096;
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, uint32_t> streams;
  static uint32_t recorded = 0;
  const gpu::DeviceGuard guard(device.index);
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  gpu::check_cuda(cudaStreamIsCapturing(handle, &status), "attention: is the stream recorded?");
  if (status == cudaStreamCaptureStatusNone) gpu::check_cuda(cudaStreamGetId(handle, &id), "attention: the stream");
  const std::lock_guard lock(mutex);
  if (status != cudaStreamCaptureStatusNone) return kStreams + recorded++ % (kSlots - kStreams);
  return streams.emplace(id, uint32_t(streams.size() % kStreams)).first->second;
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
  if (a.q.size(0) == 0 || a.q.size(1) == 0 || a.cu_q.size(0) == 1) return;
  check_hopper(op, a.q.device);
  const bool capped = a.softcap > 0 || !(a.scale > 0);
  const int width = int(a.q.size(2));
  const ForwardKernel kernel =
      a.q.dtype == DType::bf16 ? forward_kernel<bf16>(width, capped) : forward_kernel<f16>(width, capped);
  const bool has_keys = a.k.size(0) > 0;  // otherwise nothing is fetched
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
  gpu::launch(op, kernel.kernel,
              {.grid = persistent_grid(p.walk.places * p.walk.heads, a.q.device),
               .block = kernel.threads,
               .smem = kernel.smem,
               .device = a.q.device.index},
              stream, maps, p);
}

}  // namespace ingot::cuda
