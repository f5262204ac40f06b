#pragma once
// How the CUDA forward pass spreads rows over threads. A pure function of sizes, so that the choice is tested without a
// GPU.
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot::cuda {

// A row of `vecs` 16-byte vectors is held in registers by `cluster` blocks' groups of `group` threads,
// `vecs_per_thread` each. A group of a block takes `rows_per_group` neighbouring rows at once, so that narrow rows too
// have four loads in flight.
struct RmsNormConfig {
  bool vectors = true;      // false: elements one by one, two passes over the row; any alignment and length
  int vecs_per_thread = 4;  // 1, 2, 4 or 8
  int rows_per_group = 1;   // 1, or so that it makes four with vecs_per_thread
  int group = 32;           // threads per row and block, a power of two
  int cluster = 1;          // blocks per row; above 1 only with group == threads
  int threads = 128;        // per block
  bool streaming = false;   // loads and stores say that they are made once
  int rows_per_block() const { return vectors ? threads / group * rows_per_group : 1; }
  bool operator==(const RmsNormConfig&) const = default;
};

constexpr int kRmsNormMaxThreads = 1024;
constexpr int kRmsNormElementThreads = 512;  // element by element
constexpr int kRmsNormMaxCluster = 8;
// Half of Hopper's L2: from here on a copy or a norm is a few percent faster when its loads and stores say that they
// are made once (both or neither: hints on the loads alone cost as much), and a reader of y finds little of it in L2
// anyway.
constexpr int64_t kStreamingBytes = int64_t(25) << 20;

// What a configuration may use of the GPU. The kernels are there as sm_90a code and as PTX for sm_75, which knows
// neither clusters nor overlapping launches; which of them runs is the driver's choice.
struct SmLimits {
  int sms = 132;
  int smem = 227 * 1024;  // bytes of shared memory a block may have
  bool hopper = true;     // the sm_90a code runs: clusters, overlap
  // Clusters of 2, 4 and 8 blocks that run at once when each block fills its SM: fewer than sms / size, as the SMs come
  // in groups that need not divide.
  int clusters[3] = {66, 32, 14};
  constexpr int resident(int cluster) const {
    return cluster == 1 ? sms : clusters[cluster == 2 ? 0 : cluster == 4 ? 1 : 2];
  }
};

struct RmsNormShape {
  int64_t rows = 0, cols = 0;
  DType dtype = DType::bf16;  // of x
  bool aligned = true;        // every operand's rows start where a whole vector can be read or written
  bool residual = false;
};

constexpr int64_t round_up_pow2(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr int element_threads(int64_t cols) {  // about eight elements a thread and pass, in whole warps
  const int64_t wanted = round_up_pow2((cols + 7) / 8);
  return int(wanted < 32 ? 32 : wanted > kRmsNormElementThreads ? kRmsNormElementThreads : wanted);
}

constexpr RmsNormConfig pick_rmsnorm_config(const RmsNormShape& s, SmLimits sm = {}) {
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
  c.streaming = s.rows * s.cols * size_of(s.dtype) >= kStreamingBytes;
  // Few rows leave the GPU empty: short work per thread shortens the only thing that is left, latency.
  if (s.rows <= 4 * int64_t(sm.sms) && vecs <= 2 * kRmsNormMaxThreads) {
    c.vecs_per_thread = vecs < 64 ? 1 : 2;
  } else if (vecs <= 128) {
    c.vecs_per_thread = vecs <= 32 ? 1 : 2;
    c.rows_per_group = 4 / c.vecs_per_thread;
  } else {
    c.vecs_per_thread = vecs <= 1024 ? 4 : most;
  }
  int64_t group = round_up_pow2((vecs + c.vecs_per_thread - 1) / c.vecs_per_thread);
  // A row that needs a cluster is spread thinly: small blocks of several rows share an SM, and one loads while another
  // waits for its neighbours.
  const int widest = group > kRmsNormMaxThreads && sm.hopper ? 256 : kRmsNormMaxThreads;
  while (group > widest && c.cluster < kRmsNormMaxCluster) {
    group /= 2;
    c.cluster *= 2;
  }
  c.group = int(group);
  c.threads = c.cluster > 1 || group > 64 ? int(group) : 64;
  return c;
}

// How the backward pass spreads rows over threads: 16 columns a thread, one row per group of threads, and blocks that
// stay, 512 threads of them per SM, and walk over rows; `blocks` of them (or clusters of blocks) share the rows, and
// each leaves one row of sums of dw behind.
struct RmsNormBackwardConfig {
  bool vectors = true;
  int group = 32, cluster = 1, threads = 512;  // as above
  int stages = 2;                              // rows per group in shared memory
  int blocks = 1;                              // per row: times `cluster` is the grid
  bool streaming = false;                      // stores of dx say that they are made once
  constexpr int rows_per_step() const { return vectors ? threads / group : 1; }
  bool operator==(const RmsNormBackwardConfig&) const = default;
};

struct RmsNormBackwardShape {
  int64_t rows = 0, cols = 0;
  DType s = DType::bf16, dy = DType::bf16;
  bool aligned = true;  // every operand's rows start where a whole vector can be read or written
  bool more = false;    // a third operand is read per row: dsum, or dx where it is accumulated
};

constexpr int kBackwardMaxThreads = 512;
constexpr int kBackwardColumns = 16;  // of a thread
constexpr int kBackwardMaxStages = 4;
// An SM's shared memory for rows: the one that is finished, the next one, whose sums are under way, and one on its way.
// More bought nothing and cost up to a tenth: writes then lag far behind reads.
constexpr int kBackwardRingBytes = 160 * 1024;
// Sums of dw take at most this many floats, so that narrow and wide rows alike leave a few MB behind.
constexpr int64_t kPartialFloats = int64_t(1) << 24;

// Kernels of mixed types are compiled for a third operand.
constexpr bool backward_has_more(const RmsNormBackwardShape& s) { return s.more || s.s != s.dy; }
// 16-byte pieces of shared memory that a thread needs per row: s, dy and what is added to dx. dy narrower than s still
// takes a piece for each vector of s.
constexpr int backward_pieces(int s_bytes, int dy_bytes, bool more) {
  const int s = kBackwardColumns * s_bytes / 16, dy = kBackwardColumns * dy_bytes / 16;
  return s + (dy > s ? dy : s) + (more ? s : 0);
}
// Bytes of shared memory per thread and row, with the row's rstd. One row has room for a thread's sums of dw.
constexpr int backward_row_bytes(const RmsNormBackwardShape& s) {
  return 16 * backward_pieces(int(size_of(s.s)), int(size_of(s.dy)), backward_has_more(s)) + 4;
}
constexpr int kBackwardStaticBytes = 1024;
// What a block of 512 / threads on an SM may have, less what a block of the second kernel needs beside them.
constexpr int backward_smem_share(const RmsNormBackwardConfig& c, SmLimits sm) {
  return (sm.smem - 4096) / (kBackwardMaxThreads / c.threads) - 2048;
}
// All of its share, although it may need less: otherwise blocks of the next call, which come while this one still runs,
// crowd the SMs that happen to have room, and stay there.
constexpr int64_t backward_smem(const RmsNormBackwardConfig& c, const RmsNormBackwardShape& s, SmLimits sm) {
  if (!c.vectors) return 0;
  const int need = c.threads * c.stages * backward_row_bytes(s), share = backward_smem_share(c, sm);
  return need > share ? need : share;
}

constexpr RmsNormBackwardConfig pick_rmsnorm_backward_config(const RmsNormBackwardShape& s, SmLimits sm = {}) {
  const int64_t per_vec = 16 / size_of(s.s);
  RmsNormBackwardConfig c;
  int widest = kBackwardMaxThreads;  // a block with one row in its shared memory
  while (widest > 32 && widest * backward_row_bytes(s) + kBackwardStaticBytes > sm.smem) widest /= 2;
  c.vectors = s.aligned && s.cols % per_vec == 0 &&
              s.cols <= int64_t(kBackwardColumns) * widest * (sm.hopper ? kRmsNormMaxCluster : 1);
  int64_t blocks = 0;
  if (!c.vectors) {
    c.group = 1;
    c.threads = element_threads(s.cols);
    blocks = int64_t(sm.sms) * (1024 / c.threads < 8 ? 1024 / c.threads : 8);
  } else {
    int64_t group = round_up_pow2((s.cols + kBackwardColumns - 1) / kBackwardColumns);
    while (group > widest) {
      group /= 2;
      c.cluster *= 2;
    }
    c.group = int(group);
    // Two blocks wait for their rows independently; one leaves half as many sums of dw, which counts where rows are
    // few.
    c.threads =
        group > 256 || widest < 256 || s.rows * group <= int64_t(4) * sm.sms * kBackwardMaxThreads ? widest : 256;
    // Fewer rows yet: smaller blocks reach more SMs.
    while (c.threads > 128 && c.threads > group && s.rows * group < int64_t(sm.sms) * c.threads) c.threads /= 2;
    const int row = c.threads * backward_row_bytes(s), share = backward_smem_share(c, sm);
    const int wanted = kBackwardRingBytes / (kBackwardMaxThreads / c.threads) / row;
    c.stages = wanted > 3 ? 3 : wanted < 2 ? 2 : wanted;
    if (group <= 8) c.stages = 2;
    while (c.stages > 1 && c.stages * row > share) --c.stages;
    blocks = c.cluster > 1 ? sm.resident(c.cluster) : int64_t(sm.sms) * (kBackwardMaxThreads / c.threads);
  }
  const int64_t steps = (s.rows + c.rows_per_step() - 1) / c.rows_per_step();
  const int64_t room = kPartialFloats / (s.cols > 0 ? s.cols : 1);
  blocks = blocks < room ? blocks : room;
  blocks = blocks < steps ? blocks : steps;
  c.blocks = int(blocks > 1 ? blocks : 1);
  return c;
}

// The most rows of sums that any call with these sizes leaves behind, whatever its alignment and operands.
constexpr int64_t most_partial_rows(int64_t rows, int64_t cols, DType s, SmLimits sm) {
  int64_t most = 0;
  for (const bool aligned : {false, true}) {
    const RmsNormBackwardShape shape{.rows = rows, .cols = cols, .s = s, .dy = s, .aligned = aligned};
    const int64_t blocks = pick_rmsnorm_backward_config(shape, sm).blocks;
    most = blocks > most ? blocks : most;
  }
  return most;
}

// The forward pass under a given configuration: what benches and tests compare. It must fit the operands.
struct RmsNormTuning {
  RmsNormConfig config;
  bool overlap = true;  // programmatic dependent launch
};

struct RmsNormBackwardTuning {
  RmsNormBackwardConfig config;
  bool overlap = true;
};

}  // namespace ingot::cuda

namespace ingot {
struct RmsNorm;
struct RmsNormBackward;
namespace cuda {
void rmsnorm(const RmsNorm& a, Stream stream);
void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream);
RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a);
SmLimits rmsnorm_limits(int device);
void ask_resident_clusters(SmLimits& limits);  // of the current device
void rmsnorm_backward(const RmsNormBackward& a, Stream stream);
void rmsnorm_backward_with(const RmsNormBackward& a, const RmsNormBackwardTuning& tuning, Stream stream);
RmsNormBackwardTuning default_rmsnorm_backward_tuning(const RmsNormBackward& a);
int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device);
}  // namespace cuda
}  // namespace ingot
