// A warp processes a row at a time, with the whole row in registers: each operand is read once for all steps.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/residual_norm/residual_norm.h"

namespace ingot::cuda {
namespace {

using residual::Channels;
using residual::kThreads;

constexpr int kWarps = kThreads / 32, kVector = 8;  // columns of a vector
constexpr int kMostVectors = 4;                     // vectors of a lane, which allows rows of 1,024
constexpr int64_t kBlocks = 528;                    // four per SM; sums over tokens have this many parts

template <class T> struct Rows {
  Rows(const Tensor& t) : data(t ? static_cast<T*>(t.data) : nullptr), stride(t ? t.row_stride() : 0) {}
  T* data;
  int64_t stride;
  __device__ void load(int64_t row, int c, tile::Vec<T, kVector>& v) const {
    tile::load_streaming(v, data + row * stride + c);
  }
  __device__ void store(int64_t row, int c, const tile::Vec<T, kVector>& v) const {
    tile::store(data + row * stride + c, v, false);
  }
};

// A lane's columns of a vector of factors.
template <int V> struct Factors {
  float of[V][kVector];
  __device__ void load(const Channels& from, int cols) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const int c = (v * 32 + int(threadIdx.x % 32)) * kVector;
        of[v][k] = c >= cols ? 0.f : from.data != nullptr ? from.data[c + k] : 1.f;
      }
  }
};

// x rounded to T, as the next reader sees x.
template <class T> __device__ inline tile::Vec<T, kVector> rounded(float (&x)[kVector]) {
  const tile::Vec<T, kVector> v = tile::from_float<T>(x);
  tile::to_float(v, x);
  return v;
}

template <class T> struct ForwardParams {
  Rows<T> x, branch, sum, x0, mixed, y;
  Channels scale, a, b;
  float* rstd;
  int64_t rows;
  int cols;
  float eps, norm_scale;
};

template <class T, int V, bool kBranch, bool kMix>
__global__ void __launch_bounds__(kThreads) residual_norm_forward(const __grid_constant__ ForwardParams<T> p) {
  const int lane = int(threadIdx.x % 32);
  Factors<kBranch ? V : 1> scale;
  Factors<kMix ? V : 1> a, b;
  if constexpr (kBranch) scale.load(p.scale, p.cols);
  if constexpr (kMix) a.load(p.a, p.cols), b.load(p.b, p.cols);
  const int64_t apart = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.rows; row += apart) {
    tile::Vec<T, kVector> x[V], branch[kBranch ? V : 1], x0[kMix ? V : 1];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (v * 32 + lane) * kVector;
      if (c >= p.cols) continue;
      p.x.load(row, c, x[v]);
      if constexpr (kBranch) p.branch.load(row, c, branch[v]);
      if constexpr (kMix) p.x0.load(row, c, x0[v]);
    }
    float m[V][kVector], squares[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (v * 32 + lane) * kVector;
      tile::to_float(x[v], m[v]);
      float more[kVector];
      if constexpr (kBranch) {
        tile::to_float(branch[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) m[v][k] = residual::added(m[v][k], scale.of[v][k], more[k]);
        const auto s = rounded<T>(m[v]);
        if (c < p.cols) p.sum.store(row, c, s);
      }
      if constexpr (kMix) {
        tile::to_float(x0[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) m[v][k] = residual::mixed(a.of[v][k], m[v][k], b.of[v][k], more[k]);
        const auto s = rounded<T>(m[v]);
        if (c < p.cols) p.mixed.store(row, c, s);
      }
      if (c < p.cols)
#pragma unroll
        for (int k = 0; k < kVector; ++k) squares[0] += m[v][k] * m[v][k];
    }
    tile::warp_sum(squares, 32);
    const float rstd = 1 / sqrtf(squares[0] / float(p.cols) + p.eps), factor = rstd * p.norm_scale;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (v * 32 + lane) * kVector;
#pragma unroll
      for (float& value : m[v]) value *= factor;
      if (c < p.cols) p.y.store(row, c, tile::from_float<T>(m[v]));
    }
    if (p.rstd != nullptr && lane == 0) p.rstd[row] = rstd;
  }
}

