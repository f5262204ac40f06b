// Sampling on a GPU. For a row without filters, many blocks each find the largest sum of their ids, and the last block
// of a row to finish takes the largest of these. A row with filters takes a cluster of blocks, whose barriers are
// cheap, as large as lets all rows run at once; on GPUs without clusters it takes one block.
//
// A filter keeps the first ids in the order of falling logits, up to the id at which a running sum, of ones (top-k) or
// of weights (top-p), reaches a target. The cluster finds the place of this id by histograms: first over octaves below
// the largest logit, then, inside one bin, over parts of the bin and over the bits of the place (the logit's bits, then
// the id's), until few enough ids are left to compare all of them with each other. All sums are of integers, so their
// order does not matter. Each block reads its part of the logits once, into shared memory.
#include <algorithm>
#include <array>
#include <mutex>

#include "ingot/gpu/device.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/max_or_nan.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/filters.h"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/kernels/sampling/sampling_config.h"

namespace ingot::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 512, kMostBlocks = 128;  // for rows without filters
// For rows with filters. The emulator switches among all threads at every barrier, so fewer threads are faster there.
#ifdef INGOT_EMULATE
constexpr int kFilterThreads = 128;
#else
constexpr int kFilterThreads = 1024;
#endif
constexpr int kQuadsOfPass = 15;
constexpr int kCandidates = 128;  // the most ids that are compared with each other
constexpr int kThreadsOfCandidate = kFilterThreads / kCandidates;
// turns of kFilterThreads quads of logits that fit into shared memory
constexpr int kMostCachedTurns = 13 * 1024 / kFilterThreads;
// The threads that search a histogram. With all threads, adding up the sums of their warps would take longer than
// adding up the bins; with fewer, the bins of a thread take too many registers.
constexpr int kSearchThreads = kFilterThreads < 512 ? kFilterThreads : 512, kBinsOfThread = kBins / kSearchThreads;
constexpr int kHashWords = 256;  // words of a set of ids with biases

struct SampleParams {
  const void* logits;
  int64_t row_stride;
  int32_t* tokens;
  int64_t token_step;
  // null: the single row `all`, repeated with its own lane and row number for each row of logits
  const SampleRow* rows;
  SampleRow all;
  const int32_t* step_there;
  const int32_t* bias_ids;
  const float* biases;
  int64_t bias_id_stride, bias_stride;
  const uint32_t* allowed;
  int64_t allowed_stride;
  uint32_t* arrived;  // (rows), zero between launches
  uint64_t* best;     // (rows, kMostBlocks)
  struct FilterSpace* filters;
  int32_t blocks;                 // for a row without filters
  int32_t cluster, cached_turns;  // for a row with filters
};

// --- reductions

// The largest word of a warp, in a single instruction from compute capability 8.0 on.
__device__ __forceinline__ uint32_t warp_max(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  for (int mask = 16; mask > 0; mask /= 2) word = max(word, __shfl_xor_sync(~0u, word, mask));
  return word;
#else
  return __reduce_max_sync(~0u, word);
#endif
}
// The largest key of a warp.
__device__ __forceinline__ uint64_t warp_best(uint64_t key) {
  const uint32_t high = warp_max(uint32_t(key >> 32));
  return uint64_t(high) << 32 | warp_max(uint32_t(key >> 32) == high ? uint32_t(key) : 0);
}
// The largest key of a block, in the first warp; 0 in other warps.
__device__ __forceinline__ uint64_t first_warps_best(uint64_t key, BestMemory& m) {
  const uint32_t lane = threadIdx.x % 32;
  key = warp_best(key);
  __syncthreads();
  if (lane == 0) m.of_warp[threadIdx.x / 32] = key;
  __syncthreads();
  return threadIdx.x < 32 ? warp_best(lane < blockDim.x / 32 ? m.of_warp[lane] : 0) : 0;
}
// The upper half of a key: grows with the logit, all ones for a NaN.
__device__ __forceinline__ uint32_t ordered_of(float logit) {
  Best b;
  b.add(logit, 0);
  return uint32_t(b.key >> 32);
}

// --- a row of logits

struct RowMemory {
  SampleRow row;
  BestMemory best;
  uint32_t hashed[kHashWords];  // a set of ids that may have a bias: bit id % (32 kHashWords)
  uint32_t bar;                 // ordered_bits() of a sum that some id of the row has reached
};

// Loads row `r`. Called by all threads.
__device__ __forceinline__ const SampleRow& row_at(const SampleParams& p, int32_t r, RowMemory& m) {
  if (threadIdx.x == 0) {
    SampleRow row = p.rows != nullptr ? p.rows[r] : p.all;
    if (p.rows == nullptr) row.lane = uint32_t(r), row.row = r;
    if (p.step_there != nullptr) row.step += uint32_t(*p.step_there);
    m.row = row;
  }
  __syncthreads();
  return m.row;
}
__device__ __forceinline__ bool has_filter(const SampleRow& r) {
  return r.top_k > 0 || r.top_p > 0 || r.most_octaves < INFINITY;
}

