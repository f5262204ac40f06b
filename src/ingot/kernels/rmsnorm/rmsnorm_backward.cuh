#pragma once
// The backward pass on the device. Blocks stay for the whole launch and walk over rows in a fixed order; a thread keeps
// its columns, so that dw is summed in its registers and written once per block. A second kernel adds the blocks' sums
// up, in order. Each thread copies its part of the next rows into a ring in shared memory that only itself reads: many
// rows are under way without a register or a barrier spent on them.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"

namespace ingot::cuda {

struct BackwardParams {
  const void *dy, *s, *w, *more;  // more is added to ds: dsum, or dx itself where it is accumulated
  void* dx;                       // may be null
  const float* rstd;              // may be null: recomputed
  float* partial;                 // (row blocks, cols), or null where dw is not wanted
  RowMap dy_rows, s_rows, more_rows, dx_rows;
  int64_t rows, cols;
  uint32_t inner, vecs, group, cluster, stages;
  float eps, scale, w_offset, inverse_cols;
  DType w_dtype;
  bool accumulate;  // dx is read too, because `more` is dsum
};

// Shared memory of the whole block seen by one thread: 16-byte pieces of its own, each beside its neighbours', so that
// no bank is met twice. No other thread reads them.
class OwnPieces {
 public:
  __device__ explicit OwnPieces(uint4* memory) : at_(memory + threadIdx.x) {}
  __device__ uint4* operator[](uint32_t piece) const { return at_ + piece * blockDim.x; }

 private:
  uint4* at_;
};

template <int N> __device__ inline void load_floats(const OwnPieces& from, int v, float (&x)[N]) {
#pragma unroll
  for (int q = 0; q < N / 4; ++q) {
    const float4 f = *reinterpret_cast<const float4*>(from[v * (N / 4) + q]);
    x[q * 4] = f.x, x[q * 4 + 1] = f.y, x[q * 4 + 2] = f.z, x[q * 4 + 3] = f.w;
  }
}
template <int N> __device__ inline void store_floats(const OwnPieces& to, int v, const float (&x)[N]) {
#pragma unroll
  for (int q = 0; q < N / 4; ++q)
    *reinterpret_cast<float4*>(to[v * (N / 4) + q]) = make_float4(x[q * 4], x[q * 4 + 1], x[q * 4 + 2], x[q * 4 + 3]);
}

// What a thread holds of one row, packed. In the ring every vector starts a piece of its own.
template <class X, class Y, bool kMore> struct BackwardRow {
  static constexpr int N = 16 / int(sizeof(X)), V = kBackwardColumns / N;
  static constexpr int kDyPieces = (tile::Vec<Y, N>::kBytes + 15) / 16;
  static constexpr int kPieces = backward_pieces(int(sizeof(X)), int(sizeof(Y)), kMore);
  static_assert(kPieces == V * (1 + kDyPieces + (kMore ? 1 : 0)), "the host reserves what the ring takes");
  tile::Vec<X, N> s[V], more[kMore ? V : 1];
  tile::Vec<Y, N> dy[V];
};

// The vectors of a row that a thread has: first, first + step, ...
struct Lanes {
  uint32_t first, step;
};

template <class T, int N>
__device__ inline void copy_vector(uint4* to, uint32_t pieces_apart, const T* from, bool valid) {
  using Vec = tile::Vec<T, N>;
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i)
    ptx::cp_async<Vec::kPiece>(ptx::shared_address(to + i * pieces_apart),
                               reinterpret_cast<const char*>(from) + i * Vec::kPiece, valid ? Vec::kPiece : 0);
}
template <class T, int N> __device__ inline void read_vector(tile::Vec<T, N>& v, const uint4* from, uint32_t apart) {
  using Vec = tile::Vec<T, N>;
  struct alignas(Vec::kPiece) Piece {
    uint32_t w[Vec::kPiece / 4];
  };
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i) {
    const Piece piece = *reinterpret_cast<const Piece*>(from + i * apart);
#pragma unroll
    for (int k = 0; k < Vec::kPiece / 4; ++k) v.word[i][k] = piece.w[k];
  }
}

