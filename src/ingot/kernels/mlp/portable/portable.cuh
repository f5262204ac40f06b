#pragma once
// The portable kernels (sm_80 and later). A block takes a tile of rows through all layers. Its activations stay in
// shared memory, in two buffers used in turn, while tiles of the weights stream from L2, each fetched one tile ahead.
// 16-bit types multiply on the tensor cores, f32 by fused multiply-adds in the order of k.
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/portable/portable.h"

namespace ingot::cuda {
namespace {

using namespace mlp_parts;

template <class T> constexpr int kPer = 16 / int(sizeof(T));  // elements of 16 bytes

// Two neighbouring elements of a row.
template <class T> __device__ inline void load_pair(const T* p, float (&v)[2]) {
  tile::Vec<T, 2> pair;
  tile::load(pair, p);
  tile::to_float(pair, v);
}
template <class T> __device__ inline void store_pair(T* p, float a, float b) {
  const float v[2] = {a, b};
  tile::store(p, tile::from_float<T>(v), false);
}

// Calls use(F{}) for the activation chosen at run time; uniform over the grid.
template <class Use, class... Fs> __device__ inline void with_act(Act act, Use&& use, ActivationList<Fs...>) {
  int i = 0;
  ((int(act) == i++ ? use(Fs{}) : void()), ...);
}
template <class Use> __device__ inline void with_act(Act act, Use&& use) { with_act(act, use, Activations{}); }

// --- products ----------------------------------------------------------------------------------------------
// acc += in (kRows x reduction, shared memory) * tile (reduction x 128). A thread's sums are pairs of neighbouring
// columns: pair p is at (row(p), col(p)).

// The layout of the tile in shared memory, 16-bit types: forward [128 out][kRed], backward [kRed][128 out], in rows of
// 256 or 128 bytes whose 16-byte chunks are exchanged so that ldmatrix meets all banks.
template <bool kBackward, int kRed> __device__ inline uint32_t weight_offset(int row, int chunk) {
  constexpr int kRowBytes = 2 * (kBackward ? kPortableOut : kRed);
  return uint32_t(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

template <class T, int kRows> struct Product {
  static constexpr int kAcross = kRows >= 64 ? 2 : 1;                 // warps along the rows
  static constexpr int kRowTiles = kRows / kAcross / 16;              // 16 rows each, per warp
  static constexpr int kColTiles = kPortableOut / (8 / kAcross) / 8;  // 8 columns each, per warp
  static constexpr int kPairs = kRowTiles * kColTiles * 2;
  float acc[kRowTiles * kColTiles][4];

  __device__ static int warp_row() { return kAcross == 2 ? int(threadIdx.x / 128) * (kRows / 2) : 0; }
  __device__ static int warp_col() { return int(threadIdx.x / 32 % (8 / kAcross)) * kColTiles * 8; }
  __device__ static int row(int p) {
    return warp_row() + p / 2 / kColTiles * 16 + p % 2 * 8 + int(threadIdx.x % 32 / 4);
  }
  __device__ static int col(int p) { return warp_col() + p / 2 % kColTiles * 8 + int(threadIdx.x % 4) * 2; }
  __device__ float& value(int p, int i) { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles * kColTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = 0;
  }

  template <bool kBackward, int kRed>
  __device__ void multiply(const T* in, int stride, int red0, int reduction, const T* weights) {
    const int lane = int(threadIdx.x % 32);
    const uint32_t a0 = ptx::shared_address(in + int64_t(warp_row() + lane % 16) * stride + red0 + lane / 16 * 8);
    const uint32_t w0 = ptx::shared_address(weights);
    for (int k = 0; k < reduction; k += 16) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix(a[m], a0 + uint32_t((m * 16 * stride + k) * sizeof(T)));
#pragma unroll
      for (int n = 0; n < kColTiles; n += 2) {
        uint32_t b[4];
        const int out = warp_col() + n * 8;
        if constexpr (kBackward)
          ptx::ldmatrix_trans(b, w0 + weight_offset<kBackward, kRed>(k + lane % 16, out / 8 + lane / 16));
        else
          ptx::ldmatrix(b, w0 + weight_offset<kBackward, kRed>(out + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16(T{}, acc[m * kColTiles + n], a[m], {b[0], b[1]});
          ptx::mma_m16n8k16(T{}, acc[m * kColTiles + n + 1], a[m], {b[2], b[3]});
        }
      }
    }
  }
};

// f32: backward [32 reduction][128 out + 4]; forward [128 out][32 reduction + 4], where row n is found at
// (n % 4) * 32 + n / 4: a lane owns four neighbouring columns, and the lanes' rows then meet all banks.
constexpr int kF32Backward = kPortableOut + 4, kF32Forward = portable_reduction(4) + 4;
__device__ inline int f32_place(int n) { return n % 4 * 32 + n / 4; }
template <int kRows> struct Product<float, kRows> {
  static constexpr int kPerThread = kRows / 8, kPairs = kPerThread * 2;
  float acc[kPerThread][4];

  __device__ static int row(int p) { return int(threadIdx.x / 32) * kPerThread + p / 2; }
  __device__ static int col(int p) { return int(threadIdx.x % 32) * 4 + p % 2 * 2; }
  __device__ float& value(int p, int i) { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = 0;
  }

  template <bool kBackward, int kRed>
  __device__ void multiply(const float* in, int stride, int red0, int reduction, const float* weights) {
    const float* a = in + row(0) * stride + red0;
    const int lane = int(threadIdx.x % 32);
    // Sums of 32 products, then sums of these sums: several short sums lose less to rounding than a long sum.
    float part[kPerThread][4] = {};
#pragma unroll 1
    for (int k = 0; k < reduction; k += 4) {
      float w[4][4];  // w[k][out]
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4 four;
        if constexpr (kBackward) {
          four = *reinterpret_cast<const float4*>(weights + (k + j) * kF32Backward + lane * 4);
          w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
        } else {
          four = *reinterpret_cast<const float4*>(weights + (j * 32 + lane) * kF32Forward + k);
          w[0][j] = four.x, w[1][j] = four.y, w[2][j] = four.z, w[3][j] = four.w;
        }
      }
      const float* at = a + k;  // a single register for all rows' addresses
#pragma unroll
      for (int i = 0; i < kPerThread; ++i, at += stride) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        const float h[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] = fmaf(h[q], w[q][j], part[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] += part[i][j];
  }
};

// --- weights -------------------------------------------------------------------------------------------------

// A tile's place: kPortableOut columns of the product from `out` on, kRed terms of its sums from `red` on.
template <bool kBackward, int kRed> struct TilePlace {
  int layer, out = 0, red = 0;
  __device__ static int out_size(const PortableLayer& l) { return kBackward ? l.K : l.N; }
  __device__ static int red_size(const PortableLayer& l) { return kBackward ? l.N : l.K; }
  // Advances to the next tile in the order of the products: forward goes up through the layers, backward down. Returns
  // true after the last tile, and continues with the first.
  __device__ bool advance(const PortableRows& p, int begin, int end) {
    red += kRed;
    if (red < red_size(p.layer[layer])) return false;
    red = 0, out += kPortableOut;
    if (out < out_size(p.layer[layer])) return false;
    out = 0, layer += kBackward ? -1 : 1;
    if (layer != end) return false;
    layer = begin;
    return true;
  }
};

// The tiles of all layers, once or repeatedly, each fetched while the tile before is used. Each thread fetches chunks
// of 16 bytes: kChunks chunks make a row of the weight, and a thread's chunks are kStep rows apart.
template <class T, bool kBackward, int kRed, bool kOnce = true> struct WeightStream {
  static constexpr int kElements = int(portable_weight_tile(int(sizeof(T)), kRed) / sizeof(T));
  static constexpr int kChunks = (kBackward ? kPortableOut : kRed) / kPer<T>, kStep = kPortableThreads / kChunks;
  static constexpr int kSteps = (kBackward ? kRed : kPortableOut) / kStep;
  static_assert(kStep % 8 == 0, "a thread's chunks are exchanged alike in all their rows");

  const PortableRows& p;
  const float* scales;  // of all rows of all weights, or null
  T* ring;
  int begin, end;  // the first layer and the layer after the last, in the order of use
  bool done;       // no tile is left to fetch
  TilePlace<kBackward, kRed> issue_place, use_place;
  int slot = 0;  // the tile returned by next()

  __device__ WeightStream(const PortableRows& params, const float* row_scales, T* memory, int first, int last)
      : p(params),
        scales(row_scales),
        ring(memory),
        begin(first),
        end(last),
        done(first == last),
        issue_place{first},
        use_place{first} {
    issue(0);
  }
  // The place of this thread's first chunk in a tile, and the distance to its next chunks.
  __device__ static int my_row() { return int(threadIdx.x) / kChunks; }
  __device__ static int my_chunk() { return int(threadIdx.x) % kChunks; }
  static constexpr int kSlotStep = sizeof(T) == 2 ? kStep * (kBackward ? kPortableOut : kRed)
                                                  : (kBackward ? kStep * kF32Backward : kStep / 4 * kF32Forward);
  __device__ static int my_slot() {
    if constexpr (sizeof(T) == 2) return int(weight_offset<kBackward, kRed>(my_row(), my_chunk()) / 2);
    return kBackward ? my_row() * kF32Backward + my_chunk() * 4 : f32_place(my_row()) * kF32Forward + my_chunk() * 4;
  }
  __device__ static int my_n(const TilePlace<kBackward, kRed>& at) { return (kBackward ? at.red : at.out) + my_row(); }
  __device__ static int my_k(const TilePlace<kBackward, kRed>& at) {
    return (kBackward ? at.out : at.red) + my_chunk() * kPer<T>;
  }

  __device__ void issue(int to_slot) {
    if (!done) {
      const PortableLayer& l = p.layer[issue_place.layer];
      const int n = my_n(issue_place), k = my_k(issue_place), rows = k < l.K ? l.N - n : 0;
      const T* from = static_cast<const T*>(l.w) + int64_t(n) * l.K + k;
      const uint32_t to = ptx::shared_address(ring + to_slot * kElements + my_slot());
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const bool inside = i * kStep < rows;  // zeros beyond
        ptx::cp_async<16>(to + uint32_t(i * kSlotStep * sizeof(T)), inside ? from + i * kStep * l.K : l.w,
                          inside ? 16 : 0);
      }
      const bool wrapped = issue_place.advance(p, begin, end);
      if (kOnce) done = wrapped;
    }
    ptx::cp_async_commit_group();
  }
  // Returns the next tile. Earlier writes of all threads to shared memory are visible afterwards.
  __device__ const T* next() {
    static_assert(kPortableStages == 2);
    ptx::cp_async_wait_group<0>();
    T* tile = ring + slot * kElements;
    if constexpr (kBackward) scale(tile);
    __syncthreads();
    slot ^= 1;
    issue(slot);  // all threads have finished with this buffer
    return tile;
  }
  // Weight norm, backward: each thread scales its own fetched chunks. The forward pass scales the sums instead.
  __device__ void scale(T* tile) {
    if (scales == nullptr) return;
    const PortableLayer& l = p.layer[use_place.layer];
    const int n = my_n(use_place);
    use_place.advance(p, begin, end);
    if (l.g == nullptr) return;
    T* chunk_at = tile + my_slot();
#pragma unroll 4
    for (int i = 0; i < kSteps && n + i * kStep < l.N; ++i) {
      WeightChunk<T> chunk;
      tile::load(chunk, static_cast<const T*>(chunk_at + i * kSlotStep));
      tile::store(chunk_at + i * kSlotStep, scaled(chunk, scales[l.scale_at + n + i * kStep]), false);
    }
  }
};

template <class T, int kRed> struct Smem {
  T *ring, *first;
  int buffer;     // elements of each of the two buffers
  float* scales;  // null without weight norm
  __device__ Smem(T* memory, const PortableRows& p, int rows) {
    ring = memory;
    first = ring + kPortableStages * WeightStream<T, false, kRed>::kElements;
    buffer = rows * p.stride;
    scales = p.weight_norm ? reinterpret_cast<float*>(first + 2 * buffer) : nullptr;
  }
  __device__ T* h(int turn) const { return first + (turn & 1) * buffer; }
};

// weight_inverse_norm of R rows at once, with the same bits: all rows wait together for the memory.
template <class T, int R>
__device__ inline void weight_inverse_norms(const T* const (&v)[R], int K, float (&inverse)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) inverse[r] = 0;
  for (int k = int(threadIdx.x % 32) * kPer<T>; k < K; k += 32 * kPer<T>) {
    WeightChunk<T> chunk[R];
#pragma unroll
    for (int r = 0; r < R; ++r) tile::load(chunk[r], v[r] + k);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float x[kPer<T>];
      tile::to_float(chunk[r], x);
#pragma unroll
      for (int i = 0; i < kPer<T>; ++i) inverse[r] = fmaf(x[i], x[i], inverse[r]);
    }
  }
  tile::warp_sum(inverse, 32);
#pragma unroll
  for (int r = 0; r < R; ++r) inverse[r] = inverse_norm(inverse[r]);
}

// The scale of each row of each weight-normalised layer, a warp per row and several rows in flight.
template <class T> __device__ inline void form_scales(const PortableRows& p, float* scales) {
  if (scales == nullptr) return;
  constexpr int kAtOnce = 8, kWarps = kPortableThreads / 32;
  for (int l = 0; l < p.depth; ++l) {
    const PortableLayer& layer = p.layer[l];
    if (layer.g == nullptr) continue;
    for (int n = int(threadIdx.x / 32); n < layer.N; n += kWarps * kAtOnce) {
      const T* rows[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        rows[i] = static_cast<const T*>(layer.w) + int64_t(min(n + i * kWarps, layer.N - 1)) * layer.K;
      weight_inverse_norms(rows, layer.K, scale);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (threadIdx.x % 32 == 0 && n + i * kWarps < layer.N)
          scales[layer.scale_at + n + i * kWarps] =
              tile::to_float(static_cast<const T*>(layer.g)[n + i * kWarps]) * scale[i];
    }
  }
}

// --- the forward pass of a tile of rows ----------------------------------------------------------------------

// Starts to copy rows of a global matrix into shared memory, zeros beyond the last row and up to the next multiple of
// 16 columns; WeightStream::next() waits for the copies.
template <class T>
__device__ inline void load_rows(const void* from, int64_t from_stride, int width, int64_t row0, int64_t rows, T* to,
                                 int stride, int tile_rows) {
  const int chunks = (width + 15) / 16 * 16 / kPer<T>;
  for (int i = int(threadIdx.x); i < tile_rows * chunks; i += kPortableThreads) {
    const int r = i / chunks, c = i % chunks * kPer<T>;
    const bool inside = row0 + r < rows && c < width;
    ptx::cp_async<16>(ptx::shared_address(to + r * stride + c),
                      static_cast<const T*>(from) + (inside ? (row0 + r) * from_stride + c : 0), inside ? 16 : 0);
  }
  ptx::cp_async_commit_group();
}

__device__ inline bool active(const PortableRows& p, int l) { return p.activate_last || l + 1 < p.depth; }

template <class T>
__device__ inline void store_saved(const PortableRows& p, const PortableLayer& l, int64_t row, int col, float a,
                                   float b) {
  const int64_t at = l.saved_at + row * l.N + col;
  if (p.saved_f32)
    store_pair(static_cast<float*>(p.saved) + at, a, b);
  else
    store_pair(static_cast<T*>(p.saved) + at, a, b);
}
template <class T>
__device__ inline void load_saved(const PortableRows& p, const PortableLayer& l, int64_t row, int col, float (&v)[2]) {
  const int64_t at = l.saved_at + row * l.N + col;
  if (p.saved_f32)
    load_pair(static_cast<const float*>(p.saved) + at, v);
  else
    load_pair(static_cast<const T*>(p.saved) + at, v);
}

// 128 columns of a layer: bias, activation, the values saved for backward, and the place of the result.
template <class T, int kRows>
__device__ inline void finish_forward(const PortableRows& p, int l, int out0, int64_t row0, const float* scales,
                                      Product<T, kRows>& sum, T* h, bool to_y) {
  const PortableLayer& layer = p.layer[l];
  constexpr int kPairs = Product<T, kRows>::kPairs;
  const bool saves = p.saved != nullptr && active(p, l);
  const auto each_inside = [&](auto&& use) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int col = out0 + sum.col(i);
      const int64_t row = row0 + sum.row(i);
      if (col < layer.N && row < p.rows) use(row, col, sum.value(i, 0), sum.value(i, 1));
    }
  };
  if (layer.g != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int n = min(out0 + sum.col(i), layer.N - 2);
      sum.value(i, 0) *= scales[layer.scale_at + n], sum.value(i, 1) *= scales[layer.scale_at + n + 1];
    }
  }
  if (layer.b != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int col = out0 + sum.col(i);
      if (col >= layer.N) continue;
      float b[2];
      load_pair(static_cast<const T*>(layer.b) + col, b);
      sum.value(i, 0) += b[0], sum.value(i, 1) += b[1];
    }
  }
  if (saves && !p.saves_value)
    each_inside([&](int64_t row, int col, float a, float b) { store_saved<T>(p, layer, row, col, a, b); });
  if (active(p, l))
    with_act(p.act, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) sum.value(i, j) = act_value<decltype(f), T>(sum.value(i, j));
    });
  if (saves && p.saves_value)
    each_inside([&](int64_t row, int col, float a, float b) { store_saved<T>(p, layer, row, col, a, b); });
  if (to_y)
    each_inside([&](int64_t row, int col, float a, float b) {
      store_pair(static_cast<T*>(p.y) + row * p.y_stride + col, a, b);
    });
  if (h == nullptr) return;
  const int padded = (layer.N + 15) / 16 * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (const int col = out0 + sum.col(i); col < padded)
      store_pair(h + sum.row(i) * p.stride + col, sum.value(i, 0), sum.value(i, 1));
}

