#pragma once
// The activation vectors of the row kernel's products, one vector for each row: each thread reads words of all blocks
// until the words are complete and writes them to shared memory in the order of the matrix instructions.
#include "ingot/gpu/tile/epoch_words.cuh"
#include "ingot/models/decode/row_kernel/row_context.cuh"

namespace ingot::decode::rows {

// Writes the residual stream times the norm's weight and `input_scale`, and its sums of squares. `terms` is the count
// of terms that each sum must have. With `embeds` the stream is the rows of the embedding. kFp8 selects the order for
// an fp8 matrix.
template <bool kFp8>
__device__ __forceinline__ void write_normed(const Context& block, const float* weight, float input_scale,
                                             uint32_t terms, bool embeds) {
  constexpr uint32_t kWords = 3, kHeld = 2;  // words of a thread, and rows, that are requested together
  constexpr uint32_t kNext = kFp8 ? 2 : 1;   // distance from the first number of a word to the second
  const auto number = [](uint32_t word) { return kFp8 ? word / 2 * 4 + word % 2 : 2 * word; };
  const uint32_t C = block.m.step.embedding.C, words = weight_tiles::padded(C) / 2,
                 stride = weight_tiles::vector_stride(C), T = block.m.step.T;
#pragma unroll 1
  for (uint32_t j = 0; j < T; j += kHeld) {
    float sum[kHeld] = {};
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < words; first += kWords * kTokenThreads) {
      uint64_t word[kHeld][kWords][2] = {};
      const auto exists = [&](uint32_t u, uint32_t h) { return number(first + u * kTokenThreads) + h * kNext < C; };
      const auto load = [&] {
#pragma unroll
        for (uint32_t r = 0; r < kHeld; ++r)
#pragma unroll
          for (uint32_t u = 0; u < kWords; ++u) {
            const uint64_t* const from = block.x(j + r) + number(first + u * kTokenThreads);
            if (j + r >= T) continue;
            if (!kFp8 && exists(u, 0)) ptx::load_relaxed(from, word[r][u]);
            if (kFp8 && exists(u, 0)) word[r][u][0] = ptx::load_relaxed(from);
            if (kFp8 && exists(u, 1)) word[r][u][1] = ptx::load_relaxed(from + kNext);
          }
      };
      if (!embeds) load();
      float scale[kWords][2];
#pragma unroll
      for (uint32_t i = 0; i < 2 * kWords; ++i)
        scale[i / 2][i % 2] =
            exists(i / 2, i % 2) ? __ldcg(weight + number(first + i / 2 * kTokenThreads) + i % 2 * kNext) : 0;
      if (!embeds)
        block.read_again(load, [&] {
          bool all = true;
#pragma unroll
          for (uint32_t r = 0; r < kHeld; ++r)
#pragma unroll
            for (uint32_t i = 0; i < 2 * kWords; ++i)
              all &= has_terms(word[r][i / 2][i % 2], terms) | (j + r >= T) | !exists(i / 2, i % 2);
          return all;
        });
#pragma unroll
      for (uint32_t r = 0; r < kHeld; ++r) {
        if (j + r >= T) continue;
        char* const vector = block.vectors() + (j + r) * stride;
        const bf16* const row = block.m.step.embedding.table + int64_t(block.m.token[j + r]) * block.m.step.embedding.C;
#pragma unroll
        for (uint32_t u = 0; u < kWords; ++u) {
          const uint32_t c = number(first + u * kTokenThreads);
          if (first + u * kTokenThreads >= words) continue;
          float v[2];
#pragma unroll
          for (uint32_t h = 0; h < 2; ++h) {
            v[h] = 0;
            if (exists(u, h)) v[h] = embeds ? float(row[c + h * kNext]) : value_of(word[r][u][h], terms);
            sum[r] += v[h] * v[h];
            v[h] *= scale[u][h] * input_scale;
          }
          *reinterpret_cast<uint32_t*>(vector + 2 * weight_tiles::place(kFp8, c)) = ptx::pack(bf16{}, v[0], v[1]);
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < kHeld; ++r) {
      sum[r] = weight_tiles::lanes_sum(sum[r]);
      if (threadIdx.x % 32 == 0) block.m.squares[threadIdx.x / 32][j + r] = sum[r];
    }
  }
}

// Writes the activation vectors that the blocks of attention have published with this layer's epoch.
template <WeightFormat F>
__device__ __forceinline__ void write_attended(const Context& block, uint32_t C, uint32_t epoch) {
  const uint32_t stride = weight_tiles::vector_stride(C), T = block.m.step.T;
  const tile::EpochWords* from = block.m.step.words.rows.mixed + threadIdx.x;
#pragma unroll 1
  for (uint32_t c = 4 * threadIdx.x; c < weight_tiles::padded(C); c += 4 * kTokenThreads, from += kTokenThreads) {
    tile::EpochWords words[kRows];  // the words of all rows, four numbers each, requested together
    const auto load = [&] {
#pragma unroll
      for (uint32_t j = 0; j < kRows; ++j)
        if (j < T && c < C) words[j] = tile::EpochWords::load(from + j * (C / 4));
    };
    load();
    block.read_again(load, [&] {
      bool complete = true;
#pragma unroll
      for (uint32_t j = 0; j < kRows; ++j) complete &= (words[j].epoch == epoch) | (j >= T) | (c >= C);
      return complete;
    });
#pragma unroll
    for (uint32_t j = 0; j < kRows; ++j)
      if (j < T) weight_tiles::put_words4(block.vectors() + j * stride, F, c, words[j].word[0], words[j].word[1]);
  }
}

// Writes the activation vectors of the pairs `first` to `end - 1` of down. A word is published with all bits inverted,
// so that zero means that the word is not complete.
__device__ __forceinline__ void write_pairs(const Context& block, uint32_t C, uint32_t first, uint32_t end) {
  constexpr uint32_t kHeld = 3;  // pairs that are requested together, of which a thread loads 16 bytes each
  const uint32_t bytes = uint32_t(weight_tiles::vector_bytes(C)), stride = weight_tiles::vector_stride(C);
#pragma unroll 1
  for (uint32_t pair = first; pair < end; pair += kHeld)
#pragma unroll 1
    for (uint32_t at = 16 * threadIdx.x; at < bytes; at += 16 * kTokenThreads) {
      uint64_t words[kHeld][2] = {};
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (pair + u < end)
            ptx::load_relaxed_16(block.shared_vector(block.m.slots.pair[pair + u]) + at, words[u][0], words[u][1]);
      };
      load();
      block.read_again(load, [&] {
        bool complete = true;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kHeld; ++i)
          complete &= ((uint32_t(words[i / 2][i % 2]) != 0) & (words[i / 2][i % 2] >> 32 != 0)) | (pair + i / 2 >= end);
        return complete;
      });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (pair + u < end) {
          const uint64_t low = ~words[u][0], high = ~words[u][1];
          *reinterpret_cast<uint4*>(block.vectors() + (pair - first + u) * stride + at) =
              make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
        }
    }
}

}  // namespace ingot::decode::rows