// Starts the copies of a thread's part of a row into a stage of the ring; what lies beyond the row becomes zeros.
template <class X, class Y, bool kMore>
__device__ inline void fetch_row(const BackwardParams& p, int64_t row, Lanes at, const OwnPieces& stage, float* rstd) {
  using Row = BackwardRow<X, Y, kMore>;
  constexpr int N = Row::N, V = Row::V;
  if (row < p.rows) {
    if (p.rstd != nullptr) ptx::cp_async<4>(ptx::shared_address(rstd), p.rstd + row);
    const RowIndex i = row_index(p.inner, row);
    const X* s = static_cast<const X*>(p.s) + offset(p.s_rows, i) + at.first * N;
    const Y* dy = static_cast<const Y*>(p.dy) + offset(p.dy_rows, i) + at.first * N;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const bool valid = at.first + v * at.step < p.vecs;
      copy_vector<X, N>(stage[v], 0, valid ? s + v * at.step * N : static_cast<const X*>(p.s), valid);
      copy_vector<Y, N>(stage[V + v * Row::kDyPieces], blockDim.x,
                        valid ? dy + v * at.step * N : static_cast<const Y*>(p.dy), valid);
    }
    if constexpr (kMore) {
      const X* more = static_cast<const X*>(p.more) + (p.more != nullptr ? offset(p.more_rows, i) + at.first * N : 0);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const bool valid = p.more != nullptr && at.first + v * at.step < p.vecs;
        copy_vector<X, N>(stage[V + V * Row::kDyPieces + v], 0,
                          valid ? more + v * at.step * N : static_cast<const X*>(p.s), valid);
      }
    }
  }
  ptx::cp_async_commit_group();
}

template <class X, class Y, bool kMore>
__device__ inline void read_row(const OwnPieces& stage, BackwardRow<X, Y, kMore>& row) {
  using Row = BackwardRow<X, Y, kMore>;
  constexpr int V = Row::V;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    read_vector(row.s[v], stage[v], 0);
    read_vector(row.dy[v], stage[V + v * Row::kDyPieces], blockDim.x);
    if constexpr (kMore) read_vector(row.more[v], stage[V + V * Row::kDyPieces + v], 0);
  }
}

// At most `stages - 1` of a thread's copies may still be under way: the oldest row is there.
__device__ inline void wait_for_oldest(uint32_t stages) {
  switch (stages) {
    case 1: return ptx::cp_async_wait_group<0>();
    case 2: return ptx::cp_async_wait_group<1>();
    case 3: return ptx::cp_async_wait_group<2>();
    case 4: return ptx::cp_async_wait_group<3>();
    case 5: return ptx::cp_async_wait_group<4>();
    case 6: return ptx::cp_async_wait_group<5>();
    case 7: return ptx::cp_async_wait_group<6>();
    default: return ptx::cp_async_wait_group<kBackwardMaxStages - 1>();
  }
}

// scale * (w_offset + w) for a thread's columns.
template <int N, int V>
__device__ inline void place_weights(const BackwardParams& p, Lanes at, const OwnPieces& weights) {
  float x[N];
  if (p.w == nullptr) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = p.scale;
    for (int v = 0; v < V; ++v) store_floats(weights, v, x);
    return;
  }
  with_weight_type(p.w_dtype, [&](auto type) {
    using W = decltype(type);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      tile::Vec<W, N> w;
      if (const uint32_t i = at.first + v * at.step; i < p.vecs)
        tile::load(w, static_cast<const W*>(p.w) + int64_t(i) * N);
      tile::to_float(w, x);
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = (x[k] + p.w_offset) * p.scale;
      store_floats(weights, v, x);
    }
  });
}

struct BackwardMemory {
  tile::GroupSumMemory<1, kBackwardMaxThreads> one[2];
  tile::GroupSumMemory<2, kBackwardMaxThreads> two[2];
  tile::ClusterSums<2> cluster[2];
};

// A thread's share of the sums of g * s and, where rstd is not given, of s * s over a row.
template <class X, class Y, bool kMore>
__device__ inline void row_sums(const BackwardParams& p, const BackwardRow<X, Y, kMore>& row, const OwnPieces& weights,
                                float (&sum)[2]) {
  constexpr int N = BackwardRow<X, Y, kMore>::N, V = BackwardRow<X, Y, kMore>::V;
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N], w[N], even = 0, odd = 0;
    tile::to_float(row.s[v], s);
    tile::to_float(row.dy[v], dy);
    load_floats(weights, v, w);
#pragma unroll
    for (int k = 0; k < N; k += 2) even += dy[k] * w[k] * s[k], odd += dy[k + 1] * w[k + 1] * s[k + 1];
    sum[0] += even + odd;
    if (p.rstd == nullptr)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[1] += s[k] * s[k];
  }
}

