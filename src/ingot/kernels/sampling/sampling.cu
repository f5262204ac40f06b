// Sampling on a GPU. Rows without filters: many blocks each find the largest sum of their ids, and the block of a row
// that comes last takes the largest of these. Rows with filters: a cluster of eight blocks, whose barriers are cheap.
//
// A filter keeps the ids up to a place in the order of falling logits. That place is where a running sum, of ones
// (top-k) or of weights (top-p), reaches a target. The cluster finds it by histograms: first over octaves below the
// largest logit, then, inside one bin, over the bits of the place itself, until the bin holds few enough ids to be
// compared with each other. All sums are of integers, so their order does not matter.
#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/filters.h"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 512, kMostBlocks = 128;  // of rows without filters
// Of rows with filters. The emulator takes turns among all threads at every barrier.
#ifdef INGOT_EMULATE
constexpr int kFilterThreads = 128;
#else
constexpr int kFilterThreads = 1024;
#endif
constexpr int kCluster = 8, kQuadsOfPass = 8;
constexpr int kCandidates = kFilterThreads;  // a thread compares one candidate with all
constexpr int kBinsOfThread = kBins / kFilterThreads;
constexpr int kHashWords = 256;  // of a set of ids with biases

struct SampleParams {
  const void* logits;
  int64_t row_stride;
  int32_t* tokens;
  int64_t token_step;
  const SampleRow* rows;  // or null: `all`, with a lane and a row for each row
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
  int32_t blocks;  // of a row without filters
};

// --- a row of logits

struct RowMemory {
  SampleRow row;
  BestMemory best;
  uint32_t hashed[kHashWords];  // bit id % (32 kHashWords): an id with a bias may be among these
  uint32_t bar;                 // ordered_bits() of a sum that some id of the row has reached
};

// By all threads.
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
  const uint32_t* allowed;  // or null
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
    int32_t low = 0;  // the first bias of an id of at least `id`
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
  // The adjusted logits of ids 4 quad to 4 quad + 3, as far as there are such ids.
  __device__ void load(int32_t quad, float (&x)[4]) const {
    const int32_t first = 4 * quad;
    if (aligned && first + 4 <= ids) {
      tile::Vec<T, 4> v;
      tile::load(v, at + first);
      tile::to_float(v, x);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = first + j < ids ? tile::to_float(at[first + j]) : -INFINITY;
    }
    if (biases > 0) {
      // One copy of the search for all four, as few ids have a bias.
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

// The largest sums of logits and noise that a thread has met.
struct Sums {
  const SampleRow& row;
  Noise noise;
  RowMemory& m;
  Best best;

  __device__ Sums(const SampleRow& r, RowMemory& memory) : row(r), noise(r.seed, r.step, r.lane), m(memory) {
    if (threadIdx.x == 0) m.bar = 0;
    __syncthreads();
  }
  // `kept(logit, id)` says whether an id may be sampled. Noise is computed only where a bound on it lets the sum reach
  // the bar, which the best sum of the row has reached too.
  template <class Kept> __device__ void add(int32_t quad, const float (&x)[4], int32_t ids, Kept&& kept) {
    if (row.temperature == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * quad + j < ids) best.add(x[j], uint32_t(4 * quad + j));
      return;
    }
    const auto words = noise.words(uint32_t(quad));
    const float bar = float_of_ordered(*static_cast<volatile uint32_t*>(&m.bar));  // NaN at first: below nothing
    uint32_t tails = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (4 * quad + j >= ids) continue;
      if (complement(words[j]) < kTail)
        tails |= 1u << j;
      else if (!(fmaf(row.temperature, noise_bound(words[j]), x[j]) < bar) && kept(x[j], 4 * quad + j))
        best.add(noisy(row.temperature, noise_of(words[j]), x[j]), uint32_t(4 * quad + j));
    }
#pragma unroll 1
    for (uint32_t k = 0; tails >> k != 0; ++k) {  // one copy of the code, as few have so much noise
      if ((tails >> k & 1) == 0) continue;
      const uint32_t id = 4 * uint32_t(quad) + k;
      const float logit = k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]);
      if (kept(logit, int32_t(id))) best.add(noisy(row.temperature, noise.of(id, word_of(words, k)), logit), id);
    }
  }
  // Tells the block how far a sum has come, for the quads that follow.
  __device__ void raise_bar() {
    const uint32_t reached = uint32_t(best.key >> 32);
    if (reached > *static_cast<volatile uint32_t*>(&m.bar)) atomicMax(&m.bar, reached);
  }
};

