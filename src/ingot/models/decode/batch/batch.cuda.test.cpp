// Steps of many sequences by the matrix kernels: each sequence is compared with the model in fp64, and its numbers are
// the same bit for bit for every number of rows and beside any other rows.
#if defined(INGOT_HAS_CUDA_DECODE) && defined(INGOT_HAS_CUDA_GROUPED)
#include "ingot/models/decode/batch/batch.h"

#include <gtest/gtest.h>

#include <map>

#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using decode::DeviceModel;
using testing::choices_of;
using testing::choices_of_row;
using testing::DecodeModel;

class GptOssBatchCuda : public testing::GpuTest<> {};

constexpr WeightFormat kBf16 = WeightFormat::bf16, kFp8 = WeightFormat::fp8, kMx = WeightFormat::mxfp4;

// Slots of a model on the GPU, each beside the model in fp64 and beside a chain of roundings as the GPU's. Each slot
// begins with a prompt of a different length.
struct CheckedSlots {
  const DecodeModel m;
  DeviceModel gpu;
  std::vector<testing::DecodeReference> exact, chain;
  testing::LogitError of_chain, of_gpu;
  int32_t next = 0;

  CheckedSlots(const GptOssConfig& config, WeightFormat dense, WeightFormat experts, int slots)
      : m(config, dense, experts, 7),
        gpu(m.config, m.weights, {.context = 40, .slots = slots, .megakernel = false}),
        exact(size_t(slots), {m, false}),
        chain(size_t(slots), {m, true}) {
    gpu.limit_small_batch(0);
    for (int slot = 0; slot < slots; ++slot)
      for (int t = 0; t <= slot % 7; ++t) {  // one by one: not every GPU has memory for small batches
        const int32_t token = id();
        gpu.extend({&token, 1}, 1, slot);
        gpu.synchronize();
        const auto chosen = choices_of(gpu, gpu.buffers(slot), 0);
        exact[size_t(slot)].token(token, chosen), chain[size_t(slot)].token(token, chosen);
      }
  }
  int32_t id() { return int32_t((int64_t(next++) * 7919 + 13) % m.config.vocab); }
  // A step of these slots with given tokens.
  void step(const std::vector<int>& slots) {
    std::vector<int32_t> ids;
    for (size_t j = 0; j < slots.size(); ++j) ids.push_back(id());
    gpu.extend_sequences(slots, ids);
    gpu.synchronize();
    for (size_t j = 0; j < slots.size(); ++j)
      add_row(slots[j], ids[j], choices_of_row(gpu, decode::batch_rows(uint32_t(slots.size())), j));
  }
  // A pass over parts of these numbers of tokens. The parts of one token have the first rows.
  void pass(const std::vector<std::pair<int, size_t>>& of) {
    std::vector<std::vector<int32_t>> ids;
    std::vector<Decoder::Part> parts;
    size_t rows = 0;
    for (const auto& [slot, n] : of) {
      ids.emplace_back();
      for (size_t t = 0; t < n; ++t) ids.back().push_back(id());
      rows += n;
    }
    for (size_t i = 0; i < of.size(); ++i) parts.push_back({of[i].first, ids[i]});
    gpu.extend_parts(parts);
    gpu.synchronize();
    size_t row = 0;
    for (const bool single : {true, false})
      for (size_t i = 0; i < of.size(); ++i) {
        if ((of[i].second == 1) != single) continue;
        const size_t slot = size_t(of[i].first);
        for (size_t t = 0; t + 1 < of[i].second; ++t, ++row) {
          const auto chosen = choices_of_row(gpu, int64_t(rows), row);
          exact[slot].token(ids[i][t], chosen), chain[slot].token(ids[i][t], chosen);
        }
        add_row(of[i].first, ids[i].back(), choices_of_row(gpu, int64_t(rows), row++));
      }
  }
  // Compares the logits of a slot after `token`.
  void add_row(int slot, int32_t token, const testing::DecodeReference::Choices& chosen) {
    std::vector<float> row(size_t(m.config.vocab));
    gpu.logits(1, row.data(), slot);
    const std::vector<double> want = exact[size_t(slot)].token(token, chosen);
    of_gpu.add({row.begin(), row.end()}, want);
    of_chain.add(chain[size_t(slot)].token(token, chosen), want);
    EXPECT_EQ(gpu.likeliest(slot), std::max_element(row.begin(), row.end()) - row.begin());
  }
  void expect_roundings() const {
    EXPECT_LE(of_gpu.rms(), 1.5 * of_chain.rms()) << "largest " << of_gpu.largest << ", " << of_chain.largest;
    EXPECT_LE(of_gpu.largest, 2 * of_chain.largest);
  }
};

