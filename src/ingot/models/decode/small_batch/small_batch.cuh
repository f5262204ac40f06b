#pragma once
// Products for 2 to 16 tokens of a step. A unit of work is a row tile of a matrix, or of the matrix in an expert slot;
// teams of warps take the units in turn. Each warp of a team multiplies a part of every row tile's weight tiles by all
// activation vectors of the step, while its next weight tiles are being loaded, even those of the next unit. The units
// of the experts are numbered by expert slot, row tile by row tile, and each block takes an equal run of units. A
// token's result depends only on the token and the matrix, not on the other tokens.
#include "ingot/models/decode/small_batch/weight_bank.cuh"

namespace ingot::decode::small_batch {

// Loads the fp8 scales of rows g and g + 8.
template <WeightFormat F, int kScales>
__device__ __forceinline__ void row_scales(const Matrix& w, const uint8_t* row_tile, float (&scale)[kScales]) {
  if constexpr (F == WeightFormat::fp8) weight_tiles::load_row_scales(row_tile, w.weight_tiles, scale);
}

// Copies `count` activation vectors to shared memory, past L1: vector i comes from row_of(i) in global memory.
template <class Row>
__device__ __forceinline__ void stage(char* to, const char* from, uint32_t numbers, uint32_t count, Row&& row_of) {
  const uint32_t words = uint32_t(weight_tiles::vector_bytes(numbers)) / 16,  // of 16 bytes in a vector
      stride = weight_tiles::vector_stride(numbers);
  constexpr uint32_t kHeld = 5;  // 16-byte words requested together
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < count * words; first += kHeld * kThreads) {
    uint4 held[kHeld] = {};
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u)
      if (const uint32_t i = first + u * kThreads; i < count * words)
        held[u] = __ldcg(reinterpret_cast<const uint4*>(from) + int64_t(row_of(i / words)) * words + i % words);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u)
      if (const uint32_t i = first + u * kThreads; i < count * words)
        *reinterpret_cast<uint4*>(to + i / words * stride + i % words * 16) = held[u];
  }
}
// The same for the first `count` vectors, asynchronously and without registers. A thread's own words are complete after
// cp_async_wait_group<0>(), which must be called before the first weights are requested.
__device__ __forceinline__ void prefetch_vectors(char* to, const char* from, uint32_t numbers, uint32_t count) {
  const uint32_t words = uint32_t(weight_tiles::vector_bytes(numbers)) / 16,  // of 16 bytes in a vector
      stride = weight_tiles::vector_stride(numbers);
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count * words; i += kThreads)
    ptx::cp_async<16>(ptx::shared_address(to + i / words * stride + i % words * 16), from + int64_t(i) * 16);
  ptx::cp_async_commit_group();
}
// Computes the factor 1 / rms of each normalized activation vector. Call before a barrier.
__device__ __forceinline__ void put_rstd(const Normed& x, uint32_t T, uint32_t C, float eps, float* rstd) {
  if (threadIdx.x >= T) return;
  float sum = 0;
  for (uint32_t s = 0; s < x.parts; ++s) sum += __ldcg(x.squares + s * kMostTokens + threadIdx.x);
  rstd[threadIdx.x] = 1 / sqrtf(sum / float(C) + eps);
}
// This lane's activation vectors, where all units have the same vectors.
template <int kCols> struct SameVectors {
  const char* (&mine)[kBlocks8<kCols>];
  __device__ __forceinline__ void operator()(const Unit&, const char* (&vectors)[kBlocks8<kCols>]) const {
#pragma unroll
    for (int k = 0; k < kBlocks8<kCols>; ++k) vectors[k] = mine[k];
  }
};
template <WeightFormat F> struct Prepared {
  float bias[2] = {0, 0}, row_scale[F == WeightFormat::fp8 ? 2 : 1] = {};
  __device__ __forceinline__ float scale(int h) const {
    if constexpr (F == WeightFormat::fp8) return row_scale[h];
    return 1;
  }
};

// --- one matrix: y = vectors W^T + b, or y += vectors W^T + b