// --- rows without filters

template <class T>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ SampleParams p) {
  RowMemory& m = tile::shared<RowMemory>();
  const int32_t r = int32_t(blockIdx.x) / p.blocks, part = int32_t(blockIdx.x) % p.blocks;
  const SampleRow& row = row_at(p, r, m);
  if (has_filter(row)) return;
  const Logits<T> logits(p, row, m);
  Sums sums(row, m);
  for (int32_t q = part * kThreads + int32_t(threadIdx.x); q < logits.quads(); q += p.blocks * kThreads) {
    float x[4];
    logits.load(q, x);
    sums.add(q, x, logits.ids, [](float, int32_t) { return true; });
    if (q + p.blocks * kThreads < logits.quads()) sums.raise_bar();
  }
  const uint64_t mine = block_best(sums.best.key, m.best);
  uint64_t* const parts = p.best + int64_t(r) * kMostBlocks;
  if (threadIdx.x == 0) {
    __stcg(parts + part, mine);
    m.best.last = ptx::fetch_add_acq_rel(p.arrived + r, 1) == uint32_t(p.blocks - 1);
    if (m.best.last) ptx::store_relaxed(p.arrived + r, 0);
  }
  __syncthreads();
  if (!m.best.last) return;
  const uint64_t key = int32_t(threadIdx.x) < p.blocks ? __ldcg(parts + threadIdx.x) : 0;
  const Drawn found = drawn_of(block_best(key, m.best));
  if (threadIdx.x == 0) p.tokens[row.row * p.token_step] = found.flaw != 0 ? -1 : found.token;
}

// --- rows with filters

struct Bins {
  uint64_t mantissas[kBins];
  uint32_t counts[kBins];
};
// Of one row, in global memory, for the blocks of its cluster.
struct FilterSpace {
  Bins bins[3];  // of this histogram, of the one before, and of the next, which is set to zero meanwhile
  uint64_t list[kCandidates];
  uint64_t best[2][kCluster];
  uint32_t listed[2];
  uint32_t unused[2];
};
struct Found {
  Wide before;  // the sum of the bins before
  uint32_t bin, count;
  uint64_t place;
};
struct FilterMemory {
  RowMemory row;
  Found found;
  Wide of_warp[kFilterThreads / 32];
  uint64_t list[kCandidates];
  uint32_t mantissas[kBins];  // also of the candidates
  uint32_t counts[kBins];
};

// Places of ids in the order of falling logits, equal logits by rising id: growing numbers.
__device__ __forceinline__ uint64_t place_of(float logit, int32_t id) {
  Best b;
  b.add(logit, uint32_t(id));
  return ~b.key;
}
// Histogram 0 is over bin_of(octaves); the others over 11 bits of the place each, 1 to 5, and the last over the 9 that
// are left.
__device__ __forceinline__ int shift_of(int level) { return level >= 6 ? 0 : 64 - 11 * level; }
__device__ __forceinline__ int digits_of(int level) { return level == 6 ? 9 : 11; }
// The ids that a histogram counts: those of the bins that were chosen before.
struct Inside {
  int level = 0;
  int bin = 0;          // of histogram 0
  uint64_t prefix = 0;  // of the place
  __device__ bool has(uint64_t place, int b) const {
    return level == 0 || (b == bin && (level == 1 || place >> shift_of(level - 1) == prefix));
  }
  __device__ int digit(uint64_t place, int b) const {
    return level == 0 ? b : int(place >> shift_of(level) & ((1u << digits_of(level)) - 1));
  }
  __device__ void choose(uint32_t digit) {
    if (level == 0)
      bin = int(digit);
    else
      prefix = level == 1 ? digit : prefix << digits_of(level) | digit;
    ++level;
  }
};

