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

// A tensor map of q, k, v or dout (tokens, heads, columns), whose copies bring `rows` tokens of one head by 64 columns.
CUtensorMap head_map(const char* name, const Tensor& t, int rows) {
  return gpu::tensor_map(name, t, {.rows = 1, .cols = 64, .swizzle = tile::Swizzle::b128, .outer = rows});
}

// A block for each multiprocessor, where the blocks claim their items from a counter; without a counter, a block for
// each item.
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
  const bool has_keys = a.k.size(0) > 0;  // without keys no data is prefetched
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
int64_t query_sum_bytes(const AttentionBackward& a) {
  if (!joins_gradients(int(a.q.size(2)), a.softcap > 0, a.deterministic) || a.cu_q.size(0) < 2) return 0;
  return query_sum_places(a) * a.q.size(1) * (a.q.size(2) <= 64 ? 1 : 2) * 64 * 64 * int64_t(sizeof(float));
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

// Computes dK and dV. With `sums` the kernel also adds its part of dQ to these sums; with memory for panels the kernel
// stores dS there, from which launch_query_product() computes dQ.
template <class T>
void launch_key_gradient(const AttentionBackward& a, const ScoreParams& scores, float* sums, const StoredScores& stored,
                         Stream stream) {
  const KeyGradientKernel kernel = sums            ? joint_gradient_kernel<T>(scores.width)
                                   : stored.panels ? storing_gradient_kernel<T>()
                                                   : key_gradient_kernel<T>(scores.width, a.softcap > 0);
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
                      .query_sums = sums,
                      .stored = stored};
  p.walk.slot = claim_slot(stream, a.q.device);
  gpu::launch("attention_backward: dk and dv", kernel.kernel,
              walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream, maps, p);
}

// Whether the backward pass stores dS, and for how many key heads at a time (score_panels.h). This variant has kernels
// for heads of 65 to 128 numbers without a softcap, and needs segments of equal lengths, because the host computes the
// size of the memory from the lengths. Calls that allow any order of sums have a faster kernel.
ScorePlan score_plan(const AttentionBackward& a) {
  const int64_t segments = a.cu_q.size(0) - 1, width = a.q.size(2);
  if (!a.regular || !a.deterministic || width <= 64 || width > 128 || a.softcap > 0 || segments < 1) return {0, 0};
  return plan_scores(segments, a.q.size(0) / segments, a.k.size(0) / segments, a.k.size(1), a.q.size(1) / a.k.size(1),
                     a.causal, a.window);
}
int64_t key_places(const AttentionBackward& a) {
  return detail::tile_places(a.k.size(0), a.cu_q.size(0) - 1, kScoreKeys);
}
int64_t first_panel_bytes(const AttentionBackward& a) {
  return ((key_places(a) + 1) * int64_t(sizeof(int32_t)) + 127) / 128 * 128;
}
int64_t stored_score_bytes(const AttentionBackward& a) {
  const ScorePlan plan = score_plan(a);
  if (plan.key_heads == 0) return 0;
  return first_panel_bytes(a) + plan.key_heads * (a.q.size(1) / a.k.size(1)) * plan.panels * kPanelBytes;
}

Tensor heads_of(Tensor t, int dim, int64_t first, int64_t count) {
  t.data = static_cast<char*>(t.data) + first * t.stride[dim] * size_of(t.dtype);
  t.shape.dim[dim] = count;
  return t;
}
// `a` for `count` key heads and their query heads. The operands that only the kernel of delta reads keep all heads,
// because delta has been computed before.
AttentionBackward key_heads_of(AttentionBackward a, int64_t first, int64_t count) {
  const int64_t group = a.q.size(1) / a.k.size(1);
  for (Tensor* t : {&a.k, &a.v, &a.dk, &a.dv}) *t = heads_of(*t, 1, first, count);
  for (Tensor* t : {&a.q, &a.dout, &a.dq}) *t = heads_of(*t, 1, first * group, count * group);
  a.lse = heads_of(a.lse, 0, first * group, count * group);
  return a;
}

template <class T>
void launch_query_product(const AttentionBackward& a, const ScoreParams& scores, const StoredScores& stored,
                          Stream stream) {
  const QueryProductKernel kernel = query_product_kernel<T>();
  QueryProductParams p{.walk = walk_of(a, kernel.rows),
                       .stored = stored,
                       .key_places = key_places(a),
                       .scale = scores.scale,
                       .width = scores.width,
                       .dq = a.dq.data,
                       .dq_strides = strides_of(a.dq)};
  p.walk.slot = claim_slot(stream, a.q.device);
  gpu::launch("attention_backward: dq of dS", kernel.kernel,
              walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream,
              head_map("attention_backward: k", a.k, kernel.keys), p);
}

template <class T>
void launch_storing_scores(const AttentionBackward& all, const ScorePlan& plan, const float* delta, void* memory,
                           Stream stream) {
  const ScoreKernels kernels = score_kernels();
  auto* const first = static_cast<int32_t*>(memory);
  const StoredScores stored{.panels = static_cast<char*>(memory) + first_panel_bytes(all), .first = first};
  gpu::launch("attention_backward: panels of dS", kernels.places,
              {.grid = 1, .block = kPlaceThreads, .device = all.q.device.index}, stream, key_walk_of(all, kScoreKeys),
              first, plan.panels);
  const int64_t group = all.q.size(1) / all.k.size(1);
  for (int64_t head = 0; head < all.k.size(1); head += plan.key_heads) {
    const AttentionBackward a = key_heads_of(all, head, std::min(plan.key_heads, all.k.size(1) - head));
    const ScoreParams scores = score_params(a, delta + head * group * all.q.size(0), all.q.size(0));
    const Walk keys = key_walk_of(a, kScoreKeys);
    gpu::launch("attention_backward: zeros of dS", kernels.zeros,
                {.grid = keys.places * a.q.size(1), .block = kZeroThreads, .device = a.q.device.index}, stream, keys,
                stored);
    launch_key_gradient<T>(a, scores, nullptr, stored, stream);
    launch_query_product<T>(a, scores, stored, stream);
  }
}

template <class T> void launch_backward(const AttentionBackward& a, float* delta, void* memory, Stream stream) {
  if (const ScorePlan plan = score_plan(a); plan.key_heads > 0)
    return launch_storing_scores<T>(a, plan, delta, memory, stream);
  auto* const sums = static_cast<float*>(memory);
  const ScoreParams scores = score_params(a, delta, a.q.size(0));
  if (a.q.size(0) > 0) {
    if (sums)
      gpu::fill_bytes(sums, 0, query_sum_bytes(a), stream);
    else
      launch_query_gradient<T>(a, scores, stream);
  }
  if (a.k.size(0) > 0) launch_key_gradient<T>(a, scores, sums, {}, stream);
  if (sums && a.q.size(0) > 0) launch_query_sums<T>(a, sums, scores.scale, stream);
}

}  // namespace

namespace attention_hopper {

int64_t backward_bytes(const AttentionBackward& a) {
  if (const int64_t bytes = stored_score_bytes(a); bytes > 0) return bytes;
  return query_sum_bytes(a);
}
void backward(const AttentionBackward& a, float* delta, void* memory, Stream stream) {
  const gpu::DeviceGuard guard(a.q.device.index);
  if (a.q.dtype == DType::bf16)
    launch_backward<bf16>(a, delta, memory, stream);
  else
    launch_backward<f16>(a, delta, memory, stream);
}

}  // namespace attention_hopper
}  // namespace ingot::cuda
