// The prefiltered head over several emulated GPUs: the sampled token equals the whole head's, whichever GPU has the
// token's row.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "ingot/models/decode/fixtures/emulated_ranks.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"

namespace ingot {
namespace {

using decode::kGridBarriersPerLayer;
using decode::Split;
using decode::Step;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;
using testing::EmulatedRanks;
using testing::HeadRows;
using testing::PrefilteredModel;

size_t first_id(const EmulatedRanks& gpus, size_t r) { return gpus.ranks[r]->buffers.ranks.first_id; }
int32_t& next_token(Emulated& e) { return e.buffers.state->tokens[0]; }
void expect_same_states(const EmulatedRanks& gpus, const EmulatedRanks& unfiltered) {
  const decode::State& want = *unfiltered.ranks[0]->buffers.state;
  for (size_t r = 0; r < gpus.ranks.size(); ++r)
    EXPECT_EQ(std::memcmp(gpus.ranks[r]->buffers.state, &want, sizeof want), 0)
        << "GPU " << r << ": found " << next_token(*gpus.ranks[r]) << ", " << gpus.ranks[r]->buffers.state->flaw
        << ", expected " << want.tokens[0] << ", " << want.flaw;
}

// Compares the sampled token, its logit, and for greedy tokens the upper bounds of all other rows, each in the memory
// of its GPU; with `all`, every logit. `blocks` is the number of blocks of each GPU's kernel; 0: as many as are
// resident.
void check_head(const HeadRows& head, int count, Split split, std::span<const int32_t> ids, uint32_t vocab = 0,
                bool all = false, int64_t blocks = 0, const sampling::RowNoise& noise = {}) {
  SCOPED_TRACE(::testing::Message() << count << (split == Split::tensor ? " GPUs" : " GPUs, attention-experts"));
  const PrefilteredModel m(head, count);
  EmulatedRanks unfiltered(m.model, 4, count, split), gpus(m.model, 4, count, split);
  gpus.make_prefilters();
  for (size_t r = 0; r < gpus.ranks.size() && blocks > 0; ++r)
    unfiltered.ranks[r]->blocks = gpus.ranks[r]->blocks = blocks;
  const Step step{.vocab = vocab, .capacity = 4};
  const size_t sample_vocab = vocab > 0 ? vocab : head.size();
  for (const int32_t id : ids) {
    SCOPED_TRACE(id);
    for (size_t r = 0; r < gpus.ranks.size(); ++r) {
      next_token(*unfiltered.ranks[r]) = next_token(*gpus.ranks[r]) = id;
      *unfiltered.ranks[r]->buffers.noise = *gpus.ranks[r]->buffers.noise = noise;
    }
    for (auto& e : gpus.ranks) std::fill_n(e->buffers.own_logits, head.size(), NAN);
    unfiltered.token(step, false);
    gpus.token(step, true);
    expect_same_states(gpus, unfiltered);
    const decode::State& state = *unfiltered.ranks[0]->buffers.state;
    const float* const want = unfiltered.ranks[0]->buffers.logits;
    testing::expect_sampled(state, want, int64_t(sample_vocab), noise);
    for (size_t r = 0; r < gpus.ranks.size(); ++r) {
      const Emulated& e = *gpus.ranks[r];
      const float* const got = e.buffers.own_logits;
      EXPECT_EQ(e.buffers.noise->step, noise.step + 1);
      EXPECT_EQ(e.record.state, 0u);
      for (size_t n = 0, first = first_id(gpus, r); n < e.model.head.rows && first + n < sample_vocab; ++n) {
        if (noise.temperature == 0) ASSERT_FALSE(want[first + n] > got[n]) << "id " << first + n;
        ASSERT_FALSE(std::isnan(got[n]) && !std::isnan(want[first + n])) << "id " << first + n;
        if (all || (state.flaw == 0 && int32_t(first + n) == state.tokens[0]))
          ASSERT_EQ(std::memcmp(got + n, want + first + n, 4), 0)
              << "id " << first + n << ": found " << got[n] << ", expected " << want[first + n];
      }
      for (size_t n = e.model.head.rows; n < head.size(); ++n)
        ASSERT_TRUE(std::isnan(got[n])) << "GPU " << r << " has id " << n << " of another";
    }
  }
}
// Skipped: like these cases, other cases with different numbers exclude all rows, read all rows, or do both.
bool is_left_out(const std::string& name) {
  return testing::kSanitized && name != "near ties" && name != "so small that all are read";
}

TEST(GptOssPrefilterRanksEmulated, TheIdEqualsTheWholeHeadsIdOverAnyNumberOfGpus) {
  const int32_t ids[] = {0, 199};
  for (const auto& [name, head] : testing::heads_to_prefilter(200, 96)) {
    SCOPED_TRACE(name);
    if (is_left_out(name)) continue;
    const bool some = name == "random" || name == "near ties" || name == "not a number";
    check_head(head, 2, Split::tensor, std::span(ids).first(some && !testing::kSanitized ? 2 : 1));
    for (const int count : {3, 4, 5, 8})
      if (some && !testing::kSanitized && (count < 8 || name == "near ties"))
        check_head(head, count, Split::tensor, std::span(ids).first(1));
  }
}
TEST(GptOssPrefilterRanksEmulated, ASampledIdIsTheWholeHeadsAndTheCpus) {
  const int32_t ids[] = {0};
  for (const auto& [name, head] : testing::heads_to_prefilter(200, 96)) {
    SCOPED_TRACE(name);
    if (is_left_out(name) || (testing::kSanitized && name != "near ties")) continue;
    const auto noises = testing::noises_to_prefilter();
    for (size_t i = 1; i < noises.size(); ++i) check_head(head, 2, Split::tensor, ids, 0, false, 0, noises[i]);
  }
  const HeadRows head = testing::random_head(300, 96, 4, 0.3);
  for (uint32_t seed = 0; seed < (testing::kSanitized ? 2 : 20); ++seed)
    check_head(head, seed % 4 == 3 ? 5 : 2, seed % 5 == 4 ? Split::attention_experts : Split::tensor, ids,
               seed % 2 == 0 ? 0 : 150, false, 0, {.seed = seed, .step = 7 * seed, .temperature = 1.3f});
}
// A head whose rows all belong to the first GPU.
TEST(GptOssPrefilterRanksEmulated, OnlyTheFirstGpuPrefiltersIfOnlyTheFirstGpuHasTheHead) {
  const int32_t ids[] = {0};
  const auto heads = testing::heads_to_prefilter(60, 96);
  for (const size_t i : {1, 2}) {
    SCOPED_TRACE(heads[i].first);
    check_head(heads[i].second, int(i) + 1, Split::attention_experts, ids);
  }
}
TEST(GptOssPrefilterRanksEmulated, HeadsOfManyRoundsAndRowsOfManyChunks) {
  const int32_t ids[] = {0}, ids_of_wide[] = {99, 3};
  const auto heads = testing::heads_to_prefilter(3400, 96);  // more rows than one block compares at once
  for (const size_t i : {1, 2}) {
    SCOPED_TRACE(heads[i].first);
    if (!testing::kSanitized || i == 2) check_head(heads[i].second, 2, Split::tensor, ids, 0, false, 1);
  }
  // Sums depend on which warp multiplies which chunk.
  for (const auto& [name, head] : testing::heads_to_prefilter(130, 992)) {
    SCOPED_TRACE(name);
    const bool all = name == "so small that all are read" || name == "all rows alike";
    if (is_left_out(name) || !(all || name == "near ties")) continue;
    check_head(head, 2, Split::tensor, std::span(ids_of_wide).first(testing::kSanitized ? 1 : 2), 0, all);
    if (!testing::kSanitized && !all) check_head(head, 3, Split::tensor, std::span(ids_of_wide).first(1));
  }
}
// On the GPU with the largest logit, the lower bound must not exclude the row of that logit, although the codes of the
// row mislead; on the other GPUs no row comes near.
TEST(GptOssPrefilterRanksEmulated, ARowWithMisleadingCodesIsFoundOnEveryGpu) {
  const int32_t ids[] = {0};
  for (const int count : {2, 5}) {
    const PrefilteredModel any(testing::random_head(300, 96, 2), count);
    const auto slices = decode::slices_of(any.model.config, count, Split::tensor);
    for (int r = 0; r < count; ++r) {
      SCOPED_TRACE(r);
      const size_t begin = size_t(slices[size_t(r)].ids.begin), end = size_t(slices[size_t(r)].ids.end);
      for (const bool late : {false, true}) {
        if (testing::kSanitized ? count > 2 || !late : count > 2 && late != (r % 2 == 0)) continue;
        HeadRows head = testing::random_head(300, 96, 2, 1e-3);
        testing::mislead(head, late ? end - 1 : begin, late ? begin : end - 1);
        check_head(head, count, Split::tensor, ids);
      }
    }
  }
}
// Every GPU has the same logit: the lowest id wins, and ids that may not be sampled are not compared.
TEST(GptOssPrefilterRanksEmulated, TiesGoToTheLowestIdAndOnlyIdsThatMayBeSampledWin) {
  const int32_t ids[] = {0};
  HeadRows head(300, std::vector<float>(96));
  for (size_t n = 0; n < head.size(); ++n)
    for (size_t c = 0; c < 96; ++c) head[n][c] = PrefilteredModel::sign(int64_t(c)) * (n % 20 == 7 ? 0.3f : 0.29f);
  for (const uint32_t vocab : {0u, 161u, 160u, 159u, 5u})
    if (!testing::kSanitized || vocab == 160) check_head(head, 2, Split::tensor, ids, vocab);
  for (size_t n = 0; n < head.size(); ++n)  // the logits increase, so the last id that may be sampled wins
    for (float& w : head[n]) w *= 1 + float(n) * 0x1p-6f;
  for (const uint32_t vocab : {0u, 209u, 97u})
    if (!testing::kSanitized || vocab == 97) check_head(head, 3, Split::tensor, ids, vocab);
}

// A chain of greedy tokens beside the chain of the whole head; some tokens take the whole head.
void check_chain(const DecodeCase& t, int count, Split split) {
  SCOPED_TRACE(::testing::Message() << count << (split == Split::tensor ? " GPUs" : " GPUs, attention-experts"));
  const DecodeModel m(t.config, t.dense, t.experts, 11);
  EmulatedRanks unfiltered(m, 30, count, split), gpus(m, 30, count, split);
  gpus.make_prefilters();
  EXPECT_TRUE(gpus.ranks[0]->has_prefilter());
  for (size_t r = 0; r < gpus.ranks.size(); ++r) next_token(*unfiltered.ranks[r]) = next_token(*gpus.ranks[r]) = 9;
  for (int i = 0; i < (testing::kSanitized ? 4 : 7); ++i) {
    const bool prefiltered = i % 4 != 2;
    unfiltered.token({.capacity = 30}, false);
    gpus.token({.capacity = 30}, prefiltered);
    expect_same_states(gpus, unfiltered);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "token " << i;
    if (prefiltered) continue;
    ASSERT_EQ(
        std::memcmp(gpus.ranks[0]->buffers.logits, unfiltered.ranks[0]->buffers.logits, size_t(t.config.vocab) * 4), 0);
  }
  EXPECT_EQ(gpus.ranks[0]->buffers.state->position, testing::kSanitized ? 4 : 7);
}
TEST(GptOssPrefilterRanksEmulated, AModelContinuesAsWithTheWholeHead) {
  DecodeCase two = {"two", testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5, 2), WeightFormat::bf16,
                    WeightFormat::mxfp4};
  two.config.vocab = 333;
  check_chain(two, 2, Split::tensor);
  check_chain(two, 2, Split::attention_experts);
  DecodeCase four = {"four", testing::decode_config(64, 16, 4, 16, 288, 4, 2, 5, 2), WeightFormat::bf16,
                     WeightFormat::mxfp4};
  four.config.vocab = 121;
  if (!testing::kSanitized) check_chain(four, 4, Split::tensor);
}

// Every rank has a prefilter of its own rows. Dense weights in other formats have no prefilter, on one GPU or several.
TEST(GptOssPrefilterRanksEmulated, OnlyAHeadInBf16IsPrefiltered) {
  const GptOssConfig two = testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5, 2);
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (const Split split : {Split::tensor, Split::attention_experts}) {
      const DecodeModel m(two, dense, WeightFormat::mxfp4, 7);
      const EmulatedRanks gpus(m, 9, 2, split);
      EXPECT_EQ(supports_prefilter(gpus.ranks[0]->model), dense == WeightFormat::bf16);
      EXPECT_EQ(supports_prefilter(gpus.ranks[1]->model), dense == WeightFormat::bf16 && split == Split::tensor);
    }
}

