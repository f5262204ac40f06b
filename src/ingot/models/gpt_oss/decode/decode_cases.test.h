#pragma once
// Small random models for tests of decoding, what they should give, and what a chain of bf16 roundings does to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ingot/kernels/quant/e4m3_blocks.h"
#include "ingot/kernels/quant/granules.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/gpt_oss/decode/decode.h"
#include "ingot/models/gpt_oss/decode/state.h"
#include "ingot/models/gpt_oss/gpt_oss.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

// Under a sanitizer a test takes ten times as long, and what it finds depends on shapes, formats and who runs when,
// hardly on numbers: what is left out there repeats others' shapes with other numbers. All of it runs in builds without
// one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

inline GptOssConfig decode_config(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t dim, int64_t intermediate,
                                  int64_t experts, int64_t per_token, int64_t window, int64_t layers = 3) {
  GptOssConfig c;
  c.vocab = 53, c.hidden = hidden, c.layers = layers, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = dim;
  c.experts = experts, c.experts_per_token = per_token, c.intermediate = intermediate, c.window = window;
  for (int64_t l = 0; l < layers; ++l) c.sliding.push_back(l % 2 == 0);
  c.context = 256;
  c.rope_scaling.factor = 32, c.rope_scaling.original_context = 64;
  return c;
}

// So many layers of the published shapes.
inline GptOssConfig published_config(int64_t layers, int64_t experts, int64_t vocab) {
  GptOssConfig c;
  c.vocab = vocab, c.hidden = c.intermediate = 2880, c.layers = layers, c.heads = 64, c.kv_heads = 8, c.head_dim = 64;
  c.experts = experts, c.experts_per_token = 4;
  for (int64_t l = 0; l < layers; ++l) c.sliding.push_back(l % 2 == 0);
  c.rope_scaling.factor = 32, c.rope_scaling.original_context = 4096;
  return c;
}

// Weights in granules at a scale at which every part of the model matters.
class DecodeModel {
 public:
  GptOssConfig config;
  GptOssWeights weights;

  DecodeModel(const GptOssConfig& c, WeightFormat dense, WeightFormat experts, uint64_t seed)
      : config(c), seed_(seed * 1000) {
    const double in = 1 / std::sqrt(double(c.hidden));
    weights.embed = WeightMatrix(normal(DType::bf16, {c.vocab, c.hidden}, 1));
    for (int64_t l = 0; l < c.layers; ++l) {
      GptOssLayer y;
      y.attn_norm = normal(DType::f32, {c.hidden}, 0.2, 1), y.mlp_norm = normal(DType::f32, {c.hidden}, 0.2, 1);
      y.qkv = matrix(dense, 0, c.qkv_width(), c.hidden, 1.5 * in);
      y.b_qkv = c.attention_bias ? normal(DType::f32, {c.qkv_width()}, 0.5) : Tensor();
      y.sinks = normal(DType::f32, {c.heads}, 1);
      y.o = matrix(dense, 0, c.hidden, c.q_width(), 1 / std::sqrt(double(c.q_width())));
      y.b_o = c.attention_bias ? normal(DType::f32, {c.hidden}, 0.3) : Tensor();
      y.router = matrix(WeightFormat::bf16, 0, c.experts, c.hidden, 4 * in);
      y.b_router = normal(DType::f32, {c.experts}, 1);
      y.gate_up = matrix(experts, c.experts, 2 * c.intermediate, c.hidden, 3 * in);  // beyond the clamp at times
      y.b_gate_up = normal(DType::f32, {c.experts, 2 * c.intermediate}, 0.5);
      y.down = matrix(experts, c.experts, c.hidden, c.intermediate, 0.3 / std::sqrt(double(c.intermediate)));
      y.b_down = normal(DType::f32, {c.experts, c.hidden}, 0.3);
      weights.layers.push_back(y);
    }
    weights.norm = normal(DType::f32, {c.hidden}, 0.2, 1);
    weights.head = matrix(dense, 0, c.vocab, c.hidden, 2 * in);
  }

