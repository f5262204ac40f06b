#pragma once
// Attention of the rows of a step, each with the keys of its own slot. A block takes a part of a row's keys of one key
// head, for up to eight queries, and each of its warps takes every kWarps-th group of 16 of these keys. Only the row's
// own key depends on the preceding kernels, so a block requests its first groups of old keys before these kernels end.
// The number of parts follows from the number of the row's keys alone, so the bits of a row depend on no other row.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/small_batch/slot_rows.cuh"

namespace ingot::decode::row_attention {

constexpr uint32_t kQueries = 8;  // of a block
constexpr uint32_t kGroup = 16;   // keys
INGOT_HD constexpr uint32_t query_tiles(const decode_attention::Params& p) {
  return (p.group + kQueries - 1) / kQueries;
}

// kStages: the number of a warp's groups of keys that are in shared memory or being copied there.
template <int kRowDim, int kGroupsOfWarp> struct Form {
  static constexpr int kDim = kRowDim, kStages = kGroupsOfWarp, kWarps = kDim == 64 ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kVectorsOfWarp = (int(kQueries) + 2 + kWarps - 1) / kWarps;  // of queries, a key and a value
  static constexpr int kPairsOfLane = kDim / 64;                                    // of numbers of a vector
};
template <class F> struct Memory {
  static constexpr int kPitch = F::kDim + 8, kResultPitch = F::kDim + 4;  // rows start in different banks
  struct Group {
    uint16_t k[kGroup][kPitch], v[kGroup][kPitch];  // bits of bf16
  };
  union {
    alignas(16) Group groups[F::kWarps * F::kStages];
    alignas(16) float result[F::kWarps][kQueries][kResultPitch];  // each warp's sums
  };
  alignas(16) uint16_t q[kQueries][kPitch], fresh[2][F::kDim];  // fresh: the new key and the new value
  float max[F::kWarps][kQueries], sum[F::kWarps][kQueries], sink[kQueries];
  uint8_t parts[kMostSequences];  // of each row, in blocks that take further parts
  uint32_t last;
};

// The visible keys of a row, and their division into parts.
struct RowKeys {
  uint32_t low, fresh, parts, each;
  __device__ __forceinline__ RowKeys(const decode_attention::Params& p, uint32_t position) : fresh(position) {
    low = p.window > 0 && fresh + 1 > p.window ? fresh + 1 - p.window : 0;
    const uint32_t count = fresh + 1 - low;
    parts = min((count + kKeysOfBatchPart - 1) / kKeysOfBatchPart, p.parts);
    each = ((count + parts - 1) / parts + kGroup - 1) / kGroup * kGroup;
  }
};

// A warp's maximum and sums of its keys so far. Lane 4 g + t has the maximum of query g and a part of its sum, and
// numbers 16 n + g and 16 n + g + 8 of the results of queries 2 t and 2 t + 1.
template <class F> struct Sums {
  static constexpr int kDim = F::kDim;
  float out[kDim / 16][4] = {};
  float max = -INFINITY, sum = 0;

  // The queries as the left operand, whose rows 8 to 15 are zeros.
  struct Queries {
    uint32_t word[kDim / 16][2];
    __device__ __forceinline__ explicit Queries(const Memory<F>& m) {
      const uint32_t lane = threadIdx.x % 32;
      const uint16_t* const row = m.q[lane / 4] + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          word[n][half] = *reinterpret_cast<const uint32_t*>(row + 16 * n + 8 * half);
    }
  };
  // Adds a group of keys from number `key` on, of which those below `end` are visible.
  __device__ __forceinline__ void add(const typename Memory<F>::Group& group, const Queries& q, uint32_t key,
                                      uint32_t end, float scale) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float s[2][4] = {};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix(b, ptx::shared_address(&group.k[lane / 16 * 8 + lane % 8][16 * n + lane / 8 % 2 * 8]));
      const uint32_t a[4] = {q.word[n][0], 0, q.word[n][1], 0}, b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      ptx::mma_m16n8k16(bf16{}, s[0], a, b0);
      ptx::mma_m16n8k16(bf16{}, s[1], a, b1);
    }
    float top = max;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      float& v = s[i / 2][i % 2];
      v = key + i / 2 * 8 + 2 * t + i % 2 < end ? v * scale : -INFINITY;
      top = fmaxf(top, v);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));  // at least one key of a group is visible
    const float keep = __expf(max - top);
    max = top;
    sum *= keep;
    uint32_t shares[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float e0 = __expf(s[n][0] - top), e1 = __expf(s[n][1] - top);
      sum += e0 + e1;
      shares[n] = ptx::pack(bf16{}, e0, e1);
    }
    const float keep_of[2] = {__shfl_sync(~0u, keep, 8 * t), __shfl_sync(~0u, keep, 8 * t + 4)};
    // The values are the left operand, transposed: 16 numbers of each key.
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t a[4];
      ptx::ldmatrix_trans(a, ptx::shared_address(&group.v[lane / 16 * 8 + lane % 8][16 * n + lane / 8 % 2 * 8]));
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= keep_of[i % 2];
      ptx::mma_m16n8k16(bf16{}, out[n], a, shares);
    }
  }
  // Stores the sums, in the memory of the groups. Called after a barrier, when no warp reads a group any more.
  __device__ __forceinline__ void put(Memory<F>& m) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) m.max[warp][g] = max, m.sum[warp][g] = sum;
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) m.result[warp][2 * t + i % 2][16 * n + g + i / 2 * 8] = out[n][i];
  }
};