template <class T> struct Logits {
  const T* at;
  int32_t ids, biases;
  const int32_t* bias_ids;
  const float* bias;
  const uint32_t* allowed;  // null: all ids are allowed
  const uint32_t* hashed;
  bool aligned;

  __device__ Logits(const SampleParams& p, const SampleRow& r, RowMemory& m)
      : at(static_cast<const T*>(p.logits) + r.row * p.row_stride),
        ids(r.ids),
        biases(r.biases),
        bias_ids(p.bias_ids + r.row * p.bias_id_stride),
        bias(p.biases + r.row * p.bias_stride),
        allowed(r.masked != 0 ? p.allowed + r.row * p.allowed_stride : nullptr),
        hashed(m.hashed),
        aligned(reinterpret_cast<uintptr_t>(at) % (4 * sizeof(T)) == 0) {
    if (biases == 0) return;
    for (int i = int(threadIdx.x); i < kHashWords; i += int(blockDim.x)) m.hashed[i] = 0;
    __syncthreads();
    for (int i = int(threadIdx.x); i < biases; i += int(blockDim.x)) {
      const uint32_t h = uint32_t(bias_ids[i]) % (32 * kHashWords);
      atomicOr(&m.hashed[h / 32], 1u << h % 32);
    }
    __syncthreads();
  }
  __device__ int32_t quads() const { return (ids + 3) / 4; }
  __device__ bool may_have_bias(int32_t id) const {
    const uint32_t h = uint32_t(id) % (32 * kHashWords);
    return (hashed[h / 32] >> h % 32 & 1) != 0;
  }
  __device__ float biased(float x, int32_t id) const {
    int32_t low = 0;  // the first bias of an id that is at least `id`
    for (int32_t high = biases; low < high;) {
      const int32_t middle = (low + high) / 2;
      if (bias_ids[middle] < id)
        low = middle + 1;
      else
        high = middle;
    }
    for (; low < biases && bias_ids[low] == id; ++low) x += bias[low];
    return x;
  }
  // The adjusted logits of those of the ids 4 quad to 4 quad + 3 that exist.
  __device__ void load(int32_t quad, float (&x)[4]) const {
    load_unadjusted(quad, x);
    adjust(quad, x);
  }
  __device__ bool is_vector(int32_t quad) const { return aligned && 4 * quad + 4 <= ids; }
  __device__ void load_unadjusted(int32_t quad, float (&x)[4]) const {
    const int32_t first = 4 * quad;
    if (is_vector(quad)) {
      tile::Vec<T, 4> v;
      tile::load(v, at + first);
      tile::to_float(v, x);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = first + j < ids ? tile::to_float(at[first + j]) : -INFINITY;
    }
  }
  // The quads that are read as vectors.
  __device__ int32_t vectors() const { return aligned ? ids / 4 : 0; }
  // Calls use(quad, adjusted logits) for quads first, first + step, ... A vector is requested before the preceding one
  // is used.
  template <class Use> __device__ void each(int32_t first, int32_t step, Use&& use) const {
    tile::Vec<T, 4> next;
    int32_t q = first;
    if (q < vectors()) tile::load(next, at + 4 * q);
    for (; q < vectors(); q += step) {
      const tile::Vec<T, 4> v = next;
      if (q + step < vectors()) tile::load(next, at + 4 * (q + step));
      float x[4];
      tile::to_float(v, x);
      adjust(q, x);
      use(q, x);
    }
    for (; q < quads(); q += step) {
      float x[4];
      load(q, x);
      use(q, x);
    }
  }
  __device__ bool adjusts() const { return biases > 0 || allowed != nullptr; }
  __device__ void adjust(int32_t quad, float (&x)[4]) const {
    const int32_t first = 4 * quad;
    if (biases > 0) {
      // A single copy of the search serves all four ids, because few ids have a bias.
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        if (!may_have_bias(first + k)) continue;
        const float with_bias = biased(k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]), first + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = j == k ? with_bias : x[j];
      }
    }
    if (allowed != nullptr) {
      const uint32_t bits = allowed[first / 32] >> (first % 32);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if ((bits >> j & 1) == 0) x[j] = -INFINITY;
    }
  }
};

// The largest sums of logit and noise that a thread has computed.
struct Sums {
  const SampleRow& row;
  Noise noise;
  RowMemory& m;
  Best best;