// Over the threads of the row. `round` counts calls from 1; consecutive ones take turns between two memories.
__device__ inline void combine_sums(const BackwardParams& p, uint32_t round, BackwardMemory& memory, float (&sum)[2]) {
  const uint32_t turn = round & 1;
  if (p.rstd != nullptr) {
    float one[1] = {sum[0]};
    tile::group_sum(one, p.group, memory.one[turn]);
    sum[0] = one[0];
  } else {
    tile::group_sum(sum, p.group, memory.two[turn]);
  }
  if (p.cluster > 1) tile::cluster_sums(sum, p.cluster, round, memory.cluster[turn]);
}

// dw += dy * n, and dx, for one row; n = s * rstd.
template <class X, class Y, bool kMore>
__device__ inline void finish_row(const BackwardParams& p, const BackwardRow<X, Y, kMore>& row, int64_t at_row,
                                  Lanes at, const OwnPieces& weights, float rstd, float mean,
                                  float (&dw)[BackwardRow<X, Y, kMore>::V][BackwardRow<X, Y, kMore>::N]) {
  constexpr int N = BackwardRow<X, Y, kMore>::N, V = BackwardRow<X, Y, kMore>::V;
  X* dx = static_cast<X*>(p.dx);
  if (dx != nullptr) dx += offset(p.dx_rows, row_index(p.inner, at_row)) + at.first * N;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N], w[N];
    tile::to_float(row.s[v], s);
    tile::to_float(row.dy[v], dy);
    load_floats(weights, v, w);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float n = s[k] * rstd;
      dw[v][k] += dy[k] * n;
      s[k] = rstd * (dy[k] * w[k] - n * mean);
    }
    if (dx == nullptr || at.first + v * at.step >= p.vecs) continue;
    if constexpr (kMore) {
      float more[N];
      tile::to_float(row.more[v], more);  // zeros where there is none
#pragma unroll
      for (int k = 0; k < N; ++k) s[k] += more[k];
      if (p.accumulate) {
        tile::Vec<X, N> old;
        tile::load_streaming(old, dx + v * at.step * N);
        tile::to_float(old, more);
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] += more[k];
      }
    }
    tile::store(dx + v * at.step * N, tile::from_float<X>(s), false);
  }
}

// One partial row of dw per block: the sums of its groups, in order.
template <int N, int V>
__device__ inline void write_partial(const BackwardParams& p, Lanes at, const float (&dw)[V][N], int64_t row_block,
                                     uint4* memory) {
  float* out = p.partial + row_block * p.cols;
  if (p.group == blockDim.x) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = at.first + v * at.step; i < p.vecs)
#pragma unroll
        for (int k = 0; k < N; k += 4)
          *reinterpret_cast<float4*>(out + int64_t(i) * N + k) =
              make_float4(dw[v][k], dw[v][k + 1], dw[v][k + 2], dw[v][k + 3]);
    return;
  }
  const OwnPieces own(memory);
  __syncthreads();  // the weights are read no more
#pragma unroll
  for (int v = 0; v < V; ++v) store_floats(own, v, dw[v]);
  __syncthreads();
  // Column c is element k of vector v of lane `lane`; groups lie `group` threads apart.
  for (uint32_t c = threadIdx.x; c < p.vecs * N; c += blockDim.x) {
    const uint32_t i = c / N, k = c % N, v = i / p.group, lane = i % p.group;
    const float* from =
        reinterpret_cast<const float*>(memory) + ((v * (N / 4) + k / 4) * blockDim.x + lane) * 4 + k % 4;
    float sum = 0;
#pragma unroll 8
    for (uint32_t g = 0; g < blockDim.x / p.group; ++g) sum += from[g * p.group * 4];
    out[c] = sum;
  }
}

