// The row kernel on the CPU: its results equal the model's, and no row depends on the other rows.
#include "ingot/models/decode/row_kernel/row_kernel.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/decode/fixtures/emulated_model.test.h"

namespace ingot {
namespace {

using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;

void check_case(const DecodeCase& t) {
  std::unique_ptr<Emulated> gpu;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpu = std::make_unique<Emulated>(m, uint32_t(room));
    gpu->row_kernel = true;
    EXPECT_EQ(supports_row_kernel(gpu->model), m.config.head_dim <= 64);
    return testing::DecodeUnderTest{
        .extend = [&](std::span<const int32_t> ids) { return gpu->extend(ids, uint32_t(ids.size())); },
        .choices = [&](size_t i) { return testing::choices_of(gpu->buffers, gpu->c.layers, i); },
        .state = [&] { return *gpu->buffers.state; }};
  });
}
// The cases of the other paths, in steps of at most 8 tokens.
TEST(RowKernelEmulated, EveryCaseIsTheModelInStepsOfOneToEightRows) {
  for (DecodeCase t : testing::decode_cases()) {
    if (t.experts != WeightFormat::mxfp4) continue;
    t.batches = t.length > 100 ? std::vector<int64_t>(size_t(t.length / 8), 8) : std::vector<int64_t>{2, 1, 4, 3, 8};
    int64_t all = 0;
    for (size_t i = 0; i < t.batches.size(); ++i) {
      t.batches[i] = std::min(t.batches[i], t.length - all);
      all += t.batches[i];
      if (all == t.length) t.batches.resize(i + 1);
    }
    check_case(t);
  }
}

// A row has five weight tiles, because with two weight tiles every order of summation gives the same sum.
const DecodeModel& small_model() {
  static const DecodeModel model(testing::decode_config(320, 8, 2, 16, 288, 6, 2, 5, 2), WeightFormat::bf16,
                                 WeightFormat::mxfp4, 7);
  return model;
}
std::vector<int32_t> some_ids(int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), 3, small_model().config.vocab);
  return ids;
}

// Rows of one sequence have the same bits however the rows are divided among steps.
TEST(RowKernelEmulated, TheNumbersOfATokenDoNotDependOnTheRowsOfItsStep) {
  const std::vector<int32_t> ids = some_ids(16);
  std::vector<std::vector<double>> want;
  for (const std::vector<int>& steps : std::vector<std::vector<int>>{
           {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {8, 8}, {2, 3, 4, 7}, {5, 6, 1, 4}, {7, 2, 7}}) {
    Emulated gpu(small_model(), 16);
    gpu.row_kernel = true;
    std::vector<std::vector<double>> rows;
    for (const int n : steps) {
      const auto got = gpu.extend(std::span(ids).subspan(rows.size(), size_t(n)), uint32_t(n));
      rows.insert(rows.end(), got.begin(), got.end());
    }
    if (want.empty()) want = rows;
    EXPECT_EQ(rows, want) << "steps of " << ::testing::PrintToString(steps);
  }
}

// The slots of several sequences at equal distances: state, logits, keys and values.
struct Sequences {
  static constexpr int kSlots = 8;
  Emulated gpu;
  std::vector<char> slab, arrays;
  decode::BatchInput* input = nullptr;
  decode::BatchedSequences all;

  explicit Sequences(int64_t blocks = 3) : gpu(small_model(), 32) {
    gpu.blocks = blocks;
    const DecoderSpec& c = gpu.c;
    const int64_t rows = 32 * c.kv_heads * decode::cache_dim(c) * 2, logits = (c.vocab * 4 + 255) / 256 * 256;
    all.slot_bytes = 256 + logits + 2 * rows * c.layers;
    slab.resize(size_t(kSlots * all.slot_bytes) + 256);
    char* const begin = Emulated::aligned(slab);
    std::memset(begin, 0xff, size_t(kSlots * all.slot_bytes));
    all.state = reinterpret_cast<decode::State*>(begin), all.logits = reinterpret_cast<float*>(begin + 256);
    for (int64_t l = 0; l < c.layers; ++l) {
      char* const at = begin + 256 + logits + 2 * rows * l;
      gpu.model.layers[size_t(l)].keys = reinterpret_cast<bf16*>(at);
      gpu.model.layers[size_t(l)].values = reinterpret_cast<bf16*>(at + rows);
      for (int s = 0; s < kSlots && decode::cache_dim(c) > c.head_dim; ++s)
        std::memset(at + s * all.slot_bytes, 0, size_t(2 * rows));
    }
    for (int s = 0; s < kSlots; ++s) *state(s) = {};
    gpu.stages = stages_of(gpu.model, gpu.buffers, gpu.capacity);
    decode::BatchedSequences placed;
    arrays.resize(size_t(decode::lay_out(c, kSlots, nullptr, input, placed)) + 256);
    decode::lay_out(c, kSlots, Emulated::aligned(arrays), input, placed);
    all.input = placed.input, all.arrived = placed.arrived, all.best = placed.best;
  }
  decode::State* state(int slot) const {
    return reinterpret_cast<decode::State*>(reinterpret_cast<char*>(all.state) + slot * all.slot_bytes);
  }
  std::vector<float> logits(int slot) const {
    const auto* const row =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(all.logits) + slot * all.slot_bytes);
    return {row, row + gpu.c.vocab};
  }
  void step(std::span<const int> slots, std::span<const int32_t> ids) {
    input->count = uint32_t(slots.size());
    for (size_t j = 0; j < slots.size(); ++j) {
      input->slot[j] = uint32_t(slots[j]), input->token[j] = ids[j];
      input->appended[j] = 1, input->row[j] = uint32_t(j);
    }
    const uint32_t T = uint32_t(slots.size());
    gpu.run_rows({.T = T, .head_rows = T, .capacity = gpu.capacity, .sequences = &all});
  }
};