// Layers 0 to depth - 1 of a tile, from x in buffer `turn`, to y or for `saved` alone.
template <class T, int kRows, int kRed, bool kToY, class Weights>
__device__ inline void forward_tile(const PortableRows& p, int depth, int64_t row0, const Smem<T, kRed>& smem, int turn,
                                    Weights& weights) {
  Product<T, kRows> sum;
  for (int l = 0; l < depth; ++l) {
    const PortableLayer& layer = p.layer[l];
    const bool last = l + 1 == depth;
    for (int out0 = 0; out0 < layer.N; out0 += kPortableOut) {
      sum.clear();
      for (int red0 = 0; red0 < layer.K; red0 += kRed)
        sum.template multiply<false, kRed>(smem.h(turn + l), p.stride, red0, min(kRed, layer.K - red0), weights.next());
      finish_forward<T, kRows>(p, l, out0, row0, smem.scales, sum, last ? nullptr : smem.h(turn + l + 1), kToY && last);
    }
  }
}

template <class T, int kRows, int kRed>
__global__ void __launch_bounds__(kPortableThreads, portable_blocks(kRows, int(sizeof(T))))
    mlp_portable_forward(const __grid_constant__ PortableRows p) {
  const Smem<T, kRed> smem(tile::dynamic_shared<T>(), p, kRows);
  const int tiles = int((p.rows + kRows - 1) / kRows);
  WeightStream<T, false, kRed, false> weights(p, smem.scales, smem.ring, 0, p.depth);
  form_scales<T>(p, smem.scales);
  int turn = 0;
  for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
    // Into the buffer not read by slower warps, which may still be in the last layer of the preceding tile.
    load_rows(p.x, p.x_stride, p.layer[0].K, int64_t(tile) * kRows, p.rows, smem.h(turn), p.stride, kRows);
    forward_tile<T, kRows, kRed, true>(p, p.depth, int64_t(tile) * kRows, smem, turn, weights);
    turn ^= p.depth & 1;
  }
  ptx::cp_async_wait_group<0>();  // the stream has fetched a tile more
}