// `pieces`: the ring, (stages * kPieces) * threads of them; then the weights, which dw replaces at the end; then rstd
// of the rows in the ring.
template <class X, class Y, bool kMore>
__device__ inline void backward_rows(const BackwardParams& p, BackwardMemory& memory, uint4* pieces) {
  using Row = BackwardRow<X, Y, kMore>;
  constexpr int N = Row::N, V = Row::V;
  const uint32_t rank = p.cluster > 1 ? ptx::cluster_rank() : 0, lane = threadIdx.x & (p.group - 1);
  const Lanes at{rank * p.group + lane, p.cluster * p.group};
  const uint32_t groups = blockDim.x / p.group, row_block = blockIdx.x / p.cluster;
  const int64_t stride = int64_t(gridDim.x / p.cluster) * groups;
  int64_t first = int64_t(row_block) * groups, row = first + threadIdx.x / p.group;
  uint4* const weight_pieces = pieces + p.stages * Row::kPieces * blockDim.x;
  float* const rstds = reinterpret_cast<float*>(weight_pieces + kBackwardColumns / 4 * blockDim.x) + threadIdx.x;
  const auto fetch = [&](int64_t of, uint32_t stage) {
    fetch_row<X, Y, kMore>(p, of, at, OwnPieces(pieces + stage * Row::kPieces * blockDim.x),
                           rstds + stage * blockDim.x);
  };

  for (uint32_t k = 0; k < p.stages; ++k) fetch(row + k * stride, k);
  const OwnPieces weights(weight_pieces);
  place_weights<N, V>(p, at, weights);
  float dw[V][N] = {};
  uint32_t stage = 0;
  for (uint32_t round = 1; first < p.rows; first += stride, row += stride, ++round) {
    wait_for_oldest(p.stages);
    Row now;
    read_row(OwnPieces(pieces + stage * Row::kPieces * blockDim.x), now);
    float sum[2], rstd = rstds[stage * blockDim.x];
    row_sums(p, now, weights, sum);
    fetch(row + p.stages * stride, stage);  // the row is in registers by now
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    if (p.dx != nullptr || p.rstd == nullptr) combine_sums(p, round, memory, sum);
    if (p.rstd == nullptr) rstd = rstd_of(sum[1], p.cols, p.eps);
    if (row < p.rows) finish_row(p, now, row, at, weights, rstd, sum[0] * rstd * p.inverse_cols, dw);
  }
  if (p.partial != nullptr) write_partial<N, V>(p, at, dw, row_block, weight_pieces);
}

// Any alignment, any length: one block per row, element by element; the block's sum of dw lies in global memory, where
// each thread finds only what it wrote itself.
__device__ inline float slope_at(const BackwardParams& p, int64_t c) {
  if (p.w == nullptr) return p.scale;
  float w = 0;
  with_weight_type(p.w_dtype, [&](auto type) { w = tile::to_float(static_cast<const decltype(type)*>(p.w)[c]); });
  return (w + p.w_offset) * p.scale;
}

template <class X, class Y>
__device__ inline void backward_elements(const BackwardParams& p,
                                         tile::GroupSumMemory<2, kBackwardMaxThreads>* memory) {
  float* partial = p.partial != nullptr ? p.partial + blockIdx.x * p.cols : nullptr;
  uint32_t turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    const RowIndex at = row_index(p.inner, row);
    const X* s = static_cast<const X*>(p.s) + offset(p.s_rows, at);
    const Y* dy = static_cast<const Y*>(p.dy) + offset(p.dy_rows, at);
    const X* more = p.more != nullptr ? static_cast<const X*>(p.more) + offset(p.more_rows, at) : nullptr;
    X* dx = p.dx != nullptr ? static_cast<X*>(p.dx) + offset(p.dx_rows, at) : nullptr;
    float sum[2] = {};
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x) {
      const float value = tile::to_float(s[c]);
      sum[0] += tile::to_float(dy[c]) * slope_at(p, c) * value;
      sum[1] += value * value;
    }
    tile::group_sum(sum, blockDim.x, memory[turn]);
    const float rstd = p.rstd != nullptr ? p.rstd[row] : rstd_of(sum[1], p.cols, p.eps);
    const float mean = sum[0] * rstd * p.inverse_cols;
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x) {
      const float n = tile::to_float(s[c]) * rstd, g = tile::to_float(dy[c]);
      if (partial != nullptr) partial[c] = (row < gridDim.x ? 0 : partial[c]) + g * n;
      if (dx == nullptr) continue;
      float ds = rstd * (g * slope_at(p, c) - n * mean);
      if (more != nullptr) ds += tile::to_float(more[c]);
      if (p.accumulate) ds += tile::to_float(dx[c]);
      dx[c] = tile::from_float<X>(ds);
    }
  }
}

// dw += scale * (the sum of the partial rows). A block takes 32 columns; warp `i` sums rows i, i + warps, ...
struct PartialSum {
  const float* partial;
  float* dw;
  int64_t cols;
  uint32_t count;
  float scale;
};
constexpr int kPartialSumWarps = 8;  // small blocks fit beside the rows' own, and so wait there already

__device__ inline void sum_partials(const PartialSum& p, float (&memory)[kPartialSumWarps][32]) {
  const int64_t c = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float sum = 0;
  const float before = warp == 0 && c < p.cols ? p.dw[c] : 0;  // asked for together with the sums
  if (c < p.cols)
#pragma unroll 16
    for (uint32_t i = warp; i < p.count; i += warps) sum += p.partial[i * p.cols + c];
  memory[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp != 0 || c >= p.cols) return;
  float total = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < warps; ++i) total += memory[i][threadIdx.x];
  p.dw[c] = before + p.scale * total;
}

}  // namespace ingot::cuda
