#pragma once
// The backward pass on the device. Blocks stay for the whole launch and walk over rows in a fixed order; a thread keeps
// its columns, so that dw is summed in its registers and written once per block. A second kernel adds the blocks' sums
// up, in order. Each thread copies its part of the next rows into a ring in shared memory that only itself reads: many
// rows are under way without a register or a barrier spent on them. A row's sums are started one row ahead, so that no
// thread waits for its neighbours' share.
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
  bool streaming;   // dx says that it is not read again soon
};

// Shared memory of the whole block seen by one thread: `kCount` 16-byte pieces of its own, each beside its warp's, so
// that no bank is met twice and all lie a constant apart.
template <int kCount> class OwnPieces {
 public:
  __device__ explicit OwnPieces(uint4* memory) : at_(memory + threadIdx.x / 32 * (32 * kCount) + threadIdx.x % 32) {}
  __device__ uint4* operator[](int piece) const { return at_ + piece * 32; }
  // The next or a later set of all threads' pieces.
  __device__ OwnPieces after(uint32_t sets) const {
    OwnPieces p = *this;
    p.at_ += sets * kCount * blockDim.x;
    return p;
  }

 private:
  uint4* at_;
};

using BackwardSums = tile::StagedSums<2, kBackwardMaxThreads>;

// What a thread holds of one row, packed. In the ring every vector starts a piece of its own.
template <class X, class Y, bool kMore> struct BackwardRow {
  static constexpr int N = 16 / int(sizeof(X)), V = kBackwardColumns / N;
  static constexpr int kDyPieces = (tile::Vec<Y, N>::kBytes + 15) / 16;
  static constexpr int kPieces = backward_pieces(int(sizeof(X)), int(sizeof(Y)), kMore);
  static_assert(kPieces == V * (1 + kDyPieces + (kMore ? 1 : 0)), "the host reserves what the ring takes");
  using Pieces = OwnPieces<kPieces>;
  tile::Vec<X, N> s[V];
  tile::Vec<Y, N> dy[V];
  __device__ static int more_piece(int v) { return V + V * kDyPieces + v; }
};

// The vectors of a row that a thread has: `count` of them, first, first + step, ...
struct Lanes {
  uint32_t first, step;
  int count;
};

template <class T, int N> __device__ inline void copy_vector(uint4* to, const T* from) {
  using Vec = tile::Vec<T, N>;
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i)
    ptx::cp_async<Vec::kPiece>(ptx::shared_address(to + i * 32), reinterpret_cast<const char*>(from) + i * Vec::kPiece);
}
template <class T, int N> __device__ inline void read_vector(tile::Vec<T, N>& v, const uint4* from) {
  using Vec = tile::Vec<T, N>;
  struct alignas(Vec::kPiece) Piece {
    uint32_t w[Vec::kPiece / 4];
  };
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i) {
    const Piece piece = *reinterpret_cast<const Piece*>(from + i * 32);
#pragma unroll
    for (int k = 0; k < Vec::kPiece / 4; ++k) v.word[i][k] = piece.w[k];
  }
}

// A thread's place in one operand, row after row; stays null where the operand is left out.
template <class T> class RowWalk {
 public:
  __device__ RowWalk(T* base, const RowMap& map, RowIndex row, uint32_t column) { go_to(base, map, row, column); }
  __device__ T* operator+(uint32_t elements) const { return at_ + elements; }
  __device__ void go_to(T* base, const RowMap& map, RowIndex row, uint32_t column) {
    at_ = base != nullptr ? base + offset(map, row) + column : nullptr;
  }
  // Where one stride reaches all rows.
  __device__ void advance(const RowMap& map, uint32_t rows) {
    if (at_ != nullptr) at_ += int64_t(rows) * map.outer_stride;
  }

 private:
  T* at_;
};