 private:
  void* keep(int64_t bytes) {
    memory_.push_back(std::make_unique<std::vector<char>>(size_t(bytes) + 64));
    return reinterpret_cast<void*>((uintptr_t(memory_.back()->data()) + 63) / 64 * 64);
  }
  Tensor normal(DType dtype, Shape shape, double scale, double mean = 0) {
    const Tensor t(keep(shape.numel() * size_of(dtype)), dtype, shape);
    fill_normal(t, seed_ + next_++, scale, mean);
    return t;
  }
  WeightMatrix matrix(WeightFormat f, int64_t experts, int64_t rows, int64_t cols, double scale) {
    const int64_t one = granule_bands(rows) * band_bytes(f, cols), n = std::max<int64_t>(1, experts);
    const WeightMatrix w = granules_at(keep(n * one), f, experts, rows, cols);
    for (int64_t e = 0; e < n; ++e) {
      const WeightMatrix to = experts > 0 ? w.at(e) : w;
      std::vector<float> numbers(size_t(rows * cols));
      const Tensor x(numbers.data(), {rows, cols});
      fill_normal(x, seed_ + next_++, scale);
      std::vector<char> data(size_t(rows * cols * 2)), scales(size_t(rows * std::max<int64_t>(4, cols)));
      const WeightMatrix stored =
          f == WeightFormat::bf16 ? WeightMatrix(Tensor(data.data(), DType::bf16, {rows, cols}))
          : f == WeightFormat::fp8
              ? WeightMatrix(f, Tensor(data.data(), DType::u8, {rows, cols}), Tensor(scales.data(), DType::f32, {rows}))
              : WeightMatrix(f, Tensor(data.data(), DType::u8, {rows, cols / kMxBlock, kMxBlock / 2}),
                             Tensor(scales.data(), DType::u8, {rows, cols / kMxBlock}));
      if (f == WeightFormat::bf16)
        assign(stored.data, std::vector<double>(numbers.begin(), numbers.end()));
      else
        quantise(x, stored, {});
      pack_granules(stored, to);
    }
    return w;
  }
  uint64_t seed_, next_ = 0;
  std::vector<std::unique_ptr<std::vector<char>>> memory_;
};

// The model in fp64; with `rounded`, what products take and what the cache holds is rounded to bf16, each number once.
class DecodeReference {
 public:
  // chance: the seed of what moves numbers, by at most half a step of bf16, before they are rounded; 0: nothing does.
  DecodeReference(const DecodeModel& m, bool rounded, uint64_t chance = 0)
      : c_(m.config), w_(m.weights), rounded_(rounded), chance_(chance), random_(chance) {
    const RopeFrequencies f = rope_frequencies(c_.head_dim, c_.rope_base, c_.rope_scaling);
    frequencies_ = f;
    keys_.resize(w_.layers.size()), values_.resize(w_.layers.size());
  }
  // Takes these experts, by layer, where rounding may decide between near ties; else its own.
  using Choices = std::vector<std::vector<int64_t>>;
  std::vector<double> token(int32_t id, const Choices& choices = {}) {
    std::vector<double> x = row(w_.embed, id);
    for (size_t l = 0; l < w_.layers.size(); ++l) {
      const GptOssLayer& y = w_.layers[l];
      add(x, times(y.o, 0, attention(l, times(y.qkv, 0, normed(x, y.attn_norm), y.b_qkv)), y.b_o));
      add(x, experts(y, normed(x, y.mlp_norm), choices.empty() ? nullptr : &choices[l]));
    }
    ++position_;
    return times(w_.head, 0, normed(x, w_.norm), {});
  }
  double worst_choice = 0;  // by how much a better expert than one of `choices` was ahead