TEST(GptOssPrefilterRanksEmulated, ABlockThatDoesNotPublishItsBoundIsNamedAndTheNextTokenIsRight) {
  const PrefilteredModel m(testing::random_head(300, 96, 1), 2);
  EmulatedRanks gpus(m.model, 9, 2, Split::tensor), sound(m.model, 9, 2, Split::tensor);
  gpus.make_prefilters();
  for (size_t r = 0; r < 2; ++r) next_token(*sound.ranks[r]) = next_token(*gpus.ranks[r]) = 5;
  sound.token({.capacity = 9}, false);
  gpus.set_limit(20'000'000);
  gpus.token({.capacity = 9}, true, kGridBarriersPerLayer);
  // The record of the GPU itself, or of the other GPU, which waits for the first GPU's likeliest id.
  const gpu::WaitRecord &own = gpus.ranks[1]->record, &other = gpus.ranks[0]->record;
  EXPECT_TRUE(own.state == gpu::kTimedOut || other.state == gpu::kTimedOut);
  if (own.state != gpu::kRunning) EXPECT_EQ(own.what, kGridBarriersPerLayer);
  if (other.state != gpu::kRunning) EXPECT_EQ(other.what, megakernel::wait_for_rank(kGridBarriersPerLayer, 1));
  EXPECT_EQ(gpus.ranks[1]->buffers.state->position, 0);
  EXPECT_NE(gpus.ranks[1]->stop, gpu::kRunning);
  gpus.reset();
  gpus.set_limit(1'000'000'000'000);
  for (auto& e : gpus.ranks) *e->buffers.state = {.tokens = {5}, .position = 0, .flaw = 0};
  gpus.token({.capacity = 9}, true);
  for (const auto& e : gpus.ranks)
    EXPECT_EQ(std::memcmp(e->buffers.state, sound.ranks[0]->buffers.state, sizeof(decode::State)), 0);
}

}  // namespace
}  // namespace ingot