template <class T> struct BackwardParams {
  Rows<T> dy, m, dsum, x, x0, dx0, dx, more, branch, dbranch;
  Channels scale, a, b, dscale, da, db;
  const float* rstd;
  int64_t rows;
  int cols;
  float norm_scale;
  residual::Walk walk;  // of the sums
};

// Sums over tokens: da, db and dscale where present.
template <bool kMix, bool kBranch> struct AddSums {
  static constexpr int kSums = (kMix ? 2 : 0) + (kBranch ? 1 : 0);
  Channels da, db, dscale;
  __device__ void finish(int64_t c, const double* total) const {
    if constexpr (kMix) da.add(c, total[0]), db.add(c, total[1]);
    if constexpr (kBranch) dscale.add(c, total[kMix ? 2 : 0]);
  }
};

// `more`: left out; or beside dsum; or without dsum, then `more` is loaded in its place.
enum class More { none, beside, alone };

// kFrozen: no sums over tokens are computed, and operands that only these sums and the gradient of the first rows need
// are not read.
template <class T, int V, bool kFactor, bool kBranch, bool kFrozen, More kMore>
__global__ void __launch_bounds__(kThreads) residual_norm_back(const __grid_constant__ BackwardParams<T> p) {
  constexpr bool kMix = kFactor && !kFrozen;
  constexpr int kSums = kFrozen ? 0 : AddSums<kMix, kBranch>::kSums, kHeld = kSums > 0 ? kSums : 1;
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  Factors<kBranch ? V : 1> scale;
  Factors<kFactor ? V : 1> a;
  Factors<kMix ? V : 1> b;
  if constexpr (kBranch) scale.load(p.scale, p.cols);
  if constexpr (kFactor) a.load(p.a, p.cols);
  if constexpr (kMix) b.load(p.b, p.cols);
  float sums[kHeld][V][kVector] = {};
  const int64_t apart = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + warp; row < p.rows; row += apart) {
    tile::Vec<T, kVector> dy[V], m[V], dsum[V], x0[kMix ? V : 1], dx0[kMix ? V : 1], branch[kBranch ? V : 1];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (v * 32 + lane) * kVector;
      if (c >= p.cols) continue;
      p.dy.load(row, c, dy[v]);
      (kMix ? p.x : p.m).load(row, c, m[v]);
      (kMore == More::alone ? p.more : p.dsum).load(row, c, dsum[v]);
      if constexpr (kMix) p.x0.load(row, c, x0[v]), p.dx0.load(row, c, dx0[v]);
      if constexpr (kBranch && !kFrozen) p.branch.load(row, c, branch[v]);
    }
    // Registers that hold `more` until its use would halve the number of blocks on a multiprocessor.
    if (kMore == More::beside && lane == 0)
      ptx::prefetch_to_l2(p.more.data + row * p.more.stride, uint32_t(p.cols * sizeof(T)));
    const float rstd = p.rstd[row];
    // The normalised input: stored, or mixed as in the forward pass.
    const auto normed = [&](int v, float(&n)[kVector]) {
      tile::to_float(m[v], n);
      if constexpr (kMix) {
        float first[kVector];
        tile::to_float(x0[v], first);
#pragma unroll
        for (int k = 0; k < kVector; ++k) n[k] = residual::mixed(a.of[v][k], n[k], b.of[v][k], first[k]);
        rounded<T>(n);
      }
#pragma unroll
      for (float& value : n) value *= rstd;
    };
    float along[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float g[kVector], n[kVector];
      tile::to_float(dy[v], g);
      normed(v, n);
#pragma unroll
      for (int k = 0; k < kVector; ++k) along[0] += g[k] * n[k];
    }
    tile::warp_sum(along, 32);
    const float mean = along[0] * p.norm_scale / float(p.cols);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (v * 32 + lane) * kVector;
      if (c >= p.cols) continue;
      float g[kVector], n[kVector], d[kVector] = {};
      tile::to_float(dy[v], g);
      if constexpr (kMore != More::alone) tile::to_float(dsum[v], d);
      normed(v, n);
