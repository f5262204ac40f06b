// Attention of the rows of a step on the emulator, compared with the formula in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ingot/models/decode/batch/batch.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

struct AttentionSizes {
  uint32_t kv_heads, group, dim, cache_dim, window, cache_rows;
  std::vector<uint32_t> positions;  // of the sequences' new tokens
};

// Slots with random keys and values, and the queries, keys and values of a step.
struct AttentionStep {
  AttentionSizes s;
  uint32_t heads, most = 0;
  size_t slot_bytes, cache;  // numbers of a slot's keys
  std::vector<char> memory;
  std::vector<float> qkv, cos, sin, sinks, part_max, part_sum, part_out;
  std::vector<uint32_t> arrived;
  std::vector<bf16> mixed;
  decode::BatchInput input = {};

  explicit AttentionStep(const AttentionSizes& sizes, uint32_t T) : s(sizes), heads(s.kv_heads * s.group) {
    const auto normal = [](std::vector<float>& v, size_t n, uint64_t seed, double scale) {
      v.resize(n);
      testing::fill_normal(Tensor(v.data(), {int64_t(n)}), seed, scale, 0);
    };
    for (const uint32_t position : s.positions) most = std::max(most, position + 1);
    cache = size_t(s.kv_heads) * s.cache_rows * s.cache_dim;
    slot_bytes = 256 + (2 * cache * sizeof(bf16) + 255) / 256 * 256;
    memory.assign(slot_bytes * s.positions.size() + 256, 0);
    std::vector<float> numbers;
    for (size_t slot = 0; slot < s.positions.size(); ++slot) {
      state(slot).position = int32_t(s.positions[slot]);
      normal(numbers, 2 * cache, 10 + slot, 1);
      for (size_t i = 0; i < 2 * cache; ++i)
        keys(slot)[i] = i % s.cache_dim < s.dim ? bf16(numbers[i]) : bf16();  // the padding is zeros
    }
    normal(qkv, size_t(T) * (heads + 2 * s.kv_heads) * s.dim, 1, 1);
    normal(sinks, heads, 2, 1);
    for (uint32_t t = 0; t < most; ++t)
      for (uint32_t d = 0; d < s.dim / 2; ++d) {
        const double angle = t * std::pow(1e4, -2.0 * d / s.dim);
        cos.push_back(float(std::cos(angle))), sin.push_back(float(std::sin(angle)));
      }
    part_max.assign(size_t(T) * heads * decode::kBatchParts, NAN), part_sum = part_max;
    part_out.assign(part_max.size() * s.cache_dim, NAN);
    arrived.assign(size_t(T) * s.kv_heads * decode_attention::tiles_of(1, s.group), 0);
    mixed.assign(size_t(T) * heads * s.dim, bf16(NAN));
  }
  char* slot(size_t i) {
    return reinterpret_cast<char*>((uintptr_t(memory.data()) + 255) / 256 * 256) + i * slot_bytes;
  }
  decode::State& state(size_t i) { return *reinterpret_cast<decode::State*>(slot(i)); }
  bf16* keys(size_t i) { return reinterpret_cast<bf16*>(slot(i) + 256); }
  bf16* values(size_t i) { return keys(i) + cache; }

