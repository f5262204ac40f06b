#pragma once
// Compares the logprobs of another backend with the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::sampling_cases {

// The tolerance allows for sums of V doubles that the two backends add in different orders.
template <class B, class Call>
void logprobs_are_the_cpus(int64_t largest, Call&& call, int64_t (*bytes)(int64_t, int64_t, int64_t)) {
  for (const int64_t V : {int64_t(1), int64_t(37), int64_t(3000), largest})
    for (const int64_t k : {int64_t(0), int64_t(1), std::min<int64_t>(V, 20)}) {
      SCOPED_TRACE(::testing::Message() << V << " ids, " << k << " likeliest");
      B logits(DType::f32, {V}), token = testing::holding<B>(DType::i32, {1}, {double(V / 2)});
      testing::fill_normal(testing::host_of(logits), 8, 3);
      auto x = testing::values(testing::host_of(logits));
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = std::round(4 * x[i]) / 4;  // ties, zeros of both signs
        if (i % 5 == 1) x[i] = -HUGE_VAL;
      }
      testing::assign(testing::host_of(logits), x);
      testing::send(logits);
      B top(DType::i32, {std::max<int64_t>(1, k)}), values(DType::f64, {1 + k});
      testing::send(top), testing::send(values);
      B workspace(DType::u8, {std::max<int64_t>(1, bytes(V, k, 1))});
      testing::send(workspace);
      call(Logprobs{.logits = Tensor(logits).reshape({1, V}),
                    .token = token,
                    .top = k > 0 ? Tensor(top).reshape({1, k}) : Tensor(),
                    .values = Tensor(values).reshape({1, 1 + k}),
                    .workspace = workspace});
      testing::Buffer want_top(DType::i32, {std::max<int64_t>(1, k)}), want(DType::f64, {1 + k});
      logprobs({.logits = testing::host_of(logits),
                .token = testing::host_of(token),
                .top = k > 0 ? Tensor(want_top) : Tensor(),
                .values = want},
               {});
      testing::expect_close(values, testing::values(want), 0, 1e-11);
      if (k > 0) testing::expect_close(top, testing::values(want_top), 0, 0);
    }
}

// Compares all rows, and some rows with their own number of ids.
template <class B, class Call>
void logprobs_of_rows_are_the_cpus(Call&& call, int64_t (*bytes)(int64_t, int64_t, int64_t)) {
  constexpr int64_t R = 5, V = 900, k = 7;
  B logits(DType::f32, {R, V}, V + 4), token = testing::holding<B>(DType::i32, {R}, {0, 899, 3, 500, 77}),
                                       workspace(DType::u8, {bytes(V, k, R)});
  testing::fill_normal(testing::host_of(logits), 8, 3);
  testing::send(logits), testing::send(workspace);
  B rows(DType::u8, {3, int64_t(sizeof(SampleRow))});
  SampleRow* const row = static_cast<SampleRow*>(testing::host_of(rows).data);
  row[0] = {.row = 4, .ids = 100}, row[1] = {.row = 0, .ids = 900}, row[2] = {.row = 2, .ids = 7};
  testing::send(rows);
  for (const bool some : {false, true}) {
    B top = testing::holding<B>(DType::i32, {R, k}, std::vector<double>(R * k, -1)),
      values = testing::holding<B>(DType::f64, {R, 1 + k}, std::vector<double>(R * (1 + k), 5));
    testing::Buffer want_top(DType::i32, {R, k}), want(DType::f64, {R, 1 + k});
    testing::assign(want_top, std::vector<double>(R * k, -1)),
        testing::assign(want, std::vector<double>(R * (1 + k), 5));
    call(Logprobs{.logits = logits,
                  .token = token,
                  .top = top,
                  .values = values,
                  .rows = some ? Tensor(rows) : Tensor(),
                  .workspace = workspace});
    logprobs({.logits = testing::host_of(logits),
              .token = testing::host_of(token),
              .top = want_top,
              .values = want,
              .rows = some ? testing::host_of(rows) : Tensor()},
             {});
    testing::expect_close(values, testing::values(want), 0, 1e-11);
    testing::expect_close(top, testing::values(want_top), 0, 0);
  }
}

}  // namespace ingot::sampling_cases