  __device__ Sums(const SampleRow& r, RowMemory& memory) : row(r), noise(r.seed, r.step, r.lane), m(memory) {
    if (threadIdx.x == 0) m.bar = 0;
    __syncthreads();
  }
  // Adds the sums of a quad. `kept(logit, id)` says whether an id may be sampled. The noise of an id is computed only
  // if its upper bound lets the sum reach `bar`, which is the sum of another id of the row.
  template <class Kept> __device__ void add(int32_t quad, const float (&x)[4], int32_t ids, Kept&& kept) {
    if (row.temperature == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * quad + j < ids) best.add(x[j], uint32_t(4 * quad + j));
      return;
    }
    uint32_t in = 0;  // bit mask of the ids that may be sampled
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * quad + j < ids && kept(x[j], 4 * quad + j)) in |= 1u << j;
    if (in == 0) return;
    const auto words = noise.words(uint32_t(quad));
    // NaN at first, which no sum is below
    const float bar = float_of_ordered(*static_cast<volatile uint32_t*>(&m.bar));
    uint32_t tails = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((in >> j & 1) == 0) continue;
      if (complement(words[j]) < kTail)
        tails |= 1u << j;
      else if (!(fmaf(row.temperature, noise_bound(words[j]), x[j]) < bar))
        best.add(noisy(row.temperature, noise_of(words[j]), x[j]), uint32_t(4 * quad + j));
    }
#pragma unroll 1
    for (uint32_t k = 0; tails >> k != 0; ++k) {  // one copy of the code, because few ids have so much noise
      if ((tails >> k & 1) == 0) continue;
      const uint32_t id = 4 * uint32_t(quad) + k;
      const float logit = k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]);
      best.add(noisy(row.temperature, noise.of(id, word_of(words, k)), logit), id);
    }
  }
  // Publishes this thread's largest sum to the block, as the bar for later quads.
  __device__ void raise_bar() {
    const uint32_t reached = uint32_t(best.key >> 32);
    if (reached > *static_cast<volatile uint32_t*>(&m.bar)) atomicMax(&m.bar, reached);
  }
};

// --- rows without filters

// The largest of the logits that a thread has seen. Only the quad of the largest logit is kept: the id is found at the
// end, by reading the quad again. An equal logit of a later quad changes nothing, as equal logits go to the lower id.
struct Largest {
  float logit = -INFINITY;  // or a NaN
  int32_t quad = -1;

  __device__ void add(int32_t q, const float (&x)[4]) {
    const float most =
        ptx::max_or_nan(logit, ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])));
    quad = most != logit ? q : quad;
    logit = most;
  }
  template <class T> __device__ uint64_t key(const Logits<T>& logits) const {
    if (logit != logit) return ~uint64_t(0);
    Best best;
    if (quad < 0) return best.key;
    float x[4];
    logits.load(quad, x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (x[j] == logit && 4 * quad + j < logits.ids) best.add(x[j], uint32_t(4 * quad + j));
    return best.key;
  }
};
// Several vectors are requested at once, because a thread has little to do with each.
template <class T> __device__ uint64_t largest_logit(const Logits<T>& logits, int32_t first, int32_t step) {
  constexpr int kAtOnce = 4;
  Largest largest;
  int32_t q = first;
  if (!logits.adjusts()) {
    const int32_t end = logits.vectors(), last = end % step;
    for (; q < end; q += kAtOnce * step) {
      tile::Vec<T, 4> v[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (q + k * step < end) tile::load(v[k], logits.at + 4 * (q + k * step));
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (q + k * step >= end) break;
        float x[4];
        tile::to_float(v[k], x);
        largest.add(q + k * step, x);
      }
    }
    q = end - last + first + (first < last ? step : 0);  // the first of this thread's quads that is no vector
  }
  logits.each(q, step, [&](int32_t at, const float(&x)[4]) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = 4 * at + j < logits.ids ? x[j] : -INFINITY;
    largest.add(at, y);
  });
  return largest.key(logits);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(const __grid_constant__ SampleParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  RowMemory& m = tile::shared<RowMemory>();
  const int32_t r = int32_t(blockIdx.x) / p.blocks, part = int32_t(blockIdx.x) % p.blocks;
  const SampleRow& row = row_at(p, r, m);
  if (has_filter(row)) return;
  const Logits<T> logits(p, row, m);
  const int32_t first = part * kThreads + int32_t(threadIdx.x), step = p.blocks * kThreads;
  uint64_t key;
  if (row.temperature == 0) {
    key = largest_logit(logits, first, step);
  } else {
    Sums sums(row, m);
    logits.each(first, step, [&](int32_t q, const float(&x)[4]) {
      sums.add(q, x, logits.ids, [](float, int32_t) { return true; });
      if (q + step < logits.quads()) sums.raise_bar();
    });
    key = sums.best.key;
  }
  const uint64_t mine = first_warps_best(key, m.best);
  uint64_t* const parts = p.best + int64_t(r) * kMostBlocks;
  if (threadIdx.x == 0) {
    __stcg(parts + part, mine);
    m.best.last = ptx::fetch_add_acq_rel(p.arrived + r, 1) == uint32_t(p.blocks - 1);
    if (m.best.last) ptx::store_relaxed(p.arrived + r, 0);
  }
  __syncthreads();
  if (!m.best.last) return;
  key = int32_t(threadIdx.x) < p.blocks ? __ldcg(parts + threadIdx.x) : 0;
  const SampledId found = sampled_id(first_warps_best(key, m.best));
  if (threadIdx.x == 0) p.tokens[row.row * p.token_step] = found.flaw != 0 ? -1 : found.token;
}