  // Row j of the step is sequence `of[j]`.
  void run(const std::vector<uint32_t>& of, uint32_t T) {
    input.count = uint32_t(of.size());
    std::copy(of.begin(), of.end(), input.slot);
    decode::BatchedSequences sequences;
    sequences.input = &input, sequences.slot_bytes = int64_t(slot_bytes), sequences.state = &state(0);
    sequences.arrived = arrived.data();
    sequences.part_max = part_max.data(), sequences.part_sum = part_sum.data(), sequences.part_out = part_out.data();
    decode::attend_batch(sequences,
                         {.qkv = qkv.data(),
                          .cos = cos.data(),
                          .sin = sin.data(),
                          .sinks = sinks.data(),
                          .keys = keys(0),
                          .values = values(0),
                          .T = 1,
                          .heads = heads,
                          .kv_heads = s.kv_heads,
                          .dim = s.dim,
                          .rows = s.cache_rows,
                          .window = s.window,
                          .parts = decode::batch_parts(s.window, 1 << 17),
                          .tiles = decode_attention::tiles_of(1, s.group),
                          .group = s.group,
                          .scale = scale(),
                          .mixed_rows = mixed.data()},
                         {s.cache_dim, 0}, T, 0, {});
  }
  float scale() const { return float(2 / std::sqrt(double(s.dim))); }
  std::vector<float> row(uint32_t j) const {
    std::vector<float> y;
    for (uint32_t i = 0; i < heads * s.dim; ++i) y.push_back(mixed[size_t(j) * heads * s.dim + i]);
    return y;
  }
  // Vector h of a row, in order of queries, keys and values, rotated and rounded as the kernel does.
  std::vector<float> vector_of(uint32_t j, uint32_t h, bool rotates) const {
    const float* const x = qkv.data() + (size_t(j) * (heads + 2 * s.kv_heads) + h) * s.dim;
    std::vector<float> y(s.dim);
    const size_t at = size_t(s.positions[input.slot[j]]) * (s.dim / 2);
    for (uint32_t d = 0; d < s.dim / 2; ++d) {
      const float c = rotates ? cos[at + d] : 1, si = rotates ? sin[at + d] : 0;
      y[d] = bf16(x[d] * c - x[d + s.dim / 2] * si), y[d + s.dim / 2] = bf16(x[d + s.dim / 2] * c + x[d] * si);
    }
    return y;
  }
  // The result of a query head in fp64, and the mean of |value| with the same weights.
  void expected(uint32_t j, uint32_t h, std::vector<double>& y, std::vector<double>& size) {
    const uint32_t slot = input.slot[j], fresh = s.positions[slot], kv = h / s.group;
    const uint32_t low = s.window > 0 && fresh + 1 > s.window ? fresh + 1 - s.window : 0;
    const std::vector<float> q = vector_of(j, h, true);
    std::vector<double> scores;
    double top = sinks[h], sum = 0;
    for (uint32_t key = low; key <= fresh; ++key) {
      const bf16* const k = keys(slot) + (size_t(kv) * s.cache_rows + key % s.cache_rows) * s.cache_dim;
      double dot = 0;
      for (uint32_t d = 0; d < s.dim; ++d) dot += double(q[d]) * float(k[d]);
      scores.push_back(dot * scale()), top = std::max(top, scores.back());
    }
    y.assign(s.dim, 0), size.assign(s.dim, 0);
    for (double& score : scores) sum += score = std::exp(score - top);
    sum += std::exp(sinks[h] - top);
    for (uint32_t key = low; key <= fresh; ++key) {
      const bf16* const v = values(slot) + (size_t(kv) * s.cache_rows + key % s.cache_rows) * s.cache_dim;
      for (uint32_t d = 0; d < s.dim; ++d)
        y[d] += scores[key - low] / sum * float(v[d]), size[d] += scores[key - low] / sum * std::abs(float(v[d]));
    }
  }
};

const std::vector<AttentionSizes>& attention_sizes() {
  static const std::vector<AttentionSizes> all = {
      // GPT-OSS's heads, with its window and without: few keys, a window's edge, several groups a warp
      {2, 8, 64, 64, 128, 300, {0, 15, 126, 127, 128, 129, 299, 700}},
      {2, 8, 64, 64, 0, 800, {0, 16, 127, 128, 255, 799}},
      // several parts, whose number differs from row to row
      {1, 8, 64, 64, 0, 5000, {1535, 1536, 3071, 3072, 4999}},
      {1, 4, 64, 64, 2000, 2200, {1999, 2001, 6000}},
      // more further parts than blocks that take them
      {8, 1, 64, 64, 0, 1600, {1599, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1550, 9}},
      // padded heads; one, nine and sixteen queries of a key head; a cache with fewer rows than a group
      {3, 1, 48, 64, 0, 40, {3, 39}},
      {1, 16, 32, 64, 0, 12, {0, 11}},
      {2, 9, 80, 128, 0, 200, {0, 63, 199}},
      {1, 16, 64, 64, 0, 3100, {3099, 40}},
      {1, 4, 128, 128, 100, 140, {50, 99, 100, 400}},
      {1, 2, 128, 128, 0, 1700, {1534, 1699}},
  };
  return all;
}

