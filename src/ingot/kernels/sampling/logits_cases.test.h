#pragma once
// Biases, masks and logprobs of another backend beside the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/kernels/sampling/adjust.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::sampling_cases {

// Bit for bit: fp32 additions in the order of the biases.
template <class B, class Call> void adjusted_logits_are_the_cpus(Call&& call) {
  for (const int64_t V : {1, 31, 32, 33, 700, 5000}) {
    SCOPED_TRACE(V);
    B logits(DType::f32, {V}), adjusted(DType::f32, {V}), allowed(DType::u32, {(V + 31) / 32});
    testing::fill_normal(testing::host_of(logits), 5, 3);
    std::vector<double> words, ids, biases;
    for (int64_t i = 0; i < (V + 31) / 32; ++i) words.push_back(double(uint32_t(0x9e3779b9u * uint32_t(i + 1))));
    for (int64_t i = 0; i < 40; ++i) {
      ids.push_back(double(i * i * V / 1500));  // some several times, some from V on
      biases.push_back(i % 7 == 3 ? -HUGE_VAL : 0.1 * double(i) - 1);
    }
    testing::assign(testing::host_of(allowed), words);
    auto bias_ids = testing::holding<B>(DType::i32, {40}, ids), bias = testing::holding<B>(DType::f32, {40}, biases);
    testing::send(logits), testing::send(adjusted), testing::send(allowed);
    for (int what = 0; what < 4; ++what) {
      AdjustLogits a{.logits = logits, .adjusted = adjusted};
      testing::Buffer want(DType::f32, {V});
      AdjustLogits host{.logits = testing::host_of(logits), .adjusted = want};
      if ((what & 1) != 0) {
        a.bias_ids = bias_ids, a.biases = bias;
        host.bias_ids = testing::host_of(bias_ids), host.biases = testing::host_of(bias);
      }
      if ((what & 2) != 0) a.allowed = allowed, host.allowed = testing::host_of(allowed);
      call(a);
      adjust_logits(host, {});
      testing::fetch(adjusted);
      const auto got = testing::values(testing::host_of(adjusted)), expected = testing::values(want);
      for (size_t v = 0; v < expected.size(); ++v) ASSERT_EQ(got[v], expected[v]) << v << ", case " << what;
    }
  }
}

// Sums of V doubles in two orders.
template <class B, class Call>
void logprobs_are_the_cpus(int64_t largest, Call&& call, int64_t (*bytes)(int64_t, int64_t)) {
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
      B workspace(DType::u8, {std::max<int64_t>(1, bytes(V, k))});
      testing::send(workspace);
      call(Logprobs{.logits = logits,
                    .token = token,
                    .top = k > 0 ? Tensor(top) : Tensor(),
                    .values = values,
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

}  // namespace ingot::sampling_cases