// --- rows with filters

// Memory of one row, in global memory, shared by the blocks of its cluster.
struct FilterSpace {
  // sums of the present histogram, of the preceding one, and of the next one, which is being set to zero
  uint64_t sums[3][kBins];
  uint64_t list[2][kCandidates];  // for top-k and top-p
  uint32_t listed[2];
  uint32_t unused[2];
};
struct Found {
  Wide target;  // less the sum of all earlier bins
  uint32_t bin;
  uint32_t most;  // the most ids that the bin may have
  uint64_t place;
};
struct FilterMemory {
  RowMemory row;
  // Written by the blocks of the cluster: the largest logit and the least of the warps' largest logits, or the key of
  // the largest sum.
  alignas(16) uint32_t of_block[2][kMostCluster][4];
  Found found;
  Wide of_warp[kSearchThreads / 32];
  uint64_t list[kCandidates];
  uint32_t mantissas[kCandidates];
  uint32_t listed, first;
  uint32_t sums[kBins];
};

// The place of an id in the order of falling logits, equal logits by rising id, as an integer that grows with the
// place.
__device__ __forceinline__ uint64_t place_of(float logit, int32_t id) {
  Best b;
  b.add(logit, uint32_t(id));
  return ~b.key;
}
// Histogram 0 is over bin_of(octaves), histogram 1 over part_of(octaves) inside a bin. Histograms 2 to 6 are over 11
// bits of the place each, and the last over the remaining 9 bits.
__device__ __forceinline__ int part_of(float octaves) {
  if (!(octaves < float(kOctaves))) return 0;
  const float bins = octaves * float(kBinsPerOctave);
  return int((bins - float(int(bins))) * float(kBins));  // exact except for the last conversion
}
__device__ __forceinline__ int shift_of(int level) { return level >= 7 ? 0 : 64 - 11 * (level - 1); }
__device__ __forceinline__ int digits_of(int level) { return level == 7 ? 9 : 11; }
struct Id {
  float logit, octaves;
  int32_t id;
  __device__ uint64_t place() const { return place_of(logit, id); }
  __device__ int bin() const { return bin_of(octaves); }
  __device__ int part() const { return part_of(octaves); }
};
// The ids that a histogram counts, namely those of the bins that earlier histograms chose.
struct Inside {
  int level = 0;
  int bin = 0, part = 0;  // the bins chosen in histograms 0 and 1
  uint64_t prefix = 0;    // the leading bits of the place
  __device__ bool has(const Id& id) const {
    if (level == 0) return true;
    if (id.bin() != bin || (level > 1 && id.part() != part)) return false;
    return level <= 2 || id.place() >> shift_of(level - 1) == prefix;
  }
  __device__ int digit(const Id& id) const {
    if (level <= 1) return level == 0 ? id.bin() : id.part();
    return int(id.place() >> shift_of(level) & ((1u << digits_of(level)) - 1));
  }
  __device__ void choose(uint32_t digit) {
    if (level == 0)
      bin = int(digit);
    else if (level == 1)
      part = int(digit);
    else
      prefix = level == 2 ? digit : prefix << digits_of(level) | digit;
    ++level;
  }
};

__device__ __forceinline__ Wide shuffle_up(Wide v, int by) {
  const uint64_t low = __shfl_up_sync(~0u, uint64_t(v), by), high = __shfl_up_sync(~0u, uint64_t(v >> 64), by);
  return Wide(high) << 64 | low;
}

