#pragma once
// The activation vectors of the row kernel's products, one vector for each row. Blocks publish parts of the vectors in
// global memory, in the order of the matrix instructions and with all bits inverted, so that a word of zero is not
// complete; every block copies whole vectors to shared memory. The residual stream becomes vectors in one place: the
// block of a weight tile reads the sums of the tile's 64 channels, of all rows, and publishes 128 bytes of each row's
// vector. The factor 1 / rms of a row is left to the epilogue of the product.
#include "ingot/models/decode/row_kernel/row_context.cuh"

namespace ingot::decode::rows {

// The order of a vector's words: a lane's two channels of a weight tile share a word.
template <bool kFp8> struct WordOrder {
  static constexpr uint32_t kNext = kFp8 ? 2 : 1;  // distance from the first channel of a word to the second
  __device__ __forceinline__ static uint32_t channel(uint32_t word) {
    return kFp8 ? word / 2 * 4 + word % 2 : 2 * word;
  }
};
// The norm before a product, and the places of its activation vectors.
struct NormedVectors {
  const float* weight;
  float input_scale;
  uint32_t terms;  // of each sum of the residual stream
  bool experts;    // of gate and up, else of qkv or of the head
  uint32_t epoch;
  const Matrix* router;  // multiplied by the vectors of gate and up; null for other products
  uint32_t wait;         // number of the wait, for a record
};

// The address of a weight tile of the router's matrix.
__device__ __forceinline__ const uint8_t* router_tile(const Matrix& w, uint32_t row_tile, uint32_t tile) {
  return w.data + row_tile * w.row_tile_bytes + int64_t(tile) * weight_tiles::Form<WeightFormat::bf16>::kBytes;
}
// Adds the products of a weight tile's channels and the rows' vectors to the logits of a row tile of 16 experts.
__device__ __forceinline__ void add_logits(const Context& block, const Matrix& w, uint32_t row_tile,
                                           const weight_tiles::Stored<WeightFormat::bf16>& weights, uint32_t epoch) {
  constexpr float kOutputScale = 1 / weight_tiles::Form<kExperts>::kInputScale;
  const uint32_t T = block.m.step.T, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const char* const mine[1] = {block.m.normed_tile[min(g, T - 1)] + t * 16};
  float sum[1][4] = {};
  weight_tiles::multiply<WeightFormat::bf16, 1>(weights, mine, 0, sum);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t e = 16 * row_tile + g + i / 2 * 8, j = 2 * t + i % 2;
    if (e < w.rows && j < T) Sum::add(block.logits(epoch, j) + e, sum[0][i] * kOutputScale, 1);
  }
}

