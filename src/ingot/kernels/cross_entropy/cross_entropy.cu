#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/max_or_nan.cuh"
#include "ingot/gpu/tile/block_sum.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/cross_entropy/exponentials.h"
#include "ingot/kernels/cross_entropy/softcap.cuh"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 512;

struct Params {
  const void* logits;
  void* dlogits;
  int64_t logits_stride, dlogits_stride, vocab;
  const int32_t* targets;
  float *loss, *lse;   // lse: or null
  const float* dloss;  // null: no gradient
  float softcap, z_loss, smoothing;
  int32_t ignore_index;
};

// A sum of exponentials relative to the largest exponent, and the sum of the exponents.
struct RowSum {
  float high, sum, total;
};
// Combines kLanes lanes; every lane receives the result: the largest exponent first, so that each sum is scaled once.
template <int kLanes> __device__ inline RowSum together(RowSum e) {
  float high = e.high;
  for (int step = kLanes / 2; step > 0; step /= 2) high = ptx::max_or_nan(high, __shfl_xor_sync(~0u, high, step));
  float sum = e.sum == 0 ? 0.f : e.sum * ptx::exp2_approx((e.high - high) * kLog2e), total = e.total;
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
    total += __shfl_xor_sync(~0u, total, step);
  }
  return {high, sum, total};
}
template <int kThreadsOf = kThreads> struct RowMemory { RowSum of_warps[kThreadsOf / 32]; };
template <int kThreadsOf> __device__ inline RowSum of_block(RowSum e, RowMemory<kThreadsOf>& memory) {
  constexpr int kWarps = kThreadsOf / 32;
  e = together<32>(e);
  if (threadIdx.x % 32 == 0) memory.of_warps[threadIdx.x / 32] = e;
  __syncthreads();
  return together<kWarps>(memory.of_warps[threadIdx.x % kWarps]);
}

// Vectors of N logits per thread at a time. The first kHeld vectors of a thread stay in registers between the two
// passes; a longer row is read twice.
template <class L, class D, int N, int kHeld>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ Params p) {
  const int64_t row = blockIdx.x, vectors = p.vocab / N;
  const L* logits = static_cast<const L*>(p.logits) + row * p.logits_stride;
  const int32_t target = p.targets[row];
  const bool ignored = target == p.ignore_index, known = target >= 0 && target < p.vocab;
  const Cap cap(p.softcap);
  const auto load = [&](int64_t i, float(&x)[N]) {
    if constexpr (N == 1) {
      x[0] = cap(tile::to_float(logits[i]));
    } else {
      tile::Vec<L, N> v;
      tile::load(v, logits + i * N);
      tile::to_float(v, x);
#pragma unroll
      for (int n = 0; n < N; ++n) x[n] = cap(x[n]);
    }
  };
  float held[kHeld > 0 ? kHeld : 1][N];
  RowSum mine{-__int_as_float(0x7f800000), 0, 0};
  const auto take = [&](const float(&x)[N]) {
    float high = mine.high, total = mine.total;
#pragma unroll
    for (int n = 0; n < N; ++n) high = ptx::max_or_nan(high, x[n]), total += x[n];
    const float base = fmaxf(high, -3e38f);  // finite even if all logits are -infinity
    float sum = mine.sum == 0 ? 0.f : mine.sum * ptx::exp2_approx((mine.high - base) * kLog2e);
#pragma unroll
    for (int n = 0; n < N; ++n) sum += ptx::exp2_approx((x[n] - base) * kLog2e);
    mine = {high, sum, total};
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int64_t i = threadIdx.x + int64_t(k) * kThreads;
    if (i < vectors) load(i, held[k]), take(held[k]);
  }
  for (int64_t i = threadIdx.x + int64_t(kHeld) * kThreads; i < vectors; i += kThreads) {
    float x[N];
    load(i, x), take(x);
  }
  // Read before dlogits may overwrite the logit: of_block has a barrier.
  const float at_target = known ? cap(tile::to_float(logits[target])) : __int_as_float(0x7fffffff);
  const RowSum all = of_block(mine, tile::shared<RowMemory<>>());
  const float lse = all.high + logf(all.sum);
  if (threadIdx.x == 0) {
    const float mean = all.total / float(p.vocab);
    const float expected = p.smoothing > 0 ? (1 - p.smoothing) * at_target + p.smoothing * mean : at_target;
    p.loss[row] = ignored ? 0.f : (lse - expected) + p.z_loss * lse * lse;
    if (p.lse != nullptr) p.lse[row] = lse;
  }
  if (p.dloss == nullptr) return;

  D* dlogits = static_cast<D*>(p.dlogits) + row * p.dlogits_stride;
  const float dloss = ignored ? 0.f : p.dloss[row];
  const float scale = dloss * (1 + 2 * p.z_loss * lse) / all.sum;
  const float of_target = dloss * (1 - p.smoothing), of_each = dloss * p.smoothing / float(p.vocab);
  const auto put = [&](int64_t i, const float(&x)[N]) {
    float d[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float g = scale * ptx::exp2_approx((x[n] - all.high) * kLog2e) - of_each;
      if (i * N + n == target) g -= of_target;
      d[n] = ignored ? 0.f : g * cap.slope(x[n]);  // even where the logits are not finite
    }
    if constexpr (N == 1)
      dlogits[i] = tile::from_float<D>(d[0]);
    else
      tile::store(dlogits + i * N, tile::from_float<D>(d), false);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int64_t i = threadIdx.x + int64_t(k) * kThreads;
    if (i < vectors) put(i, held[k]);
  }
  for (int64_t i = threadIdx.x + int64_t(kHeld) * kThreads; i < vectors; i += kThreads) {
    float x[N];
    load(i, x), put(i, x);
  }
}

