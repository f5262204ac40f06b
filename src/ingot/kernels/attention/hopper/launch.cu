// The launches of the Hopper kernels. The choice of this variant and all checks are in attention.cu.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/forward.h"
#include "ingot/kernels/attention/hopper/launch.h"

namespace ingot::cuda {

using namespace attention_hopper;

namespace {

// Boxes of `rows` tokens of a head by 64 columns.
CUtensorMap head_map(const char* name, const Tensor& t, int rows) {
  return gpu::tensor_map(name, t, {.rows = 1, .cols = 64, .swizzle = tile::Swizzle::b128, .outer = rows});
}

// At most one block for each multiprocessor, which claim their items; or one block for each item.
gpu::Launch walk_launch(const Walk& w, int threads, int64_t smem, Device device) {
  const int64_t items = w.places * w.heads;
  return {.grid = w.slot == kNoCounter ? items : std::min<int64_t>(items, gpu::sm_count(device.index)),
          .block = threads,
          .smem = smem,
          .device = device.index};
}

ClaimSlots& claim_slots() {
  static auto* const slots = new ClaimSlots;  // never freed, because graphs may end after everything else
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

namespace attention_hopper {

void forward(const Attention& a, Stream stream) {
  const bool capped = a.softcap > 0 || !(a.scale > 0);
  const int width = int(a.q.size(2));
  const ForwardKernel kernel =
      a.q.dtype == DType::bf16 ? forward_kernel<bf16>(width, capped) : forward_kernel<f16>(width, capped);
  const bool has_keys = a.k.size(0) > 0;  // otherwise no data is prefetched
  const WalkMaps maps{.rows = {head_map("attention: q", a.q, kernel.rows)},
                      .k = head_map("attention: k", has_keys ? a.k : a.q, kernel.keys),
                      .v = head_map("attention: v", has_keys ? a.v : a.q, kernel.keys)};
  ForwardParams p = forward_params(a, kernel.rows);
  p.walk.slot = claim_slot(stream, a.q.device);
  gpu::launch("attention", kernel.kernel, walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream, maps,
              p);
}

}  // namespace attention_hopper

namespace {

template <class T> void launch_query_gradient(const AttentionBackward& a, const ScoreParams& scores, Stream stream) {
  const QueryGradientKernel kernel = query_gradient_kernel<T>(scores.width, a.softcap > 0);
  const bool has_keys = a.k.size(0) > 0;
  const WalkMaps maps{.rows = {head_map("attention_backward: q", a.q, kernel.rows),
                               head_map("attention_backward: dout", a.dout, kernel.rows)},
                      .k = head_map("attention_backward: k", has_keys ? a.k : a.q, kernel.keys),
                      .v = head_map("attention_backward: v", has_keys ? a.v : a.q, kernel.keys)};
  QueryGradientParams p{
      .walk = walk_of(a, kernel.rows), .scores = scores, .dq = a.dq.data, .dq_strides = strides_of(a.dq)};
  p.walk.slot = claim_slot(stream, a.q.device);
  gpu::launch("attention_backward: dq", kernel.kernel, walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device),
              stream, maps, p);
}

int64_t query_sum_places(const AttentionBackward& a) {
  return detail::tile_places(a.q.size(0), a.cu_q.size(0) - 1, 64);
}
template <class T> void launch_query_sums(const AttentionBackward& a, const float* sums, float scale, Stream stream) {
  const QuerySumParams p{.cu_q = a.cu_q.ptr<int32_t>(),
                         .segments = int(a.cu_q.size(0) - 1),
                         .heads = int(a.q.size(1)),
                         .width = int(a.q.size(2)),
                         .sums = sums,
                         .scale = scale,
                         .dq = a.dq.data,
                         .dq_strides = strides_of(a.dq)};
  gpu::launch("attention_backward: dq of its sums", query_sums_kernel<T>(p.width),
              {.grid = query_sum_places(a) * p.heads, .block = 128, .device = a.q.device.index}, stream, p);
}

// With `sums` this kernel also adds up dQ.
template <class T>
void launch_key_gradient(const AttentionBackward& a, const ScoreParams& scores, float* sums, Stream stream) {
  const KeyGradientKernel kernel =
      sums ? joint_gradient_kernel<T>(scores.width) : key_gradient_kernel<T>(scores.width, a.softcap > 0);
  const bool has_queries = a.q.size(0) > 0;
  const KeyGradientMaps maps{.q = head_map("attention_backward: q", has_queries ? a.q : a.k, kernel.queries),
                             .dout = head_map("attention_backward: dout", has_queries ? a.dout : a.v, kernel.queries),
                             .k = head_map("attention_backward: k", a.k, kernel.keys),
                             .v = head_map("attention_backward: v", a.v, kernel.keys)};
  KeyGradientParams p{.walk = key_walk_of(a, kernel.keys),
                      .scores = scores,
                      .query_rows = a.q.size(0),
                      .dk = a.dk.data,
                      .dv = a.dv.data,
                      .dk_strides = strides_of(a.dk),
                      .dv_strides = strides_of(a.dv),
                      .add_dv = a.add_dv,
                      .query_sums = sums};
  p.walk.slot = claim_slot(stream, a.q.device);
  gpu::launch("attention_backward: dk and dv", kernel.kernel,
              walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream, maps, p);
}

template <class T> void launch_backward(const AttentionBackward& a, float* delta, float* sums, Stream stream) {
  const ScoreParams scores = score_params(a, delta, a.q.size(0));
  if (a.q.size(0) > 0) {
    if (sums)
      gpu::fill_bytes(sums, 0, query_sum_bytes(a), stream);
    else
      launch_query_gradient<T>(a, scores, stream);
  }
  if (a.k.size(0) > 0) launch_key_gradient<T>(a, scores, sums, stream);
  if (sums && a.q.size(0) > 0) launch_query_sums<T>(a, sums, scores.scale, stream);
}

}  // namespace

namespace attention_hopper {

int64_t query_sum_bytes(const AttentionBackward& a) {
  if (!joins_gradients(int(a.q.size(2)), a.softcap > 0, a.deterministic) || a.cu_q.size(0) < 2) return 0;
  return query_sum_places(a) * a.q.size(1) * (a.q.size(2) <= 64 ? 1 : 2) * 64 * 64 * int64_t(sizeof(float));
}

void backward(const AttentionBackward& a, float* delta, float* sums, Stream stream) {
  const gpu::DeviceGuard guard(a.q.device.index);
  if (a.q.dtype == DType::bf16)
    launch_backward<bf16>(a, delta, sums, stream);
  else
    launch_backward<f16>(a, delta, sums, stream);
}

}  // namespace attention_hopper
}  // namespace ingot::cuda