// kClusters: a row has a cluster of blocks, else one. kCached: all logits are in shared memory.
template <class T, bool kClusters, bool kCached> struct Filter {
  const SampleRow& row;
  const Logits<T>& logits;
  FilterSpace& space;
  FilterMemory& m;
  float4* cache;  // logits of this block's first turns, in shared memory
  int32_t cached_turns;
  int32_t cluster, rank;
  float high = 0;                 // the largest logit
  int round = 0;                  // the number of histograms so far
  float floor = -INFINITY;        // ids with smaller logits are not kept
  uint64_t limit = ~uint64_t(0);  // the place of the last id that is kept

  // A barrier of the row's blocks; their earlier stores to the row's memory are visible after it. One warp's fence
  // publishes the stores of all threads that the block's barrier has gathered; a fence in every warp, which the
  // barrier of the cluster has otherwise, takes several times as long.
  __device__ void sync() const {
    __syncthreads();
    if constexpr (kClusters) {
      if (threadIdx.x < 32) ptx::fence_acq_rel_gpu();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  }
  // Sends a block's words to all blocks of the row. Called by the first warp.
  __device__ void send(int which, uint64_t low, uint64_t high) const {
    const uint32_t words[4] = {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
    if constexpr (kClusters) {
      if (int32_t(threadIdx.x) < cluster)
        ptx::cluster_store(ptx::cluster_address(m.of_block[which][rank], threadIdx.x), words);
    } else if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) m.of_block[which][0][i] = words[i];
    }
  }
  // A word that the block of this lane's number has sent; `none` in lanes without a block.
  __device__ uint32_t sent(int which, int word, uint32_t none) const {
    const int32_t lane = int32_t(threadIdx.x % 32);
    return lane < cluster ? m.of_block[which][lane][word] : none;
  }
  __device__ float octaves(float x) const { return octaves_below(high, x, row.octaves_per_logit); }

  // The number of turns: the blocks of the cluster take kFilterThreads quads each in turn.
  __device__ int32_t turns() const {
    return (logits.quads() + cluster * kFilterThreads - 1) / (cluster * kFilterThreads);
  }
  __device__ int32_t quad(int32_t turn) const {
    return (turn * cluster + rank) * kFilterThreads + int32_t(threadIdx.x);
  }
  __device__ float4& cached(int32_t turn) const { return cache[turn * kFilterThreads + int32_t(threadIdx.x)]; }
  // Loads the logits of the cached turns into shared memory. Each thread reads only the logits that it has loaded.
  __device__ void fill_cache() const {
    const int32_t end = kCached ? turns() : min(turns(), cached_turns);
    for (int32_t i = 0; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      if constexpr (sizeof(T) == 4)
        if (logits.is_vector(q)) {
          ptx::cp_async<16>(ptx::shared_address(&cached(i)), logits.at + 4 * q);
          continue;
        }
      float x[4];
      logits.load_unadjusted(q, x);
      cached(i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    if (!logits.adjusts()) return;
    for (int32_t i = 0; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      const float4 v = cached(i);
      float x[4] = {v.x, v.y, v.z, v.w};
      logits.adjust(q, x);
      cached(i) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  // Calls use(quad, logits) for the quads of this block in turns [begin, end).
  template <class Use> __device__ void each_quad(int32_t begin, int32_t end, Use&& use) const {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      float x[4];
      if (kCached || i < cached_turns) {
        const float4 v = cached(i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      } else {
        logits.load(q, x);
      }
      use(q, x);
    }
  }
  // Calls use(id) for the ids of these turns that are kept so far.
  template <class Use> __device__ void each_kept(int32_t begin, int32_t end, Use&& use) const {
    each_quad(begin, end, [&](int32_t q, const float(&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x[j] >= floor) || 4 * q + j >= logits.ids) continue;
        const Id id{x[j], octaves(x[j]), 4 * q + j};
        if (limit == ~uint64_t(0) || id.place() <= limit) use(id);
      }
    });
  }

  __device__ void clear(uint64_t (&sums)[kBins]) const {
    for (int i = rank * kFilterThreads + int(threadIdx.x); i < kBins; i += cluster * kFilterThreads)
      __stcg(&sums[i], uint64_t(0));
  }
  // Adds ones or mantissas to the histogram, in passes, so that a block's sums fit into 32 bits.
  __device__ void add_up(const Inside& inside, bool weighted, uint64_t (&sums)[kBins]) const {
    static_assert(int64_t(kQuadsOfPass) * 4 * kFilterThreads * 65536 < int64_t(1) << 32, "sums of mantissas fit");
    for (int32_t pass = 0; pass < turns(); pass += kQuadsOfPass) {
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads) m.sums[i] = 0;
      __syncthreads();
      each_kept(pass, min(pass + kQuadsOfPass, turns()), [&](const Id& id) {
        if (!inside.has(id)) return;
        const uint32_t one = weighted ? mantissa_of(id.octaves) : 1;
        if (one != 0) atomicAdd(&m.sums[inside.digit(id)], one);
      });
      __syncthreads();
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads)
        if (m.sums[i] != 0) ptx::add_relaxed(&sums[i], uint64_t(m.sums[i]));
      __syncthreads();
    }
  }

  // Finds the bin in which the running sum reaches the target: top_k, or the part of the total that top-p keeps, or, in
  // further histograms, the target that the preceding one has left.
  __device__ Found find(const uint64_t (&sums)[kBins], const Inside& inside, bool weighted) const {
    const int first = kBinsOfThread * int(threadIdx.x), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    const bool searches = int(threadIdx.x) < kSearchThreads;
    const auto sum_of = [&](uint64_t ones) {
      return weighted ? weight_of(ones, inside.level == 0 ? first : inside.bin) : Wide(ones);
    };
    static_assert(kBinsPerOctave % kBinsOfThread == 0, "the bins of a thread have one weight");
    uint64_t ones[kBinsOfThread];
    Wide mine = 0, upto = 0, target = inside.level == 0 ? Wide(uint32_t(row.top_k)) : m.found.target;
    if (searches) {
      uint64_t all = 0;
#pragma unroll
      for (int k = 0; k < kBinsOfThread; ++k) ones[k] = __ldcg(&sums[first + k]);
#pragma unroll
      for (int k = 0; k < kBinsOfThread; ++k) all += ones[k];
      mine = sum_of(all);
      upto = mine;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const Wide other = shuffle_up(upto, by);
        if (lane >= by) upto += other;
      }
      if (lane == 31) m.of_warp[warp] = upto;
    }
    __syncthreads();
    if (searches) {
      Wide at = upto - mine;
      for (int w = 0; w < warp; ++w) at += m.of_warp[w];
      if (weighted && inside.level == 0) {
        Wide total = 0;
        for (int w = 0; w < kSearchThreads / 32; ++w) total += m.of_warp[w];
        target = target_of(total, row.top_p);
      }
      if (at < target && at + mine >= target) {
        // The sum of ones (or mantissas) that reaches the target: small numbers, as the bins have one weight.
        const int shift = weighted ? kOctaves - (inside.level == 0 ? first : inside.bin) / kBinsPerOctave : 0;
        const Wide left = target - at;
        const uint64_t wanted = uint64_t((left + ((Wide(1) << shift) - 1)) >> shift);
        uint64_t before = 0;
#pragma unroll
        for (int k = 0; k < kBinsOfThread; ++k) {
          if (before < wanted && before + ones[k] >= wanted)  // a mantissa is at least 2^15
            m.found.target = left - (Wide(before) << shift), m.found.bin = uint32_t(first + k),
            m.found.most = uint32_t(weighted ? ones[k] >> 15 : ones[k]);
          before += ones[k];
        }
      }
    }
    __syncthreads();
    return m.found;
  }
  // Among the ids inside the bin, at most kCandidates: the place at which the running sum reaches the target.
  __device__ uint64_t compare(const Inside& inside, bool weighted) const {
    if (threadIdx.x == 0) m.listed = 0;
    __syncthreads();
    each_kept(0, turns(), [&](const Id& id) {
      if (inside.has(id)) m.list[atomicAdd(&m.listed, 1u)] = id.place();
    });
    __syncthreads();
    const uint32_t own = m.listed;
    if (threadIdx.x == 0 && own > 0) m.first = ptx::fetch_add_relaxed(&space.listed[weighted], own);
    __syncthreads();
    if (threadIdx.x < own) __stcg(&space.list[weighted][m.first + threadIdx.x], m.list[threadIdx.x]);
    sync();
    if (threadIdx.x < kCandidates) {
      const uint32_t count = __ldcg(&space.listed[weighted]);
      if (threadIdx.x == 0) m.listed = count;
      if (threadIdx.x < count) {
        const uint64_t place = __ldcg(&space.list[weighted][threadIdx.x]);
        m.list[threadIdx.x] = place;
        m.mantissas[threadIdx.x] = weighted ? mantissa_of(octaves(float_of_ordered(uint32_t(~place >> 32)))) : 1;
      }
    }
    __syncthreads();
    const Wide target = m.found.target;
    const uint32_t count = m.listed, candidate = threadIdx.x / kThreadsOfCandidate;
    uint64_t mine = 0;
    uint32_t before = 0;  // at most 128 mantissas of 2^16
    if (candidate < count) {
      mine = m.list[candidate];
      for (uint32_t i = threadIdx.x % kThreadsOfCandidate; i < count; i += kThreadsOfCandidate)
        before += m.list[i] < mine ? m.mantissas[i] : 0;
    }
#pragma unroll
    for (int mask = kThreadsOfCandidate / 2; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
    if (candidate < count && threadIdx.x % kThreadsOfCandidate == 0) {
      const uint32_t own = m.mantissas[candidate];
      const Wide sum = weighted ? weight_of(before, inside.bin) : Wide(before);
      const Wide upto = weighted ? weight_of(before + own, inside.bin) : Wide(before + own);
      if (sum < target && upto >= target) m.found.place = mine;
    }
    __syncthreads();
    return m.found.place;
  }
  // Keeps the first top_k of the kept ids, or the first ids whose weights reach the share top_p.
  __device__ void cut(bool weighted) {
    if (!weighted && row.top_k <= cluster * (kFilterThreads / 32)) floor = least_of_warps();
    for (Inside inside;; ++round) {
      uint64_t(&sums)[kBins] = space.sums[round % 3];
      add_up(inside, weighted, sums);
      sync();
      clear(space.sums[(round + 2) % 3]);
      const Found found = find(sums, inside, weighted);
      inside.choose(__shfl_sync(~0u, found.bin, 0));  // visibly uniform over the lanes for the compiler
      if (found.most > kCandidates) continue;
      ++round;
      limit = compare(inside, weighted);
      floor = float_of_ordered(uint32_t(~limit >> 32));
      return;
    }
  }

  // Every warp has an id whose logit is at least this; or -INFINITY. After largest_logit().
  __device__ float least_of_warps() const { return float_of_ordered(~warp_max(~sent(0, 2, ~0u))); }
  // The largest logit of the row, as the upper half of a key.
  __device__ uint32_t largest_logit() {
    fill_cache();
    float most = -INFINITY;
    each_quad(0, turns(), [&](int32_t q, const float(&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) most = 4 * q + j < logits.ids ? ptx::max_or_nan(most, x[j]) : most;
    });
    const uint32_t of_warp = warp_max(ordered_of(most)), lane = threadIdx.x % 32;
    if (lane == 0) m.row.best.of_warp[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr uint32_t kWarps = kFilterThreads / 32;
      const uint32_t mine = lane < kWarps ? uint32_t(m.row.best.of_warp[lane]) : 0;
      send(0, warp_max(mine), ~warp_max(lane < kWarps ? ~mine : 0));
    }
    sync();
    return warp_max(sent(0, 0, 0));
  }
  __device__ uint64_t largest_sum() const {
    Sums sums(row, m.row);
    each_quad(0, turns(), [&](int32_t q, const float(&x)[4]) {
      sums.add(q, x, logits.ids, [&](float logit, int32_t id) {
        return logit >= floor && octaves(logit) <= row.most_octaves &&
               (limit == ~uint64_t(0) || place_of(logit, id) <= limit);
      });
      sums.raise_bar();
    });
    const uint64_t mine = first_warps_best(sums.best.key, m.row.best);
    if (threadIdx.x < 32) send(1, mine, 0);
    sync();
    return warp_best(uint64_t(sent(1, 1, 0)) << 32 | sent(1, 0, 0));
  }
};

