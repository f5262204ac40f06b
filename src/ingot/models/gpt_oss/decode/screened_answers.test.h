#pragma once
// What generation sees of a screen: nothing, whatever draws are mixed.
#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "ingot/models/gpt_oss/decode/decode_cases.test.h"
#include "ingot/models/gpt_oss/decode/decoder.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::testing {

// Of a decoder over so many GPUs, with a screen and without. `more`: draws after those that all have.
inline void check_screened_answers(const DecodeModel& m, int gpus, std::span<const DrawOptions> more = {}) {
  std::vector<DrawOptions> draws = {
      {.sampling = {.temperature = 0}},
      {.sampling = {.temperature = 1.2}, .seed = 3},
      {.sampling = {.temperature = 0}, .vocab = 120},
      {.sampling = {.temperature = 0}, .logprobs = 3},
      {.sampling = {.temperature = 0}},
  };
  draws.insert(draws.end(), more.begin(), more.end());
  std::vector<Drawn> answers[2];
  for (const bool screen : {false, true}) {
    const auto d = make_gpu_decoder(m.config, m.weights, {.context = 200, .gpus = gpus, .screen = screen});
    Sequence s(*d);
    const std::vector<int32_t> prompt = {5, 280, 17};
    s.extend(prompt);
    for (int round = 0; round < (kEmulated ? 1 : 3); ++round)
      for (const DrawOptions& o : draws) answers[screen].push_back(s.draw(o, kEmulated ? 2 : 6));
  }
  for (size_t i = 0; i < answers[0].size(); ++i) {
    EXPECT_EQ(answers[0][i].tokens, answers[1][i].tokens) << "draw " << i;
    ASSERT_EQ(answers[0][i].logprobs.size(), answers[1][i].logprobs.size());
    for (size_t j = 0; j < answers[0][i].logprobs.size(); ++j)
      EXPECT_EQ(answers[0][i].logprobs[j].drawn, answers[1][i].logprobs[j].drawn);
  }
}

}  // namespace ingot::testing
