// Steps of many sequences on the emulator, with the CPU's products in place of the matrix kernels
// (prompt/prompt.emulated.test.cpp).
#include "ingot/models/decode/batch/batch.h"

#include <gtest/gtest.h>

#include "ingot/models/decode/fixtures/emulated_model.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/models/decode/prompt/prompt.h"

namespace ingot {
namespace {

using testing::DecodeModel;
using testing::Emulated;

// Slots of one model at equal distances, as DeviceModel places them.
struct Batch {
  static constexpr int64_t kRows = 32;  // of the buffers
  Emulated first;
  int slots;
  int64_t distance;
  std::vector<char> memory, prompt_memory, sequences_memory;
  std::vector<decode::Model> model;
  std::vector<decode::Buffers> buffers;
  decode::PromptBuffers prompt;
  decode::BatchInput* input = nullptr;
  decode::BatchedSequences sequences;
  std::vector<char> small_memory;
  decode::Buffers small_buffers;

  Batch(const DecodeModel& m, uint32_t room, int count) : Batch(m.config, m.weights, room, count) {}
  Batch(const DecoderSpec& spec, const DecoderWeights& weights, uint32_t room, int count)
      : first(spec, weights, room), slots(count) {
    const DecoderSpec& c = first.model.config;
    const int64_t cache = int64_t(first.cache.size()) / 256 * 256 + 256;
    distance = cache + int64_t(first.memory.size()) / 256 * 256 + 256;
    memory.assign(size_t(distance * slots + 256), 0);
    for (int s = 0; s < slots; ++s) {
      char* const at = Emulated::aligned(memory) + s * distance;
      std::copy_n(Emulated::aligned(first.cache), first.cache.size() - 256, at);
      decode::Model& y = model.emplace_back(first.model);
      for (decode::Layer& l : y.layers)
        for (bf16** rows : {&l.keys, &l.values})
          *rows = reinterpret_cast<bf16*>(at + (reinterpret_cast<char*>(*rows) - Emulated::aligned(first.cache)));
      decode::lay_out(c, room, at + cache, buffers.emplace_back());
    }
    decode::PromptBuffers counted;
    prompt_memory.assign(size_t(lay_out(c, kRows, false, nullptr, counted)) + 256, char(0xff));  // NaN
    lay_out(c, kRows, false, Emulated::aligned(prompt_memory), prompt);
    std::fill_n(prompt.arrived, decode::kMostRouted / 16, 0u);
    sequences_memory.assign(size_t(lay_out(c, kRows, nullptr, input, sequences)) + 256, 0);
    lay_out(c, kRows, Emulated::aligned(sequences_memory), input, sequences);
    sequences.slot_bytes = distance;
    sequences.state = buffers[0].state, sequences.logits = buffers[0].logits;
  }
  void extend(int slot, int32_t id) {
    buffers[size_t(slot)].state->tokens[0] = id;
    decode::run(model[size_t(slot)], buffers[size_t(slot)], {.capacity = first.capacity}, {});
  }
  // Computes a token of each of these slots; -1 stands for the slot's own greedy token.
  void step(const std::vector<int>& of, const std::vector<int32_t>& ids, uint32_t vocab = 0) {
    *input = {.count = uint32_t(of.size())};
    for (size_t j = 0; j < of.size(); ++j) {
      input->slot[j] = uint32_t(of[j]), input->token[j] = ids[j];
      input->appended[j] = 1, input->row[j] = uint32_t(j);
    }
    run_prompt(model[0], buffers[0], prompt,
               {.T = decode::batch_rows(uint32_t(of.size())),
                .position = 0,
                .head_rows = 1,
                .vocab = vocab,
                .capacity = first.capacity,
                .device = 0,
                .sequences = &sequences},
               {});
  }
  // The same by the small batch's kernels.
  void small_step(const std::vector<int>& of, const std::vector<int32_t>& ids) {
    if (small_memory.empty()) {
      small_memory.resize(size_t(lay_out(first.c, first.capacity, nullptr, small_buffers)) + 256);
      lay_out(first.c, first.capacity, Emulated::aligned(small_memory), small_buffers);
    }
    *input = {.count = uint32_t(of.size())};
    for (size_t j = 0; j < of.size(); ++j) input->slot[j] = uint32_t(of[j]), input->token[j] = ids[j];
    decode::run(model[0], small_buffers,
                {.T = uint32_t(of.size()),
                 .head_rows = uint32_t(of.size()),
                 .capacity = first.capacity,
                 .sequences = &sequences},
                {});
  }
  // The experts of the last single token of a slot.
  testing::Definition::Choices single_choices(int slot) const {
    if (first.c.experts == 0) return {};
    return testing::choices_of(buffers[size_t(slot)], first.c.layers, 0);
  }
  // Appends parts of prompts in one pass, or the part of a single slot in a pass of its own.
  void prompts(const std::vector<std::pair<int, std::vector<int32_t>>>& of) {
    *input = {.count = uint32_t(of.size())};
    std::vector<decode::PromptPart> parts;
    int64_t T = 0;
    for (const auto& [slot, ids] : of) {
      const size_t j = parts.size();
      std::copy(ids.begin(), ids.end(), prompt.ids + T);
      T += int64_t(ids.size());
      input->slot[j] = uint32_t(slot), input->appended[j] = uint32_t(ids.size()), input->row[j] = uint32_t(T - 1);
      parts.push_back({&model[size_t(slot)], int64_t(ids.size()), buffers[size_t(slot)].state->position});
    }
    *prompt.single_tokens = *input;
    prompt.single_tokens->count = uint32_t(
        std::find_if(of.begin(), of.end(), [](const auto& part) { return part.second.size() > 1; }) - of.begin());
    decode::Prompt p{.T = T, .position = 0, .head_rows = 1, .vocab = 0, .capacity = first.capacity, .device = 0};
    p.sequences = &sequences, p.parts = parts;
    run_prompt(model[0], buffers[0], this->prompt, p, {});
  }
  void prompt_alone(int slot, const std::vector<int32_t>& ids) {
    std::copy(ids.begin(), ids.end(), prompt.ids);
    run_prompt(model[size_t(slot)], buffers[size_t(slot)], prompt,
               {.T = int64_t(ids.size()),
                .position = buffers[size_t(slot)].state->position,
                .head_rows = 1,
                .vocab = 0,
                .capacity = first.capacity,
                .device = 0},
               {});
  }
  // All keys and values of a slot.
  std::vector<char> cache(int slot) const {
    const char* const at = Emulated::aligned(const_cast<std::vector<char>&>(memory)) + slot * distance;
    return {at, at + first.cache.size() - 256};
  }
  std::vector<double> row(int slot) const {
    const float* const from = buffers[size_t(slot)].logits;
    return {from, from + first.c.vocab};
  }
  testing::DecodeReference::Choices choices(size_t sequences_of_step, size_t j) const {
    const size_t k = size_t(first.c.experts_per_token), rows = decode::batch_rows(uint32_t(sequences_of_step));
    testing::DecodeReference::Choices all(size_t(first.c.layers));
    for (size_t l = 0; l < all.size(); ++l)
      for (size_t i = 0; i < k; ++i) all[l].push_back(prompt.chosen[(l * rows + j) * k + i]);
    return all;
  }
};

GptOssConfig small() { return testing::decode_config(96, 8, 2, 32, 96, 6, 2, 5, 2); }

// Sequences of lengths below and above a window take part in some of the steps.
TEST(GptOssBatchEmulated, EverySequenceOfAStepIsTheModel) {
  for (const auto& [dense, experts] :
       {std::pair{WeightFormat::bf16, WeightFormat::mxfp4}, {WeightFormat::mxfp4, WeightFormat::fp8}}) {
    if (testing::kSanitized && dense == WeightFormat::mxfp4) continue;
    const GptOssConfig c = dense == WeightFormat::bf16 ? small() : testing::decode_config(64, 4, 2, 32, 96, 4, 2, 7, 2);
    const DecodeModel m(c, dense, experts, 7);
    Batch batch(m, 24, 5);
    std::vector<testing::DecodeReference> exact(5, {m, false}), chain(5, {m, true});
    testing::LogitError of_chain, of_gpu;
    int32_t next = 3;
    const auto id = [&] { return next = (next * 7 + 5) % int32_t(c.vocab); };
    for (int slot = 0; slot < 5; ++slot)
      for (int t = 0; t <= 3 * slot; ++t) {
        const int32_t token = id();
        batch.extend(slot, token);
        const auto chosen = testing::choices_of(batch.buffers[size_t(slot)], c.layers, 0);
        exact[size_t(slot)].token(token, chosen), chain[size_t(slot)].token(token, chosen);
      }
    for (const std::vector<int>& step : {std::vector<int>{2, 0, 4}, {0, 1, 2, 3, 4}, {4, 3}, {3, 2, 1, 0}}) {
      std::vector<int32_t> ids;
      for (size_t j = 0; j < step.size(); ++j) ids.push_back(id());
      batch.step(step, ids);
      for (size_t j = 0; j < step.size(); ++j) {
        const size_t slot = size_t(step[j]);
        const auto chosen = batch.choices(step.size(), j);
        const std::vector<double> want = exact[slot].token(ids[j], chosen), got = batch.row(step[j]);
        of_gpu.add(got, want);
        of_chain.add(chain[slot].token(ids[j], chosen), want);
        const decode::State& state = *batch.buffers[slot].state;
        EXPECT_EQ(state.tokens[0], std::max_element(got.begin(), got.end()) - got.begin());
        EXPECT_EQ(state.flaw, 0u);
      }
    }
    for (int slot = 0; slot < 5; ++slot)
      EXPECT_EQ(batch.buffers[size_t(slot)].state->position, 3 * slot + 1 + (slot == 4 ? 3 : slot == 1 ? 2 : 3));
    EXPECT_LE(of_gpu.rms(), 1.5 * of_chain.rms()) << "largest " << of_gpu.largest << ", " << of_chain.largest;
    EXPECT_LE(of_gpu.largest, 2 * of_chain.largest);
  }
}

// The same of models beside GPT-OSS, and of the small batch's kernels.
TEST(FamiliesBatchEmulated, EverySequenceOfAStepIsTheModel) {
  for (const testing::FamilyCase& t : testing::family_cases()) {
    // In the skipped cases a step of sequences runs the same kernels as a prompt of one sequence.
    if (!t.spec.qk_norm && !t.spec.norm.post) continue;
    const testing::RandomModel m(t.spec, t.dense, t.experts);
    for (const bool matrix_kernels : {false, true}) {
      SCOPED_TRACE(::testing::Message() << t.name << (matrix_kernels ? " by matrix kernels" : " by a small batch"));
      Batch batch(m.spec, m.weights, 24, 4);
      std::vector<testing::Definition> exact, chain;
      for (int slot = 0; slot < 4; ++slot) exact.emplace_back(m, false), chain.emplace_back(m, true);
      testing::LogitError of_chain, of_gpu;
      int32_t next = 3;
      const auto id = [&] { return next = (next * 7 + 5) % int32_t(t.spec.vocab); };
      for (int slot = 0; slot < 4; ++slot)
        for (int n = 0; n <= 3 * slot; ++n) {
          const int32_t token = id();
          batch.extend(slot, token);
          const auto chosen = batch.single_choices(slot);
          exact[size_t(slot)].logits(token, chosen), chain[size_t(slot)].logits(token, chosen);
        }
      for (const std::vector<int>& step : {std::vector<int>{2, 0, 3}, {0, 1, 2, 3}, {3, 1}}) {
        std::vector<int32_t> ids;
        for (size_t j = 0; j < step.size(); ++j) ids.push_back(id());
        matrix_kernels ? batch.step(step, ids) : batch.small_step(step, ids);
        for (size_t j = 0; j < step.size(); ++j) {
          const size_t slot = size_t(step[j]);
          const auto chosen = t.spec.experts == 0 ? testing::Definition::Choices()
                              : matrix_kernels    ? batch.choices(step.size(), j)
                                                  : testing::choices_of(batch.small_buffers, t.spec.layers, j);
          const std::vector<double> want = exact[slot].logits(ids[j], chosen), got = batch.row(step[j]);
          of_gpu.add(got, want);
          of_chain.add(chain[slot].logits(ids[j], chosen), want);
          const decode::State& state = *batch.buffers[slot].state;
          EXPECT_EQ(state.tokens[0], std::max_element(got.begin(), got.end()) - got.begin());
          EXPECT_EQ(state.flaw, 0u);
        }
      }
      EXPECT_LE(of_gpu.rms(), 1.5 * of_chain.rms()) << "largest " << of_gpu.largest << ", " << of_chain.largest;
      EXPECT_LE(of_gpu.largest, 2 * of_chain.largest);
    }
  }
}

// Rows without a sequence belong to no expert and touch no slot. A row has the same numbers alone, beside other rows,
// and with another rounding of the number of rows.
TEST(GptOssBatchEmulated, ARowHasTheSameBitsBesideAnyOtherRows) {
  const DecodeModel m(small(), WeightFormat::bf16, WeightFormat::mxfp4, 7);
  constexpr int kSlots = 20;
  std::vector<std::vector<double>> alone;
  for (const int n : {1, kSlots}) {
    Batch batch(m, 8, kSlots);
    std::vector<int> all;
    std::vector<int32_t> ids, greedy;
    for (int slot = 0; slot < kSlots; ++slot) all.push_back(slot), ids.push_back(slot * 5 % 53), greedy.push_back(-1);
    for (int begin = 0; begin < kSlots; begin += n) {
      const std::vector<int> slots(all.begin() + begin, all.begin() + begin + n);
      batch.step(slots, {ids.begin() + begin, ids.begin() + begin + n});
      EXPECT_EQ(batch.prompt.offsets[m.config.experts], n * m.config.experts_per_token);
      batch.step(slots, {greedy.begin(), greedy.begin() + n});
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      EXPECT_EQ(batch.buffers[size_t(slot)].state->position, 2);
      if (n == 1)
        alone.push_back(batch.row(slot));
      else
        EXPECT_EQ(batch.row(slot), alone[size_t(slot)]) << "slot " << slot;
    }
  }
}

// Slots of different lengths, shorter and longer than the window; a slot without a part does not change. Parts of one
// token come first, as the pending tokens of answers beside prompts. Another kernel computes their attention, so that
// later keys of such a slot differ by roundings.
TEST(GptOssBatchEmulated, PartsOfSeveralPromptsGiveTheLogitsOfThePromptsAlone) {
  const DecodeModel m(small(), WeightFormat::bf16, WeightFormat::mxfp4, 7);
  Batch together(m, 32, 3), alone(m, 32, 3);
  int32_t next = 3;
  const auto some = [&](int64_t n) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < n; ++t) ids.push_back(next = (next * 7 + 5) % 53);
    return ids;
  };
  int64_t length[3] = {};
  bool rounded[3] = {};
  using Parts = std::vector<std::pair<int, int64_t>>;  // slot, tokens
  for (const Parts& of :
       {Parts{{2, 1}, {0, 7}}, {{2, 9}, {0, 12}}, {{2, 1}, {0, 1}, {1, 6}}, {{2, 5}, {0, 2}}, {{1, 1}, {2, 1}}}) {
    std::vector<std::pair<int, std::vector<int32_t>>> parts;
    for (const auto& [slot, n] : of) {
      parts.push_back({slot, some(n)});
      alone.prompt_alone(slot, parts.back().second);
      rounded[slot] |= n == 1 && length[slot] > 0;
      length[slot] += n;
    }
    together.prompts(parts);
    for (const int slot : {0, 1, 2}) {
      EXPECT_EQ(together.buffers[size_t(slot)].state->position, length[slot]);
      EXPECT_TRUE(rounded[slot] || together.cache(slot) == alone.cache(slot)) << "keys and values of slot " << slot;
      if (length[slot] == 0) continue;
      const std::vector<double> got = together.row(slot), want = alone.row(slot);
      // a different kernel computes the head
      for (size_t v = 0; v < want.size(); ++v) EXPECT_NEAR(got[v], want[v], 0.1);
      EXPECT_EQ(together.buffers[size_t(slot)].state->tokens[0],
                std::max_element(got.begin(), got.end()) - got.begin());
    }
  }
}