template <WeightFormat F, int kCols>
__device__ __forceinline__ void product(const SmallBatchProduct& p, uint32_t slots, At at, char* memory) {
  auto& m = tile::shared<Memory<kCols>>();
  const uint32_t stride = weight_tiles::vector_stride(p.w.cols), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Ring<F> ring(memory, slots);
  char* const sums = memory + slots * kWarps * Ring<F>::kSlotBytes;
  Bank<F, kCols, kMatrixTeam> bank(p.w, ring, sums, at);
  bank.ask();
  memory = sums + kSumsBytes<kCols>;
  ptx::wait_for_earlier_kernels();
  if (p.x.parts > 0) put_rstd(p.x, p.T, p.w.cols, p.eps, m.rstd);
  stage(memory, p.x.vectors, p.w.cols, p.T, [](uint32_t j) { return j; });
  __syncthreads();
  const char* mine[kBlocks8<kCols>];
  weight_tiles::lane_vectors(memory, stride, p.T, mine);
  bank.multiply(
      bank.end(), SameVectors<kCols>{mine},
      [&](const Unit& u, bool ends) {
        Prepared<F> r;
        if (!ends) return r;
        const uint32_t n = 16 * u.row_tile + g;
        if (p.bias != nullptr)
          r.bias[0] = n < p.w.rows ? p.bias[n] : 0, r.bias[1] = n + 8 < p.w.rows ? p.bias[n + 8] : 0;
        row_scales<F>(p.w, data_of(p.w, nullptr, u), r.row_scale);
        return r;
      },
      [&](const Unit& u, const float(&sum)[kBlocks8<kCols>][4], const Prepared<F>& r) {
#pragma unroll
        for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const uint32_t j = 8 * k + 2 * t + c;
            if (j >= p.T) continue;
            const float scale = (p.x.parts > 0 ? m.rstd[j] : 1) * weight_tiles::Form<F>::kOutputScale;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t n = 16 * u.row_tile + g + 8 * h;
              if (n >= p.w.rows) continue;
              float* const y = p.y + j * p.y_stride + n;
              *y = (p.adds ? __ldcg(y) : 0) + (sum[k][c + 2 * h] * (scale * r.scale(h)) + r.bias[h]);
            }
          }
      });
}

// --- gate and up

// The router, computed by all blocks together; each block repeats the final choice for itself. Copies the activation
// vectors to `vectors`, writes the chosen experts to `lists` and the input of list_tokens() to `memory`, and returns
// the number of expert slots. Waits for earlier kernels.
template <int kCols>
__device__ __forceinline__ uint32_t choose(const Routed& routed, const GateUp& p, const Normed& x, At at, char* memory,
                                           char* vectors, const routing::Copy& lists) {
  auto& m = tile::shared<Memory<kCols>>();
  const Router& r = routed.router;
  const ChoiceMemory choice(memory, r.T, r.w.rows, r.k);
  begin_lists<kCols>(choice, r.w.rows, p.most, lists);
  route_wide<kCols, kThreads>(r, x, at,
                              *reinterpret_cast<RouterRoom<kCols>*>(memory + choice_bytes(r.T, r.w.rows, r.k)));
  tile::grid_barrier(routed.counter, routed.watch, routed.what);
  prefetch_vectors(vectors, x.vectors, p.w.cols, p.T);
  put_rstd(x, p.T, p.w.cols, p.eps, m.rstd);
  small_batch::choose_experts(r, choice);
  ptx::cp_async_wait_group<0>();
  return list_experts(choice, r.T, r.w.rows, r.k, m.expert_slots, lists);
}