void check_batch(const GptOssConfig& config, WeightFormat dense, WeightFormat experts, int slots,
                 const std::vector<std::vector<int>>& steps) {
  SCOPED_TRACE(::testing::Message() << name_of(dense) << " and " << name_of(experts));
  CheckedSlots checked(config, dense, experts, slots);
  for (const std::vector<int>& step : steps) checked.step(step);
  checked.expect_roundings();
}
// Selects `count` slots from `first` on, in a stride that does not divide the number of slots.
std::vector<int> some_slots(int slots, int count, int first) {
  std::vector<int> some;
  for (int j = 0; j < count; ++j) some.push_back((first + 5 * j) % slots);
  return some;
}
TEST_F(GptOssBatchCuda, EverySequenceOfAStepIsTheModel) {
  const std::vector<std::vector<int>> steps = {some_slots(18, 18, 3), some_slots(18, 3, 1), some_slots(18, 16, 2),
                                               some_slots(18, 9, 0), some_slots(18, 17, 4)};
  check_batch(testing::decode_config(96, 8, 2, 32, 96, 6, 2, 5), kBf16, kMx, 18, steps);
  check_batch(testing::decode_config(64, 4, 4, 32, 96, 4, 2, 7, 2), kMx, kFp8, 18, steps);
  check_batch(testing::decode_config(64, 4, 2, 32, 96, 4, 2, 7, 2), kFp8, kMx, 18, steps);
}
TEST_F(GptOssBatchCuda, EverySequenceOfAStepIsTheModelSmall) {
  check_batch(testing::decode_config(64, 4, 2, 32, 64, 3, 2, 2, 2), kBf16, kMx, 3, {{2, 0, 1}, {1, 0}});
}

// The pending tokens of 14 answers beside two prompts, given in any order, then the same answers in a step.
TEST_F(GptOssBatchCuda, EveryPartOfAPassOverAnswersAndPromptsIsTheModel) {
  for (const auto& [config, dense, experts] :
       {std::tuple{testing::decode_config(96, 8, 2, 32, 96, 6, 2, 5), kBf16, kMx},
        {testing::decode_config(64, 4, 4, 32, 96, 4, 2, 7, 2), kMx, kFp8}}) {
    SCOPED_TRACE(::testing::Message() << name_of(dense) << " and " << name_of(experts));
    CheckedSlots checked(config, dense, experts, 18);
    std::vector<std::pair<int, size_t>> parts;
    for (const int slot : some_slots(18, 16, 3)) parts.push_back({slot, slot == 8 ? 9 : slot == 13 ? 2 : 1});
    checked.pass(parts);
    checked.step(some_slots(18, 16, 3));
    checked.pass({{17, 1}, {2, 12}});
    checked.pass({{17, 1}, {2, 1}});
    checked.expect_roundings();
  }
}

// With the published shapes: a row's logits have the same bits with any number of rows and beside any other rows, in
// every format of the dense matrices, with contexts shorter and longer than the window; and a step continues from its
// own greedy tokens.
TEST_F(GptOssBatchCuda, ARowHasTheSameBitsForEveryNumberOfRowsAndBesideAnyOtherRows) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr int kSlots = 128;
  for (const WeightFormat dense : {kBf16, kFp8, kMx}) {
    SCOPED_TRACE(name_of(dense));
    const GptOssConfig c = testing::published_config(2, 32, 2000);
    DeviceModel gpu(c, decode::shapes_of(c, dense, kMx), {.context = 700, .slots = kSlots, .megakernel = false}, 5);
    gpu.limit_small_batch(0);
    const auto id_of = [&](int slot) { return int32_t((slot * 7919 + 13) % c.vocab); };
    std::map<std::pair<int, int>, std::vector<float>> seen;  // by slot and step
    for (const int n : {128, 127, 97, 96, 65, 64, 49, 48, 33, 32, 25, 24, 17, 16, 9, 8, 2, 1})
      for (const int first : {n, 3 * n + 1}) {
        if (n > 100 && first != n && n != 127) continue;
        std::vector<int> slots;
        for (int j = 0; j < n; ++j) slots.push_back((first + 37 * j) % kSlots);
        std::vector<int32_t> ids;
        for (const int slot : slots) ids.push_back(id_of(slot)), gpu.fill_cache_with_random(1 + 5 * slot, slot);
        for (int step = 0; step < 2; ++step) {
          step == 0 ? gpu.extend_sequences(slots, ids) : gpu.continue_sequences(slots, 1);
          for (const int slot : slots) {
            std::vector<float> row(static_cast<size_t>(c.vocab));
            gpu.logits(1, row.data(), slot);
            const auto& before = seen.try_emplace({slot, step}, row).first->second;
            ASSERT_EQ(std::memcmp(row.data(), before.data(), row.size() * 4), 0)
                << "slot " << slot << ", step " << step << " of " << n << " rows";
            ASSERT_EQ(gpu.likeliest(slot), std::max_element(row.begin(), row.end()) - row.begin());
          }
        }
      }
  }
}