__device__ __forceinline__ Wide shuffle_up(Wide v, int by) {
  const uint64_t low = __shfl_up_sync(~0u, uint64_t(v), by), high = __shfl_up_sync(~0u, uint64_t(v >> 64), by);
  return Wide(high) << 64 | low;
}

template <class T> struct Filter {
  const SampleRow& row;
  const Logits<T>& logits;
  FilterSpace& space;
  FilterMemory& m;
  int32_t rank;
  float high = 0;                 // the largest logit
  int round = 0;                  // the number of histograms so far
  uint64_t limit = ~uint64_t(0);  // the place of the last id that is kept

  __device__ float octaves(float x) const { return octaves_below(high, x, row.octaves_per_logit); }

  // Calls use(place, octaves, bin) for the ids of quads [begin, end) of this block's share that are kept so far. The
  // blocks take turns by kFilterThreads quads.
  template <class Use> __device__ void each_kept(int32_t begin, int32_t end, Use&& use) const {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t q = (i * kCluster + rank) * kFilterThreads + int32_t(threadIdx.x);
      if (q >= logits.quads()) break;
      float x[4];
      logits.load(q, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t id = 4 * q + j;
        const uint64_t place = place_of(x[j], id);
        if (id >= logits.ids || place > limit) continue;
        const float o = octaves(x[j]);
        use(place, o, bin_of(o));
      }
    }
  }
  __device__ int32_t turns() const {
    return (logits.quads() + kCluster * kFilterThreads - 1) / (kCluster * kFilterThreads);
  }

  __device__ void clear(Bins& bins) const {
    for (int i = rank * kFilterThreads + int(threadIdx.x); i < kBins; i += kCluster * kFilterThreads)
      __stcg(&bins.mantissas[i], uint64_t(0)), __stcg(&bins.counts[i], 0u);
  }
  // In passes, so that a block's sums of mantissas fit 32 bits.
  __device__ void count(const Inside& inside, bool weighted, Bins& bins) const {
    static_assert(int64_t(kQuadsOfPass) * 4 * kFilterThreads * 65536 < int64_t(1) << 32, "sums of mantissas fit");
    for (int32_t pass = 0; pass < turns(); pass += kQuadsOfPass) {
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads) m.mantissas[i] = m.counts[i] = 0;
      __syncthreads();
      each_kept(pass, min(pass + kQuadsOfPass, turns()), [&](uint64_t place, float o, int bin) {
        if (!inside.has(place, bin)) return;
        const int digit = inside.digit(place, bin);
        atomicAdd(&m.counts[digit], 1u);
        if (weighted) atomicAdd(&m.mantissas[digit], mantissa_of(o));
      });
      __syncthreads();
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads) {
        if (m.counts[i] != 0) ptx::add_relaxed(&bins.counts[i], m.counts[i]);
        if (m.mantissas[i] != 0) ptx::add_relaxed(&bins.mantissas[i], uint64_t(m.mantissas[i]));
      }
      __syncthreads();
    }
  }

  // The running sum before this thread's part, and that of all threads.
  __device__ Wide sum_before(Wide mine, Wide& total) const {
    Wide upto = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const Wide other = shuffle_up(upto, by);
      if (int(threadIdx.x % 32) >= by) upto += other;
    }
    if (threadIdx.x % 32 == 31) m.of_warp[threadIdx.x / 32] = upto;
    __syncthreads();
    Wide before = upto - mine;
    total = 0;
    for (int w = 0; w < kFilterThreads / 32; ++w) {
      if (w < int(threadIdx.x / 32)) before += m.of_warp[w];
      total += m.of_warp[w];
    }
    return before;
  }
  // The bin in which the running sum reaches the target. `target`: what is wanted, of top-p's first histogram not known
  // before its total is.
  __device__ Found find(const Bins& bins, const Inside& inside, bool weighted, Wide& target) const {
    const int first = kBinsOfThread * int(threadIdx.x);
    Wide sum[kBinsOfThread], mine = 0;
    uint32_t count[kBinsOfThread];
#pragma unroll
    for (int k = 0; k < kBinsOfThread; ++k) {
      count[k] = __ldcg(&bins.counts[first + k]);
      const int bin = inside.level == 0 ? first + k : inside.bin;
      sum[k] = weighted ? weight_of(__ldcg(&bins.mantissas[first + k]), bin) : Wide(count[k]);
      mine += sum[k];
    }
    Wide total, at = sum_before(mine, total);
    if (weighted && inside.level == 0) target = target_of(total, row.top_p);
#pragma unroll
    for (int k = 0; k < kBinsOfThread; ++k) {
      if (at < target && at + sum[k] >= target)
        m.found.before = at, m.found.bin = uint32_t(first + k), m.found.count = count[k];
      at += sum[k];
    }
    __syncthreads();
    return m.found;
  }
  // Of `count` ids inside, the place at which the running sum reaches the target.
  __device__ uint64_t compare(const Inside& inside, uint32_t count, bool weighted, Wide target) const {
    each_kept(0, turns(), [&](uint64_t place, float, int bin) {
      if (inside.has(place, bin)) __stcg(&space.list[ptx::fetch_add_relaxed(&space.listed[weighted], 1)], place);
    });
    tile::sync_cluster();
    uint64_t mine = 0;
    uint32_t mantissa = 1;
    if (threadIdx.x < count) {
      mine = __ldcg(&space.list[threadIdx.x]);
      if (weighted) mantissa = mantissa_of(octaves(float_of_ordered(uint32_t(~mine >> 32))));
      m.list[threadIdx.x] = mine, m.mantissas[threadIdx.x] = mantissa;
    }
    __syncthreads();
    if (threadIdx.x < count) {
      uint64_t before = 0;
      for (uint32_t i = 0; i < count; ++i) before += m.list[i] < mine ? m.mantissas[i] : 0;
      const Wide sum = weighted ? weight_of(before, inside.bin) : Wide(before);
      const Wide own = weighted ? weight_of(mantissa, inside.bin) : Wide(1);
      if (sum < target && sum + own >= target) m.found.place = mine;
    }
    __syncthreads();
    return m.found.place;
  }
  // Cuts after the first top_k of the ids that are kept, or after top_p of their weights.
  __device__ void cut(bool weighted) {
    Wide target = weighted ? 0 : uint32_t(row.top_k);
    for (Inside inside;; ++round) {
      Bins& bins = space.bins[round % 3];
      count(inside, weighted, bins);
      tile::sync_cluster();
      clear(space.bins[(round + 2) % 3]);
      const Found found = find(bins, inside, weighted, target);
      target -= found.before;
      inside.choose(found.bin);
      if (found.count > kCandidates) continue;
      ++round;
      limit = compare(inside, found.count, weighted, target);
      return;
    }
  }

  // The largest key of the cluster. `which`: each is used once.
  __device__ uint64_t best_of_cluster(uint64_t key, int which) const {
    key = block_best(key, m.row.best);
    if (threadIdx.x == 0) __stcg(&space.best[which][rank], key);
    tile::sync_cluster();
    key = 0;
    for (int i = 0; i < kCluster; ++i) {
      const uint64_t other = __ldcg(&space.best[which][i]);
      key = other > key ? other : key;
    }
    return key;
  }
  __device__ uint64_t largest_logit() const {
    Best best;
    for (int32_t q = rank * kFilterThreads + int32_t(threadIdx.x); q < logits.quads(); q += kCluster * kFilterThreads) {
      float x[4];
      logits.load(q, x);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * q + j < logits.ids) best.add(x[j], uint32_t(4 * q + j));
    }
    return best_of_cluster(best.key, 0);
  }
  __device__ uint64_t largest_sum() const {
    Sums sums(row, m.row);
    for (int32_t q = rank * kFilterThreads + int32_t(threadIdx.x); q < logits.quads(); q += kCluster * kFilterThreads) {
      float x[4];
      logits.load(q, x);
      sums.add(q, x, logits.ids, [&](float logit, int32_t id) {
        return octaves(logit) <= row.most_octaves && place_of(logit, id) <= limit;
      });
      sums.raise_bar();
    }
    return best_of_cluster(sums.best.key, 1);
  }
};