// Publishes this block's weight tiles of the activation vectors, and adds their products to the router's logits. One
// warp reads one row of a tile. Waits for the sums of all blocks.
template <bool kFp8> __device__ __forceinline__ void publish_normed(const Context& block, const NormedVectors& v) {
  using Order = WordOrder<kFp8>;
  const uint32_t C = block.m.step.embedding.C, tiles = weight_tiles::padded(C) / 64, T = block.m.step.T,
                 row = threadIdx.x / 32, lane = threadIdx.x % 32, router_row_tile = kTokenWarps - 1 - row;
  static_assert(32 * kLogitsOfLane <= 16 * kTokenWarps, "a warp for each row tile of the router's matrix");
  const RowWords& words = block.m.step.words;
  char* const vector = block.turn(v.epoch, row) + (v.experts ? words.routed : words.normed);
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    weight_tiles::Stored<WeightFormat::bf16> weights{};
    const bool routes = v.router != nullptr && router_row_tile < v.router->row_tiles;
    if (routes) weight_tiles::load(weights, router_tile(*v.router, router_row_tile, tile), lane);
    if (row < T) {
      const uint32_t c = 64 * tile + Order::channel(lane);
      const auto exists = [&](uint32_t h) { return c + h * Order::kNext < C; };
      const uint64_t* const from = block.x(row) + c;
      uint64_t word[2] = {};
      float scale[2];
      const auto load = [&] {
        if (!kFp8) ptx::load_relaxed(from, word);  // the padding has no terms
        if (kFp8) word[0] = ptx::load_relaxed(from), word[1] = ptx::load_relaxed(from + Order::kNext);
      };
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) scale[h] = exists(h) ? __ldcg(v.weight + c + h * Order::kNext) : 0;
      block.wait_for(
          load, [&] { return (has_terms(word[0], v.terms) | !exists(0)) & (has_terms(word[1], v.terms) | !exists(1)); },
          v.wait);
      float sum = 0, value[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        value[h] = exists(h) ? value_of(word[h], v.terms) : 0;
        sum += value[h] * value[h];
        value[h] *= scale[h] * v.input_scale;
      }
      const uint32_t at = 2 * weight_tiles::place(kFp8, c), two = ptx::pack(bf16{}, value[0], value[1]);
      ptx::store_relaxed(reinterpret_cast<uint32_t*>(vector + at), ~two);
      if (v.router != nullptr)
        *reinterpret_cast<uint32_t*>(block.m.normed_tile[row] + at % weight_tiles::kVectorTileBytes) = two;
      sum = weight_tiles::lanes_sum(sum);
      if (lane == 0)
        ptx::store_relaxed(block.squares(v.experts, row) + tile, __float_as_uint(sum) | uint64_t(v.epoch) << 32);
    }
    if (v.router == nullptr) continue;
    ComputeThreads::sync();
    if (routes) add_logits(block, *v.router, router_row_tile, weights, v.epoch);
    if (tile + gridDim.x < tiles) ComputeThreads::sync();  // the next tile overwrites normed_tile
  }
}

// Which sums of squares a product needs.
struct PublishedSquares {
  bool experts;  // of gate and up, else of qkv or of the head
  uint32_t epoch;
};
constexpr uint32_t kSquaresOfLane = 2;
// The sums of squares of this warp's row, requested before the row's activation vector has been copied.
struct RowSquares {
  static constexpr uint32_t kHeld = kSquaresOfLane;
  uint64_t word[kHeld] = {};

  __device__ __forceinline__ void load(const Context& block, const PublishedSquares& p) {
    const uint32_t tiles = uint32_t(block.m.step.words.x_stride / 64);
    const uint64_t* const from = block.squares(p.experts, threadIdx.x / 32);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u)
      if (threadIdx.x % 32 + 32 * u < tiles) word[u] = ptx::load_relaxed(from + threadIdx.x % 32 + 32 * u);
  }
  // Writes 1 / rms of the row.
  __device__ __forceinline__ void finish(const Context& block, const PublishedSquares& p, float eps) {
    const uint32_t tiles = uint32_t(block.m.step.words.x_stride / 64), lane = threadIdx.x % 32;
    block.read_again([&] { load(block, p); },
                     [&] {
                       bool complete = true;
#pragma unroll
                       for (uint32_t u = 0; u < kHeld; ++u)
                         complete &= (word[u] >> 32 == p.epoch) | (lane + 32 * u >= tiles);
                       return complete;
                     });
    float sum = 0;
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) sum += __uint_as_float(uint32_t(word[u]));
    sum = weight_tiles::lanes_sum(sum);
    if (lane == 0) block.m.rstd[threadIdx.x / 32] = rsqrtf(sum / float(block.m.step.embedding.C) + eps);
    __syncwarp();
  }
};