// The launch of the dependent kernel is triggered after the expert lists are written, because that kernel reads the
// lists before its grid wait. Without a router, an earlier kernel has written the lists and the activation vectors.
// `P`: GateUp or GeneralGateUp.
template <WeightFormat F, int kCols, class P>
__device__ __forceinline__ void gate_up(const P& p, const Normed& x, const Routed& routed, uint32_t slots, At at,
                                        char* memory) {
  const Ring<F> ring(memory, slots);
  char* const sums = memory + slots * kWarps * Ring<F>::kSlotBytes;
  memory = sums + kSumsBytes<kCols>;
  auto& m = tile::shared<Memory<kCols>>();
  const uint32_t stride = weight_tiles::vector_stride(p.w.cols), width = p.w.rows / 2;
  const bool routes = routed.counter != nullptr;
  const routing::Copy lists = copy_at<kCols>(memory + p.T * stride, p.most);
  uint32_t count;
  if (routes) {
    count = choose<kCols>(routed, p, x, at, sums, memory, lists);
  } else {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
    count = __ldcg(p.lists.count);
    routing::copy_lists<kCols>(memory + p.T * stride, p.lists, p.most);
    put_rstd(x, p.T, p.w.cols, p.eps, m.rstd);
    __syncthreads();
  }
  Bank<F, kCols, kTeam> bank(p.w, ring, sums, lists.expert, count, at);
  bank.ask();
  if (routes) {
    const Router& r = routed.router;
    list_tokens<kCols>(ChoiceMemory(sums, r.T, r.w.rows, r.k), r.T, r.k, lists);
  } else {
    stage(memory, x.vectors, p.w.cols, p.T, [](uint32_t j) { return j; });
  }
  __syncthreads();
  if (routes) {
    if (at.block == at.blocks - 1) publish_lists<kCols>(lists, count, p.lists);
    ptx::let_next_kernel_start();
  }
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool odd =
      g % 2 != 0;  // rows 2 c and 2 c + 1 are gate and up of channel c: even lanes finish row g, odd lanes row g + 8
  const uint32_t channel = g / 2 + (odd ? 4 : 0);
  const char* mine[kBlocks8<kCols>];
  weight_tiles::lane_vectors(memory, stride, p.T, mine);
  bank.multiply(
      bank.end(), SameVectors<kCols>{mine},
      [&](const Unit& u, bool ends) {
        Prepared<F> r;
        const uint32_t n = 8 * u.row_tile + channel;
        if (!ends) return r;
        if (n < width) {
          const float2 bias =
              *reinterpret_cast<const float2*>(p.bias + (int64_t(lists.expert[u.expert_slot]) * width + n) * 2);
          r.bias[0] = bias.x, r.bias[1] = bias.y;
        }
        row_scales<F>(p.w, data_of(p.w, lists.expert, u), r.row_scale);
        return r;
      },
      [&](const Unit& u, const float(&sum)[kBlocks8<kCols>][4], const Prepared<F>& r) {
        const uint32_t n = 8 * u.row_tile + channel;
#pragma unroll
        for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float low = sum[k][c] * r.scale(0), high = sum[k][2 + c] * r.scale(1);
            const float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
            const uint32_t j = 8 * k + 2 * t + c;
            const int32_t row = lists.row[u.expert_slot * kCols + j];
            if (row < 0 || n >= width) continue;
            const float scale = m.rstd[j] * weight_tiles::Form<F>::kOutputScale;
            const float gate = (odd ? other : low) * scale + r.bias[0], up = (odd ? high : other) * scale + r.bias[1];
            weight_tiles::put(p.hidden + row * weight_tiles::vector_bytes(width), p.down, n, gated(gate, up, p));
          }
      });
}

// --- down

// The activation vectors of some expert slots, which a block copies to shared memory, slot by slot.
struct Staged {
  uint32_t* row;  // (room): rows of p.hidden
  // (most, kCols): index of a slot's vector; an arbitrary vector for tokens that did not choose the expert
  uint32_t* place;
};
INGOT_HD constexpr int64_t staged_bytes(int64_t room, int64_t most, int64_t vectors) {
  return 4 * (room + most * vectors);
}

// Called by a block before a barrier: selects as many expert slots from `first` on as there is room for, at least one.
// Returns the slot after these.
template <int kCols>
__device__ __forceinline__ uint32_t place_vectors(const routing::Copy& lists, uint32_t first, uint32_t end,
                                                  uint32_t room, const Staged& s, uint32_t& vectors) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t used = 0, e = first;