// A part of a row's keys of one key head, for the queries of tile `tile`. `p` holds the parameters of the row.
template <class F> class Part {
 public:
  __device__ __forceinline__ Part(const decode_attention::Params& p, const RowKeys& keys, uint32_t head, uint32_t tile,
                                  uint32_t part, Memory<F>& m)
      : p_(p), m_(m), keys_(keys), head_(head), part_(part), tile_(tile) {
    begin_ = keys.low + part * keys.each, end_ = min(begin_ + keys.each, keys.fresh + 1);
    first_query_ = head * p.group + tile * kQueries, queries_ = min(p.group - tile * kQueries, kQueries);
    cached_ = size_t(head) * p.rows * F::kDim;
  }

  // Requests everything that does not depend on the preceding kernels: the warps' first groups of keys, the angles and
  // the sinks.
  __device__ __forceinline__ void prepare() {
#pragma unroll 1
    for (uint32_t i = 0; i < F::kStages; ++i) request(i, i);
#pragma unroll
    for (int i = 0; i < F::kPairsOfLane; ++i) {
      const uint32_t d = lane_ + 32 * i;
      const size_t at = size_t(keys_.fresh) * (p_.dim / 2) + d;
      cos_[i] = d < p_.dim / 2 ? p_.cos[at] : 0, sin_[i] = d < p_.dim / 2 ? p_.sin[at] : 0;
    }
    if (threadIdx.x < queries_) m_.sink[threadIdx.x] = p_.sinks[first_query_ + threadIdx.x];
  }
  // Writes the result of the row's only part, or this part's sums.
  __device__ __forceinline__ void attend() {
    stage();
    __syncthreads();
    const typename Sums<F>::Queries queries(m_);
    Sums<F> sums;
#pragma unroll 1
    for (uint32_t i = 0, stage = 0; key_of(i) < end_; ++i, stage = stage + 1 == F::kStages ? 0 : stage + 1) {
      const uint32_t key = key_of(i);
      auto& group = m_.groups[warp_ * F::kStages + stage];
      ptx::cp_async_wait_group<F::kStages - 1>();
      __syncwarp();
      if (keys_.fresh - key < kGroup) put_fresh(group, keys_.fresh - key);
      sums.add(group, queries, key, end_, p_.scale);
      __syncwarp();
      request(i + F::kStages, stage);
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    sums.put(m_);
    __syncthreads();
    // A thread adds up four numbers of a query.
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < queries_ * (F::kDim / 4); i += F::kThreads)
      add_warps(i / (F::kDim / 4), i % (F::kDim / 4) * 4);
  }
  // Called by the last block to finish a part of the row and key head: adds up the parts of all queries.
  __device__ __forceinline__ void add_parts() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < p_.group * (F::kDim / 4); i += F::kThreads) {
      const uint32_t query = head_ * p_.group + i / (F::kDim / 4), d = i % (F::kDim / 4) * 4;
      decode_attention::Total total = decode_attention::total_of_parts<F::kDim>(p_, {0, query}, d, keys_.parts);
      put_result(query, d, total, p_.sinks[query]);
    }
  }

 private:
  // The first key of the warp's group `i`.
  __device__ __forceinline__ uint32_t key_of(uint32_t i) const { return begin_ + kGroup * (warp_ + i * F::kWarps); }
  __device__ __forceinline__ bool has_fresh() const { return end_ > keys_.fresh; }

  // Requests the old keys of the warp's group `i`, and their values; the remaining keys are zeros. Each call is one
  // group of copies.
  __device__ __forceinline__ void request(uint32_t i, uint32_t stage) const {
    const uint32_t key = key_of(i), last = min(end_, keys_.fresh), first = key % p_.rows;
    constexpr uint32_t kAhead = 32 / (F::kDim / 8);  // keys of the warp's lanes together
    const uint32_t ahead = lane_ / (F::kDim / 8), d = lane_ % (F::kDim / 8) * 8;
    auto& group = m_.groups[warp_ * F::kStages + stage];
    const uint32_t to_k = ptx::shared_address(&group.k[ahead][d]), to_v = ptx::shared_address(&group.v[ahead][d]);
    constexpr uint32_t kStep = kAhead * Memory<F>::kPitch * sizeof(bf16);
    if (key + kGroup <= last && first + kGroup <= p_.rows) {
      const size_t at = cached_ + size_t(first + ahead) * F::kDim + d;
      const bf16 *const k = p_.keys + at, *const v = p_.values + at;
#pragma unroll
      for (uint32_t n = 0; n < kGroup / kAhead; ++n) {
        ptx::cp_async<16>(to_k + n * kStep, k + n * kAhead * F::kDim);
        ptx::cp_async<16>(to_v + n * kStep, v + n * kAhead * F::kDim);
      }
    } else if (key < end_) {
#pragma unroll 1
      for (uint32_t n = 0; n < kGroup / kAhead; ++n) {
        const bool exists = key + n * kAhead + ahead < last;
        // A circular cache has more rows than a group. In a cache with fewer rows, no group wraps around.
        uint32_t row = first + n * kAhead + ahead;
        row = !exists ? 0 : row < p_.rows ? row : row - p_.rows;
        const size_t at = cached_ + size_t(row) * F::kDim + d;
        ptx::cp_async<16>(to_k + n * kStep, p_.keys + at, exists ? 16 : 0);
        ptx::cp_async<16>(to_v + n * kStep, p_.values + at, exists ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();
  }
  // Rotates the queries and, in the part that contains it, the new key; stores the new key and value. A warp takes
  // every kWarps-th of these vectors.
  __device__ __forceinline__ void stage() {
    const uint32_t half = p_.dim / 2, vectors = queries_ + (has_fresh() ? 2 : 0);
    float a[F::kVectorsOfWarp][F::kPairsOfLane], b[F::kVectorsOfWarp][F::kPairsOfLane];
#pragma unroll
    for (int n = 0; n < F::kVectorsOfWarp; ++n) {
      const uint32_t v = warp_ + n * F::kWarps;
      const uint32_t from = v < queries_ ? first_query_ + v : p_.heads + (v - queries_) * p_.kv_heads + head_;
#pragma unroll
      for (int i = 0; i < F::kPairsOfLane; ++i) {
        const uint32_t d = lane_ + 32 * i;
        const bool exists = v < vectors && d < half;
        const float* const x = p_.qkv + from * p_.dim + d;
        a[n][i] = exists ? __ldcg(x) : 0, b[n][i] = exists ? __ldcg(x + half) : 0;
      }
    }
#pragma unroll
    for (int n = 0; n < F::kVectorsOfWarp; ++n) {
      const uint32_t v = warp_ + n * F::kWarps;
      if (v < vectors) stage_vector(v, a[n], b[n]);
    }
  }
  __device__ __forceinline__ void stage_vector(uint32_t v, const float (&a)[F::kPairsOfLane],
                                               const float (&b)[F::kPairsOfLane]) {
    const uint32_t half = p_.dim / 2;
    const bool is_query = v < queries_, is_value = v == queries_ + 1;
    uint16_t* const to = is_query ? m_.q[v] : m_.fresh[is_value];
    bf16* const cache = (is_value ? p_.values : p_.keys) + cached_ + size_t(keys_.fresh % p_.rows) * F::kDim;
#pragma unroll
    for (int i = 0; i < F::kPairsOfLane; ++i) {
      const uint32_t d = lane_ + 32 * i;
      if (d >= half) continue;
      const float c = is_value ? 1 : cos_[i], s = is_value ? 0 : sin_[i];
      const bf16 low(a[i] * c - b[i] * s), high(b[i] * c + a[i] * s);
      to[d] = low.bits, to[d + half] = high.bits;
      if (!is_query && tile_ == 0) cache[d] = low, cache[d + half] = high;
    }
#pragma unroll 1
    for (uint32_t d = p_.dim + lane_; d < uint32_t(F::kDim); d += 32) to[d] = 0;
  }
  // The new key and value become row `ahead` of a group.
  __device__ __forceinline__ void put_fresh(typename Memory<F>::Group& group, uint32_t ahead) {
    constexpr uint32_t kPieces = F::kDim / 8;
    if (lane_ < 2 * kPieces) {
      const bool is_value = lane_ >= kPieces;
      const uint32_t d = lane_ % kPieces * 8;
      uint16_t* const to = is_value ? group.v[ahead] : group.k[ahead];
      *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(m_.fresh[is_value] + d);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_warps(uint32_t r, uint32_t d) const {
    decode_attention::Total total;
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w) total.max = fmaxf(total.max, m_.max[w][r]);
#pragma unroll
    for (int w = 0; w < F::kWarps; ++w)
      total.add(m_.max[w][r], m_.sum[w][r], *reinterpret_cast<const float4*>(&m_.result[w][r][d]));
    if (keys_.parts == 1) return put_result(first_query_ + r, d, total, m_.sink[r]);
    const size_t slot = size_t(first_query_ + r) * p_.parts + part_;
    *reinterpret_cast<float4*>(p_.part_out + slot * F::kDim + d) =
        make_float4(total.out[0], total.out[1], total.out[2], total.out[3]);
    if (d == 0) p_.part_max[slot] = total.max, p_.part_sum[slot] = total.sum;
  }
  // Numbers d to d + 3 of a query.
  __device__ __forceinline__ void put_result(uint32_t query, uint32_t d, decode_attention::Total& total,
                                             float sink) const {
    if (d >= p_.dim) return;  // a multiple of 8
    total.finish(sink);
    *reinterpret_cast<uint2*>(p_.mixed_rows + query * p_.dim + d) = {ptx::pack(bf16{}, total.out[0], total.out[1]),
                                                                     ptx::pack(bf16{}, total.out[2], total.out[3])};
  }

  const decode_attention::Params& p_;
  Memory<F>& m_;
  const RowKeys keys_;
  const uint32_t head_, part_, tile_;
  const uint32_t warp_ = threadIdx.x / 32, lane_ = threadIdx.x % 32;
  uint32_t begin_, end_, first_query_, queries_;
  size_t cached_;  // where the head's keys begin
  float cos_[F::kPairsOfLane], sin_[F::kPairsOfLane];
};

// Makes `p` the parameters of row `j` of the step.
template <int kDim>
__device__ __forceinline__ void point_to_row(const BatchedSequences& s, uint32_t j, decode_attention::Params& p) {
  point_to_slot(s, j, p);
  p.mixed_rows += size_t(j) * p.heads * p.dim;
  point_to_parts<kDim>(j, p);
}
// `pair`: a key head and a tile of its queries.
template <class F>
__device__ __forceinline__ void attend_part(const BatchedSequences& s, const decode_attention::Params& step,
                                            uint32_t row, uint32_t pair, uint32_t index, Memory<F>& m) {
  decode_attention::Params p = step;
  point_to_row<F::kDim>(s, row, p);
  const uint32_t tiles = query_tiles(p), head = pair / tiles;
  const RowKeys keys(p, uint32_t(__ldcg(p.position)));
  Part<F> part(p, keys, head, pair - head * tiles, index, m);
  part.prepare();
  ptx::wait_for_earlier_kernels();
  part.attend();
  if (keys.parts == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    m.last = ptx::fetch_add_acq_rel(p.arrived + head, 1) == keys.parts * tiles - 1;
    if (m.last) ptx::store_relaxed(p.arrived + head, 0);
  }
  __syncthreads();
  if (m.last) part.add_parts();
}

// The first T * kv_heads * query_tiles(p) blocks take the first parts, the other blocks share all further parts. The
// step's input and the slots' positions were complete before the first kernel of the step.
template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kDim == 128    ? 2
                                               : F::kStages == 1 ? 4
                                                                 : 3)
    attend_rows_kernel(const __grid_constant__ BatchedSequences s, const __grid_constant__ decode_attention::Params p,
                       uint32_t T) {
  ptx::let_next_kernel_start();
  auto& m = *tile::dynamic_shared<Memory<F>>();
  const uint32_t count = __ldcg(&s.input->count), pairs = p.kv_heads * query_tiles(p), first_parts = T * pairs;
  const bool further = blockIdx.x >= first_parts;
  if (further) {
    for (uint32_t row = threadIdx.x; row < count; row += F::kThreads)
      m.parts[row] = uint8_t(RowKeys(p, uint32_t(__ldcg(&in_slot(s.state, s, slot_of(s, row))->position))).parts);
    __syncthreads();
  }
  const uint32_t each = pairs * (further ? p.parts - 1 : 1);  // parts of a row that blocks of this kind take
  const uint32_t step = further ? gridDim.x - first_parts : first_parts;
#pragma unroll 1
  for (uint32_t i = further ? blockIdx.x - first_parts : blockIdx.x; i < count * each; i += step) {
    const uint32_t row = i / each, of_row = i - row * each, part = further ? 1 + of_row / pairs : 0;
    if (further && part >= m.parts[row]) continue;
    attend_part<F>(s, p, row, of_row % pairs, part, m);
    __syncthreads();
  }
  ptx::wait_for_earlier_kernels();
}

}  // namespace ingot::decode::row_attention