// Compares a sequence alone with the same sequence beside more or fewer sequences of different lengths, in different
// orders.
TEST(RowKernelEmulated, ASequenceDoesNotDependOnTheOtherSequencesOfItsStep) {
  const std::vector<int32_t> ids = some_ids(24);
  std::vector<std::vector<float>> want;  // the logits of each token of a sequence that is computed alone
  Sequences alone;
  for (int t = 0; t < 6; ++t) {
    alone.step(std::vector<int>{3}, std::span(ids).subspan(size_t(t), 1));
    want.push_back(alone.logits(3));
  }
  Emulated one(small_model(), 32);
  one.row_kernel = true;
  for (int t = 0; t < 6; ++t) {
    const std::vector<double> row = one.extend(std::span(ids).subspan(size_t(t), 1), 1)[0];
    EXPECT_EQ(std::vector<float>(row.begin(), row.end()), want[size_t(t)]) << "as rows of one sequence";
  }
  Sequences together;
  const std::vector<std::vector<int>> companies = {{3, 0}, {5, 3, 1, 0},          {0, 1, 2, 3, 4, 5, 6, 7},
                                                   {7, 3}, {3, 4, 2, 6, 5, 0, 1}, {2, 1, 3}};
  size_t other = 6;
  for (size_t t = 0; t < companies.size(); ++t) {
    std::vector<int32_t> tokens;
    for (const int slot : companies[t]) tokens.push_back(slot == 3 ? ids[t] : ids[other++ % ids.size()]);
    together.step(companies[t], tokens);
    EXPECT_EQ(together.logits(3), want[t]) << "token " << t;
    EXPECT_EQ(together.state(3)->position, int32_t(t + 1));
    EXPECT_EQ(together.state(3)->tokens[0], std::max_element(want[t].begin(), want[t].end()) - want[t].begin());
  }
}

// The rows of a draft step are consecutive tokens of slots of different lengths. Each row equals the same token of the
// same slot in a step of its own.
TEST(RowKernelEmulated, RowsOfADraftStepEqualStepsOfOneToken) {
  const std::vector<int32_t> ids = some_ids(24);
  constexpr int kFed[] = {5, 0, 2};  // tokens of each slot before the draft step
  const auto token = [&](int slot, int at) { return ids[size_t(7 * slot + at) % ids.size()]; };
  Sequences alone;
  std::vector<std::vector<float>> want;
  const std::vector<std::pair<int, int>> rows = {{2, 0}, {2, 1}, {2, 2}, {0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}};
  for (int slot = 0; slot < 3; ++slot)
    for (int at = 0; at < kFed[slot] + 3; ++at) {
      alone.step(std::vector<int>{slot}, std::vector<int32_t>{token(slot, at)});
      if (at >= kFed[slot]) want.push_back(alone.logits(slot));
    }
  for (const size_t count : {rows.size(), size_t(3), size_t(1)}) {
    Sequences drafts;
    for (int slot = 0; slot < 3; ++slot)
      for (int at = 0; at < kFed[slot]; ++at)
        drafts.step(std::vector<int>{slot}, std::vector<int32_t>{token(slot, at)});
    drafts.input->count = uint32_t(count);
    for (size_t j = 0; j < count; ++j) {
      const auto [slot, at] = rows[j];
      drafts.input->slot[j] = uint32_t(slot), drafts.input->token[j] = token(slot, kFed[slot] + at);
      drafts.input->position[j] = kFed[slot] + at;
    }
    const uint32_t T = uint32_t(count);
    drafts.gpu.run_rows(
        {.T = T, .head_rows = T, .capacity = drafts.gpu.capacity, .sequences = &drafts.all, .draft = true});
    const auto got = drafts.gpu.rows_of_logits(T);
    for (size_t j = 0; j < count; ++j) {
      const auto [slot, at] = rows[j];
      EXPECT_EQ(std::vector<float>(got[j].begin(), got[j].end()), want[size_t(3 * slot + at)]) << "row " << j;
    }
  }
}