 private:
  using Row = std::vector<double>;
  double r(double v) {
    if (chance_ != 0) v += (double(random_() >> 11) * 0x1p-53 - 0.5) * 0x1p-8 * std::abs(v);
    return rounded_ ? double(float(bf16(float(v)))) : v;
  }
  // What an expert's product takes, where the config has them rounded: e4m3 by trying all scales from below.
  Row taken(Row x) const {
    for (size_t first = 0; c_.e4m3_inputs && first < x.size(); first += 32) {
      const size_t end = std::min(first + 32, x.size());
      double top = 0, scale = 0x1p-118;
      for (size_t i = first; i < end; ++i) top = std::max(top, std::abs(x[i] = double(float(bf16(float(x[i]))))));
      while (top > 448 * scale) scale *= 2;
      for (size_t i = first; i < end; ++i) x[i] = double(e4m3_value(e4m3_nearest(float(x[i] / scale)))) * scale;
    }
    return x;
  }
  static void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  Row row(const WeightMatrix& w, int64_t n) {
    Row out(size_t(w.cols()));
    dequantise(w.row_range(n, n + 1), Tensor(out.data(), {1, w.cols()}), {});
    return out;
  }
  const Row& wide(const WeightMatrix& w) {
    Row& numbers = wide_[w.data.data];
    if (numbers.empty()) {
      numbers.resize(size_t(w.rows() * w.cols()));
      dequantise(w, Tensor(numbers.data(), {w.rows(), w.cols()}), {});
    }
    return numbers;
  }
  Row normed(const Row& x, const Tensor& weight) {
    double sum = 0;
    for (double v : x) sum += v * v;
    const double rstd = 1 / std::sqrt(sum / double(x.size()) + c_.norm_eps);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = r(x[i] * double(weight.ptr<float>()[i]) * rstd);
    return y;
  }
  Row times(const WeightMatrix& bank, int64_t expert, const Row& x, const Tensor& bias) {
    const WeightMatrix w = bank.is_bank() ? bank.at(expert) : bank;
    const Row& numbers = wide(w);
    Row y(size_t(w.rows()));
    for (size_t n = 0; n < y.size(); ++n) {
      for (size_t k = 0; k < x.size(); ++k) y[n] += numbers[n * x.size() + k] * x[k];
      if (bias) y[n] += double(bias.ptr<float>()[(bank.is_bank() ? size_t(expert) * y.size() : 0) + n]);
    }
    return y;
  }
  void rotate(double* v) {
    const size_t half = size_t(c_.head_dim / 2);
    for (size_t i = 0; i < half; ++i) {
      const double angle = double(position_) * frequencies_.theta[i], co = frequencies_.amplitude * std::cos(angle),
                   si = frequencies_.amplitude * std::sin(angle), a = v[i], b = v[i + half];
      v[i] = r(a * co - b * si), v[i + half] = r(b * co + a * si);
    }
  }
  Row attention(size_t l, Row qkv) {
    const int64_t D = c_.head_dim, group = c_.heads / c_.kv_heads;
    for (int64_t h = 0; h < c_.heads + c_.kv_heads; ++h) rotate(&qkv[size_t(h * D)]);
    for (int64_t i = 0; i < c_.kv_width(); ++i) {
      keys_[l].push_back(qkv[size_t(c_.q_width() + i)]);
      values_[l].push_back(r(qkv[size_t(c_.q_width() + c_.kv_width() + i)]));
    }
    const int64_t low = c_.sliding[l] ? std::max<int64_t>(0, position_ + 1 - c_.window) : 0;
    Row out(size_t(c_.q_width()));
    for (int64_t h = 0; h < c_.heads; ++h) {
      const double sink = double(w_.layers[l].sinks.ptr<float>()[h]);
      Row s;
      double top = sink, sum = 0;
      for (int64_t j = low; j <= position_; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < D; ++d)
          dot += qkv[size_t(h * D + d)] * keys_[l][size_t(j * c_.kv_width() + h / group * D + d)];
        s.push_back(dot / std::sqrt(double(D)));
        top = std::max(top, s.back());
      }
      for (double& v : s) sum += v = std::exp(v - top);
      sum += std::exp(sink - top);
      for (int64_t d = 0; d < D; ++d) {
        double v = 0;
        for (int64_t j = low; j <= position_; ++j)
          v += r(s[size_t(j - low)]) * values_[l][size_t(j * c_.kv_width() + h / group * D + d)];
        out[size_t(h * D + d)] = r(v / sum);
      }
    }
    return out;
  }
  Row experts(const GptOssLayer& y, const Row& x, const std::vector<int64_t>* given) {
    const Row logits = times(y.router, 0, x, y.b_router);
    std::vector<int64_t> order(size_t(c_.experts));
    for (size_t e = 0; e < order.size(); ++e) order[e] = int64_t(e);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
    order.resize(size_t(c_.experts_per_token));
    if (given != nullptr) {
      for (int64_t e : *given) worst_choice = std::max(worst_choice, logits[size_t(order.back())] - logits[size_t(e)]);
      order = *given;
    }
    double sum = 0;
    for (int64_t e : order) sum += std::exp(logits[size_t(e)] - logits[size_t(order[0])]);
    Row out(x.size());
    for (int64_t e : order) {
      const Row z = times(y.gate_up, e, taken(x), y.b_gate_up);
      Row h(size_t(c_.intermediate));
      for (size_t j = 0; j < h.size(); ++j) {
        const double gate = std::min(z[2 * j], c_.swiglu_limit),
                     up = std::clamp(z[2 * j + 1], -c_.swiglu_limit, c_.swiglu_limit);
        h[j] = r(gate / (1 + std::exp(-c_.swiglu_alpha * gate)) * (up + 1));
      }
      Row d = times(y.down, e, taken(h), y.b_down);
      for (double& v : d) v *= std::exp(logits[size_t(e)] - logits[size_t(order[0])]) / sum;
      add(out, d);
    }
    return out;
  }

  const GptOssConfig& c_;
  const GptOssWeights& w_;
  bool rounded_;
  uint64_t chance_;
  std::mt19937_64 random_;
  int64_t position_ = 0;
  RopeFrequencies frequencies_;
  std::vector<Row> keys_, values_;  // by layer, (positions, kv_width)
  std::map<const void*, Row> wide_;
};

