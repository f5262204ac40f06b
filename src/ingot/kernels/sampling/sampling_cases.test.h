#pragma once
// Compares the tokens of another backend with the CPU's: the same tokens from the same logits and seed.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/sampling/filters.h"
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
    {.min_p = 1},
    {.temperature = 1.4426950408889634, .min_p = 0.25},  // a logit is an octave, and tied logits lie at the bound
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

// The size of the kernels' workspace, which is zero at first.
using WorkspaceBytes = int64_t (*)(int64_t rows);
template <class B> B workspace_of(int64_t rows, WorkspaceBytes bytes) {
  B w(DType::u8, {std::max<int64_t>(16, bytes(rows))});
  fill_zero(testing::host_of(w));
  testing::send(w);
  return w;
}

// every: of the pairs of logits and options only each `every`-th.
template <class B, class Call>
void tokens_are_the_cpus(int64_t rows, WorkspaceBytes bytes, Call&& call, int every = 1) {
  B workspace = workspace_of<B>(rows, bytes);
  int pair = 0;
  for (const Logits& c : kLogits)
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
      if (type != DType::f32 && c.V != 700) continue;
      B logits(type, {rows, c.V}, c.V + 5);
      fill(logits, c, uint64_t(c.V));
      for (const SamplingOptions& o : kDeviceOptions) {
        if (pair++ % every != 0) continue;
        B tokens(DType::i32, {rows});
        testing::send(tokens);
        call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 77, .step = 5, .workspace = workspace});
        testing::Buffer want(DType::i32, {rows});
        sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 77, .step = 5}, {});
        SCOPED_TRACE(::testing::Message() << c.V << " " << type << " temperature " << o.temperature << " top_k "
                                          << o.top_k << " top_p " << o.top_p << " min_p " << o.min_p);
        testing::expect_close(tokens, testing::values(want), 0, 0);
      }
    }
}

// Thousands of equal logits, among which filters cut by id, and logits that differ only in their last bits: these need
// the histograms over the places themselves. The rows are of three kinds. cuts: how many of the options are tried.
template <class B, class Call>
void cuts_among_equal_logits_are_the_cpus(WorkspaceBytes bytes, Call&& call, int64_t rows = 3, size_t cuts = 8) {
  constexpr int64_t V = 6001;
  B logits(DType::f32, {rows, V}), workspace = workspace_of<B>(rows, bytes);
  std::vector<double> x;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < V; ++v)
      x.push_back(r % 3 == 0   ? (v % 3 == 0 ? -1 : 2)
                  : r % 3 == 1 ? 5 + double(v * 7919 % V) * 0x1p-21
                               : (v % 2 == 0 ? 0. : -0.));
  testing::assign(testing::host_of(logits), x);
  testing::send(logits);
  const std::vector<SamplingOptions> options = {{.top_k = 3900},
                                                {.top_p = 0.99},
                                                {.top_k = 5500},
                                                {.top_k = 2},
                                                {.top_p = 0.3},
                                                {.temperature = 1e6, .top_k = 5900, .top_p = 0.5},
                                                {.top_k = 4000, .top_p = 0.999},
                                                {.top_p = 1e-9}};
  for (size_t i = 0; i < cuts; ++i)
    for (uint32_t step = 0; step < 2; ++step) {
      const SamplingOptions& o = options.at(i);
      B tokens(DType::i32, {rows});
      testing::send(tokens);
      call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 3, .step = step, .workspace = workspace});
      testing::Buffer want(DType::i32, {rows});
      sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 3, .step = step}, {});
      SCOPED_TRACE(::testing::Message() << "top_k " << o.top_k << " top_p " << o.top_p);
      testing::expect_close(tokens, testing::values(want), 0, 0);
    }
}

// Rows with their own options, biases, masks and row numbers; tokens of other rows are left alone.
template <class B, class Call> void rows_with_their_own_options_are_the_cpus(WorkspaceBytes bytes, Call&& call) {
  constexpr int64_t V = 2003, R = 20, n = 17;
  B logits(DType::f32, {R, V}), tokens(DType::i32, {R}), allowed(DType::u32, {R, (V + 31) / 32}),
      bias_ids(DType::i32, {R, n}), biases(DType::f32, {R, n}), workspace = workspace_of<B>(R, bytes);
  testing::fill_normal(testing::host_of(logits), 5, 3);
  const Rng rng(9, Purpose::test);
  std::vector<double> words, ids, amounts;
  for (int64_t i = 0; i < R * ((V + 31) / 32); ++i) words.push_back(double(rng.bits(uint64_t(i)) | 1u));
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < n; ++i) {
      ids.push_back(double(i * i * V / 250));  // some ids twice, some at least V
      amounts.push_back(i % 7 == 3 ? -HUGE_VAL : 6 * rng.normal(uint64_t(100000 + r * n + i)));
    }
  testing::assign(testing::host_of(allowed), words);
  testing::assign(testing::host_of(bias_ids), ids);
  testing::assign(testing::host_of(biases), amounts);
  testing::send(logits), testing::send(allowed), testing::send(bias_ids), testing::send(biases);
  B rows(DType::u8, {R - 2, int64_t(sizeof(SampleRow))});
  testing::Buffer want(DType::i32, {R});
  for (const bool all_filter : {false, true}) {
    SampleRow* const row = reinterpret_cast<SampleRow*>(testing::host_of(rows).data);
    for (int32_t i = 0; i < R - 2; ++i) {
      SamplingOptions o = kDeviceOptions[size_t(i) % std::size(kDeviceOptions)];
      if (all_filter) o = {.temperature = 1 + 0.1 * i, .top_k = 1 + 30 * i, .top_p = 0.9};
      row[i] = row_of(o, i % 3 == 0 ? V : V - 100);
      row[i].seed = uint64_t(1000 + i), row[i].step = uint32_t(i / 2), row[i].lane = uint32_t(i % 5);
      row[i].row = i == 3 ? int32_t(R - 1) : i;
      row[i].biases = i % 2 == 0 ? n : 0, row[i].masked = i % 4 < 2 ? 1 : 0;
    }
    for (int32_t* t = testing::host_of(tokens).template ptr<int32_t>();
         t < testing::host_of(tokens).template ptr<int32_t>() + R; ++t)
      *t = -7;
    testing::assign(want, std::vector<double>(size_t(R), -7));
    testing::send(rows), testing::send(tokens);
    Sample s{.logits = logits,
             .tokens = tokens,
             .bias_ids = bias_ids,
             .biases = biases,
             .allowed = allowed,
             .rows = rows,
             .some_unfiltered = !all_filter,
             .workspace = workspace};
    call(s);
    sample({.logits = testing::host_of(logits),
            .tokens = want,
            .bias_ids = testing::host_of(bias_ids),
            .biases = testing::host_of(biases),
            .allowed = testing::host_of(allowed),
            .rows = testing::host_of(rows)},
           {});
    testing::fetch(tokens);
    EXPECT_EQ(testing::values(testing::host_of(tokens)), testing::values(want));
  }
}

