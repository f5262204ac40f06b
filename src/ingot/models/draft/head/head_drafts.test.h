// What tests of a head's guesses share: a small model with a random head, and answers by draft steps.
#pragma once
#include <gtest/gtest.h>

#include <functional>

#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/draft/answer_drafts.h"
#include "ingot/models/draft/head/random_head.test.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/gpt_oss/weights.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::testing::head_drafts {

using Ids = std::vector<int32_t>;
inline constexpr int64_t kVocab = 37, kContext = 64, kBatch = 8;

// A small GPT-OSS with a window of 6, so that drafts cross the window, and a random head over all its boundaries. The
// guesses of such a head are mostly wrong.
struct WithHead {
  testing::TemporaryDirectory dir;
  GptOssConfig config;
  GptOssWeights weights;
  draft::DraftHead head;
  std::unique_ptr<Decoder> plain, decoder;
  explicit WithHead(int64_t slots = 1, int64_t window = 0, bool on_gpu = false) {
    testing::GptOssCheckpoint().write(dir / "m");
    config = read_gpt_oss_config(dir / "m");
    config.window = 6;
    weights = load_gpt_oss(dir / "m", config);
    testing::RandomHead random;
    random.norm_before_fc = true;
    random.write(dir / "head");
    head = draft::load_draft_head(dir / "head", config, config.layers, {.window = window});
    // With a head a GPU computes single tokens by a launch for each phase; without one it does so here.
    const DecoderOptions o{.context = kContext, .batch = kBatch, .slots = slots, .megakernel = !on_gpu};
    if (on_gpu)
      plain = make_gpu_decoder(config, weights, o), decoder = make_gpu_decoder(config, weights, o, &head);
    else
      plain = make_decoder(config, weights, o), decoder = make_decoder(config, weights, o, &head);
  }
};

inline Ids ids_of(uint64_t seed, int64_t n) {
  Ids ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), seed, kVocab);
  return ids;
}
inline Ids plus(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
inline void feed(Sequence& s, const Ids& ids) {
  for (size_t at = 0; at < ids.size(); at += kBatch)
    ASSERT_TRUE(s.extend(std::span(ids).subspan(at, std::min<size_t>(kBatch, ids.size() - at))));
}

struct Outcome {
  Ids tokens;
  std::vector<double> logprobs;
  Finish finish = Finish::length;
  int32_t stop_id = -1;
  int64_t length = 0, drafted = 0, accepted = 0;
};
// With `guess` by draft steps.
inline Outcome answer(Decoder& d, const Ids& prompt, SampleOptions o, int64_t tokens,
                      const std::function<Ids(const Ids& answer)>& guess = {}) {
  Sequence s(d);
  feed(s, prompt);
  Outcome all;
  while (int64_t(all.tokens.size()) < tokens && all.finish == Finish::length) {
    const Ids draft = guess ? guess(all.tokens) : Ids();
    o.drafting = bool(guess), o.draft = draft, o.step = uint32_t(all.tokens.size());
    const Sampled step = s.sample(o, guess ? tokens - int64_t(all.tokens.size()) : 1);
    all.tokens.insert(all.tokens.end(), step.tokens.begin(), step.tokens.end());
    for (const TokenLogprobs& p : step.logprobs) all.logprobs.push_back(p.sampled);
    all.finish = step.finish, all.stop_id = step.stop_id;
    all.drafted += step.drafted, all.accepted += step.accepted;
  }
  all.length = s.length();
  return all;
}

}  // namespace ingot::testing::head_drafts