#pragma unroll
      for (int k = 0; k < kVector; ++k) d[k] += rstd * (g[k] * p.norm_scale - n[k] * mean);
      auto out = rounded<T>(d);
      if constexpr (kMix) {
        float x[kVector], first[kVector], more[kVector];
        tile::to_float(m[v], x), tile::to_float(x0[v], first), tile::to_float(dx0[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          sums[0][v][k] += x[k] * d[k];
          sums[1][v][k] += first[k] * d[k];
          more[k] += b.of[v][k] * d[k];
          d[k] *= a.of[v][k];
        }
        p.dx0.store(row, c, tile::from_float<T>(more));
        out = rounded<T>(d);
      } else if constexpr (kFactor) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] *= a.of[v][k];
        out = rounded<T>(d);
      }
      if constexpr (kMore != More::none) {
        if constexpr (kMore == More::beside) p.more.load(row, c, dsum[v]);
        float more[kVector];
        tile::to_float(dsum[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] += more[k];
        out = tile::from_float<T>(d);
      }
      p.dx.store(row, c, out);
      if constexpr (kBranch) {
        if constexpr (!kFrozen) {
          float x[kVector];
          tile::to_float(branch[v], x);
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums[kSums - 1][v][k] += x[k] * d[k];
        }
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] *= scale.of[v][k];
        p.dbranch.store(row, c, tile::from_float<T>(d));
      }
    }
  }
  if constexpr (kSums > 0) {
    // The sums of the warps, in order.
    struct Memory {
      float of_warps[kWarps][V * 32 * kVector];
    };
    Memory& memory = tile::shared<Memory>();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      __syncthreads();
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int k = 0; k < kVector; ++k) memory.of_warps[warp][(v * 32 + lane) * kVector + k] = sums[s][v][k];
      __syncthreads();
      for (int c = int(threadIdx.x); c < p.cols; c += kThreads) {
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += memory.of_warps[w][c];
        p.walk.partial[(int64_t(blockIdx.x) * kSums + s) * p.cols + c] = sum;
      }
    }
  }
}

bool fits(const Tensor& like, std::initializer_list<Tensor> matrices) {
  if (like.dtype != DType::bf16 && like.dtype != DType::f16) return false;
  if (like.cols() % kVector != 0 || like.cols() == 0 || like.cols() > 32 * kVector * kMostVectors) return false;
  for (const Tensor& t : matrices)
    if (t && !tile::rows_start_aligned(t, 16)) return false;
  return true;
}
int64_t blocks_for(int64_t rows) { return std::min((rows + kWarps - 1) / kWarps, kBlocks); }

// Calls go.operator()<T, V>() with the type and the number of vectors per lane.
template <class Go> void with_form(const Tensor& like, Go&& go) {
  const int64_t vectors = (like.cols() + 32 * kVector - 1) / (32 * kVector);
  const auto typed = [&]<class T>(T) {
    if (vectors == 1) return go.template operator()<T, 1>();
    if (vectors == 2) return go.template operator()<T, 2>();
    go.template operator()<T, kMostVectors>();
  };
  if (like.dtype == DType::bf16) return typed(bf16{});
  typed(f16{});
}

}  // namespace