// Different numbers of blocks divide the work differently, and blocks wait for different blocks.
TEST(RowKernelEmulated, AnyNumberOfBlocksComputesTheModel) {
  const std::vector<int32_t> ids = some_ids(8);
  Emulated phased(small_model(), 16);
  const auto want = phased.extend(ids, 8);
  for (const int64_t blocks : {1, 2, 7}) {
    Emulated gpu(small_model(), 16);
    gpu.row_kernel = true, gpu.blocks = blocks;
    const auto got = gpu.extend(ids, 8);
    for (size_t j = 0; j < got.size(); ++j)
      for (size_t v = 0; v < got[j].size(); ++v) ASSERT_NEAR(got[j][v], want[j][v], 0.25) << "row " << j;
  }
}

// Steps without logits, and steps with the logits of the last row alone.
TEST(RowKernelEmulated, AStepComputesTheRequestedLogits) {
  const std::vector<int32_t> ids = some_ids(9);
  Emulated all(small_model(), 16), few(small_model(), 16);
  all.row_kernel = few.row_kernel = true;
  all.extend(std::span(ids).first(4), 4);
  const auto want = all.extend(std::span(ids).subspan(4), 5);
  few.extend(std::span(ids).first(4), 0);
  EXPECT_EQ(few.buffers.state->position, 4);
  EXPECT_EQ(few.extend(std::span(ids).subspan(4), 1)[0], want[4]);
  EXPECT_EQ(few.buffers.state->position, 9);
  EXPECT_EQ(few.buffers.state->tokens[0], all.buffers.state->tokens[0]);
}

TEST(RowKernelEmulated, AMissingGridBarrierEndsTheStepAndAppendsNothing) {
  const std::vector<int32_t> ids = some_ids(5);
  Emulated sound(small_model(), 16);
  sound.row_kernel = true;
  const auto want = sound.extend(ids, 5);
  for (const uint32_t missing : {1u, 2u, 8u, 9u}) {
    SCOPED_TRACE(missing);
    Emulated gpu(small_model(), 16);
    gpu.row_kernel = true;
    std::copy(ids.begin(), ids.end(), gpu.buffers.state->tokens);
    gpu.run_rows({.T = 5, .head_rows = 5, .capacity = 16}, missing);
    EXPECT_EQ(gpu.record.state, gpu::kTimedOut);
    EXPECT_EQ(gpu.record.what, missing);
    EXPECT_EQ(gpu.record.seen, 2u);
    EXPECT_EQ(gpu.record.expected, 3u);
    EXPECT_EQ(gpu.buffers.state->position, 0);
    gpu.stop = gpu::kRunning, gpu.record = {};
    std::memset(gpu.row_words.grid_barrier, 0, size_t(gpu.row_words.bytes));
    EXPECT_EQ(gpu.extend(ids, 5), want);
    EXPECT_EQ(gpu.buffers.state->position, 5);
  }
}

TEST(RowKernelEmulated, ASplitHasAllWeightTilesOnce) {
  for (const uint32_t row_tiles : {1u, 6u, 180u, 320u})
    for (const uint32_t weight_tiles : {1u, 2u, 45u, 64u})
      for (const uint32_t most : {1u, 6u, 23u})
        for (const uint32_t blocks : {1u, 3u, 132u}) {
          const decode::RowSplit s = decode::row_split_of(row_tiles, weight_tiles, most, 16, blocks);
          EXPECT_LE(s.parts, 16u);
          EXPECT_LE(s.chunk_tiles, most);
          EXPECT_GE(s.chunks * s.chunk_tiles, s.tiles);
          EXPECT_GE(s.parts * s.tiles, weight_tiles);
          EXPECT_LT((s.parts - 1) * s.tiles, weight_tiles) << "a part is empty";
        }
}

}  // namespace
}  // namespace ingot