template <class T, bool kClusters, bool kCached>
__global__ void __launch_bounds__(kFilterThreads, 1) filter_kernel(const __grid_constant__ SampleParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  FilterMemory& m = tile::shared<FilterMemory>();
  const int32_t r = int32_t(blockIdx.x) / p.cluster;
  const SampleRow& row = row_at(p, r, m.row);
  if (!has_filter(row)) return;
  if constexpr (kClusters) ptx::cluster_arrive_relaxed();  // a block writes to the memory of blocks that have started
  const Logits<T> logits(p, row, m.row);
  FilterSpace& space = p.filters[r];
  const int32_t rank = kClusters ? int32_t(ptx::cluster_rank()) : 0;
  Filter<T, kClusters, kCached> filter{row,       logits, space, m, tile::dynamic_shared<float4>(), p.cached_turns,
                                       p.cluster, rank};
  // The memory that the cluster writes first is zero from the cluster's first barrier on.
  for (int i = 0; i < 2; ++i) filter.clear(space.sums[i]);
  if (filter.rank == 0 && threadIdx.x < 2) __stcg(&space.listed[threadIdx.x], 0u);
  if constexpr (kClusters) ptx::cluster_wait();
  const uint32_t largest = filter.largest_logit();
  SampledId found = sampled_id(largest == ~0u ? ~uint64_t(0) : uint64_t(largest) << 32);
  if (found.flaw == 0) {
    filter.high = float_of_ordered(largest);
#pragma unroll 1
    for (int weighted = 0; weighted < 2; ++weighted)  // one copy of the code, which is long
      if (weighted != 0 ? row.top_p > 0 : row.top_k > 0) filter.cut(weighted != 0);
    found = sampled_id(filter.largest_sum());
  }
  if (filter.rank == 0 && threadIdx.x == 0) p.tokens[row.row * p.token_step] = found.flaw != 0 ? -1 : found.token;
}

