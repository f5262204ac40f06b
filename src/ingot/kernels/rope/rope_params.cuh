#pragma once
// What every kernel of the rotary embedding receives.
#include <cstdint>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/divide.cuh"
#include "ingot/gpu/tile/early_reads.cuh"

namespace ingot::cuda::rope_kernels {

// (T, H, D) with any strides, in elements; the last stride is 1.
struct Heads {
  void* data = nullptr;
  int64_t token = 0, head = 0;
  int64_t step = 0;  // to the next token of a thread
};
template <class T> __device__ inline T* head_of(const Heads& r, int64_t token, uint32_t head) {
  return static_cast<T*>(r.data) + token * r.token + head * r.head;
}

struct RopeParams {
  Heads x, dy, y;  // y is dx in a backward pass
  const int32_t* positions;
  const float *cos, *sin, *gain;
  float* partial;  // (heads, slices) sums for dgain, or null
  int64_t tokens, first_token, slice_tokens;
  uint32_t units;                            // threads of the launch, where every thread has one place in one head
  uint32_t heads, head_dim, half, last_row;  // half: rotated pairs; last_row: of the table of angles
  uint32_t lanes;                            // threads of a head
  uint32_t rotating_lanes, passing_lanes;    // lanes with rotation, and lanes whose dimensions pass through unchanged
  tile::Divisor by_lanes, by_heads;
  // Of the kernels whose threads walk over tokens (RopeSlices in rope_config.h).
  tile::Divisor by_slots, by_chunks, by_rows;
  uint32_t slices, rows, iterations;
  tile::EarlyReads early_reads;  // of x
  float sign, eps, inverse_dim;  // sign includes the direction of the pass
  bool normalise, interleaved, evict_first, early;
  bool in_place;  // y is x and there is no norm: dimensions without rotation stay where they are
};

// Where the angles of a position begin in the table. Only the device knows the positions: a position outside the table
// takes the last row, so that no thread reads outside the table.
__device__ inline int64_t table_row(const RopeParams& p, int32_t position) {
  const uint32_t row = uint32_t(position);
  return int64_t(row < p.last_row ? row : p.last_row) * p.half;
}

// The first step of a kernel, before it waits for earlier kernels: permits the next kernel to start, and prefetches x
// into L2.
__device__ inline void start(const RopeParams& p) {
  if (p.early) ptx::let_next_kernel_start();
  tile::ask_early<false>(p.early_reads, p.x.data);
}

__device__ inline float rstd_of(float sum_of_squares, const RopeParams& p) {
  return __frsqrt_rn(sum_of_squares * p.inverse_dim + p.eps);
}

}  // namespace ingot::cuda::rope_kernels