bool residual_norm(const ResidualNorm& r, Stream stream) {
  if (r.w || (r.branch && r.x0) || !fits(r.x, {r.x, r.branch, r.sum, r.x0, r.mixed, r.y})) return false;
  const int64_t rows = r.x.rows();
  if (rows == 0) return true;
  with_form(r.x, [&]<class T, int V>() {
    const ForwardParams<T> p{.x = r.x,
                             .branch = r.branch,
                             .sum = r.sum,
                             .x0 = r.x0,
                             .mixed = r.mixed,
                             .y = r.y,
                             .scale = r.scale,
                             .a = r.a,
                             .b = r.b,
                             .rstd = r.rstd ? r.rstd.ptr<float>() : nullptr,
                             .rows = rows,
                             .cols = int(r.x.cols()),
                             .eps = float(r.eps),
                             .norm_scale = float(r.norm_scale)};
    const auto launch = [&](auto kernel) {
      gpu::launch("residual_norm", kernel, {.grid = blocks_for(rows), .block = kThreads, .device = r.x.device.index},
                  stream, p);
    };
    if (r.branch) return launch(residual_norm_forward<T, V, true, false>);
    if (r.x0) return launch(residual_norm_forward<T, V, false, true>);
    launch(residual_norm_forward<T, V, false, false>);
  });
  return true;
}

bool residual_norm_backward(const ResidualNormBackward& r, Stream stream) {
  const char* op = "residual_norm_backward";
  if (r.w || !r.rstd || (!r.dsum && !r.more) || (r.branch && r.a) ||
      !fits(r.dy, {r.dy, r.m, r.dsum, r.x, r.x0, r.dx0, r.dx, r.more, r.branch, r.dbranch}))
    return false;
  const int64_t rows = r.dy.rows(), cols = r.dy.cols();
  if (rows == 0) return true;
  const bool frozen = r.x0 ? false : !r.dscale;
  const int sums = r.x0 ? 2 : r.branch && !frozen ? 1 : 0;
  const int64_t need = sums > 0 ? residual_workspace_bytes(rows, cols, r.dy.device) : 0;
  INGOT_CHECK_GE(r.workspace ? r.workspace.bytes() : 0, need, op, ": bytes of workspace");
  const int64_t blocks = blocks_for(rows);
  static_assert(kBlocks <= residual::kMostRowBlocks);
  residual::Walk walk{.rows = rows, .cols = cols, .row_blocks = int(blocks)};
  if (sums > 0) {
    walk.total = static_cast<double*>(r.workspace.data);
    walk.partial = reinterpret_cast<float*>(walk.total + residual::kMostSums * cols);
  }
  const int device = r.dy.device.index;
  with_form(r.dy, [&]<class T, int V>() {
    const BackwardParams<T> p{.dy = r.dy,
                              .m = r.m,
                              .dsum = r.dsum,
                              .x = r.x,
                              .x0 = r.x0,
                              .dx0 = r.dx0,
                              .dx = r.dx,
                              .more = r.more,
                              .branch = r.branch,
                              .dbranch = r.dbranch,
                              .scale = r.scale,
                              .a = r.a,
                              .b = r.b,
                              .dscale = r.dscale,
                              .da = r.da,
                              .db = r.db,
                              .rstd = r.rstd.ptr<float>(),
                              .rows = rows,
                              .cols = int(cols),
                              .norm_scale = float(r.norm_scale),
                              .walk = walk};
    const auto run = [&]<bool kFactor, bool kBranch, bool kFrozen>() {
      const auto launch = [&](auto kernel) {
        gpu::launch(op, kernel, {.grid = blocks, .block = kThreads, .device = device}, stream, p);
      };
      if constexpr (kBranch)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::none>);
      else if (!r.more)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::none>);
      else if (r.dsum)
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::beside>);
      else
        launch(residual_norm_back<T, V, kFactor, kBranch, kFrozen, More::alone>);
      using Sums = AddSums<kFactor, kBranch>;
      if constexpr (!kFrozen && Sums::kSums > 0)
        gpu::launch(op, residual::add_partials<Sums>,
                    {.grid = (cols + 31) / 32, .block = residual::kPartialThreads, .device = device}, stream,
                    Sums{.da = r.da, .db = r.db, .dscale = r.dscale}, walk);
    };
    if (r.x0) return run.template operator()<true, false, false>();
    if (r.branch && frozen) return run.template operator()<false, true, true>();
    if (r.branch) return run.template operator()<false, true, false>();
    if (r.a) return run.template operator()<true, false, true>();
    run.template operator()<false, false, true>();
  });
  return true;
}

}  // namespace ingot::cuda
