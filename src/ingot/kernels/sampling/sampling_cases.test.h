#pragma once
// Draws of another backend beside the CPU's: the same tokens from the same logits and seed.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/sampling/sampling.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::sampling_cases {

constexpr SamplingOptions kDeviceOptions[] = {
    {.temperature = 0},
    {},
    {.temperature = 2.5},
    {.top_k = 1},
    {.top_k = 37},
    {.top_k = 1000000},
    {.temperature = 3, .top_p = 0.5},
    {.top_p = 0.999},
    {.top_p = 1e-9},
    {.min_p = 0.3},
    {.temperature = 1e9, .top_p = 0.9},
    {.temperature = 1e-300},
    {.temperature = 1.5, .top_k = 80, .top_p = 0.9, .min_p = 0.05},
};
struct Logits {
  int64_t V;
  bool ties, minus_infinity, plus_infinity;
};
constexpr Logits kLogits[] = {
    {1, false, false, false},  {3, true, false, false}, {1500, true, false, false},
    {700, false, true, false}, {513, true, true, true},
};

template <class B> void fill(B& logits, const Logits& c, uint64_t seed) {
  testing::fill_normal(testing::host_of(logits), seed, 2);
  auto x = testing::values(testing::host_of(logits));
  for (size_t i = 0; i < x.size(); ++i) {
    if (c.ties) x[i] = std::round(2 * x[i]) / 2;  // zeros of both signs too
    if (c.minus_infinity && i % 3 == 1) x[i] = -HUGE_VAL;
    if (c.plus_infinity && i % 200 == 100) x[i] = HUGE_VAL;
  }
  testing::assign(testing::host_of(logits), x);
  testing::send(logits);
}

template <class B, class Call> void draws_are_the_cpus(int64_t rows, Call&& call) {
  for (const Logits& c : kLogits)
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
      if (type != DType::f32 && c.V != 700) continue;
      B logits(type, {rows, c.V}, c.V + 5);
      fill(logits, c, uint64_t(c.V));
      for (const SamplingOptions& o : kDeviceOptions) {
        B tokens(DType::i32, {rows});
        testing::send(tokens);
        call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 77, .step = 5});
        testing::Buffer want(DType::i32, {rows});
        sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 77, .step = 5}, {});
        SCOPED_TRACE(::testing::Message() << c.V << " " << type << " temperature " << o.temperature << " top_k "
                                          << o.top_k << " top_p " << o.top_p << " min_p " << o.min_p);
        testing::expect_close(tokens, testing::values(want), 0, 0);
      }
    }
}

// The vocabulary of GPT-OSS, several draws of each kind.
template <class B, class Call> void draws_of_a_full_vocabulary_are_the_cpus(int64_t rows, Call&& call) {
  constexpr int64_t V = 201088;
  B logits(DType::f32, {rows, V}), tokens(DType::i32, {rows});
  testing::fill_normal(testing::host_of(logits), 6, 3);
  testing::send(logits);
  for (const SamplingOptions& o : {SamplingOptions{}, {.top_p = 0.95}, {.temperature = 2, .top_k = 50}})
    for (uint32_t step = 0; step < 2; ++step) {
      testing::send(tokens);
      call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 3, .step = step});
      testing::Buffer want(DType::i32, {rows});
      sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 3, .step = step}, {});
      testing::expect_close(tokens, testing::values(want), 0, 0);
    }
}

// What the CPU reports as an error is token -1 of that row, and of that row alone.
template <class B, class Call> void rows_without_a_distribution_give_minus_one(Call&& call) {
  for (double temperature : {0., 1.}) {
    B logits(DType::f32, {4, 40}), tokens(DType::i32, {4});
    std::vector<double> x(160, 0);
    x[5] = 1e6, x[40 + 17] = NAN, x[120 + 39] = 1e6;
    for (size_t v = 80; v < 120; ++v) x[v] = -HUGE_VAL;
    testing::assign(testing::host_of(logits), x);
    testing::send(logits), testing::send(tokens);
    call(Sample{.logits = logits, .tokens = tokens, .options = {.temperature = temperature}});
    testing::expect_close(tokens, std::vector<double>{5, -1, -1, 39}, 0, 0);
  }
  B none(DType::f32, {0, 5}), nothing(DType::i32, {0});
  call(Sample{.logits = none, .tokens = nothing});
}

// A step that lies beside the logits is added to the one that is given.
template <class B, class Call> void steps_add_up(Call&& call) {
  B logits(DType::f32, {3, 50}), there(DType::i32, {1}), tokens(DType::i32, {3});
  testing::fill_normal(testing::host_of(logits), 4);
  testing::assign(testing::host_of(there), std::vector<double>{4});
  testing::send(logits), testing::send(there), testing::send(tokens);
  call(Sample{.logits = logits, .tokens = tokens, .seed = 5, .step = 3, .step_there = there});
  testing::Buffer want(DType::i32, {3});
  sample({.logits = testing::host_of(logits), .tokens = want, .seed = 5, .step = 7}, {});
  testing::expect_close(tokens, testing::values(want), 0, 0);
}

}  // namespace ingot::sampling_cases