// --- the chain of gradients ------------------------------------------------------------------------------------

// Recomputes a layer's input from the saved values, where dW needs the input and memory has no copy in T.
template <class T, int kRows> __device__ inline void form_inputs(const PortableRows& p, int64_t row0) {
  for (int l = 1; l < p.depth; ++l) {
    if (p.layer[l].input == nullptr) continue;
    const PortableLayer& below = p.layer[l - 1];
    const int pairs = below.N / 2;
    with_act(p.act, [&](auto f) {
      for (int i = int(threadIdx.x); i < kRows * pairs; i += kPortableThreads) {
        const int64_t row = row0 + i / pairs;
        const int col = i % pairs * 2;
        if (row >= p.rows) break;
        float v[2];
        load_saved<T>(p, below, row, col, v);
        store_pair(static_cast<T*>(p.layer[l].input) + row * below.N + col, act_value_from_saved<decltype(f), T>(v[0]),
                   act_value_from_saved<decltype(f), T>(v[1]));
      }
    });
  }
}

// dz of the last layer into shared memory: dy, times the slope where the last layer is activated.
template <class T, int kRows> __device__ inline void first_gradient(const PortableRows& p, int64_t row0, T* d) {
  const PortableLayer& layer = p.layer[p.depth - 1];
  load_rows(p.dy, p.dy_stride, layer.N, row0, p.rows, d, p.stride, kRows);
  if (!p.activate_last) return;
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  const int pairs = layer.N / 2;
  with_act(p.act, [&](auto f) {
    for (int i = int(threadIdx.x); i < kRows * pairs; i += kPortableThreads) {
      const int64_t row = row0 + i / pairs;
      const int col = i % pairs * 2;
      if (row >= p.rows) break;
      float g[2], v[2];
      T* at = d + i / pairs * p.stride + col;
      load_pair(at, g);
      load_saved<T>(p, layer, row, col, v);
#pragma unroll
      for (int j = 0; j < 2; ++j) g[j] *= act_slope_from_saved<decltype(f), T>(v[j]);
      store_pair(at, g[0], g[1]);
      store_pair(static_cast<T*>(layer.dz) + row * layer.N + col, g[0], g[1]);
    }
  });
}

