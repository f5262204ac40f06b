// Both projections and the gate for at most 64 rows of x, where reading the weights takes the whole time. The weights'
// rows go down a tile and x's rows across, so no tile is mostly empty: a tile has 64 rows of the gate's weights above
// 64 of up's, and x's rows as 64 columns. The two blocks of a cluster divide K, so that 4,096 columns of h occupy 128
// multiprocessors; each block adds both halves of K for half of x's rows. In a block the first warpgroup has the gate's
// sums and the second up's; they exchange halves through shared memory, and each warpgroup computes the gate of its
// half.
//
// The order of all additions is fixed by the sizes alone, and a row's results do not depend on the other rows.
#include "ingot/gpu/gemm/operand.cuh"
#include "ingot/gpu/gemm/pipeline.cuh"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/swiglu/gate.cuh"
#include "ingot/kernels/swiglu/gated.h"

namespace ingot::cuda {
namespace {

using gemm::Pair;
using ptx::Major;

constexpr int kRows = int(kFewGatedRows);  // of x
constexpr int kColumns = 64;               // of h in a tile
constexpr int kBlocks = 2;                 // of a cluster, which divide K
constexpr int kConsumerWarps = gemm::kConsumerThreads / 32, kThreads = gemm::kConsumerThreads + 32;
// Numbers of groups of 8 columns of the sums, that is of 8 rows of x: in a tile, in the part that a block finishes, and
// in the part of a warpgroup.
constexpr int kEights = kRows / 8, kOfBlock = kEights / kBlocks, kOfGroup = kOfBlock / gemm::kWarpgroups;
// 192 KB in flight. With four stages a second block would fit on the multiprocessor, but the kernel would take 1 us
// longer with 64 rows and 7 us longer with one row.
constexpr int kStages = 8;

template <class T, Major kWeights> struct Product {
  using Type = T;
  using Weights = gemm::Operand<T, kWeights, 2 * kColumns, false, Pair::stacked>;
  using Tokens = gemm::Operand<T, Major::k, kRows, false>;

  struct Arguments {
    typename Weights::Params weights;
    typename Tokens::Params x;
    uint32_t k_steps, rows, columns;
    T *h, *gate, *up;  // or null
    int64_t h_stride, gate_stride, up_stride;
    const T *b_gate, *b_up;  // or null
    GateNumbers numbers;
    bool plain;
  };
};

using Four = uint32_t[4];  // fp32

template <class P> struct Memory {
  using Pipe = gemm::Pipeline<kStages, 1, gemm::Team::cooperative>;
  alignas(1024) char weights[kStages][P::Weights::kBytes];
  alignas(1024) char x[kStages][P::Tokens::kBytes];
  alignas(16) Four from_neighbour[gemm::kWarpgroups][kOfBlock][128];
  typename Pipe::Memory pipe;

  // After the products the first stage is free.
  using Exchange = Four[gemm::kWarpgroups][kOfGroup][128];
  __device__ Exchange& exchange() { return *reinterpret_cast<Exchange*>(weights[0]); }
  static constexpr uint32_t kPanelBytes = 8 * kOfGroup * 32;  // the rows of a warpgroup, 16 columns of 16 bits
  __device__ char* panel(uint32_t warp) { return x[0] + warp * kPanelBytes; }
  static_assert(sizeof(Exchange) <= P::Weights::kBytes && kConsumerWarps * kPanelBytes <= P::Tokens::kBytes,
                "both fit into a stage");
};

// The K steps of this block of the cluster.
struct Steps {
  uint32_t begin, end;
  __device__ Steps(uint32_t all, uint32_t rank)
      : begin(rank == 0 ? 0 : (all + 1) / 2), end(rank == 0 ? (all + 1) / 2 : all) {}
};

template <class P>
__device__ __forceinline__ void produce(const typename P::Arguments& p, Memory<P>& m, const Steps& steps,
                                        uint32_t tile) {
  using Pipe = typename Memory<P>::Pipe;
  typename Pipe::Cursor at;
  const gemm::TileAt place;
  for (uint32_t step = steps.begin; step < steps.end; ++step, at.advance()) {
    uint64_t* const full = Pipe::acquire(m.pipe, at, P::Weights::kBytes + P::Tokens::kBytes);
    P::Weights::template load<1>(p.weights, m.weights[at.stage], place, tile * 2 * kColumns, step, full, 0);
    P::Tokens::template load<1>(p.x, m.x[at.stage], place, 0, step, full, 0);
  }
}

// d = 64 rows of weights times x's rows, over this block's part of K. A stage is returned to the producer when the next
// stage's products have been issued.
template <class P>
__device__ __forceinline__ void multiply(Memory<P>& m, const Steps& steps, uint32_t group, float (&d)[kRows / 2]) {
  using Pipe = typename Memory<P>::Pipe;
  constexpr tile::Swizzle kSwizzle = tile::Swizzle::b128;
  typename Pipe::Cursor at;
#pragma unroll
  for (float& sum : d) sum = 0;
  ptx::fence_registers(d);
  uint32_t before = 0;
  for (uint32_t step = steps.begin; step < steps.end; ++step, at.advance()) {
    Pipe::wait(m.pipe, at);
    const uint32_t a = ptx::shared_address(m.weights[at.stage]) + group * gemm::kPanelBytes;
    const uint32_t b = ptx::shared_address(m.x[at.stage]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < gemm::kTileK; k += 16)
      ptx::wgmma<typename P::Type, kRows, P::Weights::kMajor, Major::k>(
          d, tile::operand<P::Weights::kMajor, kSwizzle>(a, k, gemm::kPanelBytes),
          tile::operand<Major::k, kSwizzle>(b, k, gemm::kPanelBytes), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (step > steps.begin) Pipe::release(m.pipe, before);
    before = at.stage;
  }
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(d);
}

__device__ __forceinline__ void as_words(Four& to, const float* from) {
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = __float_as_uint(from[e]);
}
// from[first ? i : i + n], without indexing registers.
template <int n> __device__ __forceinline__ void half_of(const float (&from)[2 * n], bool first, float (&to)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) to[i] = first ? from[i] : from[n + i];
}

// A warp's part of a result: 16 rows of x (two times 8), 16 columns of h. The sums have h's columns down, so they are
// stored transposed.
template <class T>
__device__ __forceinline__ void store_part(const float (&v)[4 * kOfGroup], char* panel, T* to, int64_t stride,
                                           uint32_t row, uint32_t column, uint32_t rows, uint32_t columns) {
  static_assert(kOfGroup == 2, "four matrices of 8 x 8");
  const uint32_t lane = threadIdx.x % 32;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = ptx::pack(T{}, v[2 * i], v[2 * i + 1]);
  __syncwarp();  // the panel's previous contents have been read
  ptx::stmatrix_trans(ptx::shared_address(panel) + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16, pairs);
  __syncwarp();
  const uint32_t r = row + lane / 2, c = column + lane % 2 * 8;
  if (r < rows && c < columns)
    *reinterpret_cast<uint4*>(to + int64_t(r) * stride + c) = *reinterpret_cast<const uint4*>(panel + lane * 16);
}

template <class T>
__device__ __forceinline__ void add_bias(float (&v)[4 * kOfGroup], const T* bias, uint32_t column, uint32_t columns) {
  if (bias == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t c = column + threadIdx.x % 32 / 4 + 8 * half;
    const float b = c < columns ? tile::to_float(bias[c]) : 0;
#pragma unroll
    for (int i = 0; i < kOfGroup; ++i) v[4 * i + 2 * half] += b, v[4 * i + 2 * half + 1] += b;
  }
}

// For the rows that the block finishes, the first warpgroup's `sums` are the gate's sums over both halves of K, and the
// second warpgroup's `sums` are up's.
template <class P>
__device__ __forceinline__ void finish(const typename P::Arguments& p, Memory<P>& m, const float (&sums)[4 * kOfBlock],
                                       uint32_t rank, uint32_t tile, uint32_t warp) {
  constexpr int N = 4 * kOfGroup;
  const uint32_t group = warp / 4, thread = threadIdx.x % 128;
  float own[N], other[N];
  half_of<N>(sums, group == 0, own);
  half_of<N>(sums, group != 0, other);  // the half that the other warpgroup needs
  auto& exchange = m.exchange();
#pragma unroll
  for (int i = 0; i < kOfGroup; ++i) as_words(exchange[group][i][thread], other + 4 * i);
  ptx::barrier_sync(1, gemm::kConsumerThreads);
#pragma unroll
  for (int i = 0; i < kOfGroup; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) other[4 * i + e] = __uint_as_float(exchange[1 - group][i][thread][e]);
  float gate[N], up[N];
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = group == 0 ? own[i] : other[i], up[i] = group == 0 ? other[i] : own[i];
  const uint32_t column = tile * kColumns + warp % 4 * 16, row = 8 * (rank * kOfBlock + group * kOfGroup);
  add_bias(gate, p.b_gate, column, p.columns);
  add_bias(up, p.b_up, column, p.columns);
  char* const panel = m.panel(warp);
  if (p.gate != nullptr) {
    store_part(gate, panel, p.gate, p.gate_stride, row, column, p.rows, p.columns);
    store_part(up, panel, p.up, p.up_stride, row, column, p.rows, p.columns);
  }
  if (p.h == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; ++i)
    gate[i] = p.plain ? gated<false, true>(p.numbers, gate[i], up[i]) : gated<false, false>(p.numbers, gate[i], up[i]);
  store_part(gate, panel, p.h, p.h_stride, row, column, p.rows, p.columns);
}

template <class P>
__global__ void __launch_bounds__(kThreads, 1) gated_few_rows(const __grid_constant__ typename P::Arguments p) {
  auto& m = *tile::dynamic_shared<Memory<P>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // visibly uniform over the lanes for the compiler
  const uint32_t rank = ptx::cluster_rank(), tile = blockIdx.x / kBlocks;
  const bool consumes = warp < kConsumerWarps;
  const Steps steps(p.k_steps, rank);
  ptx::let_next_kernel_start();
  ptx::cluster_arrive_relaxed();  // the neighbour may write to this block's memory once it has started
  if (threadIdx.x == 0) Memory<P>::Pipe::init(m.pipe);
  __syncthreads();
  ptx::wait_for_earlier_kernels();
  float d[kRows / 2];
  if (consumes)
    multiply<P>(m, steps, warp / 4, d);
  else if (ptx::elect_one())
    produce<P>(p, m, steps, tile);
  __syncwarp();
  ptx::cluster_wait();
  float sums[4 * kOfBlock];
  if (consumes) {
    float of_neighbour[4 * kOfBlock];
    half_of<4 * kOfBlock>(d, rank == 0, sums);
    half_of<4 * kOfBlock>(d, rank != 0, of_neighbour);
#pragma unroll
    for (int i = 0; i < kOfBlock; ++i) {
      Four words;
      as_words(words, of_neighbour + 4 * i);
      ptx::cluster_store(ptx::cluster_address(m.from_neighbour[warp / 4][i][threadIdx.x % 128], 1 - rank), words);
    }
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (!consumes) return;
#pragma unroll
  for (int i = 0; i < kOfBlock; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[4 * i + e] += __uint_as_float(m.from_neighbour[warp / 4][i][threadIdx.x % 128][e]);
  finish<P>(p, m, sums, rank, tile, warp);
}

template <class P> void launch(const GatedLinear& g, Stream stream) {
  using T = typename P::Type;
  const int64_t columns = P::Weights::kMajor == Major::k ? g.w_gate.rows() : g.w_gate.cols();
  const auto data = [](const Tensor& t) { return t ? t.ptr<T>() : nullptr; };
  const auto stride = [](const Tensor& t) { return t ? t.row_stride() : 0; };
  const typename P::Arguments p{.weights = P::Weights::template params<1>("gated_linear: weights", g.w_gate, g.w_up),
                                .x = P::Tokens::template params<1>("gated_linear: x", g.x),
                                .k_steps = uint32_t(gemm::ceil_div(g.x.cols(), gemm::kTileK)),
                                .rows = uint32_t(g.x.rows()),
                                .columns = uint32_t(columns),
                                .h = data(g.h),
                                .gate = data(g.gate),
                                .up = data(g.up),
                                .h_stride = stride(g.h),
                                .gate_stride = stride(g.gate),
                                .up_stride = stride(g.up),
                                .b_gate = data(g.b_gate),
                                .b_up = data(g.b_up),
                                .numbers = gate_numbers(g.options),
                                .plain = is_plain(g.options)};
  gpu::launch("gated_linear", gated_few_rows<P>,
              {.grid = gemm::ceil_div(columns, kColumns) * kBlocks,
               .block = kThreads,
               .smem = int64_t(sizeof(Memory<P>)),
               .cluster = kBlocks,
               .overlap = true,
               .device = g.x.device.index},
              stream, p);
}

}  // namespace

void gated_few_rows(const GatedLinear& g, Stream stream) {
  gemm::with_16_bit_type(g.x.dtype, [&](auto type) {
    using T = decltype(type);
    (g.transposed ? launch<Product<T, Major::mn>> : launch<Product<T, Major::k>>)(g, stream);
  });
}

}  // namespace ingot::cuda