template <class T>
__global__ void __launch_bounds__(kFilterThreads, 1) filter_kernel(const __grid_constant__ SampleParams p) {
  FilterMemory& m = tile::shared<FilterMemory>();
  const int32_t r = int32_t(blockIdx.x) / kCluster;
  const SampleRow& row = row_at(p, r, m.row);
  if (!has_filter(row)) return;
  const Logits<T> logits(p, row, m.row);
  FilterSpace& space = p.filters[r];
  Filter<T> filter{row, logits, space, m, int32_t(ptx::cluster_rank())};
  // What the cluster writes first is zero from its first barrier on.
  for (int i = 0; i < 2; ++i) filter.clear(space.bins[i]);
  if (filter.rank == 0 && threadIdx.x < 2) __stcg(&space.listed[threadIdx.x], 0u);
  uint64_t key = filter.largest_logit();
  Drawn found = drawn_of(key);
  if (found.flaw == 0) {
    filter.high = float_of_ordered(uint32_t(key >> 32));
#pragma unroll 1
    for (int weighted = 0; weighted < 2; ++weighted)  // one copy of the code, which is long
      if (weighted != 0 ? row.top_p > 0 : row.top_k > 0) filter.cut(weighted != 0);
    found = drawn_of(filter.largest_sum());
  }
  if (filter.rank == 0 && threadIdx.x == 0) p.tokens[row.row * p.token_step] = found.flaw != 0 ? -1 : found.token;
}