// 128 columns of dh = dz W: multiplied by the slope of the layer below and kept, or written as dx.
template <class T, int kRows>
__device__ inline void finish_backward(const PortableRows& p, int l, int out0, int64_t row0, Product<T, kRows>& sum,
                                       T* d) {
  constexpr int kPairs = Product<T, kRows>::kPairs;
  const int width = p.layer[l].K;
  if (l > 0) {
    const PortableLayer& below = p.layer[l - 1];
    with_act(p.act, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int64_t row = row0 + sum.row(i);
        const int col = out0 + sum.col(i);
        if (row >= p.rows || col >= width) continue;
        float v[2];
        load_saved<T>(p, below, row, col, v);
#pragma unroll
        for (int j = 0; j < 2; ++j) sum.value(i, j) *= act_slope_from_saved<decltype(f), T>(v[j]);
      }
    });
  }
  T* out = static_cast<T*>(l > 0 ? p.layer[l - 1].dz : p.dx);
  const int64_t out_stride = l > 0 ? width : p.dx_stride;
  const int padded = (width + 15) / 16 * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t row = row0 + sum.row(i);
    const int col = out0 + sum.col(i);
    if (row < p.rows && col < width) store_pair(out + row * out_stride + col, sum.value(i, 0), sum.value(i, 1));
    if (l > 0 && col < padded) store_pair(d + sum.row(i) * p.stride + col, sum.value(i, 0), sum.value(i, 1));
  }
}