// Root mean square and largest difference of two rows of logits.
struct LogitError {
  double sum = 0, largest = 0;
  int64_t count = 0;
  void add(const std::vector<double>& got, const std::vector<double>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      const double e = got[i] - want[i];
      if (!(std::abs(e) <= largest)) largest = std::abs(e);  // a NaN stays
      sum += e * e;
    }
    count += int64_t(want.size());
  }
  double rms() const { return std::sqrt(sum / double(count)); }
};

// --- cases

struct DecodeCase {
  std::string name;
  GptOssConfig config;
  WeightFormat dense, experts;
  int64_t length;                // tokens in all
  std::vector<int64_t> batches;  // the first ones' sizes; the rest come one by one
  int chains = 0;                // more of them, rounded by chance: what rounding does to a model that nobody chose
};
inline std::vector<DecodeCase> decode_cases() {
  constexpr WeightFormat kBf16 = WeightFormat::bf16, kFp8 = WeightFormat::fp8, kMx = WeightFormat::mxfp4;
  const GptOssConfig small = decode_config(96, 8, 2, 16, 96, 6, 2, 5),
                     formats = decode_config(64, 4, 2, 32, 96, 4, 2, 7, 2);
  GptOssConfig odd = decode_config(46, 3, 1, 100, 25, 5, 1, 3, 2);
  odd.attention_bias = false;
  return {{"one token at a time", small, kBf16, kMx, 9, {}},
          {"prompts of several sizes", small, kBf16, kMx, 28, {16, 3, 7}},
          {"fp8, mxfp4", formats, kFp8, kMx, 12, {9}},
          {"mxfp4, mxfp4", formats, kMx, kMx, 12, {9}},
          {"mxfp4, fp8", formats, kMx, kFp8, 12, {9}},
          {"bf16, fp8", formats, kBf16, kFp8, 4, {3}},
          {"keys in many parts",
           decode_config(64, 8, 1, 8, 32, 3, 3, 70, 2),
           kBf16,
           kMx,
           150,
           {16, 16, 16, 16, 16, 16, 16, 16, 16}},
          {"no bias, odd widths, wide heads", odd, kBf16, kBf16, 14, {8, 2}}};
}