TEST(BatchAttentionEmulated, EveryRowAttendsToTheKeysOfItsSlot) {
  for (const AttentionSizes& s : attention_sizes()) {
    SCOPED_TRACE(::testing::Message() << s.group << " queries of " << s.dim << ", window " << s.window);
    const uint32_t count = uint32_t(s.positions.size()), T = count + 2;
    AttentionStep step(s, T);
    const std::vector<char> before = step.memory;
    std::vector<uint32_t> of;
    for (uint32_t j = 0; j < count; ++j) of.push_back(count - 1 - j);
    step.run(of, T);
    for (const uint32_t arrivals : step.arrived) EXPECT_EQ(arrivals, 0u);
    std::vector<double> want, size;
    for (uint32_t j = 0; j < count; ++j) {
      const std::vector<float> got = step.row(j);
      for (uint32_t h = 0; h < step.heads; ++h) {
        step.expected(j, h, want, size);
        // The share of a key and the result are rounded to bf16, each by at most 2^-9; the products and sums in fp32
        // add less than one more such error.
        for (uint32_t d = 0; d < s.dim; ++d)
          ASSERT_NEAR(got[h * s.dim + d], want[d], 3.0 / 512 * size[d]) << "row " << j << ", head " << h << ", " << d;
      }
    }
    for (uint32_t j = count; j < T; ++j)
      for (const float v : step.row(j)) ASSERT_TRUE(std::isnan(v)) << "row " << j << " belongs to no sequence";
    // Each slot has its new key and value, and nothing else has changed.
    const std::vector<char> after = step.memory;
    std::copy(before.begin(), before.end(), step.memory.begin());
    for (uint32_t j = 0; j < count; ++j)
      for (uint32_t kv = 0; kv < s.kv_heads; ++kv) {
        const size_t at = (size_t(kv) * s.cache_rows + s.positions[of[j]] % s.cache_rows) * s.cache_dim;
        const std::vector<float> key = step.vector_of(j, step.heads + kv, true),
                                 value = step.vector_of(j, step.heads + s.kv_heads + kv, false);
        for (uint32_t d = 0; d < s.dim; ++d)
          step.keys(of[j])[at + d] = bf16(key[d]), step.values(of[j])[at + d] = bf16(value[d]);
      }
    EXPECT_TRUE(after == step.memory);
  }
}

TEST(BatchAttentionEmulated, ARowHasTheSameBitsInEveryCompany) {
  for (const AttentionSizes& s : attention_sizes()) {
    SCOPED_TRACE(::testing::Message() << s.group << " queries of " << s.dim << ", window " << s.window);
    const uint32_t count = uint32_t(s.positions.size());
    AttentionStep together(s, count);
    std::vector<uint32_t> of;
    for (uint32_t j = 0; j < count; ++j) of.push_back(j);
    together.run(of, count);
    AttentionStep alone(s, 16);
    const size_t width = (alone.heads + 2 * s.kv_heads) * s.dim;
    for (uint32_t j = 0; j < count; ++j) {
      std::copy_n(together.qkv.begin() + std::ptrdiff_t(j * width), width, alone.qkv.begin());
      alone.run({j}, 16);
      EXPECT_EQ(alone.row(0), together.row(j)) << "row " << j;
    }
  }
}

// A counter returns to zero after the arrivals of all parts and tiles of a key head and not earlier: from every value
// that the counter can have during a step, as many arrivals lead back to this value. The block whose arrival the
// counter takes for the last one adds all parts, so that it must not be earlier.
TEST(BatchAttentionEmulated, TheBlocksOfAllPartsAndTilesOfAKeyHeadArriveBeforeOneOfThemAddsTheParts) {
  for (const uint32_t group : {8, 12, 16}) {
    const uint32_t parts = 3, arrivals = parts * ((group + 7) / 8);
    for (uint32_t begun = 0; begun < arrivals; ++begun) {
      AttentionStep step({2, group, 64, 64, 0, 3200, {3080}}, 1);
      std::fill(step.arrived.begin(), step.arrived.end(), begun);
      step.run({0}, 1);
      EXPECT_EQ(step.arrived[0], begun) << group << " queries";
      EXPECT_EQ(step.arrived[1], begun) << group << " queries";
    }
  }
}

}  // namespace
}  // namespace ingot