template <class T, int kRows, int kRed>
__global__ void __launch_bounds__(kPortableThreads, portable_blocks(kRows, int(sizeof(T))))
    mlp_portable_chain(const __grid_constant__ PortableRows p) {
  const Smem<T, kRed> smem(tile::dynamic_shared<T>(), p, kRows);
  for (int i = int(blockIdx.x) * kPortableThreads + int(threadIdx.x); i < p.counter_count;
       i += int(gridDim.x) * kPortableThreads)
    p.counters[i] = 0;
  form_scales<T>(p, smem.scales);
  __syncthreads();
  // The products through layers depth - 1 to `lowest`; the last product gives dx where requested.
  const int lowest = p.dx != nullptr ? 0 : p.first + 1;
  for (int tile = int(blockIdx.x); int64_t(tile) * kRows < p.rows; tile += int(gridDim.x)) {
    const int64_t row0 = int64_t(tile) * kRows;
    if (p.recomputed > 0) {
      WeightStream<T, false, kRed> weights(p, smem.scales, smem.ring, 0, p.recomputed);
      load_rows(p.x, p.x_stride, p.layer[0].K, row0, p.rows, smem.h(0), p.stride, kRows);
      forward_tile<T, kRows, kRed, false>(p, p.recomputed, row0, smem, 0, weights);
      __syncthreads();  // threads read parts of `saved` written by different threads
    }
    form_inputs<T, kRows>(p, row0);
    WeightStream<T, true, kRed> weights(p, smem.scales, smem.ring, p.depth - 1, min(lowest, p.depth) - 1);
    first_gradient<T, kRows>(p, row0, smem.h(0));
    Product<T, kRows> sum;
    for (int l = p.depth - 1; l >= lowest; --l) {
      const int turn = p.depth - 1 - l;
      for (int out0 = 0; out0 < p.layer[l].K; out0 += kPortableOut) {
        sum.clear();
        for (int red0 = 0; red0 < p.layer[l].N; red0 += kRed)
          sum.template multiply<true, kRed>(smem.h(turn), p.stride, red0, min(kRed, p.layer[l].N - red0),
                                            weights.next());
        finish_backward<T, kRows>(p, l, out0, row0, sum, smem.h(turn + 1));
      }
    }
    __syncthreads();
  }
}