constexpr int kVector = 4, kHeld = 4;  // 16 logits per thread in registers, for rows of up to 8,192

template <class L, class D> void launch_rows(const CrossEntropy& a, Stream stream) {
  const auto aligned = [](const Tensor& t, int64_t bytes) {
    return !t || (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) == 0 &&
                  (t.rows() <= 1 || t.row_stride() * size_of(t.dtype) % bytes == 0));
  };
  const bool vectors = a.logits.cols() % kVector == 0 && aligned(a.logits, kVector * int64_t(sizeof(L))) &&
                       aligned(a.dlogits, kVector * int64_t(sizeof(D)));
  const Params p{.logits = a.logits.data,
                 .dlogits = a.dlogits.data,
                 .logits_stride = a.logits.row_stride(),
                 .dlogits_stride = a.dlogits ? a.dlogits.row_stride() : 0,
                 .vocab = a.logits.cols(),
                 .targets = a.targets.ptr<int32_t>(),
                 .loss = a.loss.ptr<float>(),
                 .lse = a.lse ? a.lse.ptr<float>() : nullptr,
                 .dloss = a.dloss ? a.dloss.ptr<float>() : nullptr,
                 .softcap = float(a.softcap),
                 .z_loss = float(a.z_loss),
                 .smoothing = float(a.label_smoothing),
                 .ignore_index = a.ignore_index};
  gpu::launch("cross_entropy", vectors ? row_kernel<L, D, kVector, kHeld> : row_kernel<L, D, 1, 0>,
              {.grid = a.logits.rows(), .block = kThreads, .device = a.logits.device.index}, stream, p);
}

}  // namespace

void cross_entropy(const CrossEntropy& a, Stream stream) {
  if (a.logits.rows() == 0) return;
  const DType from = a.logits.dtype, to = a.dloss ? a.dlogits.dtype : from;
  if (from == DType::bf16) return launch_rows<bf16, bf16>(a, stream);
  if (from == DType::f16) return launch_rows<f16, f16>(a, stream);
  if (from != DType::f32)
    fail(ErrorCode::unsupported, "cross_entropy: found dtype ", from, " on a GPU, expected f32, bf16 or f16");
  if (to == DType::bf16) return launch_rows<float, bf16>(a, stream);
  if (to == DType::f16) return launch_rows<float, f16>(a, stream);
  launch_rows<float, float>(a, stream);
}

// --- from exponentials (exponentials.h)

