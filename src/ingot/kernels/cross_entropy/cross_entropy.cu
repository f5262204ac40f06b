#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/block_sum.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/cross_entropy/cross_entropy.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 512;
constexpr float kLog2e = 1.44269504088896f;

struct Params {
  const void* logits;
  void* dlogits;
  int64_t logits_stride, dlogits_stride, vocab;
  const int32_t* targets;
  float *loss, *lse;   // lse: or null
  const float* dloss;  // or null: no gradient
  float softcap, z_loss, smoothing;
  int32_t ignore_index;
};

// softcap * tanh(l / softcap) by two special functions, 2^-21 of the cap at most; l itself without a cap.
struct Cap {
  float cap, rate;  // rate: 2 log2(e) / cap
  __device__ explicit Cap(float softcap) : cap(softcap), rate(softcap > 0 ? 2 * kLog2e / softcap : 0) {}
  __device__ float operator()(float l) const {
    if (cap == 0) return l;
    return cap - 2 * cap * ptx::reciprocal_approx(1 + ptx::exp2_approx(l * rate));
  }
  __device__ float slope(float capped) const {
    if (cap == 0) return 1;
    const float u = capped / cap;
    return 1 - u * u;
  }
};

// A sum of exponentials beside the largest exponent among them, and the sum of the exponents.
struct Exponentials {
  float high, sum, total;
};
// Of kLanes lanes in every one of them: the largest exponent first, so that each sum is scaled once.
template <int kLanes> __device__ inline Exponentials together(Exponentials e) {
  float high = e.high;
  for (int step = kLanes / 2; step > 0; step /= 2) high = ptx::max_nan(high, __shfl_xor_sync(~0u, high, step));
  float sum = e.sum == 0 ? 0.f : e.sum * ptx::exp2_approx((e.high - high) * kLog2e), total = e.total;
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
    total += __shfl_xor_sync(~0u, total, step);
  }
  return {high, sum, total};
}
struct RowMemory {
  Exponentials of_warps[kThreads / 32];
};
__device__ inline Exponentials of_block(Exponentials e, RowMemory& memory) {
  constexpr int kWarps = kThreads / 32;
  e = together<32>(e);
  if (threadIdx.x % 32 == 0) memory.of_warps[threadIdx.x / 32] = e;
  __syncthreads();
  return together<kWarps>(memory.of_warps[threadIdx.x % kWarps]);
}

// Vectors of N logits a thread at a time. The first kHeld vectors of a thread stay in registers between the two passes;
// a longer row is read twice.
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
  Exponentials mine{-__int_as_float(0x7f800000), 0, 0};
  const auto take = [&](const float(&x)[N]) {
    float high = mine.high, total = mine.total;
#pragma unroll
    for (int n = 0; n < N; ++n) high = ptx::max_nan(high, x[n]), total += x[n];
    const float base = fmaxf(high, -3e38f);  // where all are -infinity
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
  // Read before dlogits may overwrite it: of_block has a barrier.
  const float at_target = known ? cap(tile::to_float(logits[target])) : __int_as_float(0x7fffffff);
  const Exponentials all = of_block(mine, tile::shared<RowMemory>());
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

constexpr int kVector = 4, kHeld = 4;  // 16 logits a thread in registers: rows of 8,192

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

namespace {

// Products of few rows waste tiles, and the gradient of the weights is read and written once a chunk: as many rows as
// take so much memory, and no more than the longest products need. A chunk's logits are beyond L2 either way.
constexpr int64_t kChunkBytes = 1'400'000'000, kMostChunkRows = 8192, kLeastChunkRows = 128;

// Equal chunks, but for the last, of rows in whole tiles.
int64_t chunk_rows(int64_t rows, int64_t vocab, DType type) {
  const int64_t row = std::max<int64_t>(1, vocab) * (4 + (type == DType::f32 ? 0 : size_of(type))),
                most = std::clamp(kChunkBytes / row / 128 * 128, kLeastChunkRows, kMostChunkRows),
                chunks = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::min(most, ((rows + chunks - 1) / chunks + 127) / 128 * 128);
}
// Room for a chunk of logits, for their gradients where those have another type, and for the products.
struct Room {
  int64_t logits, dlogits, product;
  int64_t bytes() const { return logits + dlogits + product; }
};
Room room_of(int64_t rows, int64_t vocab, DType type, Device device) {
  const int64_t n = std::min(rows, chunk_rows(rows, vocab, type)), padded = (vocab + 7) / 8 * 8;
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  return {aligned(n * padded * 4), type == DType::f32 ? 0 : aligned(n * padded * size_of(type)),
          linear_workspace_bytes(device)};
}

}  // namespace

int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t, int64_t vocab, DType dtype, Products,
                                             Device device) {
  return room_of(rows, vocab, dtype, device).bytes();
}

void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream) {
  const int64_t T = a.x.size(0), V = a.w.size(0), step = chunk_rows(T, V, a.x.dtype), padded = (V + 7) / 8 * 8;
  const Room room = room_of(T, V, a.x.dtype, a.x.device);
  char* const memory = static_cast<char*>(a.workspace.data);
  const Tensor product(memory + room.logits + room.dlogits, DType::u8, {room.product}, a.x.device);
  for (int64_t begin = 0; begin < T; begin += step) {
    const int64_t end = std::min(T, begin + step);
    const auto rows = [&](const Tensor& t) { return t ? t.slice(0, begin, end) : Tensor(); };
    const auto chunk = [&](char* at, DType type) {
      Tensor t(at, type, {end - begin, V}, a.x.device);
      t.stride[0] = padded;
      return t;
    };
    // Logits in fp32 also where the operands have 16 bits: their rounding would be the loss's.
    const Tensor logits = chunk(memory, DType::f32);
    const auto multiply = [&](const Tensor& x, const Tensor& w, double beta) {
      matmul({.a = x,
              .b = w,
              .c = logits,
              .transpose_b = true,
              .beta = beta,
              .products = a.products,
              .workspace = product},
             stream);
    };
    multiply(rows(a.x), a.w, 0);
    if (a.x2) multiply(rows(a.x2), a.w2, 1);
    const Tensor dlogits = !a.dloss ? Tensor() : room.dlogits == 0 ? logits : chunk(memory + room.logits, a.x.dtype);
    ingot::cross_entropy({.logits = logits,
                          .targets = rows(a.targets),
                          .loss = rows(a.loss),
                          .lse = rows(a.lse),
                          .dloss = rows(a.dloss),
                          .dlogits = dlogits,
                          .softcap = a.softcap,
                          .z_loss = a.z_loss,
                          .ignore_index = a.ignore_index,
                          .label_smoothing = a.label_smoothing},
                         stream);
    if (!a.dloss) continue;
    const auto backward = [&](const Tensor& x, const Tensor& w, const Tensor& dx, const Tensor& dw) {
      if (!dx && !dw) return;
      linear_backward({.dy = dlogits, .x = x, .w = w, .dx = dx, .dw = dw, .products = a.products, .workspace = product},
                      stream);
    };
    backward(rows(a.x), a.w, rows(a.dx), a.dw);
    if (a.x2) backward(rows(a.x2), a.w2, rows(a.dx2), a.dw2);
  }
}

}  // namespace ingot::cuda
