#pragma once
// How the CUDA kernels spread heads over threads. Pure functions of sizes, so that the choice is tested without a GPU.
#include <cstdint>

#include "ingot/core/tensor.h"
#include "ingot/gpu/l2.h"

namespace ingot {
struct Rope;
struct QkNormRope;
struct QkNormRopeBackward;
}  // namespace ingot

namespace ingot::cuda {

// A head of D dimensions is held by `lanes` threads, two 16-byte vectors each: for half-split pairs a vector of either
// half. Or, without a norm, a single vector each, side by side.
struct RopeConfig {
  bool vectors = true;  // false: elements one by one, any alignment, dimensions and strides
  int lanes = 8;        // a power of two <= 32 with a norm, without vectors, or with one vector per lane
  int threads = 128;    // per block
  int iterations = 1;   // with a norm: the least number of tokens that a thread processes one after another
  int per_lane = 2;     // vectors
  int heads = 1;        // 2: a lane has two heads, with two vectors each, without a norm
  bool once = false;    // forward with a norm: a single token per thread, without a walk
  bool spread = false;  // backward with a norm: vectors lie over the lanes as in memory, and pairs meet by shuffles
  bool operator==(const RopeConfig&) const = default;
};

constexpr int kRopeThreads = 256;      // the most threads of a block
constexpr int kRopePairThreads = 128;  // threads of the kernel whose lanes have two heads
constexpr int kRopeMaxNormLanes = 32;

struct RopeShape {
  int64_t tokens = 0, heads = 0, head_dim = 0, half = 0;  // half: rotated pairs
  DType dtype = DType::bf16;
  bool aligned = true;  // every head of every operand starts where a whole vector can be read or written
  bool interleaved = false;
  bool norm = false;      // sums over the head: lanes exchange numbers
  bool backward = false;  // of the norm
  bool in_place = false;  // y is x and there is no norm: dimensions without rotation stay where they are
};

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The lanes with rotated dimensions, and the lanes of a whole head.
constexpr int64_t rope_rotating_lanes(const RopeShape& s) {
  const int64_t n = 16 / size_of(s.dtype);
  return s.interleaved ? ceil_divide(2 * s.half, 2 * n) : s.half / n;
}
constexpr int64_t rope_head_lanes(const RopeShape& s) {
  const int64_t n = 16 / size_of(s.dtype);
  return rope_rotating_lanes(s) + (s.in_place && !s.norm ? 0 : ceil_divide(s.head_dim - 2 * s.half, 2 * n));
}
constexpr int64_t rope_row_vectors(const RopeShape& s) { return s.head_dim * size_of(s.dtype) / 16; }

// Whether both vectors of half-split pairs are among the first vectors of their lanes.
constexpr bool rope_may_spread(const RopeShape& s, int64_t lanes) {
  return s.norm && s.backward && !s.interleaved && 2 * s.half < s.head_dim &&
         2 * s.half * size_of(s.dtype) <= 16 * lanes;
}

// The lanes of a head whose elements are read and written as whole vectors, or 0 where they cannot be.
constexpr int64_t rope_vector_lanes(const RopeShape& s) {
  const int64_t n = 16 / size_of(s.dtype);
  if (!s.aligned || s.head_dim % n != 0 || (s.interleaved ? 2 * s.half : s.half) % n != 0) return 0;
  int64_t lanes = rope_head_lanes(s);
  if (s.norm) {
    int64_t power = 1;
    while (power < lanes) power *= 2;
    lanes = power;
  }
  if (lanes > (s.norm ? kRopeMaxNormLanes : 128)) return 0;
  return lanes < 1 ? 1 : lanes;
}

constexpr RopeConfig pick_rope_config(const RopeShape& s, const gpu::Limits& limits) {
  RopeConfig c;
  const int64_t lanes = rope_vector_lanes(s);
  c.vectors = lanes > 0;
  if (c.vectors) {
    c.lanes = int(lanes);
  } else {
    c.lanes = 1;
    while (c.lanes < 32 && 2 * c.lanes < s.head_dim) c.lanes *= 2;
  }
  if (!s.norm) {
    const int64_t bytes = s.tokens * s.heads * s.head_dim * size_of(s.dtype);
    if (c.vectors && bytes > gpu::beyond_l2_bytes(limits) && s.heads > 1) {
      c.heads = 2;
      return c;
    }
    // Rotated dimensions and dimensions without rotation both fill whole lines of memory.
    const int64_t row = rope_row_vectors(s);
    if (c.vectors && 2 * s.half < s.head_dim && !s.in_place && row <= 32 && (row & (row - 1)) == 0)
      c.per_lane = 1, c.lanes = int(row), c.threads = s.interleaved ? 256 : 128;
    return c;
  }
  c.threads = s.backward ? 128 : 64;
  // these kernels access whole lines of memory, however small the rotated part of a head is
  c.spread = c.vectors && rope_may_spread(s, c.lanes);
  const int64_t sms = limits.sms;
  // As many iterations as leave two rounds of blocks for every SM, up to four: with more the last round takes too long.
  while (c.iterations < 4 && s.tokens * s.heads * c.lanes >= sms * 1024 * 4 * c.iterations) c.iterations *= 2;
  // If every SM has a thousand threads, the kernel without a walk is faster: 1,024 tokens of 40 heads of 128 take 6.7
  // us instead of 8.3. 256 tokens take 2.8 us without a walk and 2.7 us with one.
  if (c.vectors && !s.backward && c.iterations == 1 && s.tokens * s.heads * c.lanes >= sms * 1024)
    c.once = true, c.threads = 128;
  return c;
}

// The passes with a norm: a block keeps a slice of the tokens and some of the heads. For dgain the block adds its
// threads' sums of each head in the order of the tokens.
struct RopeSlices {
  int64_t slots = 1;   // heads a block takes at once
  int64_t chunks = 1;  // blocks sharing the heads of a token
  int64_t rows = 1;    // tokens a block takes at once
  int64_t slices = 1;  // of the tokens
  int64_t iterations = 1;
};
constexpr int64_t kRopeMaxSlices = 2048;

constexpr RopeSlices pick_rope_slices(const RopeConfig& c, int64_t tokens, int64_t heads,
                                      int64_t most = kRopeMaxSlices) {
  RopeSlices s;
  const int64_t groups = c.threads / c.lanes;  // groups of lanes
  // As many heads as leave the fewest groups idle.
  int64_t best = 0;
  for (int64_t slots = 1; slots <= groups && slots <= heads; ++slots) {
    const int64_t busy = heads * (groups / slots) * 1000 / ceil_divide(heads, slots);
    if (busy >= best) best = busy, s.slots = slots;
  }
  s.chunks = ceil_divide(heads, s.slots);
  s.rows = groups / s.slots;
  constexpr int64_t kMostBlocks = int64_t(1) << 30;
  s.slices = ceil_divide(tokens, s.rows * c.iterations);
  if (s.slices > most) s.slices = most;
  if (s.slices > kMostBlocks / s.chunks) s.slices = kMostBlocks / s.chunks;
  if (s.slices < 1) s.slices = 1;
  s.iterations = ceil_divide(ceil_divide(tokens, s.slices), s.rows);
  return s;
}

// A pass under a given configuration: for benches and tests. The configuration must fit the operands.
struct RopeTuning {
  RopeConfig config;
  bool overlap = true;   // programmatic dependent launch
  int evict_first = -1;  // stores of y: 1 yes, 0 no, -1 by size
  int early = -1;        // lets the next kernel start at once: 1 yes, 0 no, -1 by size
};
void rope_with(const Rope& a, const RopeTuning& tuning, Stream stream);
void rope_backward_with(const Rope& a, const RopeTuning& tuning, Stream stream);
void qk_norm_rope_with(const QkNormRope& a, const RopeTuning& tuning, Stream stream);
void qk_norm_rope_backward_with(const QkNormRopeBackward& a, const RopeTuning& tuning, Stream stream);
RopeTuning default_rope_tuning(const Rope& a);
RopeTuning default_rope_tuning(const QkNormRope& a);
RopeTuning default_rope_tuning(const QkNormRopeBackward& a);

}  // namespace ingot::cuda