// --- launches

// The number of blocks that gives every quad of ids a thread, at most as many as the GPU runs at once.
int64_t blocks_of(int64_t rows, int64_t ids, int64_t sms) {
  const int64_t wanted = (ids + 4 * kThreads - 1) / (4 * kThreads);
  return std::max<int64_t>(1, std::min({wanted, 2 * sms / rows, int64_t(kMostBlocks)}));
}
// The turns of a row's blocks, and the most whose logits fit into shared memory.
int64_t turns_of(int64_t ids, int64_t cluster) {
  return ((ids + 3) / 4 + cluster * kFilterThreads - 1) / (cluster * kFilterThreads);
}
int64_t most_cached_turns(const gpu::Limits& limits) {
  constexpr int64_t kOfSystem = 1024;  // bytes of shared memory that the driver keeps for itself in each block
  const int64_t fits =
      (limits.smem_per_block - int64_t(sizeof(FilterMemory)) - kOfSystem) / (kFilterThreads * int64_t(sizeof(float4)));
  return std::min(fits, int64_t(kMostCachedTurns));
}
gpu::Launch filter_launch(int64_t rows, int64_t cluster, int64_t cached_turns, int device) {
  return {.grid = rows * cluster,
          .block = kFilterThreads,
          .smem = cached_turns * kFilterThreads * int64_t(sizeof(float4)),
          .cluster = int(cluster),
          .overlap = true,
          .device = device};
}
// The clusters of every size that the GPU runs at once; a block fills its multiprocessor.
#ifdef INGOT_EMULATE
ResidentClusters resident_clusters_of(const gpu::Limits& limits, int) {
  ResidentClusters found{};
  for (const int cluster : {1, 2, 4, 8}) found[size_t(cluster)] = limits.resident(cluster);
  found[kMostCluster] = 1;
  return found;
}
#else
ResidentClusters resident_clusters_of(const gpu::Limits& limits, int device) {
  static std::mutex mutex;
  static std::array<ResidentClusters, 64> known{};
  const std::lock_guard lock(mutex);
  ResidentClusters& found = known[size_t(device) % known.size()];
  if (found[1] == 0) {
    for (const int cluster : {2, 3, 4, 5, 6, 7, 8, kMostCluster})
      found[size_t(cluster)] = int(gpu::resident_clusters("sample with filters", filter_kernel<float, true, true>,
                                                          filter_launch(1, cluster, kMostCachedTurns, device)));
    found[1] = limits.sms;
  }
  return found;
}
#endif
template <class T>
void launch_filters(SampleParams p, int64_t rows, int64_t ids, const gpu::Limits& limits, int device, Stream stream) {
  const int64_t most_cached = most_cached_turns(limits);
  p.cluster = 1;
  if (limits.hopper)
    p.cluster = pick_filter_cluster(rows, turns_of(ids, 1), most_cached, resident_clusters_of(limits, device));
  const int64_t turns = turns_of(ids, p.cluster);
  p.cached_turns = int32_t(std::min(turns, most_cached));
  const bool cached = p.cached_turns == turns;
  const auto kernel = !limits.hopper ? filter_kernel<T, false, false>
                      : cached       ? filter_kernel<T, true, true>
                                     : filter_kernel<T, true, false>;
  gpu::launch("sample with filters", kernel, filter_launch(rows, p.cluster, p.cached_turns, device), stream, p);
}
constexpr int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }
constexpr int64_t kBytesOfRow = 8 * kMostBlocks + int64_t(sizeof(FilterSpace));
// The rows of a workspace of at least sample_workspace_bytes(1). The number of rows determines the places of the
// arrays. The words that are zero between calls are therefore the same words for calls with any number of rows.
constexpr int64_t rows_of_workspace(int64_t bytes) { return bytes / (kBytesOfRow + 4); }

}  // namespace