// The rows of a group, `apart` from each other, on their way into the ring.
template <class X, class Y, bool kMore> class RowFetcher {
 public:
  using Row = BackwardRow<X, Y, kMore>;
  __device__ RowFetcher(const BackwardParams& p, int64_t row, uint32_t rows, uint32_t column)
      : row_(row),
        left_(rows),
        s_(static_cast<const X*>(p.s), p.s_rows, row_index(p.inner, row), column),
        dy_(static_cast<const Y*>(p.dy), p.dy_rows, row_index(p.inner, row), column),
        more_(static_cast<const X*>(p.more), p.more_rows, row_index(p.inner, row), column) {}

  // Starts the copies of a thread's part of the next row; every call is one group of copies.
  __device__ void next(const BackwardParams& p, const Lanes& at, uint32_t apart, const typename Row::Pieces& stage,
                       float* rstd) {
    constexpr int N = Row::N, V = Row::V;
    if (left_ > 0) {
      if (p.rstd != nullptr) ptx::cp_async<4>(ptx::shared_address(rstd), p.rstd + row_);
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (v < at.count) {
          copy_vector<X, N>(stage[v], s_ + v * at.step * N);
          copy_vector<Y, N>(stage[V + v * Row::kDyPieces], dy_ + v * at.step * N);
          if constexpr (kMore)
            if (p.more != nullptr) copy_vector<X, N>(stage[Row::more_piece(v)], more_ + v * at.step * N);
        }
      if (--left_ > 0) advance(p, apart, at.first * N);
    }
    ptx::cp_async_commit_group();
  }

 private:
  __device__ void advance(const BackwardParams& p, uint32_t apart, uint32_t column) {
    row_ += apart;
    if (p.inner == 0) {
      s_.advance(p.s_rows, apart);
      dy_.advance(p.dy_rows, apart);
      if constexpr (kMore) more_.advance(p.more_rows, apart);
      return;
    }
    const RowIndex at = row_index(p.inner, row_);
    s_.go_to(static_cast<const X*>(p.s), p.s_rows, at, column);
    dy_.go_to(static_cast<const Y*>(p.dy), p.dy_rows, at, column);
    if constexpr (kMore) more_.go_to(static_cast<const X*>(p.more), p.more_rows, at, column);
  }

  uint32_t row_, left_;
  RowWalk<const X> s_;
  RowWalk<const Y> dy_;
  RowWalk<const X> more_;
};

template <class X, class Y, bool kMore>
__device__ inline void read_row(const OwnPieces<BackwardRow<X, Y, kMore>::kPieces>& stage,
                                BackwardRow<X, Y, kMore>& row) {
  using Row = BackwardRow<X, Y, kMore>;
#pragma unroll
  for (int v = 0; v < Row::V; ++v) {
    read_vector(row.s[v], stage[v]);
    read_vector(row.dy[v], stage[Row::V + v * Row::kDyPieces]);
  }
}

// At most `n` of a thread's groups of copies may still be under way.
__device__ inline void wait_for_copies(uint32_t n) {
  if (n == 0)
    ptx::cp_async_wait_group<0>();
  else if (n == 1)
    ptx::cp_async_wait_group<1>();
  else if (n == 2)
    ptx::cp_async_wait_group<2>();
  else
    ptx::cp_async_wait_group<kBackwardMaxStages - 1>();
}

// scale * (w_offset + w) for a thread's columns.
template <int N, int V>
__device__ inline void load_factors(const BackwardParams& p, const Lanes& at, float (&w)[V][N]) {
  if (p.w == nullptr) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < N; ++k) w[v][k] = p.scale;
    return;
  }
  with_weight_type(p.w_dtype, [&](auto type) {
    using W = decltype(type);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      tile::Vec<W, N> packed;
      if (v < at.count) tile::load(packed, static_cast<const W*>(p.w) + int64_t(at.first + v * at.step) * N);
      tile::to_float(packed, w[v]);
#pragma unroll
      for (int k = 0; k < N; ++k) w[v][k] = (w[v][k] + p.w_offset) * p.scale;
    }
  });
}

// A thread's share of the sums of g * s and, where rstd is not given, of s * s over a row.
template <class X, class Y, bool kMore, int N, int V>
__device__ inline void row_sums(const BackwardParams& p, const OwnPieces<BackwardRow<X, Y, kMore>::kPieces>& stage,
                                const float (&w)[V][N], float (&sum)[2]) {
  BackwardRow<X, Y, kMore> row;
  read_row<X, Y, kMore>(stage, row);
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N], even = 0, odd = 0;
    tile::to_float(row.s[v], s);
    tile::to_float(row.dy[v], dy);