// Logits of GPT-OSS's vocabulary size, several tokens with each kind of options.
template <class B, class Call>
void tokens_of_a_full_vocabulary_are_the_cpus(int64_t rows, uint32_t steps, WorkspaceBytes bytes, Call&& call) {
  constexpr int64_t V = 201088;
  B logits(DType::f32, {rows, V}), tokens(DType::i32, {rows}), workspace = workspace_of<B>(rows, bytes);
  testing::fill_normal(testing::host_of(logits), 6, 3);
  testing::send(logits);
  for (const SamplingOptions& o : {SamplingOptions{},
                                   {.top_p = 0.95},
                                   {.temperature = 2, .top_k = 50},
                                   {.top_k = 100000, .top_p = 0.999},
                                   {.min_p = 0.05},
                                   {.temperature = 40, .top_p = 0.9}})
    for (uint32_t step = 0; step < steps; ++step) {
      testing::send(tokens);
      call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 3, .step = step, .workspace = workspace});
      testing::Buffer want(DType::i32, {rows});
      sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 3, .step = step}, {});
      testing::expect_close(tokens, testing::values(want), 0, 0);
    }
}

// Where the CPU throws an error, the kernels write token -1 for that row, and only for that row.
template <class B, class Call> void rows_without_a_distribution_give_minus_one(WorkspaceBytes bytes, Call&& call) {
  B workspace = workspace_of<B>(4, bytes);
  for (const SamplingOptions& o : {SamplingOptions{.temperature = 0}, {}, {.top_k = 5, .top_p = 0.5}}) {
    B logits(DType::f32, {4, 40}), tokens(DType::i32, {4});
    std::vector<double> x(160, 0);
    x[5] = 1e6, x[40 + 17] = NAN, x[120 + 39] = 1e6;
    for (size_t v = 80; v < 120; ++v) x[v] = -HUGE_VAL;
    testing::assign(testing::host_of(logits), x);
    testing::send(logits), testing::send(tokens);
    call(Sample{.logits = logits, .tokens = tokens, .options = o, .workspace = workspace});
    testing::expect_close(tokens, std::vector<double>{5, -1, -1, 39}, 0, 0);
  }
  B none(DType::f32, {0, 5}), nothing(DType::i32, {0});
  call(Sample{.logits = none, .tokens = nothing, .workspace = workspace});
}

// Calls of different numbers of rows, in any order, share a workspace.
template <class B, class Call> void calls_of_any_number_of_rows_share_a_workspace(WorkspaceBytes bytes, Call&& call) {
  constexpr int64_t R = 9, V = 90;
  B workspace = workspace_of<B>(R, bytes);
  for (const SamplingOptions& o : {SamplingOptions{}, {.top_k = 5, .top_p = 0.5}})
    for (const int64_t rows : {1, 4, 5, 8, 9, 3, 9}) {
      B logits(DType::f32, {rows, V}), tokens(DType::i32, {rows});
      testing::fill_normal(testing::host_of(logits), uint64_t(rows), 2);
      fill_zero(testing::host_of(tokens));
      testing::send(logits), testing::send(tokens);
      call(Sample{.logits = logits, .tokens = tokens, .options = o, .seed = 9, .workspace = workspace});
      testing::Buffer want(DType::i32, {rows});
      sample({.logits = testing::host_of(logits), .tokens = want, .options = o, .seed = 9}, {});
      SCOPED_TRACE(::testing::Message() << rows << " rows, top_k " << o.top_k);
      testing::expect_close(tokens, testing::values(want), 0, 0);
    }
}

// A step in device memory is added to the step in the arguments.
template <class B, class Call> void steps_add_up(WorkspaceBytes bytes, Call&& call) {
  B workspace = workspace_of<B>(3, bytes);
  B logits(DType::f32, {3, 50}), there(DType::i32, {1}), tokens(DType::i32, {3});
  testing::fill_normal(testing::host_of(logits), 4);
  testing::assign(testing::host_of(there), std::vector<double>{4});
  testing::send(logits), testing::send(there), testing::send(tokens);
  call(Sample{.logits = logits, .tokens = tokens, .seed = 5, .step = 3, .device_step = there, .workspace = workspace});
  testing::Buffer want(DType::i32, {3});
  sample({.logits = testing::host_of(logits), .tokens = want, .seed = 5, .step = 7}, {});
  testing::expect_close(tokens, testing::values(want), 0, 0);
}

}  // namespace ingot::sampling_cases