// --- all dW and db ---------------------------------------------------------------------------------------------

// Both operands of a stage: [rows][64] of dz and of the layer's input.
template <class T> constexpr int kGradRows = sizeof(T) == 2 ? 64 : 32;
template <class T> struct GradStage { T dz[kGradRows<T> * kGradTile], h[kGradRows<T> * kGradTile]; };
template <class T> struct GradMemory {
  GradStage<T> stage[kGradStages];
  float bias[4][kGradTile];
  bool last;
};
template <class T> __device__ inline int grad_at(int row, int col) {
  return sizeof(T) == 2 ? row * kGradTile + ((col / 8 ^ (row & 7)) * 8 + col % 8) : row * kGradTile + col;
}

template <class T> struct GradProduct {
  static constexpr int kPairs = 8;
  float acc[4][4];  // two tiles of 16 rows of dW by two of 8 columns per warp; warps 2 by 4
  __device__ static int n(int p) {
    return int(threadIdx.x / 128) * 32 + p / 4 * 16 + p % 2 * 8 + int(threadIdx.x % 32 / 4);
  }
  __device__ static int k(int p) { return int(threadIdx.x / 32 % 4) * 16 + p / 2 % 2 * 8 + int(threadIdx.x % 4) * 2; }
  __device__ float value(int p, int i) const { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void multiply(const GradStage<T>& stage) {
    const int lane = int(threadIdx.x % 32);
#pragma unroll
    for (int t = 0; t < kGradRows<T>; t += 16) {
      uint32_t a[2][4], b[4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        ptx::ldmatrix_trans(
            a[m], ptx::shared_address(stage.dz + grad_at<T>(t + lane / 16 * 8 + lane % 8,
                                                            int(threadIdx.x / 128) * 32 + m * 16 + lane / 8 % 2 * 8)));
      ptx::ldmatrix_trans(
          b, ptx::shared_address(stage.h + grad_at<T>(t + lane % 16, int(threadIdx.x / 32 % 4) * 16 + lane / 16 * 8)));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_m16n8k16(T{}, acc[m * 2], a[m], {b[0], b[1]});
        ptx::mma_m16n8k16(T{}, acc[m * 2 + 1], a[m], {b[2], b[3]});
      }
    }
  }
};
template <> struct GradProduct<float> {
  static constexpr int kPairs = 8;
  float acc[4][4];
  __device__ static int n(int p) { return int(threadIdx.x / 16) * 4 + p / 2; }
  __device__ static int k(int p) { return int(threadIdx.x % 16) * 4 + p % 2 * 2; }
  __device__ float value(int p, int i) const { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void multiply(const GradStage<float>& stage) {
#pragma unroll 4
    for (int t = 0; t < kGradRows<float>; ++t) {
      const float4 a = *reinterpret_cast<const float4*>(stage.dz + t * kGradTile + n(0));
      const float4 b = *reinterpret_cast<const float4*>(stage.h + t * kGradTile + k(0));
      const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(left[i], right[j], acc[i][j]);
    }
  }
};

template <class T>
__device__ inline void load_grad_stage(const PortableGrad::Layer& l, int n0, int k0, int64_t row0, int64_t end,
                                       GradStage<T>& to) {
  constexpr int kChunks = kGradTile / kPer<T>;
  for (int i = int(threadIdx.x); i < kGradRows<T> * kChunks; i += kPortableThreads) {
    const int r = i / kChunks, c = i % kChunks * kPer<T>;
    const bool row_ok = row0 + r < end;
    const bool n_ok = row_ok && n0 + c < l.N, k_ok = row_ok && k0 + c < l.K;
    ptx::cp_async<16>(ptx::shared_address(to.dz + grad_at<T>(r, c)),
                      static_cast<const T*>(l.dz) + (n_ok ? (row0 + r) * l.dz_stride + n0 + c : 0), n_ok ? 16 : 0);
    ptx::cp_async<16>(ptx::shared_address(to.h + grad_at<T>(r, c)),
                      static_cast<const T*>(l.h) + (k_ok ? (row0 + r) * l.h_stride + k0 + c : 0), k_ok ? 16 : 0);
  }
}

// Sums of a block: its square of dW over its rows, and its part of db where the block owns this part. Every 128 or 64
// rows the running sum is added to a second sum, because short sums lose less to rounding.
template <class T> struct GradSums {
  float dw[GradProduct<T>::kPairs][2] = {};
  float db = 0;  // of column threadIdx.x % 64, every fourth row
};
template <class T>
__device__ inline void sum_rows(const PortableGrad& p, const PortableGrad::Layer& l, int n0, int k0, bool bias,
                                int64_t begin, int64_t end, GradMemory<T>& memory, GradSums<T>& sums) {
  const int64_t steps = (end - begin + kGradRows<T> - 1) / kGradRows<T>;
  const auto fetch = [&](int64_t s) {
    if (s < steps) load_grad_stage(l, n0, k0, begin + s * kGradRows<T>, end, memory.stage[s % kGradStages]);
    ptx::cp_async_commit_group();
  };
  for (int s = 0; s + 1 < kGradStages; ++s) fetch(s);
  GradProduct<T> product;
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) product.acc[i][j] = 0;
  };
  clear();
  float db = 0;
  for (int64_t s = 0; s < steps; ++s) {
    ptx::cp_async_wait_group<kGradStages - 2>();
    __syncthreads();
    fetch(s + kGradStages - 1);
    const GradStage<T>& stage = memory.stage[s % kGradStages];
    product.multiply(stage);
    if (bias)
#pragma unroll 4
      for (int r = int(threadIdx.x / kGradTile); r < kGradRows<T>; r += kPortableThreads / kGradTile)
        db += tile::to_float(stage.dz[grad_at<T>(r, int(threadIdx.x % kGradTile))]);
    if (s % 2 == 0 && s + 1 < steps) continue;
    sums.db += db;
    db = 0;
#pragma unroll
    for (int i = 0; i < GradProduct<T>::kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) sums.dw[i][j] += product.value(i, j);
    clear();
  }
}