// Twelve and sixteen queries of a key head are two tiles, whose blocks count their arrivals in one counter; the block
// that arrives last adds up to three parts of the keys. The repeated steps run these blocks in many orders.
TEST_F(GptOssBatchCuda, ARowOfTwoTilesOfQueriesHasTheSameBitsInEveryOrderOfItsBlocks) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  constexpr int kSlots = 40;
  for (const int64_t heads : {32, 24}) {
    GptOssConfig c = testing::decode_config(256, heads, 2, 64, 96, 8, 2, 700, 2);
    c.context = 4096;
    DeviceModel gpu(c, decode::shapes_of(c, kBf16, kMx), {.context = 4096, .slots = kSlots, .megakernel = false}, 5);
    gpu.limit_small_batch(0);
    std::vector<std::vector<float>> seen(kSlots);
    for (const int n : {1, kSlots, 9, kSlots, 24, kSlots, kSlots, kSlots, 17, kSlots})
      for (int first = 0; first < kSlots; first += n) {
        std::vector<int> slots;
        std::vector<int32_t> ids;
        for (int j = 0; j < std::min(n, kSlots - first); ++j) {
          slots.push_back((first + j) * 7 % kSlots), ids.push_back(slots.back() % int32_t(c.vocab));
          gpu.fill_cache_with_random(1 + 101 * slots.back(), slots.back());
        }
        gpu.extend_sequences(slots, ids);
        for (const int slot : slots) {
          std::vector<float> row(static_cast<size_t>(c.vocab));
          gpu.logits(1, row.data(), slot);
          ASSERT_TRUE(std::isfinite(row[0]));
          if (n == 1) seen[size_t(slot)] = row;
          ASSERT_EQ(row, seen[size_t(slot)]) << "slot " << slot << " of " << n << " rows";
        }
      }
    for (const uint32_t arrived : testing::download(gpu.sequences().arrived, kSlots * 2)) EXPECT_EQ(arrived, 0u);
  }
}

// Compares with the path of up to 16 sequences: except for near ties (which choose other experts in some layer) the two
// paths differ by roundings to 8 bits.
TEST_F(GptOssBatchCuda, ManySequencesDifferFromFewByRoundings) {
  if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  const GptOssConfig c = testing::published_config(4, 32, 2000);
  DeviceModel gpu(c, decode::shapes_of(c, kBf16, kMx), {.context = 1024, .slots = 16, .megakernel = false}, 5);
  const int sequences = int(std::min<int64_t>(16, gpu.batch()));
  if (sequences == 1) GTEST_SKIP() << "an SM's memory has no room for small batches";
  std::vector<int> slots;
  std::vector<int32_t> ids;
  for (int slot = 0; slot < sequences; ++slot)
    slots.push_back(slot), ids.push_back((slot * 7919 + 13) % int32_t(c.vocab));
  std::vector<std::vector<float>> rows[2];
  std::vector<testing::DecodeReference::Choices> chosen[2];
  for (const int matrix : {0, 1}) {
    gpu.limit_small_batch(matrix == 1 ? 0 : sequences);
    for (const int slot : slots) gpu.fill_cache_with_random(1 + 63 * slot, slot);
    gpu.extend_sequences(slots, ids);
    for (const int slot : slots) {
      gpu.logits(1, rows[matrix].emplace_back(size_t(c.vocab)).data(), slot);
      auto experts = matrix == 1 ? choices_of_row(gpu, decode::batch_rows(uint32_t(sequences)), size_t(slot))
                                 : choices_of(gpu, gpu.sequences_buffers(), size_t(slot));
      for (auto& layer : experts) std::sort(layer.begin(), layer.end());
      chosen[matrix].push_back(experts);
    }
  }
  int same = 0;
  double largest = 0;
  for (size_t s = 0; s < size_t(sequences); ++s) {
    if (chosen[0][s] != chosen[1][s]) continue;
    double error = 0, size = 0;
    for (size_t v = 0; v < rows[0][s].size(); ++v)
      error += std::pow(double(rows[0][s][v]) - double(rows[1][s][v]), 2), size += std::pow(double(rows[0][s][v]), 2);
    ++same, largest = std::max(largest, std::sqrt(error / size));
  }
  std::printf("%d of %d sequences took the same experts on both paths; those differ by at most %.4f\n", same, sequences,
              largest);
  EXPECT_GE(same, sequences / 2);
  EXPECT_LT(largest, 0.03);
}

}  // namespace
}  // namespace ingot
#endif