namespace {

struct TiledParams {
  void* e;              // becomes the gradient
  const float2* parts;  // (rows, tiles): high, sum
  const float* at_target;
  int64_t stride;
  uint32_t vocab, tiles;
  const int32_t* targets;
  float *loss, *lse;   // lse: or null
  const float* dloss;  // null: no gradient
  float softcap, z_loss;
  int32_t ignore_index;
};

constexpr uint32_t kEights = 4, kTileEights = kExponentialColumns / 8;  // vectors of a thread that are loaded at once

// One block per row. With few columns blocks are small, so that the sums of one block overlap with the loads and stores
// of other blocks.
template <class T, int kThreadsOf>
__global__ void __launch_bounds__(kThreadsOf) tiled_row_kernel(const __grid_constant__ TiledParams p) {
  const int64_t row = blockIdx.x;
  const float2* const parts = p.parts + row * p.tiles;
  T* const e = static_cast<T*>(p.e) + row * p.stride;
  const uint32_t eights = p.dloss == nullptr ? 0 : p.vocab / 8;
  tile::Vec<T, 8> v[kEights];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (uint32_t k = 0; k < kEights; ++k)
      if (first + k * kThreadsOf < eights) tile::load(v[k], e + int64_t(first + k * kThreadsOf) * 8);
  };
  load(threadIdx.x);
  const int32_t target = p.targets[row];
  const bool ignored = target == p.ignore_index, known = target >= 0 && uint32_t(target) < p.vocab;
  const float at_target = known ? p.at_target[row] : __int_as_float(0x7fffffff);
  RowSum mine{-__int_as_float(0x7f800000), 0, 0};
  for (uint32_t t = threadIdx.x; t < p.tiles; t += kThreadsOf) {
    const float2 part = parts[t];
    const float high = ptx::max_or_nan(mine.high, part.x);
    const auto scaled = [&](float sum, float from) {
      return sum == 0 ? 0.f : sum * ptx::exp2_approx((from - high) * kLog2e);
    };
    mine = {high, scaled(mine.sum, mine.high) + scaled(part.y, part.x), 0};
  }
  const RowSum all = of_block(mine, tile::shared<RowMemory<kThreadsOf>>());
  const float lse = all.high + logf(all.sum);
  if (threadIdx.x == 0) {
    p.loss[row] = ignored ? 0.f : (lse - at_target) + p.z_loss * lse * lse;
    if (p.lse != nullptr) p.lse[row] = lse;
  }
  if (p.dloss == nullptr) return;

  const Cap cap(p.softcap);
  const float dloss = ignored ? 0.f : p.dloss[row];
  const float scale = dloss * (1 + 2 * p.z_loss * lse) / all.sum;
  const auto exponential = [&](float c) { return ptx::exp2_approx((c - all.high) * kLog2e); };
  const float of_target = (scale * exponential(at_target) - dloss) * cap.slope(at_target);
  for (uint32_t first = threadIdx.x; first < eights;) {
#pragma unroll
    for (uint32_t k = 0; k < kEights; ++k) {
      const uint32_t i = first + k * kThreadsOf;
      if (i >= eights) break;
      const float high = parts[i / kTileEights].x, factor = scale * exponential(high);
      float x[8], d[8];
      tile::to_float(v[k], x);
#pragma unroll
      for (uint32_t n = 0; n < 8; ++n) {
        // Where the exponential has underflowed to 0, the logit is the smallest that the cap allows.
        const float c = p.softcap > 0 ? fmaxf(high + ptx::log2_approx(x[n]) * (1 / kLog2e), -p.softcap) : 0.f;
        const float g = int32_t(i * 8 + n) == target ? of_target : factor * x[n] * cap.slope(c);
        d[n] = ignored ? 0.f : g;  // even where the logits are not finite
      }
      tile::store(e + int64_t(i) * 8, tile::from_float<T>(d), false);
    }
    first += kEights * kThreadsOf;
    load(first);
  }
}

template <class T> void launch_tiled_rows(const TiledParams& p, int64_t rows, int device, Stream stream) {
  const bool few = p.vocab <= 16384;
  gpu::launch("cross_entropy", few ? tiled_row_kernel<T, 128> : tiled_row_kernel<T, kThreads>,
              {.grid = rows, .block = few ? 128 : kThreads, .device = device}, stream, p);
}

}  // namespace

void cross_entropy_of(const Exponentials& in, const CrossEntropy& a, Stream stream) {
  const int64_t rows = in.parts.size(0);
  if (rows == 0) return;
  const TiledParams p{.e = in.e.data,
                      .parts = static_cast<const float2*>(in.parts.data),
                      .at_target = in.at_target.ptr<float>(),
                      .stride = in.e ? in.e.row_stride() : 0,
                      .vocab = uint32_t(in.vocab),
                      .tiles = uint32_t(in.parts.size(1)),
                      .targets = a.targets.ptr<int32_t>(),
                      .loss = a.loss.ptr<float>(),
                      .lse = a.lse ? a.lse.ptr<float>() : nullptr,
                      .dloss = a.dloss ? a.dloss.ptr<float>() : nullptr,
                      .softcap = float(a.softcap),
                      .z_loss = float(a.z_loss),
                      .ignore_index = a.ignore_index};
  if (in.e && in.e.dtype == DType::f16) return launch_tiled_rows<f16>(p, rows, in.parts.device.index, stream);
  launch_tiled_rows<bf16>(p, rows, in.parts.device.index, stream);
}

}  // namespace ingot::cuda