// True in the last of `count` blocks to arrive; the earlier writes of all blocks are visible to this block.
__device__ inline bool last_to_arrive(uint32_t* counter, int count, bool& shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared_flag = atomicAdd(counter, 1u) == uint32_t(count - 1);
  __syncthreads();
  const bool last = shared_flag;
  __threadfence();
  return last;
}

// Adds the four partial sums of a bias' 64 columns in order, in the first 64 threads.
__device__ inline float sum_bias(float mine, float (&memory)[4][kGradTile]) {
  memory[threadIdx.x / kGradTile][threadIdx.x % kGradTile] = mine;
  __syncthreads();
  float sum = 0;
  if (threadIdx.x < kGradTile)
    for (int q = 0; q < 4; ++q) sum += memory[q][threadIdx.x];
  return sum;
}

// dv and dg of 64 rows of a weight from the whole dW, a warp per row.
template <class T> __device__ inline void weight_norm_rows(const PortableGrad::Layer& l, int n0) {
  for (int n = n0 + int(threadIdx.x / 32); n < min(n0 + kGradTile, l.N); n += kPortableThreads / 32) {
    const T* v = static_cast<const T*>(l.v) + int64_t(n) * l.K;
    const float* dw = l.whole + int64_t(n) * l.K;
    const float r = weight_inverse_norm(v, l.K);
    float along[1] = {};
    for (int k = int(threadIdx.x % 32); k < l.K; k += 32)
      along[0] = fmaf(__ldcg(dw + k), tile::to_float(v[k]), along[0]);
    tile::warp_sum(along, 32);
    along[0] *= r;
    const float scale = tile::to_float(static_cast<const T*>(l.g)[n]) * r, back = along[0] * r;
    if (l.dg != nullptr && threadIdx.x % 32 == 0) l.dg[n] += along[0];
    if (l.dw == nullptr) continue;
    for (int k = int(threadIdx.x % 32); k < l.K; k += 32)
      l.dw[int64_t(n) * l.K + k] += scale * (__ldcg(dw + k) - back * tile::to_float(v[k]));
  }
}