TEST(GptOssBatchEmulated, OnlyIdsBelowTheVocabularyAreTheLikeliest) {
  const DecodeModel m(small(), WeightFormat::bf16, WeightFormat::mxfp4, 7);
  Batch batch(m, 8, 2);
  batch.step({1, 0}, {4, 9}, 11);
  for (const int slot : {0, 1}) {
    const std::vector<double> row = batch.row(slot);
    EXPECT_EQ(batch.buffers[size_t(slot)].state->tokens[0],
              std::max_element(row.begin(), row.begin() + 11) - row.begin());
  }
}

TEST(GptOssBatch, MatrixKernelsBeginWhereTheyWereFasterThanSmallBatches) {
  EXPECT_EQ(decode::small_batch_sequences(/*hopper=*/true, /*experts=*/true), 8);
  EXPECT_EQ(decode::small_batch_sequences(true, false), 7);
  EXPECT_EQ(decode::small_batch_sequences(false, true), 12);
  EXPECT_EQ(decode::small_batch_sequences(false, false), 12);
}

TEST(GptOssBatch, TheNumberOfRowsIsRoundedUpToTheNextOfTheList) {
  for (uint32_t n = 1; n <= decode::kMostSequences; ++n) {
    const auto next = std::lower_bound(std::begin(decode::kBatchRows), std::end(decode::kBatchRows), n);
    ASSERT_NE(next, std::end(decode::kBatchRows));
    EXPECT_EQ(decode::batch_rows(n), *next);
  }
}

}  // namespace
}  // namespace ingot