// Published activation vectors.
struct PublishedVectors {
  const char* from;                  // of the first row
  uint32_t bytes, stride, count;     // of a vector; in shared memory; vectors
  const uint16_t* offset = nullptr;  // of each vector, in units of 16 bytes; null: one vector of each row
};
// Copies the vectors to shared memory. Called after the grid barrier that follows their publication.
__device__ __forceinline__ void copy_vectors(const Context& block, const PublishedVectors& v) {
  constexpr uint32_t kHeld = 6;  // 16-byte words of a thread that are requested together: all of 8 rows of 2,880
  const uint32_t pieces = v.bytes / 16, all = v.count * pieces, inverse = ~0u / pieces + 1;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < all; first += kHeld * kTokenThreads) {
    uint64_t words[kHeld][2] = {};  // not complete, so that read_again() loads
    // The quotient by `pieces`, which is exact because `all` times `pieces` is less than 2^32.
    const auto vector_of = [&](uint32_t u) { return __umulhi(first + u * kTokenThreads, inverse); };
    const auto load = [&] {
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u) {
        const uint32_t i = first + u * kTokenThreads;
        if (i >= all) continue;
        const uint32_t n = vector_of(u), piece = i - n * pieces;
        const uint32_t at = v.offset != nullptr ? v.offset[n] : n * uint32_t(block.m.step.words.turn_bytes / 16);
        ptx::load_relaxed_16(v.from + 16 * (at + piece), words[u][0], words[u][1]);
      }
    };
    block.read_again(load, [&] {
      bool complete = true;
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u) {
        bool all_words = true;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) all_words &= (uint32_t(words[u][h]) != 0) & (uint32_t(words[u][h] >> 32) != 0);
        complete &= all_words | (first + u * kTokenThreads >= all);
      }
      return complete;
    });
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) {
      const uint32_t i = first + u * kTokenThreads, n = vector_of(u), piece = i - n * pieces;
      if (i >= all) continue;
      const uint64_t low = ~words[u][0], high = ~words[u][1];
      *reinterpret_cast<uint4*>(block.vectors() + n * v.stride + piece * 16) =
          make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
    }
  }
}

// The activation vectors of a step's first product, which every block makes from the rows of the embedding. Ends with
// a barrier.
template <bool kFp8>
__device__ __forceinline__ void embed(const Context& block, const float* weight, float input_scale, float eps) {
  using Order = WordOrder<kFp8>;
  const Embedding& e = block.m.step.embedding;
  const uint32_t words = weight_tiles::padded(e.C) / 2, stride = weight_tiles::vector_stride(e.C), T = block.m.step.T;
  float sum[kRows] = {};
#pragma unroll 1
  for (uint32_t word = threadIdx.x; word < words; word += kTokenThreads) {
    const uint32_t c = Order::channel(word);
    float scale[2], value[kRows][2] = {};
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t n = c + h * Order::kNext;
      scale[h] = n < e.C ? __ldcg(weight + n) * input_scale : 0;
#pragma unroll
      for (uint32_t j = 0; j < kRows; ++j)
        if (n < e.C && j < T) value[j][h] = float(e.table[int64_t(block.m.token[j]) * e.C + n]);
    }
#pragma unroll
    for (uint32_t j = 0; j < kRows; ++j) {
      if (j >= T) continue;
      sum[j] += value[j][0] * value[j][0] + value[j][1] * value[j][1];
      *reinterpret_cast<uint32_t*>(block.vectors() + j * stride + 2 * weight_tiles::place(kFp8, c)) =
          ptx::pack(bf16{}, value[j][0] * scale[0], value[j][1] * scale[1]);
    }
  }
  float(&parts)[kTokenWarps][kRows] = reinterpret_cast<float(&)[kTokenWarps][kRows]>(block.m.sums);
#pragma unroll
  for (uint32_t j = 0; j < kRows; ++j) {
    sum[j] = weight_tiles::lanes_sum(sum[j]);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][j] = sum[j];
  }
  ComputeThreads::sync();
  if (threadIdx.x < T) {
    float all = 0;
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) all += parts[w][threadIdx.x];
    block.m.rstd[threadIdx.x] = rsqrtf(all / float(e.C) + eps);
  }
  ComputeThreads::sync();
}

}  // namespace ingot::decode::rows
