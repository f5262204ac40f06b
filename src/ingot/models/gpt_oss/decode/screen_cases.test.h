#pragma once
// Heads that a screen (screen.h) may get wrong: near ties, ties, rows of which eight bits say little, rows that are not
// numbers. For models whose layers add nothing, so that what the head takes is the token's embedding.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ingot/kernels/quant/granules.h"
#include "ingot/models/gpt_oss/decode/decode_cases.test.h"

namespace ingot::testing {

using HeadRows = std::vector<std::vector<float>>;

// A model of one layer, which adds nothing, whose head has these rows: of token 0 the head takes signs(), of others
// random numbers. So many GPUs can share it.
struct ScreenedModel {
  DecodeModel model;

  static GptOssConfig config(int64_t hidden, int64_t vocab, int64_t gpus) {
    GptOssConfig c = gpus == 1 ? decode_config(hidden, 4, 2, 16, 32, 3, 2, 5, 1)
                               : decode_config(hidden, 4 * gpus, gpus, 16, 64 * gpus - 32, 3, 2, 5, 1);
    c.vocab = vocab, c.norm_eps = 0;
    return c;
  }
  explicit ScreenedModel(const HeadRows& rows, int64_t gpus = 1)
      : model(config(int64_t(rows[0].size()), int64_t(rows.size()), gpus), WeightFormat::bf16, WeightFormat::mxfp4, 7) {
    GptOssLayer& l = model.weights.layers[0];
    std::fill_n(l.o.data.ptr<uint8_t>(), l.o.data.bytes(), uint8_t(0));
    std::fill_n(l.down.data.ptr<uint8_t>(), l.down.data.bytes(), uint8_t(0));
    std::fill_n(l.b_o.ptr<float>(), l.b_o.numel(), 0.f);
    std::fill_n(l.b_down.ptr<float>(), l.b_down.numel(), 0.f);
    const int64_t C = model.config.hidden;
    std::fill_n(model.weights.norm.ptr<float>(), C, 1.f);
    for (int64_t c = 0; c < C; ++c) model.weights.embed.data.ptr<bf16>()[c] = bf16(sign(c));
    const WeightMatrix& head = model.weights.head;
    uint8_t* const data = head.data.ptr<uint8_t>();
    for (size_t n = 0; n < rows.size(); ++n)
      for (int64_t c = 0; c < C; ++c)
        *reinterpret_cast<bf16*>(data + int64_t(n) / 16 * band_bytes(WeightFormat::bf16, C) +
                                 detail::granule_place(WeightFormat::bf16, int64_t(n % 16), c).byte) =
            bf16(rows[n][size_t(c)]);
  }
  static float sign(int64_t c) { return c * 7 % 11 < 5 ? 1.f : -1.f; }
};

inline HeadRows random_head(size_t rows, size_t cols, uint64_t seed, double scale = 0.1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, float(scale));
  HeadRows head(rows, std::vector<float>(cols));
  for (auto& row : head)
    for (float& w : row) w = normal(random);
  return head;
}
// Codes of two rows are off by nearly half a step in every number, with the signs of what they meet: the one, whose
// logit of token 0 is the largest, is taken for much smaller, the other for much larger.
inline void mislead(HeadRows& head, size_t largest, size_t other) {
  for (size_t c = 0; c < head[0].size(); ++c) {
    const float sign = ScreenedModel::sign(int64_t(c));
    head[largest][c] = sign * (c == 0 ? 1.9375f : 1 + 3 / 128.f);
    head[other][c] = sign * (c == 0 ? -1.9375f : 1 + 5 / 128.f);
  }
}
inline std::vector<std::pair<std::string, HeadRows>> heads_to_screen(size_t rows, size_t cols) {
  std::vector<std::pair<std::string, HeadRows>> all;
  const auto sign = [](size_t c) { return ScreenedModel::sign(int64_t(c)); };
  all.emplace_back("random", random_head(rows, cols, 1));
  {
    HeadRows head = random_head(rows, cols, 2, 1e-3);
    mislead(head, rows / 3, rows - 2);
    all.emplace_back("errors against it", head);
  }
  {
    HeadRows head = random_head(rows, cols, 3);  // the same row many times, and one bit beside it
    for (size_t n = 5; n < rows; n += 3) {
      for (size_t c = 0; c < cols; ++c) head[n][c] = sign(c) * (0.2f + 0.01f * float(c % 13));
      head[n][n % cols] *= n % 2 == 0 ? 1 + 1 / 128.f : 1;
    }
    all.emplace_back("near ties", head);
  }
  all.emplace_back("all rows alike", HeadRows(rows, random_head(1, cols, 4)[0]));
  all.emplace_back("zeros", HeadRows(rows, std::vector<float>(cols)));
  {
    HeadRows head = random_head(rows, cols, 5);  // numbers of very different size in a row, and rows
    std::mt19937 random(6);
    for (auto& row : head)
      for (float& w : row) w = std::ldexp(w, -int(random() % 40));
    all.emplace_back("of many sizes", head);
  }
  all.emplace_back("subnormal", random_head(rows, cols, 7, 0x1p-128));
  all.emplace_back("so small that all are read", random_head(rows, cols, 8, 1e-34));
  {
    HeadRows head = random_head(rows, cols, 9);
    head[rows / 2][3] = INFINITY;
    all.emplace_back("an infinity", head);
    head[rows / 2][3] = -INFINITY;
    all.emplace_back("minus infinity", head);
    head[rows - 1][1] = NAN;
    all.emplace_back("not a number", head);
  }
  {
    HeadRows head = random_head(rows, cols, 10);
    for (size_t c = 0; c < cols; ++c) head[rows / 2][c] = sign(c) * 0x1.8p126f, head[rows - 1][c] = sign(c) * 1e35f;
    all.emplace_back("overflowing", head);
  }
  HeadRows nothing(rows, std::vector<float>(cols));
  for (auto& row : nothing)
    for (size_t c = 0; c < cols; ++c) row[c] = c == 0 ? -sign(c) * INFINITY : 0;
  all.emplace_back("all minus infinity", nothing);
  return all;
}

}  // namespace ingot::testing
