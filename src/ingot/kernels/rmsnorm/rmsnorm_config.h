#pragma once
// How the CUDA forward pass distributes rows over threads. Pure functions of sizes, so that the choice is tested
// without a GPU.
#include <cstdint>

#include "ingot/core/tensor.h"
#include "ingot/gpu/l2.h"
#include "ingot/gpu/limits.h"

namespace ingot::cuda {

// A row of `vecs` 16-byte vectors is held in registers by `cluster` blocks' groups of `group` threads,
// `vecs_per_thread` each. A group of a block takes `rows_per_group` neighbouring rows at once, so that narrow rows too
// have four loads in flight.
struct RmsNormConfig {
  bool vectors = true;      // false: elements one by one, two passes over the row; any alignment and length
  int vecs_per_thread = 4;  // 1, 2, 4 or 8; 3 only where rows are kept
  int rows_per_group = 1;   // 1, or 4 / vecs_per_thread, or kRowPair where rows are kept
  int group = 32;           // threads per row and block: a power of two; where kept or reread, above 32 whole warps
  int cluster = 1;          // blocks per row; above 1 only with group == threads
  int threads = 128;        // per block
  bool streaming = false;   // loads and stores carry the hint that the data is used once
  // For tensors larger than L2 (x and y together). A group is a whole block or some lanes of a warp:
  bool kept = false;    // rows in registers, 2, 3 or 4 vectors per thread, or one vector of each of kRowPair rows
  bool reread = false;  // rows are read twice: 2 vectors per thread with a residual, 4 without
  bool walk = false;    // persistent clusters walk over rows of fp32, 4 vectors per thread
  int rows_per_block() const { return vectors ? threads / group * rows_per_group : 1; }
  bool operator==(const RmsNormConfig&) const = default;
};

constexpr int kMaxStages = 4;  // of a ring
constexpr int kRmsNormMaxThreads = 1024;
constexpr int kRmsNormElementThreads = 512;  // threads of the kernel that processes single elements
constexpr int kKeptThreads = 512;
constexpr int kRowPair = 2;
constexpr int kWalkThreads = 512, kWalkVecs = 4, kWalkStages = 2;
constexpr int kRmsNormMaxCluster = 8;

struct RmsNormShape {
  int64_t rows = 0, cols = 0;
  DType dtype = DType::bf16;  // the type of x
  bool aligned = true;        // every operand's rows start where a whole vector can be read or written
  bool residual = false;
  // y's type is x's, w's too or f32, and all rows have the same stride.
  bool plain = true;
};

constexpr int64_t round_up_pow2(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr int element_threads(int64_t cols) {  // about eight elements per thread and pass, in whole warps
  const int64_t wanted = round_up_pow2((cols + 7) / 8);
  return int(wanted < 32 ? 32 : wanted > kRmsNormElementThreads ? kRmsNormElementThreads : wanted);
}

// The variants for tensors larger than L2, where they were measured to be faster; false elsewhere.
constexpr bool pick_large_config(const RmsNormShape& s, int64_t vecs, RmsNormConfig& c) {
  const int most_kept = size_of(s.dtype) == 2 ? 2 : 4;  // vectors per thread
  c.kept = !s.residual && vecs <= most_kept * kKeptThreads;
  c.reread = !c.kept && vecs > 256 && vecs <= 2 * kRmsNormMaxThreads;
  c.walk = !s.residual && s.dtype == DType::f32 && vecs > 8 * kRmsNormMaxThreads &&
           vecs <= int64_t(kWalkThreads) * kWalkVecs * kRmsNormMaxCluster;
  if (c.walk) {
    c.vecs_per_thread = kWalkVecs;
    c.cluster = kRmsNormMaxCluster;
    c.group = c.threads = kWalkThreads;
  } else if (c.kept || c.reread) {
    const bool warp = vecs > 64 && vecs <= 128;  // one warp may have the whole row, so that no barrier is needed
    c.vecs_per_thread = !s.residual && (warp || vecs > 2 * kKeptThreads) ? 4 : 2;
    const bool pair = c.kept && vecs > 8 && vecs <= 16;  // a warp's loads then lie side by side: 0.5 %
    if (pair) c.vecs_per_thread = 1, c.rows_per_group = kRowPair;
    // Three vectors per lane on 8 or 16 lanes, where two vectors on 16 or 32 lanes would leave a quarter of the lanes
    // idle. This gains 5 % for 192 and 384 columns of 16 bits.
    if (c.kept && ((vecs > 16 && vecs <= 24) || (vecs > 32 && vecs <= 48))) c.vecs_per_thread = 3;
    const int64_t lanes = (vecs + c.vecs_per_thread - 1) / c.vecs_per_thread;
    c.group = int(lanes <= 32 ? round_up_pow2(lanes) : (lanes + 31) / 32 * 32);
    c.threads = c.group <= 32 ? 128 : c.group;
  }
  return c.kept || c.reread || c.walk;
}

constexpr RmsNormConfig pick_rmsnorm_config(const RmsNormShape& s, gpu::Limits sm = {}) {
  const int64_t per_vec = 16 / size_of(s.dtype);
  const int64_t vecs = s.cols / per_vec;
  RmsNormConfig c;
  // With a residual each vector needs twice the registers.
  const int most = s.residual ? 4 : 8;
  const int64_t room = int64_t(most) * kRmsNormMaxThreads * (sm.hopper ? kRmsNormMaxCluster : 1);
  if (!s.aligned || s.cols % per_vec != 0 || vecs > room) {
    c.vectors = false;
    c.vecs_per_thread = c.rows_per_group = c.group = 1;
    c.threads = element_threads(s.cols);
    return c;
  }
  // From half of L2 on, a copy or a norm is a few percent faster with the used-once hint on both loads and stores
  // (hints on the loads alone cost as much), and a reader of y would find little of y in L2 anyway.
  c.streaming = s.rows * s.cols * size_of(s.dtype) >= gpu::half_l2_bytes(sm);
  if (c.streaming && s.plain && sm.hopper && pick_large_config(s, vecs, c)) return c;
  // With few rows most of the GPU is idle, so only latency matters; little work per thread keeps the latency short.
  if (s.rows <= 4 * int64_t(sm.sms) && vecs <= 2 * kRmsNormMaxThreads) {
    c.vecs_per_thread = vecs < 64 ? 1 : 2;
  } else if (vecs <= 128) {
    c.vecs_per_thread = vecs <= 32 ? 1 : 2;
    c.rows_per_group = 4 / c.vecs_per_thread;
  } else {
    const bool odd = c.streaming && !s.residual && vecs > 256 && vecs < 512;  // eight vectors leave fewer threads idle
    c.vecs_per_thread = vecs <= 1024 && !odd ? 4 : most;
  }
  int64_t group = round_up_pow2((vecs + c.vecs_per_thread - 1) / c.vecs_per_thread);
  // A row that needs a cluster is distributed over small blocks: several rows then share an SM, and a block loads while
  // a second block waits for its neighbours.
  const int widest = group > kRmsNormMaxThreads && sm.hopper ? 256 : kRmsNormMaxThreads;
  while (group > widest && c.cluster < kRmsNormMaxCluster) {
    group /= 2;
    c.cluster *= 2;
  }
  c.group = int(group);
  c.threads = c.cluster > 1 || group > 64 ? int(group) : 64;
  return c;
}

// How the backward pass distributes rows over threads: a group of threads takes `rows_at_once` adjacent rows, each
// thread `columns` of their columns. Blocks are persistent and walk over the rows; `blocks` of them (or clusters of
// blocks) share the rows, and each writes a row of sums of dw.
struct RmsNormBackwardConfig {
  bool vectors = true;
  int group = 32, cluster = 1, threads = 512;  // as above, except that a group may be any number of whole warps
  int stages = 2;                              // times rows_at_once: rows per group in shared memory
  int blocks = 1;                              // per row: times `cluster` is the grid
  int columns = 16, rows_at_once = 1;
  constexpr int rows_per_step() const { return vectors ? threads / group * rows_at_once : 1; }
  bool operator==(const RmsNormBackwardConfig&) const = default;
};

struct RmsNormBackwardShape {
  int64_t rows = 0, cols = 0;
  DType s = DType::bf16, dy = DType::bf16;
  bool aligned = true;  // every operand's rows start where a whole vector can be read or written
  // A third operand is read per row (dsum, or dx where dx accumulates), rstd or dx is left out, or rows lie two strides
  // apart.
  bool rare = false;
};

constexpr int kBackwardElementThreads = 512;
// The most floats of partial sums of dw, so that these sums take 64 MiB at most, whatever the width of the rows.
constexpr int64_t kPartialFloats = int64_t(1) << 24;

// Between two rows of sums: whole vectors.
constexpr int64_t partial_stride(int64_t cols) { return (cols + 3) / 4 * 4; }

// Kernels of mixed types are compiled with all rare options.
constexpr bool backward_is_rare(const RmsNormBackwardShape& s) { return s.rare || s.s != s.dy; }
// The 16-byte pieces of shared memory that a thread needs per row: s, dy and the old dx, which is added. A dy narrower
// than s still takes a piece for each vector of s.
constexpr int backward_pieces(int s_bytes, int dy_bytes, int columns, bool rare) {
  const int s = columns * s_bytes / 16, dy = columns * dy_bytes / 16;
  return s + (dy > s ? dy : s) + (rare ? s : 0);
}
// The number of threads on an SM for which the registers suffice: registers for the rows, w and dw, and as many again
// for everything else.
constexpr int backward_threads(int s_bytes, int dy_bytes, int columns, int rows_at_once, bool rare) {
  return s_bytes + dy_bytes == 4 && columns * rows_at_once <= 16 && !rare ? 768 : 512;
}
constexpr int backward_threads(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s) {
  return backward_threads(int(size_of(s.s)), int(size_of(s.dy)), c.columns, c.rows_at_once, backward_is_rare(s));
}
// Bytes of shared memory of a block for `rows_at_once` rows of each group. The sums of dw fit into this memory.
constexpr int backward_stage_bytes(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s) {
  return c.threads * c.rows_at_once * 16 *
         backward_pieces(int(size_of(s.s)), int(size_of(s.dy)), c.columns, backward_is_rare(s));
}
constexpr int kBackwardStaticBytes = 3072;
// The shared memory of one of the blocks on an SM, less the part that a block of the second kernel needs beside them.
constexpr int backward_smem_share(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s, gpu::Limits sm) {
  const int blocks = backward_threads(c, s) / c.threads;
  return int(sm.smem_per_block - 4096) / (blocks < 1 ? 1 : blocks) - 1024 - kBackwardStaticBytes;
}
// A block allocates all of its share, although less may suffice. Otherwise blocks of the next call, which start while
// this one still runs, would all go to the SMs that happen to have room, and stay there.
constexpr int64_t backward_smem(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s, gpu::Limits sm) {
  if (!c.vectors) return 0;
  const int need = c.stages * backward_stage_bytes(c, s), share = backward_smem_share(c, s, sm);
  return need > share ? need : share;
}

// The columns and rows that a thread takes at once. Narrow rows lie side by side in a warp's loads. Wide rows of 16
// bits are taken in pairs where there are enough rows, so a thread waits for its neighbours once for two rows.
constexpr void pick_backward_work(RmsNormBackwardConfig& c, const RmsNormBackwardShape& s, gpu::Limits sm) {
  const bool halves = size_of(s.s) == 2, rare = backward_is_rare(s);
  const bool narrow = s.cols <= 256 || (rare && halves && s.cols <= 4096);
  const int64_t group = (s.cols + 511) / 512 * 32;
  const bool fills = group > 512 || 512 / group * group > 448;
  const bool wide = halves && !rare && s.cols >= 4096 && fills && s.rows >= 2 * int64_t(sm.sms);
  c.columns = 16, c.rows_at_once = 1;
  if (s.s != s.dy || !sm.hopper) return;
  // There are too few rows to hide a barrier of many threads behind other work, so a row is given to a pair of small
  // blocks, of which three fit on an SM.
  if (halves && !rare && s.cols > 3584 && s.cols <= 4096 && s.rows >= 2048 && s.rows <= 8192) {
    c.columns = 8, c.rows_at_once = 2, c.cluster = 2;
    return;
  }
  if (narrow)
    c.columns = 8, c.rows_at_once = 2;
  else if (wide && (s.cols <= 8192 || s.cols > 16384))
    c.rows_at_once = 2;
}

constexpr RmsNormBackwardConfig pick_rmsnorm_backward_config(const RmsNormBackwardShape& s, gpu::Limits sm = {}) {
  const int64_t per_vec = 16 / size_of(s.s);
  RmsNormBackwardConfig c;
  pick_backward_work(c, s, sm);
  const bool halves = size_of(s.s) == 2, rare = backward_is_rare(s);
  // The widest block with its rows in shared memory; a cluster where a block is not enough.
  const int per_thread = 16 * c.rows_at_once * backward_pieces(int(size_of(s.s)), int(size_of(s.dy)), c.columns, rare);
  int widest = 512;
  while (widest > 32 && widest * per_thread + kBackwardStaticBytes + 5 * 1024 > sm.smem_per_block) widest -= 32;
  const int64_t threads = (s.cols + c.columns - 1) / c.columns;
  while (c.cluster * widest < threads && c.cluster < kRmsNormMaxCluster && sm.hopper) c.cluster *= 2;
  c.vectors = s.aligned && s.cols % per_vec == 0 && threads <= int64_t(c.cluster) * widest;
  int64_t blocks = 0;
  if (!c.vectors) {
    c.group = c.cluster = 1;
    c.threads = element_threads(s.cols);
    blocks = int64_t(sm.sms) * (1024 / c.threads < 8 ? 1024 / c.threads : 8);
  } else {
    const int64_t per_block = (threads + c.cluster - 1) / c.cluster;
    c.group = int(per_block <= 32 ? round_up_pow2(per_block) : (per_block + 31) / 32 * 32);
    // A block fills an SM and writes a row of sums of dw. Where there are fewer rows, smaller blocks use more SMs.
    const int room = backward_threads(c, s), most = c.columns == 16 && c.group < 256 && room > 576 ? 576 : room;
    const int unit = c.group > 32 ? c.group : 32;
    int units = c.cluster > 1 ? 1 : most / unit;
    if (units > 15 && c.group > 32) units = 15;
    const auto steps = [&] {
      c.threads = units * unit;
      return (s.rows + c.rows_per_step() - 1) / c.rows_per_step();
    };
    while (units > 1 && units * unit > 128 && 2 * steps() <= sm.sms) units /= 2;
    while (units > 1 && units * unit * per_thread + kBackwardStaticBytes + 5 * 1024 > sm.smem_per_block) --units;
    c.threads = units * unit;
    const int share = backward_smem_share(c, s, sm), stage = backward_stage_bytes(c, s);
    const bool short_walk = steps() < 16 * int64_t(sm.resident(c.cluster));
    c.stages = c.columns == 8 && !rare ? (c.cluster == 1 ? 4 : 1) : c.cluster == 2 || !halves || short_walk ? 2 : 3;
    while (c.stages > 1 && c.stages * stage > share) --c.stages;
    const int per_sm = backward_threads(c, s) / c.threads;
    blocks = int64_t(sm.resident(c.cluster)) * (per_sm < 1 ? 1 : per_sm);
  }
  const int64_t steps = (s.rows + c.rows_per_step() - 1) / c.rows_per_step();
  const int64_t most = kPartialFloats / (s.cols > 0 ? s.cols : 1);
  blocks = blocks < most ? blocks : most;
  blocks = blocks < steps ? blocks : steps;
  c.blocks = int(blocks > 1 ? blocks : 1);
  return c;
}

// The most rows of sums that any call with these sizes writes, whatever its alignment and operands.
constexpr int64_t most_partial_rows(int64_t rows, int64_t cols, DType s, gpu::Limits sm) {
  int64_t most = 0;
  for (const bool aligned : {false, true})
    for (const bool rare : {false, true})
      for (const DType dy : {DType::f32, DType::bf16}) {
        const RmsNormBackwardShape shape{
            .rows = rows, .cols = cols, .s = s, .dy = dy, .aligned = aligned, .rare = rare};
        const int64_t blocks = pick_rmsnorm_backward_config(shape, sm).blocks;
        most = blocks > most ? blocks : most;
      }
  return most;
}

// The forward pass with a given configuration, for benchmarks and tests. The configuration must fit the operands.
struct RmsNormTuning {
  RmsNormConfig config;
  bool overlap = true;   // programmatic dependent launch
  bool prefetch = true;  // and a prefetch of the first blocks' rows before the wait for the earlier kernel
};

struct RmsNormBackwardTuning {
  RmsNormBackwardConfig config;
  bool overlap = true, prefetch = true;
};

}  // namespace ingot::cuda

namespace ingot {
struct RmsNorm;
struct RmsNormBackward;
namespace cuda {
void rmsnorm(const RmsNorm& a, Stream stream);
void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream);
RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a);
gpu::Limits rmsnorm_limits(int device);
void rmsnorm_backward(const RmsNormBackward& a, Stream stream);
void rmsnorm_backward_with(const RmsNormBackward& a, const RmsNormBackwardTuning& tuning, Stream stream);
RmsNormBackwardTuning default_rmsnorm_backward_tuning(const RmsNormBackward& a);
int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device);
}  // namespace cuda
}  // namespace ingot
