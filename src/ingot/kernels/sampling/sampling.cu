// Drawing tokens on a GPU: one block a row, which reads the row a few dozen times from the L2 and keeps nothing of it.
//
// sampling.cpp sorts; here nothing is sorted. Tokens have places in an order (by logit for the filters, by id for the
// draw), and what a filter or a draw looks for is the first place at which a sum over all places up to it reaches a
// target. It is found eight parts at a time. Weights are doubles added up in a fixed order, so draws repeat exactly,
// and they are those of the CPU unless a target lies within the rounding of such sums from a boundary.
#include "ingot/core/rng.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kParts = 8;

struct SampleParams {
  const void* logits;
  int32_t* tokens;
  int64_t row_stride, token_step;
  int32_t V;
  SamplingOptions options;
  uint64_t seed;
  uint32_t step;
  const int32_t* step_there;  // added, or null
};
struct SampleMemory {
  sampling::BestMemory best;
  double sums[kWarps][kParts];
  int32_t counts[kWarps][kParts];
};
// Of the tokens between two places: their weights, and how many have one, by eighths.
struct Parts {
  double sum[kParts] = {};
  int32_t count[kParts] = {};
};

// Every thread's parts added up, the same bits in all of them.
__device__ inline void block_sum(Parts& parts, SampleMemory& m) {
  __syncthreads();  // who still reads what was there
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      parts.sum[j] += __shfl_xor_sync(~0u, parts.sum[j], mask);
      parts.count[j] += __shfl_xor_sync(~0u, parts.count[j], mask);
    }
    if (threadIdx.x % 32 == 0) {
      m.sums[threadIdx.x / 32][j] = parts.sum[j];
      m.counts[threadIdx.x / 32][j] = parts.count[j];
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    parts.sum[j] = 0, parts.count[j] = 0;
    for (int w = 0; w < kWarps; ++w) parts.sum[j] += m.sums[w][j], parts.count[j] += m.counts[w][j];
  }
}

// place(v) < 2^64 - 1 differs for each of V tokens; weight(v) >= 0. A place in (lo, hi] up to which the weights of all
// places after `lo` reach `target`, while up to the token with weight before it they do not; hi where they never do.
template <class Place, class Weight>
__device__ inline uint64_t first_reaching(double target, uint64_t lo, uint64_t hi, int32_t V, SampleMemory& m,
                                          Place&& place, Weight&& weight) {
  double before = 0;  // the weights up to lo
  while (hi - lo > 1) {
    const uint64_t most = hi - lo - 1;
    int shift = 0;
    while (most >> shift >= kParts) ++shift;
    Parts parts;
    for (int32_t v = int32_t(threadIdx.x); v < V; v += kThreads) {
      const uint64_t offset = place(v) - lo - 1;  // huge up to lo
      if (offset > most) continue;
      const double w = weight(v);
      const int part = int(offset >> shift);
#pragma unroll
      for (int j = 0; j < kParts; ++j)
        if (part == j) parts.sum[j] += w, parts.count[j] += w > 0;
    }
    block_sum(parts, m);
    const int last = int(most >> shift);
    const uint64_t from = lo;
    int32_t left = 0;
    bool found = false;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (found || j > last) continue;
      found = before + parts.sum[j] >= target || j == last;
      if (!found) {
        before += parts.sum[j];
        continue;
      }
      lo = from + (uint64_t(j) << shift);
      hi = j == last ? hi : from + (uint64_t(j + 1) << shift);
      left = parts.count[j];
    }
    if (left <= 1) break;
  }
  return hi;
}

template <class T> struct Row {
  const T* logits;
  double high, temperature;

  __device__ float logit(int32_t v) const { return tile::to_float(logits[v]); }
  // The largest logit first, of equal ones the lower id: falls with Best's key.
  __device__ uint64_t place(int32_t v) const {
    sampling::Best b;
    b.add(logit(v), uint32_t(v));
    return ~b.key;
  }
  __device__ double weight(int32_t v) const {
    const double l = double(logit(v));
    return l == high ? 1 : exp((l - high) / temperature);  // so that two +inf logits share
  }
};