// --- launches

// Enough blocks for every quad of ids to have a thread, as far as the GPU runs them at once.
int64_t blocks_of(int64_t rows, int64_t ids, int64_t sms) {
  const int64_t wanted = (ids + 4 * kThreads - 1) / (4 * kThreads);
  return std::max<int64_t>(1, std::min({wanted, 2 * sms / rows, int64_t(kMostBlocks)}));
}
#ifdef INGOT_EMULATE
int sms_of(int) { return 8; }
#else
int sms_of(int device) { return gpu::sm_count(device); }
#endif
constexpr int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

int64_t sample_workspace_bytes(int64_t rows) {
  return aligned(4 * rows) + rows * int64_t(8 * kMostBlocks + sizeof(FilterSpace));
}

void sample(const Sample& s, Stream stream) {
  const int64_t rows = s.rows ? s.rows.size(0) : s.logits.size(0), V = s.logits.cols();
  if (rows == 0) return;
  const int device = s.logits.device.index;
  char* const workspace = static_cast<char*>(s.workspace.data);
  char* const best = workspace + aligned(4 * rows);
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
                 .filters = reinterpret_cast<FilterSpace*>(best + 8 * kMostBlocks * rows),
                 .blocks = int32_t(blocks_of(rows, V, sms_of(device)))};
  p.all.seed = s.seed, p.all.step = s.step;
  p.all.biases = s.bias_ids ? int32_t(s.bias_ids.cols()) : 0, p.all.masked = s.allowed ? 1 : 0;
  const bool some_filter = s.rows ? s.some_filter : ingot::filters(p.all);
  const bool some_do_not = s.rows ? s.some_do_not : !some_filter;
  with_gpu_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    using T = decltype(scalar);
    if (some_do_not)
      gpu::launch("sample", sample_kernel<T>, {.grid = rows * p.blocks, .block = kThreads, .device = device}, stream,
                  p);
    if (some_filter)
      gpu::launch("sample with filters", filter_kernel<T>,
                  {.grid = rows * kCluster, .block = kFilterThreads, .cluster = kCluster, .device = device}, stream, p);
  });
}

}  // namespace ingot::cuda
