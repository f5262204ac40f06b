#pragma once
// The backward pass on the device. Blocks stay for the whole launch and walk over rows in a fixed order; a thread keeps
// its columns, so dw is summed in its registers and written once per block. A second kernel adds the blocks' sums in
// order. Each thread copies its part of the next rows into a ring in shared memory that only this thread reads: many
// rows are in flight without registers or barriers. A row is read from the ring once, and stays packed in registers
// between its sum and its gradient. A group of threads waits only for its own warps, once per kRows rows.
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/rmsnorm/parts/row_ring.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

namespace ingot::cuda {

struct BackwardParams {
  const void *dy, *s, *w, *more;  // more is added to ds: dsum, or dx itself where dx accumulates
  void* dx;                       // may be null
  const float* rstd;              // may be null: recomputed
  float* partial;                 // (row blocks, cols), partial_stride apart, or null where dw is not wanted
  RowMap dy_rows, s_rows, more_rows, dx_rows;
  int64_t rows, cols, partial_stride;
  uint32_t inner, vecs, group, cluster, stages;
  float eps, scale, w_offset, inverse_cols;
  DType w_dtype;
  bool accumulate;  // dx is read too, because `more` is dsum
  bool prefetch;
};

// A thread's part of the rows in work: kColumns of each of kRows neighbouring rows. kRare: options that most calls do
// not use (a third operand, dx accumulated or not wanted, rstd recomputed, mixed types, rows two strides apart).
template <class X_, class Y_, int kColumns_, int kRows_, bool kRare_> struct BackwardWork {
  using X = X_;
  using Y = Y_;
  static constexpr int kColumns = kColumns_, kRows = kRows_;
  static constexpr bool kRare = kRare_;
  static constexpr int N = 16 / int(sizeof(X)), V = kColumns / N;
  static constexpr int kDyPieces = (tile::Vec<Y, N>::kBytes + 15) / 16;
  static constexpr int kRowPieces = backward_pieces(int(sizeof(X)), int(sizeof(Y)), kColumns, kRare);
  static constexpr int kPieces = kRows * kRowPieces;
  static_assert(kRowPieces == V * (1 + kDyPieces + (kRare ? 1 : 0)), "the host reserves what the ring takes");
  static constexpr int kSums = kRows * (kRare ? 2 : 1);  // with additional sums of squares where rstd is recomputed
  using Pieces = OwnPieces<kPieces>;
  __device__ static constexpr int s_piece(int r, int v) { return r * kRowPieces + v; }
  __device__ static constexpr int dy_piece(int r, int v) { return r * kRowPieces + V + v * kDyPieces; }
  __device__ static constexpr int more_piece(int r, int v) { return r * kRowPieces + V + V * kDyPieces + v; }

  tile::Vec<X, N> s[kRows][V];
  tile::Vec<Y, N> dy[kRows][V];
};

// Copies a group's rows into the ring, kRows at a time, `apart` rows from step to step.
template <class Work> class RowFetcher {
 public:
  using X = typename Work::X;
  using Y = typename Work::Y;
  __device__ RowFetcher(const BackwardParams& p, RowPlace place, uint32_t column)
      : s_(static_cast<const X*>(p.s), p.s_rows, p.inner, place.row, column),
        dy_(static_cast<const Y*>(p.dy), p.dy_rows, p.inner, place.row, column),
        more_(static_cast<const X*>(p.more), p.more_rows, p.inner, place.row, column) {}

  // Starts the copies of a thread's part of the next rows, at `place`; every call commits a group of copies.
  __device__ void next(const BackwardParams& p, RowPlace place, const Lanes& at, uint32_t apart,
                       const typename Work::Pieces& stage) {
#pragma unroll
    for (int r = 0; r < Work::kRows; ++r)
      if (place.has(r)) copy_row(p, place.row, at, r, stage);
    s_.advance(p.s_rows, apart);
    dy_.advance(p.dy_rows, apart);
    if constexpr (Work::kRare) more_.advance(p.more_rows, apart);
    ptx::cp_async_commit_group();
  }

 private:
  __device__ void copy_row(const BackwardParams& p, uint32_t row, const Lanes& at, int r,
                           const typename Work::Pieces& stage) {
    constexpr int N = Work::N;
    const X* s = s_.row(static_cast<const X*>(p.s), p.s_rows, p.inner, row, r, at.first * N);
    const Y* dy = dy_.row(static_cast<const Y*>(p.dy), p.dy_rows, p.inner, row, r, at.first * N);
#pragma unroll
    for (int v = 0; v < Work::V; ++v)
      if (v < at.count) {
        copy_vector<X, N>(stage[Work::s_piece(r, v)], s + v * at.step * N);
        copy_vector<Y, N>(stage[Work::dy_piece(r, v)], dy + v * at.step * N);
      }
    if constexpr (Work::kRare)
      if (p.more != nullptr) {
        const X* more = more_.row(static_cast<const X*>(p.more), p.more_rows, p.inner, row, r, at.first * N);
#pragma unroll
        for (int v = 0; v < Work::V; ++v)
          if (v < at.count) copy_vector<X, N>(stage[Work::more_piece(r, v)], more + v * at.step * N);
      }
  }

  RowWalk<const X, Work::kRare> s_;
  RowWalk<const Y, Work::kRare> dy_;
  RowWalk<const X, Work::kRare> more_;
};

template <class Work> __device__ inline void read_rows(const typename Work::Pieces& stage, Work& rows) {
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r)
#pragma unroll
    for (int v = 0; v < Work::V; ++v) {
      read_vector(rows.s[r][v], stage[Work::s_piece(r, v)]);
      read_vector(rows.dy[r][v], stage[Work::dy_piece(r, v)]);
    }
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

// A thread's share of row r's sum of g * s.
template <class Work, int N, int V>
__device__ inline float product_sum(const Work& rows, int r, const float (&w)[V][N]) {
  float even = 0, odd = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N];
    tile::to_float(rows.s[r][v], s);
    tile::to_float(rows.dy[r][v], dy);
#pragma unroll
    for (int k = 0; k < N; k += 2) even += dy[k] * w[v][k] * s[k], odd += dy[k + 1] * w[v][k + 1] * s[k + 1];
  }
  return even + odd;
}
template <class Work> __device__ inline float square_sum(const Work& rows, int r) {
  float sum = 0;
#pragma unroll
  for (int v = 0; v < Work::V; ++v) {
    float s[Work::N];
    tile::to_float(rows.s[r][v], s);
#pragma unroll
    for (int k = 0; k < Work::N; ++k) sum += s[k] * s[k];
  }
  return sum;
}