#pragma unroll
    for (int k = 0; k < N; k += 2) even += dy[k] * w[v][k] * s[k], odd += dy[k + 1] * w[v][k + 1] * s[k + 1];
    sum[0] += even + odd;
    if (p.rstd == nullptr)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[1] += s[k] * s[k];
  }
}

// dw += dy * n, and dx, for one row; n = s * rstd, mean that of g * n.
template <class X, class Y, bool kMore, int N, int V>
__device__ inline void finish_row(const BackwardParams& p, const BackwardRow<X, Y, kMore>& row,
                                  const OwnPieces<BackwardRow<X, Y, kMore>::kPieces>& stage, const RowWalk<X>& dx,
                                  const Lanes& at, const float (&w)[V][N], float rstd, float mean, float (&dw)[V][N]) {
  const float of_s = -mean * rstd * rstd;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N];
    tile::to_float(row.s[v], s);
    tile::to_float(row.dy[v], dy);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = dy[k] * rstd;
      dw[v][k] += g * s[k];
      s[k] = g * w[v][k] + s[k] * of_s;
    }
    if (p.dx == nullptr || v >= at.count) continue;
    if constexpr (kMore) {
      float more[N];
      tile::Vec<X, N> old;
      if (p.more != nullptr) {
        read_vector(old, stage[BackwardRow<X, Y, kMore>::more_piece(v)]);
        tile::to_float(old, more);
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] += more[k];
      }
      if (p.accumulate) {
        tile::load_streaming(old, dx + v * at.step * N);
        tile::to_float(old, more);
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] += more[k];
      }
    }
    tile::store(dx + v * at.step * N, tile::from_float<X>(s), p.streaming);
  }
}

// One partial row of dw per block: the sums of its groups, in order.
template <int N, int V>
__device__ inline void write_partial(const BackwardParams& p, const Lanes& at, const float (&dw)[V][N],
                                     int64_t row_block, uint4* memory) {
  constexpr int kCount = kBackwardColumns / 4;
  float* out = p.partial + row_block * p.cols;
  if (p.group == blockDim.x) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (v < at.count)
#pragma unroll
        for (int k = 0; k < N; k += 4)
          *reinterpret_cast<float4*>(out + int64_t(at.first + v * at.step) * N + k) =
              make_float4(dw[v][k], dw[v][k + 1], dw[v][k + 2], dw[v][k + 3]);
    return;
  }
  const OwnPieces<kCount> own(memory);
  __syncthreads();  // no row is under way any more
#pragma unroll
  for (int v = 0; v < V; ++v)
#pragma unroll
    for (int k = 0; k < N; k += 4)
      *reinterpret_cast<float4*>(own[(v * N + k) / 4]) =
          make_float4(dw[v][k], dw[v][k + 1], dw[v][k + 2], dw[v][k + 3]);
  __syncthreads();
  // Column c is element k of vector v of lane `lane`; groups lie `group` threads apart.
  for (uint32_t c = threadIdx.x; c < p.vecs * N; c += blockDim.x) {
    const uint32_t i = c / N, v = i / p.group, lane = i % p.group, piece = (v * N + c % N) / 4;
    float sum = 0;
#pragma unroll 8
    for (uint32_t t = lane; t < blockDim.x; t += p.group)
      sum += reinterpret_cast<const float*>(memory + t / 32 * (32 * kCount) + piece * 32 + t % 32)[c % 4];
    out[c] = sum;
  }
}