#pragma unroll 1
  for (; e < end; ++e) {
    const int32_t row = lane < uint32_t(kCols) ? lists.row[e * kCols + lane] : -1;
    const uint32_t all = __ballot_sync(~0u, int(row >= 0)), more = uint32_t(__popc(all));
    if (used + more > room) break;
    const uint32_t place = row < 0 ? used : used + uint32_t(__popc(all & ((1u << lane) - 1)));
    if (threadIdx.x < uint32_t(kCols)) {
      s.place[e * kCols + lane] = place;
      if (row >= 0) s.row[place] = uint32_t(row);
    }
    used += more;
  }
  vectors = used;
  return e;
}

template <WeightFormat F, int kCols>
__device__ __forceinline__ void down(const Down& p, const ChoiceSums& to, uint32_t slots, At at, char* memory) {
  const Ring<F> ring(memory, slots);
  char* const sums = memory + slots * kWarps * Ring<F>::kSlotBytes;
  memory = sums + kSumsBytes<kCols>;
  const uint32_t stride = weight_tiles::vector_stride(p.w.cols), count = __ldcg(p.lists.count);
  char* const after = memory + to.room * stride;
  const routing::Copy lists = routing::copy_lists<kCols>(after, p.lists, p.most);
  const Staged staged{reinterpret_cast<uint32_t*>(after + routing::copy_bytes(p.most, kCols)),
                      reinterpret_cast<uint32_t*>(after + routing::copy_bytes(p.most, kCols)) + to.room};
  __syncthreads();
  Bank<F, kCols, kTeam> bank(p.w, ring, sums, lists.expert, count, at);
  bank.ask();
  ptx::wait_for_earlier_kernels();
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t last = (bank.end() + p.w.row_tiles - 1) / p.w.row_tiles;
#pragma unroll 1
  for (uint32_t first = bank.first(); first < bank.end();) {
    uint32_t vectors;
    const uint32_t expert_slot = place_vectors<kCols>(lists, first / p.w.row_tiles, last, to.room, staged, vectors);
    __syncthreads();
    stage(memory, p.hidden, p.w.cols, vectors, [&](uint32_t i) { return staged.row[i]; });
    __syncthreads();
    const uint32_t stop = min(bank.end(), expert_slot * p.w.row_tiles);
    bank.multiply(
        stop,
        [&](const Unit& u, const char*(&mine)[kBlocks8<kCols>]) {
#pragma unroll
          for (int k = 0; k < kBlocks8<kCols>; ++k)
            mine[k] = memory + staged.place[u.expert_slot * kCols + 8 * k + g] * stride + t * 16;
        },
        [&](const Unit& u, bool ends) {
          Prepared<F> r;
          if (!ends) return r;
          const uint32_t n = 16 * u.row_tile + g;
          const float* const bias =
              p.bias == nullptr ? nullptr : p.bias + int64_t(lists.expert[u.expert_slot]) * p.w.rows;
          if (bias != nullptr) r.bias[0] = n < p.w.rows ? bias[n] : 0, r.bias[1] = n + 8 < p.w.rows ? bias[n + 8] : 0;
          row_scales<F>(p.w, data_of(p.w, lists.expert, u), r.row_scale);
          return r;
        },
        [&](const Unit& u, const float(&sum)[kBlocks8<kCols>][4], const Prepared<F>& r) {
#pragma unroll
          for (int k = 0; k < kBlocks8<kCols>; ++k)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const uint32_t i = u.expert_slot * kCols + 8 * k + 2 * t + c;
              const int32_t row = lists.row[i];
              if (row < 0) continue;
              const float weight = lists.weight[i];
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const uint32_t n = 16 * u.row_tile + g + 8 * h;
                const float y = sum[k][c + 2 * h] * (r.scale(h) * weight_tiles::Form<F>::kOutputScale) + r.bias[h];
                if (n < p.w.rows) to.sums[row * to.stride + n] = weight * y;
              }
            }
        });
    first = stop;
    __syncthreads();  // before the next activation vectors overwrite the present ones
  }
}

}  // namespace ingot::decode::small_batch