// dw += dy * n, and dx, for row r; n = s * rstd, mean is the mean of g * n.
template <class Work, int N, int V>
__device__ inline void finish_row(const BackwardParams& p, const Work& rows, int r, const typename Work::Pieces& stage,
                                  typename Work::X* dx, const Lanes& at, const float (&w)[V][N], float rstd, float mean,
                                  float (&dw)[V][N]) {
  using X = typename Work::X;
  const float of_s = -mean * rstd * rstd;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float s[N], dy[N];
    tile::to_float(rows.s[r][v], s);
    tile::to_float(rows.dy[r][v], dy);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = dy[k] * rstd;
      dw[v][k] += g * s[k];
      s[k] = g * w[v][k] + s[k] * of_s;
    }
    if (v >= at.count) continue;
    if constexpr (Work::kRare) {
      if (p.dx == nullptr) continue;
      float more[N];
      tile::Vec<X, N> old;
      if (p.more != nullptr) {
        read_vector(old, stage[Work::more_piece(r, v)]);
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
    tile::store(dx + v * at.step * N, tile::from_float<X>(s), false);
  }
}

// Writes one partial row of dw per block: the sums of its groups, added in order.
template <int N, int V>
__device__ inline void write_partial(const BackwardParams& p, const Lanes& at, const float (&dw)[V][N],
                                     int64_t row_block, uint4* memory) {
  constexpr int kCount = N * V / 4;
  float* out = p.partial + row_block * p.partial_stride;
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
  __syncthreads();  // no copies of rows are in flight any more
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

// A block prefetches the first data that it will read into L2 while earlier kernels still run. All writes of the GPU
// pass through L2, so data that those kernels change is up to date for this kernel, too.
template <class Work>
__device__ inline void prefetch_first_rows(const BackwardParams& p, int64_t first, uint32_t rows, uint32_t apart) {
  if (p.inner != 0 || p.s_rows.outer_stride != p.cols || p.dy_rows.outer_stride != p.cols) return;
  const int64_t row = first + int64_t(threadIdx.x) * apart;
  if (threadIdx.x >= p.stages || row >= p.rows) return;
  const uint32_t there = uint32_t(p.rows - row < rows ? p.rows - row : rows), part = there * uint32_t(p.cols);
  ptx::prefetch_to_l2(static_cast<const typename Work::X*>(p.s) + row * p.cols, part * sizeof(typename Work::X));
  ptx::prefetch_to_l2(static_cast<const typename Work::Y*>(p.dy) + row * p.cols, part * sizeof(typename Work::Y));
}

// `pieces`: the ring of (stages * kPieces) * threads pieces; the sums of dw use this memory at the end.
template <class Work>
__device__ inline void backward_rows(const BackwardParams& p, typename tile::RoundSums<Work::kSums>::Memory& memory,
                                     uint4* pieces) {
  using X = typename Work::X;
  constexpr int N = Work::N, V = Work::V, R = Work::kRows;
  const uint32_t rank = p.cluster > 1 ? ptx::cluster_rank() : 0, step = p.cluster * p.group;
  const uint32_t group = threadIdx.x / p.group, groups = blockDim.x / p.group;
  const uint32_t mine = rank * p.group + (threadIdx.x - group * p.group);
  const Lanes at{mine, step, mine < p.vecs ? int((p.vecs - mine + step - 1) / step) : 0};
  const uint32_t row_block = blockIdx.x / p.cluster, apart = gridDim.x / p.cluster * groups * R;
  const int64_t first = int64_t(row_block) * groups * R;
  if (p.prefetch && rank == 0) prefetch_first_rows<Work>(p, first, groups * R, apart);
  tile::RoundSums<Work::kSums> row_sums(memory, p.group, p.cluster);
  const typename Work::Pieces ring(pieces);
  // Columns beyond the row are never copied, and count as zeros.
  for (uint32_t k = 0; at.count < V && k < p.stages; ++k)
#pragma unroll
    for (int i = 0; i < Work::kPieces; ++i) *ring.after(k)[i] = make_uint4(0, 0, 0, 0);
  if (p.cluster > 1) {  // no write to a neighbour before its barrier is ready
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  ptx::wait_for_earlier_kernels();

  const uint32_t steps = uint32_t((p.rows - first + apart - 1) / apart);  // every block has rows
  const int64_t start = first + group * R;
  RowPlace place{uint32_t(start), uint32_t(p.rows > start ? p.rows - start : 0)};
  const uint32_t ahead = p.stages * apart;
  RowFetcher<Work> fetcher(p, place, at.first * N);
  for (uint32_t k = 0; k < p.stages; ++k) fetcher.next(p, place.after(k * apart), at, apart, ring.after(k));
  RowWalk<X, Work::kRare> walk(static_cast<X*>(p.dx), p.dx_rows, p.inner, place.row, at.first * N);
  float w[V][N], dw[V][N] = {}, next_rstd[R] = {};
  const auto load_rstd = [&] {
    if (Work::kRare && p.rstd == nullptr) return;
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (place.has(r)) next_rstd[r] = p.rstd[place.row + r];
  };
  load_rstd();
  load_factors(p, at, w);

  uint32_t stage = 0;
  for (uint32_t round = 1; round <= steps; ++round) {
    const typename Work::Pieces here = ring.after(stage);
    wait_for_copies(p.stages - 1);
    Work rows;
    read_rows(here, rows);
    const auto fetch = [&](RowPlace now) { fetcher.next(p, now.after(ahead), at, apart, here); };
    if constexpr (!Work::kRare) fetch(place);  // the rows are in registers by now
    float rstd[R], sum[Work::kSums];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = next_rstd[r];
      sum[r] = product_sum(rows, r, w);
      if constexpr (Work::kRare)
        if (p.rstd == nullptr) sum[R + r] = square_sum(rows, r);
    }
    const RowPlace now = place;
    place = place.after(apart);
    load_rstd();
    row_sums(sum, Work::kRare && p.rstd == nullptr ? 2 * R : R, round);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!now.has(r)) continue;
      if constexpr (Work::kRare)
        if (p.rstd == nullptr) rstd[r] = rstd_of(sum[R + r], float(p.cols), p.eps);
      X* const dx = walk.row(static_cast<X*>(p.dx), p.dx_rows, p.inner, now.row, r, at.first * N);
      finish_row(p, rows, r, here, dx, at, w, rstd[r], sum[r] * rstd[r] * p.inverse_cols, dw);
    }
    if constexpr (Work::kRare) fetch(now);
    walk.advance(p.dx_rows, apart);
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  if (p.partial != nullptr) write_partial<N, V>(p, at, dw, row_block, pieces);
}

// Any alignment, any length: a block per row, element by element; the block's sum of dw lies in global memory, where
// each thread reads only its own values.
__device__ inline float slope_at(const BackwardParams& p, int64_t c) {
  if (p.w == nullptr) return p.scale;
  float w = 0;
  with_weight_type(p.w_dtype, [&](auto type) { w = tile::to_float(static_cast<const decltype(type)*>(p.w)[c]); });
  return (w + p.w_offset) * p.scale;
}

template <class X, class Y>
__device__ inline void backward_elements(const BackwardParams& p,
                                         tile::GroupSumMemory<2, kBackwardElementThreads>* memory) {
  float* partial = p.partial != nullptr ? p.partial + blockIdx.x * p.partial_stride : nullptr;
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
    const float rstd = p.rstd != nullptr ? p.rstd[row] : rstd_of(sum[1], float(p.cols), p.eps);
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

}  // namespace ingot::cuda