template <class T>
__device__ inline int32_t draw(const Row<T>& row, const SampleParams& p, int32_t best, double uniform,
                               SampleMemory& m) {
  const auto place = [&](int32_t v) { return row.place(v); };
  const auto weight = [&](int32_t v) { return row.weight(v); };
  const auto total_of = [&](auto&& w) {
    Parts all;
    for (int32_t v = int32_t(threadIdx.x); v < p.V; v += kThreads) all.sum[0] += w(v);
    block_sum(all, m);
    return all.sum[0];
  };
  const uint64_t before_all = row.place(best) - 1;
  uint64_t cut = ~uint64_t(0) - 1;  // places beyond are not kept
  if (p.options.top_k > 0 && p.options.top_k < p.V)
    cut = first_reaching(double(p.options.top_k), before_all, cut, p.V, m, place, [](int32_t) { return 1.; });
  if (p.options.top_p < 1) {
    const double total = total_of([&](int32_t v) { return place(v) <= cut ? weight(v) : 0; });
    cut = first_reaching(p.options.top_p * total, before_all, cut, p.V, m, place, weight);
  }
  const auto kept = [&](int32_t v) {
    if (place(v) > cut) return 0.;
    const double w = weight(v);
    return w >= p.options.min_p ? w : 0;
  };
  const double target = uniform * total_of(kept);
  const uint64_t upto = first_reaching(
      target, 0, uint64_t(p.V), p.V, m, [](int32_t v) { return uint64_t(v) + 1; }, kept);
  uint64_t drawn = 0;
  for (int32_t v = int32_t(threadIdx.x); v < p.V && uint64_t(v) < upto; v += kThreads)
    if (kept(v) > 0) drawn = uint64_t(v) + 1;
  drawn = sampling::block_best(drawn, m.best);
  return drawn > 0 ? int32_t(drawn - 1) : best;
}

template <class T> __global__ void __launch_bounds__(kThreads) sample_rows(const __grid_constant__ SampleParams p) {
  SampleMemory& memory = tile::shared<SampleMemory>();
  const T* logits = static_cast<const T*>(p.logits) + int64_t(blockIdx.x) * p.row_stride;
  sampling::Best mine;
  for (int32_t v = int32_t(threadIdx.x); v < p.V; v += kThreads) mine.add(tile::to_float(logits[v]), uint32_t(v));
  const sampling::Drawn best = sampling::drawn_of(sampling::block_best(mine.key, memory.best));
  int32_t token = best.flaw != 0 ? -1 : best.token;
  if (token >= 0 && p.options.temperature > 0) {
    const Row<T> row{logits, double(tile::to_float(logits[token])), p.options.temperature};
    const uint32_t step = p.step + (p.step_there != nullptr ? uint32_t(*p.step_there) : 0);
    const auto bits = Rng(p.seed, Purpose::sampling, step).block(blockIdx.x);  // as Rng::uniform has it
    const double uniform = (double((uint64_t(bits[0]) << 21) ^ (bits[1] >> 11)) + 0.5) * 0x1p-53;
    token = draw(row, p, token, uniform, memory);
  }
  if (threadIdx.x == 0) p.tokens[int64_t(blockIdx.x) * p.token_step] = token;
}

}  // namespace

void sample(const Sample& s, Stream stream) {
  if (s.logits.size(0) == 0) return;
  const SampleParams p{.logits = s.logits.data,
                       .tokens = s.tokens.ptr<int32_t>(),
                       .row_stride = s.logits.row_stride(),
                       .token_step = s.tokens.step(0),
                       .V = int32_t(s.logits.cols()),
                       .options = s.options,
                       .seed = s.seed,
                       .step = s.step,
                       .step_there = s.step_there ? s.step_there.ptr<int32_t>() : nullptr};
  with_gpu_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    gpu::launch("sample", sample_rows<decltype(scalar)>,
                {.grid = s.logits.size(0), .block = kThreads, .device = s.logits.device.index}, stream, p);
  });
}

}  // namespace ingot::cuda