template <class T>
__global__ void __launch_bounds__(kPortableThreads, kPortableBlocks)
    mlp_portable_grad(const __grid_constant__ PortableGrad p) {
  GradMemory<T>& memory = *tile::dynamic_shared<GradMemory<T>>();
  const int tile = int(blockIdx.x) / p.splits, split = int(blockIdx.x) % p.splits;
  int index = 0;
  while (index + 1 < p.depth && tile >= p.layer[index + 1].first_tile) ++index;
  const PortableGrad::Layer& l = p.layer[index];
  const int across = (l.K + kGradTile - 1) / kGradTile, local = tile - l.first_tile;
  const int n0 = local / across * kGradTile, k0 = local % across * kGradTile, block = l.first_block + local / across;
  const bool normed = l.whole != nullptr, weight = l.dw != nullptr || l.dg != nullptr;
  const bool bias = l.db != nullptr && k0 == 0;
  if (!weight && !bias) return;

  GradSums<T> sums;
  const int64_t begin = split * p.rows_per_split, end = min(p.rows, begin + p.rows_per_split);
  sum_rows<T>(p, l, n0, k0, bias, begin, end, memory, sums);
  float db = bias ? sum_bias(sums.db, memory.bias) : 0;
  constexpr int kPairs = GradProduct<T>::kPairs;
  if (p.splits > 1) {
    // (tile, split, pair, thread): the last block's threads find the sums of their own elements.
    float2* partial = reinterpret_cast<float2*>(p.partial) + int64_t(tile) * p.splits * kPairs * kPortableThreads;
    float* bias_partial = p.bias_partial + int64_t(block) * p.splits * kGradTile;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      partial[(int64_t(split) * kPairs + i) * kPortableThreads + threadIdx.x] =
          make_float2(sums.dw[i][0], sums.dw[i][1]);
    if (bias && threadIdx.x < kGradTile) bias_partial[split * kGradTile + threadIdx.x] = db;
    if (!last_to_arrive(p.tile_counter + tile, p.splits, memory.last)) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sums.dw[i][0] = sums.dw[i][1] = 0;
    db = 0;
    for (int s = 0; s < p.splits; ++s) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 v = __ldcg(partial + (int64_t(s) * kPairs + i) * kPortableThreads + threadIdx.x);
        sums.dw[i][0] += v.x, sums.dw[i][1] += v.y;
      }
      if (bias && threadIdx.x < kGradTile) db += __ldcg(bias_partial + s * kGradTile + threadIdx.x);
    }
  }
  if (bias && threadIdx.x < kGradTile && n0 + int(threadIdx.x) < l.N) l.db[n0 + threadIdx.x] += db;
  if (!weight) return;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int n = n0 + GradProduct<T>::n(i), k = k0 + GradProduct<T>::k(i);
    if (n >= l.N || k >= l.K) continue;
    float2* at = reinterpret_cast<float2*>((normed ? l.whole : l.dw) + int64_t(n) * l.K + k);
    const float2 before = normed ? make_float2(0, 0) : *at;
    *at = make_float2(before.x + sums.dw[i][0], before.y + sums.dw[i][1]);
  }
  if (normed && last_to_arrive(p.block_counter + block, across, memory.last)) weight_norm_rows<T>(l, n0);
}

}  // namespace

// --- launchers -------------------------------------------------------------------------------------------------

// Calls use(rows, reduction), both std::integral_constant, for the tile of the configuration, from height number kFirst
// on.
template <class T, int kFirst, class Use> void with_tile(const PortableConfig& c, Use&& use) {
  constexpr int kSize = int(sizeof(T)), kHigh = portable_height(kSize, 0), kMiddle = portable_height(kSize, 1),
                kLow = portable_height(kSize, 2);
  using Low = std::integral_constant<int, kLow>;
  using Wide = std::integral_constant<int, portable_reduction(kSize)>;
  if constexpr (portable_has_narrow(kSize)) {
    if (c.reduction == kPortableNarrow) return use(Low{}, std::integral_constant<int, kPortableNarrow>{});
  }
  if constexpr (kFirst == 0) {
    if (c.rows == kHigh) return use(std::integral_constant<int, kHigh>{}, Wide{});
  }
  c.rows == kMiddle ? use(std::integral_constant<int, kMiddle>{}, Wide{}) : use(Low{}, Wide{});
}
template <class T>
void launch_portable_forward(const PortableRows& p, const PortableConfig& c, int device, Stream stream) {
  with_tile<T, 0>(c, [&](auto rows, auto reduction) {
    gpu::launch("mlp", mlp_portable_forward<T, rows(), reduction()>,
                {.grid = c.grid, .block = kPortableThreads, .smem = c.smem, .device = device}, stream, p);
  });
}
template <class T>
void launch_portable_chain(const PortableRows& p, const PortableConfig& c, int device, Stream stream) {
  with_tile<T, portable_backward_height(int(sizeof(T)))>(c, [&](auto rows, auto reduction) {
    gpu::launch("mlp_backward", mlp_portable_chain<T, rows(), reduction()>,
                {.grid = c.grid, .block = kPortableThreads, .smem = c.smem, .device = device}, stream, p);
  });
}
template <class T> void launch_portable_grad(const PortableGrad& p, int device, Stream stream) {
  gpu::launch(
      "mlp_backward", mlp_portable_grad<T>,
      {.grid = int64_t(p.tiles) * p.splits, .block = kPortableThreads, .smem = sizeof(GradMemory<T>), .device = device},
      stream, p);
}

}  // namespace ingot::cuda