// Models of any shape that a GPU takes, in any formats, of tokens in batches of any sizes: case k of a seed.
inline DecodeCase random_case(uint64_t seed, uint64_t k) {
  std::mt19937_64 random(seed * 1000003 + k);
  const auto one_of = [&](std::initializer_list<int64_t> all) { return all.begin()[random() % all.size()]; };
  const auto upto = [&](int64_t n) { return 1 + int64_t(random() % uint64_t(n)); };
  const auto format = [&] {
    return WeightFormat(
        one_of({int64_t(WeightFormat::bf16), int64_t(WeightFormat::fp8), int64_t(WeightFormat::mxfp4)}));
  };
  const WeightFormat dense = format(), experts = format();
  const bool blocks = dense == WeightFormat::mxfp4 || experts == WeightFormat::mxfp4;  // of 32 numbers
  const int64_t kv_heads = one_of({1, 1, 2, 3, 4, 8}), group = one_of({1, 1, 2, 3, 4, 5, 7, 8, 9}),
                number = one_of({1, 2, 3, 5, 6, 17, 32, 40});
  int64_t dim = one_of({2, 6, 8, 16, 32, 32, 64, 64, 66, 100, 128});
  if (dense == WeightFormat::mxfp4) dim = one_of({32, 64, 96, 128});
  const int64_t hidden = blocks ? 32 * upto(9) : upto(300),
                intermediate = experts == WeightFormat::mxfp4 ? 32 * upto(7) : upto(200);
  const int64_t layers = upto(4), window = one_of({1, 2, 5, 15, 16, 17, 31, 32, 33, 70}),
                per_token = std::min(number, one_of({1, 2, 3, 4, 8}));
  GptOssConfig c =
      decode_config(hidden, kv_heads * group, kv_heads, dim, intermediate, number, per_token, window, layers);
  c.vocab = one_of({1, 2, 53, 127, 128, 129, 300, 1000});
  for (size_t l = 0; l < c.sliding.size(); ++l) c.sliding[l] = random() % 2 == 0;
  c.attention_bias = random() % 4 != 0;
  DecodeCase t{"", c, dense, experts, upto(45), {}, 7};
  const int64_t most = gpt_oss_decode::max_columns(c);  // of a step, whose choices are looked at
  for (int64_t at = 0; at < t.length && random() % 5 != 0; at += t.batches.back())
    t.batches.push_back(std::min({t.length - at, upto(16), one_of({1, 2, 8, 9, 16}), most}));
  t.name = detail::concat("seed ", seed, " case ", k, ": ", dense, " and ", experts, ", vocab ", c.vocab, ", hidden ",
                          c.hidden, ", ", c.layers, " layers, ", c.heads, " heads on ", kv_heads, " of ", dim, ", ",
                          number, " experts of ", intermediate, ", ", c.experts_per_token, " a token, window ",
                          c.window, ", ", t.length, " tokens");
  return t;
}
// Some of them; INGOT_DECODE_SEED, _FIRST and _CASES in the environment: others.
inline std::vector<DecodeCase> random_cases(uint64_t usual) {
  const auto number = [](const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  std::vector<DecodeCase> all;
  const uint64_t first = number("INGOT_DECODE_FIRST", 0);
  for (uint64_t k = first; k < first + number("INGOT_DECODE_CASES", usual); ++k)
    all.push_back(random_case(number("INGOT_DECODE_SEED", 1), k));
  return all;
}

// Models whose experts take e4m3: alone, together, of 32 numbers that do not divide the widths, in every format.
inline std::vector<DecodeCase> rounded_cases() {
  std::vector<DecodeCase> all;
  for (const DecodeCase& t : decode_cases()) {
    // Attention over many keys knows nothing of rounded inputs, prompts of several sizes are batches of other cases.
    if (kSanitized && t.length > 20) continue;
    all.push_back(t);
    all.back().config.e4m3_inputs = true;
  }
  return all;
}

// Whatever runs the kernels, emulated or on a GPU.
struct DecodeUnderTest {
  std::function<std::vector<std::vector<double>>(std::span<const int32_t>)> extend;  // logits of all
  std::function<DecodeReference::Choices(size_t)> choices;                           // of a token of the last step
  std::function<gpt_oss_decode::State()> state;
};
// The experts that token t of the last step went to, by layer. `b` in memory the host can read.
inline DecodeReference::Choices choices_of(const gpt_oss_decode::Buffers& b, int64_t layers, size_t t) {
  DecodeReference::Choices all(static_cast<size_t>(layers));
  for (size_t l = 0; l < all.size(); ++l) {
    const routing::Lists lists = b.lists_of(l);
    for (uint32_t i = 0; i < *lists.count; ++i)
      if (lists.row[i * routing::kTokens + t] >= 0) all[l].push_back(lists.expert[i]);
  }
  return all;
}

template <class Make> void check_decode(const DecodeCase& t, Make&& make) {
  SCOPED_TRACE(t.name);
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  std::vector<int32_t> ids(static_cast<size_t>(t.length));
  fill_ids(Tensor(ids.data(), {t.length}), 3, t.config.vocab);
  DecodeReference alone(m, false), exact(m, false), chain(m, true);
  std::vector<DecodeReference> others;
  for (int i = 0; i < t.chains; ++i) others.emplace_back(m, true, uint64_t(1 + i));
  std::vector<LogitError> of_others(others.size());
  GptOss engine(m.config, m.weights, {.batch = t.length, .positions = t.length});
  GptOssCache cache(m.config, m.config.layers, t.length, t.length);
  std::vector<float> engine_logits(size_t(t.length * t.config.vocab));
  engine.logits(engine.extend(ids, cache), Tensor(engine_logits.data(), {t.length, t.config.vocab}));
  const DecodeUnderTest gpu = make(m, t.length);
  LogitError of_engine, of_chain, of_gpu;
  size_t batch = 0;
  for (int64_t at = 0; at < t.length;) {
    const int64_t n = batch < t.batches.size() ? t.batches[batch] : 1;
    ++batch;
    const auto got = gpu.extend(std::span(ids).subspan(size_t(at), size_t(n)));
    for (int64_t i = 0; i < n; ++i, ++at) {
      const auto chosen = gpu.choices(size_t(i));
      ASSERT_EQ(int64_t(chosen[0].size()), t.config.experts_per_token);
      const std::vector<double> want = exact.token(ids[size_t(at)], chosen);
      const float* row = &engine_logits[size_t(at * t.config.vocab)];
      of_engine.add(std::vector<double>(row, row + t.config.vocab), alone.token(ids[size_t(at)]));
      of_chain.add(chain.token(ids[size_t(at)], chosen), want);
      for (size_t c = 0; c < others.size(); ++c) of_others[c].add(others[c].token(ids[size_t(at)], chosen), want);
      of_gpu.add(got[size_t(i)], want);
      ASSERT_TRUE(std::isfinite(of_gpu.largest)) << "position " << at;
    }
    const std::vector<double>& last = got.back();
    const gpt_oss_decode::State state = gpu.state();
    EXPECT_EQ(state.position, at);
    EXPECT_EQ(state.tokens[0], std::max_element(last.begin(), last.end()) - last.begin());
    EXPECT_EQ(state.flaw, 0u);
  }
  // Of 4 bits a number that falls on the other side of a middle is off by a sixteenth, so that two chains differ by as
  // much as rounding does: check_rounded_layer() is the sharper one.
  const double slack = t.config.e4m3_inputs ? 2 : 1;
  double rms = of_chain.rms(), largest = of_chain.largest;
  for (const LogitError& e : of_others) rms = std::max(rms, e.rms()), largest = std::max(largest, e.largest);
  // Logits of deviation 4, from inputs with 8 bits; of a model that nobody chose, as the logits of ids are.
  EXPECT_LT(exact.worst_choice, slack * (t.chains > 0 ? std::max(0.2, 4 * largest) : 0.2));
  EXPECT_LT(of_engine.rms(), 1e-4);  // fp32 beside fp64: the reference is the model
  EXPECT_LT(of_engine.largest, t.config.e4m3_inputs || t.chains > 0 ? 2e-3 : 2e-4);
  EXPECT_LE(of_gpu.rms(), slack * 1.5 * rms) << "largest " << of_gpu.largest << ", of the chain " << largest;
  EXPECT_LE(of_gpu.largest, slack * 2 * largest);
}

// A layer of which the experts take rounded inputs, each number from what the kernels left before it. `run` does some
// phases (PhaseBit) of a step of T tokens; `fetch` brings n of what a pointer of `b` leads to.
template <class Run, class Fetch>
void check_rounded_layer(const DecodeModel& m, const gpt_oss_decode::Buffers& b, uint32_t T, Run&& run, Fetch&& fetch) {
  using namespace gpt_oss_decode;
  const GptOssConfig& c = m.config;
  const GptOssLayer& l = m.weights.layers[0];
  const size_t C = size_t(c.hidden), H = size_t(c.intermediate), k = size_t(c.experts_per_token), S = T * k;
  // Columns of global memory as the product with a matrix takes them.
  const auto columns = [&](const char* from, size_t rows, size_t numbers, WeightFormat f) {
    const int64_t bytes = granule_padded_cols(int64_t(numbers)) * 2;
    const std::vector<char> raw = fetch(from, int64_t(rows) * bytes);
    std::vector<std::vector<float>> all(rows, std::vector<float>(numbers));
    for (size_t r = 0; r < rows; ++r)
      for (size_t i = 0; i < numbers; ++i) {
        const size_t j = i % 32;  // where lanes find it: granule_product.cuh
        const size_t at = f == WeightFormat::fp8 ? j % 16 / 4 * 8 + (j / 16 * 2 + j % 2) * 2 + j % 4 / 2
                                                 : j % 8 / 2 * 8 + (j / 16 * 2 + j % 16 / 8) * 2 + j % 2;
        bf16 v;
        std::memcpy(&v, &raw[r * size_t(bytes) + 2 * (i / 32 * 32 + at)], 2);
        all[r][i] = float(v) * (f == WeightFormat::bf16 ? 1.f : 0x1p-64f);
      }
    return all;
  };
  const auto product = [](const std::vector<double>& wide, size_t n, const std::vector<float>& x) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += wide[n * x.size() + i] * double(x[i]);
    return sum;
  };
  const auto widened = [](const WeightMatrix& w) {
    std::vector<double> wide(size_t(w.rows() * w.cols()));
    dequantise(w, Tensor(wide.data(), {w.rows(), w.cols()}), {});
    return wide;
  };
  run(kEmbed | kQkv | kAttention | kOutput | kRouter | kGateUp);
  const std::vector<float> x = fetch(b.x, int64_t(T) * b.x_stride);
  const auto normed = columns(b.normed, T, C, l.gate_up.format), hidden = columns(b.hidden, S, H, l.down.format);
  // Roundings that fp32's own last bits decide: hardly any.
  size_t others = 0;
  for (size_t t = 0; t < T; ++t) {
    double squares = 0;
    for (size_t i = 0; i < C; ++i) squares += std::pow(double(x[t * size_t(b.x_stride) + i]), 2);
    std::vector<double> want(C);
    for (size_t i = 0; i < C; ++i)
      want[i] = double(x[t * size_t(b.x_stride) + i]) * double(l.mlp_norm.ptr<float>()[i]) /
                std::sqrt(squares / double(C) + c.norm_eps);
    round_to_e4m3_blocks(want.data(), c.hidden);
    for (size_t i = 0; i < C; ++i) others += double(normed[t][i]) != want[i];
  }
  EXPECT_LE(others, 1 + T * C / 500) << "of the norm";
  const int64_t entries = fetch(b.lists.count, 1)[0];
  const auto expert = fetch(b.lists.expert, entries), row = fetch(b.lists.row, entries * routing::kTokens);
  const auto share = fetch(b.lists.weight, entries * routing::kTokens);
  std::vector<std::vector<double>> added(T, std::vector<double>(C));
  size_t rows = 0;
  others = 0;
  for (size_t entry = 0; entry < size_t(entries); ++entry) {
    const int64_t e = expert[entry];
    const std::vector<double> up = widened(l.gate_up.at(e)), down = widened(l.down.at(e));
    for (size_t t = 0; t < T; ++t) {
      const int32_t r = row[entry * routing::kTokens + t];
      if (r < 0) continue;
      ++rows;
      std::vector<double> want(H);
      for (size_t n = 0; n < H; ++n) {
        const float* const bias = l.b_gate_up.ptr<float>() + (size_t(e) * H + n) * 2;
        const double g = std::min(product(up, 2 * n, normed[t]) + double(bias[0]), c.swiglu_limit);
        const double u =
            std::clamp(product(up, 2 * n + 1, normed[t]) + double(bias[1]), -c.swiglu_limit, c.swiglu_limit);
        want[n] = g / (1 + std::exp(-c.swiglu_alpha * g)) * (u + 1);
      }
      round_to_e4m3_blocks(want.data(), c.intermediate);
      for (size_t n = 0; n < H; ++n) others += double(hidden[size_t(r)][n]) != want[n];
      for (size_t n = 0; n < C; ++n)
        added[t][n] += double(share[entry * routing::kTokens + t]) *
                       (product(down, n, hidden[size_t(r)]) + double(l.b_down.ptr<float>()[size_t(e) * C + n]));
    }
  }
  EXPECT_EQ(rows, S);
  EXPECT_LE(others, 1 + S * H / 500) << "of the channels";
  run(kDown);
  const std::vector<float> after = fetch(b.x, int64_t(T) * b.x_stride);
  for (size_t t = 0; t < T; ++t)
    for (size_t n = 0; n < C; ++n) {
      const size_t at = t * size_t(b.x_stride) + n;
      EXPECT_NEAR(double(after[at]), double(x[at]) + added[t][n], 1e-4) << "token " << t << " number " << n;
    }
}
// Of one token and of several, in every format of the experts.
template <class Check> void for_rounded_layers(Check&& check) {
  GptOssConfig small = decode_config(96, 8, 2, 16, 96, 6, 2, 5, 1), odd = decode_config(46, 3, 1, 16, 25, 5, 3, 3, 1);
  small.e4m3_inputs = odd.e4m3_inputs = true;
  for (const uint32_t T : {1u, 5u, 11u})
    for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
      SCOPED_TRACE(::testing::Message() << f << ", " << T << " tokens");
      std::vector<int32_t> ids(T);
      fill_ids(Tensor(ids.data(), {int64_t(T)}), 3, small.vocab);
      check(DecodeModel(small, WeightFormat::bf16, f, 7), ids);
      if (f != WeightFormat::mxfp4) check(DecodeModel(odd, WeightFormat::bf16, f, 7), ids);
    }
}

}  // namespace ingot::testing