// `pieces`: the ring, (stages * kPieces) * threads of them, which dw takes over at the end; then rstd of its rows.
template <class X, class Y, bool kMore>
__device__ inline void backward_rows(const BackwardParams& p, BackwardSums& sums, uint4* pieces) {
  using Row = BackwardRow<X, Y, kMore>;
  constexpr int N = Row::N, V = Row::V;
  const uint32_t rank = p.cluster > 1 ? ptx::cluster_rank() : 0, step = p.cluster * p.group;
  const uint32_t mine = rank * p.group + (threadIdx.x & (p.group - 1));
  const Lanes at{mine, step, mine < p.vecs ? int((p.vecs - mine + step - 1) / step) : 0};
  const uint32_t groups = blockDim.x / p.group, row_block = blockIdx.x / p.cluster;
  const uint32_t apart = gridDim.x / p.cluster * groups;
  const int64_t first = int64_t(row_block) * groups, row = first + threadIdx.x / p.group;
  const auto steps_from = [&](int64_t r) { return r < p.rows ? uint32_t((p.rows - r + apart - 1) / apart) : 0; };
  const uint32_t rounds = steps_from(first), rows = steps_from(row);  // of the block, of this group
  float* const rstds = reinterpret_cast<float*>(pieces + p.stages * Row::kPieces * blockDim.x) + threadIdx.x;
  const typename Row::Pieces ring(pieces);

  // What lies beyond the row is never copied, and counts as zeros.
  for (uint32_t k = 0; at.count < V && k < p.stages; ++k)
#pragma unroll
    for (int i = 0; i < Row::kPieces; ++i) *ring.after(k)[i] = make_uint4(0, 0, 0, 0);
  RowFetcher<X, Y, kMore> fetcher(p, row, rows, at.first * N);
  for (uint32_t k = 0; k < p.stages; ++k) fetcher.next(p, at, apart, ring.after(k), rstds + k * blockDim.x);
  RowWalk<X> dx(static_cast<X*>(p.dx), p.dx_rows, row_index(p.inner, row), at.first * N);
  float w[V][N], dw[V][N] = {}, sum[2], next[2] = {};
  load_factors(p, at, w);

  const uint32_t count = p.rstd == nullptr ? 2 : p.dx != nullptr ? 1 : 0;
  const auto start_sums = [&](uint32_t stage, uint32_t round, uint32_t under_way) {
    wait_for_copies(under_way);
    if (count == 0) return;
    row_sums<X, Y, kMore>(p, ring.after(stage), w, next);
    sums.give(next, count, p.group, p.cluster, round);
  };
  if (rounds > 0) start_sums(0, 1, p.stages - 1);
  uint32_t stage = 0;
  for (uint32_t round = 1; round <= rounds; ++round) {
    sum[0] = next[0], sum[1] = next[1];
    const uint32_t after = stage + 1 == p.stages ? 0 : stage + 1;
    if (p.stages > 1 && round < rounds) start_sums(after, round + 1, p.stages - 2);
    Row now;
    read_row<X, Y, kMore>(ring.after(stage), now);
    float rstd = rstds[stage * blockDim.x];
    const auto fetch = [&] { fetcher.next(p, at, apart, ring.after(stage), rstds + stage * blockDim.x); };
    if constexpr (!kMore) fetch();  // the row is in registers by now
    if (count > 0) sums.take(sum, count, p.group, p.cluster, round);
    if (p.rstd == nullptr) rstd = rstd_of(sum[1], p.cols, p.eps);
    if (round <= rows) finish_row(p, now, ring.after(stage), dx, at, w, rstd, sum[0] * rstd * p.inverse_cols, dw);
    if constexpr (kMore) fetch();
    if (p.inner == 0)
      dx.advance(p.dx_rows, apart);
    else if (round < rows)
      dx.go_to(static_cast<X*>(p.dx), p.dx_rows, row_index(p.inner, row + int64_t(round) * apart), at.first * N);
    stage = after;
    if (p.stages == 1 && round < rounds) start_sums(0, round + 1, 0);
  }
  if (p.partial != nullptr) write_partial<N, V>(p, at, dw, row_block, pieces);
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
constexpr int kPartialSumWarps = 16, kPartialSumBatch = 9;  // 144 rows at once: one block per SM leaves at most 132

__device__ inline void sum_partials(const PartialSum& p, float (&memory)[kPartialSumWarps][32]) {
  const int64_t c = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const bool valid = c < p.cols;
  const float before = warp == 0 && valid ? p.dw[c] : 0;  // asked for together with the sums
  float sum = 0;
  for (uint32_t first = warp; first < p.count; first += warps * kPartialSumBatch) {
    float x[kPartialSumBatch];
#pragma unroll
    for (uint32_t k = 0; k < kPartialSumBatch; ++k)
      x[k] = valid && first + k * warps < p.count ? p.partial[(first + k * warps) * p.cols + c] : 0;
#pragma unroll
    for (uint32_t k = 0; k < kPartialSumBatch; ++k) sum += x[k];
  }
  memory[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp != 0 || !valid) return;
  float total = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < warps; ++i) total += memory[i][threadIdx.x];
  p.dw[c] = before + p.scale * total;
}

}  // namespace ingot::cuda
