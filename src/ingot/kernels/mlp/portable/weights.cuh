#pragma once
// The stream of weight tiles through shared memory, and the scales of weight-normalised rows.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/portable/elements.cuh"
#include "ingot/kernels/mlp/portable/portable.h"
#include "ingot/kernels/mlp/portable/product.cuh"

namespace ingot::cuda {
namespace {

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

}  // namespace
}  // namespace ingot::cuda