int64_t sample_workspace_bytes(int64_t rows) { return aligned(4 * rows) + rows * kBytesOfRow; }

void sample(const Sample& s, const gpu::Limits& limits, Stream stream) {
  const int64_t rows = s.rows ? s.rows.size(0) : s.logits.size(0), V = s.logits.cols();
  if (rows == 0) return;
  const int device = s.logits.device.index;
  const int64_t room = rows_of_workspace(s.workspace.bytes());
  char* const workspace = static_cast<char*>(s.workspace.data);
  char* const best = workspace + aligned(4 * room);
  SampleParams p{.logits = s.logits.data,
                 .row_stride = s.logits.row_stride(),
                 .tokens = s.tokens.ptr<int32_t>(),
                 .token_step = s.tokens.step(0),
                 .rows = s.rows ? reinterpret_cast<const SampleRow*>(s.rows.data) : nullptr,
                 .all = row_of(s.options, V),
                 .step_there = s.step_there ? s.step_there.ptr<int32_t>() : nullptr,
                 .bias_ids = s.bias_ids ? s.bias_ids.ptr<int32_t>() : nullptr,
                 .biases = s.biases ? s.biases.ptr<float>() : nullptr,
                 .bias_id_stride = s.bias_ids ? s.bias_ids.row_stride() : 0,
                 .bias_stride = s.biases ? s.biases.row_stride() : 0,
                 .allowed = s.allowed ? s.allowed.ptr<uint32_t>() : nullptr,
                 .allowed_stride = s.allowed ? s.allowed.row_stride() : 0,
                 .arrived = reinterpret_cast<uint32_t*>(workspace),
                 .best = reinterpret_cast<uint64_t*>(best),
                 .filters = reinterpret_cast<FilterSpace*>(best + 8 * kMostBlocks * room),
                 .blocks = int32_t(blocks_of(rows, V, limits.sms))};
  p.all.seed = s.seed, p.all.step = s.step;
  p.all.biases = s.bias_ids ? int32_t(s.bias_ids.cols()) : 0, p.all.masked = s.allowed ? 1 : 0;
  const bool some_filter = s.rows ? s.some_filter : ingot::filters(p.all);
  const bool some_do_not = s.rows ? s.some_do_not : !some_filter;
  with_gpu_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    using T = decltype(scalar);
    if (some_do_not)
      gpu::launch("sample", sample_kernel<T>,
                  {.grid = rows * p.blocks, .block = kThreads, .overlap = true, .device = device}, stream, p);
    if (some_filter) launch_filters<T>(p, rows, V, limits, device, stream);
  });
}
void sample(const Sample& s, Stream stream) { sample(s, gpu::limits(s.logits.device.index), stream); }

}  // namespace ingot::cuda
