// A draft head on a GPU: its guesses are those of the definition up to the rounding of activations to bf16, and follow
// from the tokens of a slot alone; every path of the target keeps the hidden states that the head reads.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include "ingot/gpu/allocator.h"
#include "ingot/models/decode/cpu/cpu_model.h"
#include "ingot/models/decode/fixtures/device_model.test.h"
#include "ingot/models/draft/head/cpu_head.h"
#include "ingot/models/draft/head/random_head.test.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using decode::DeviceHead;
using decode::DeviceModel;
using testing::DefinedHead;
using testing::HeadCase;
using testing::RandomHead;
using Ids = std::vector<int32_t>;
using Row = std::vector<double>;

class DeviceHeadCuda : public testing::GpuTest<> {};

constexpr int64_t kTokens = 40, kContext = kTokens + 8;
// Roundings of activations to bf16 in series, from the hidden states to the logits of a guess: states, features, the
// two inputs of the layer, queries and keys, shares and values, the mixed values, and the inputs of the three products
// that follow. A rounding changes a number by at most 2^-9 of it, and a product of random numbers keeps the error of a
// vector in proportion to the vector.
constexpr double kRoundings = 10 * 0x1p-9;

using Target = testing::RandomGptOss;
draft::DraftHead head_of(const Target& target, RandomHead random, const draft::HeadOptions& options = {}) {
  random.write(target.dir / "head");
  return draft::load_draft_head(target.dir / "head", target.config, target.config.layers, options);
}
Ids ids_of(uint64_t seed, int64_t n, int64_t vocab) {
  Ids ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), seed, vocab);
  return ids;
}

// Tokens of a sequence, and the target's hidden states, which the test makes up.
struct Text {
  Ids ids;
  std::vector<float> states;
  int64_t width, hidden;
  explicit Text(const draft::HeadConfig& c, uint64_t seed = 1)
      : ids(ids_of(seed, kTokens, c.vocab)),
        states(size_t(kTokens * c.features())),
        width(c.features()),
        hidden(c.hidden) {
    testing::fill_normal(Tensor(states.data(), {kTokens, width}), seed, 3);
  }
  // Appends tokens `begin` to `end` - 1 in steps of at most `most` rows.
  void append(int64_t begin, int64_t end, DeviceHead& head, Stream stream, int64_t most, int slot = 0) const {
    const int64_t bytes = int64_t(states.size()) * 4;
    const Arena arena(bytes, gpu::device_memory(0));
    auto* const device = static_cast<float*>(arena.at(0, DType::u8, {bytes}).data);
    gpu::copy_to_device(device, states.data(), bytes);
    for (int64_t t = begin; t < end; t += most) {
      const int64_t T = std::min(most, end - t);
      for (uint32_t i = 0; i < head.states().count; ++i)
        decode::keep_states(head.states(), head.states().boundary[i], device + t * width + i * hidden, width,
                            uint32_t(T), uint32_t(hidden), stream);
      const DeviceHead::Part part{slot, t, T};
      head.place({&part, 1});
      head.append(slot, std::span(ids).subspan(size_t(t), size_t(T)));
    }
    gpu::synchronize({Device::cuda, 0}, stream);
  }
  std::vector<Row> rows(int64_t n) const {
    std::vector<Row> out;
    for (int64_t t = 0; t < n; ++t) out.emplace_back(states.begin() + t * width, states.begin() + (t + 1) * width);
    return out;
  }
};

TEST_F(DeviceHeadCuda, GuessesAreThoseOfTheDefinitionForEveryKindOfHead) {
  const Target target;
  const DeviceModel model(target.config, target.weights, {.context = kContext});
  int64_t equal = 0, all = 0;
  for (const HeadCase& c : testing::head_cases()) {
    SCOPED_TRACE(c.name);
    const draft::DraftHead h = head_of(target, c.head, c.options);
    DeviceHead head(h, model.model(), {.context = kContext, .rows = 16}, model.stream(), 0);
    const DefinedHead defined(h, target.weights);
    const Text text(h.config);
    const auto number_of = [&](int32_t id) {  // of the target's id among the head's
      const Ids& ids = h.weights.ids;
      return ids.empty() ? size_t(id) : size_t(std::find(ids.begin(), ids.end(), id) - ids.begin());
    };
    for (const int64_t n : {1, 2, 9, 30}) {
      head.truncate(0, 0);
      text.append(0, n, head, model.stream(), n == 30 ? 11 : 8);
      Ids tokens(text.ids.begin(), text.ids.begin() + n + 1);
      const DefinedHead::Guesses want = defined.draft(text.rows(n), tokens, 4);
      for (int64_t count = 1; count <= 4; ++count) {
        SCOPED_TRACE(detail::concat(n, " tokens, guess ", count));
        const Ids found = head.draft(0, tokens.back(), count);
        ASSERT_EQ(int64_t(found.size()), count);
        const Row& expected = want.logits[size_t(count - 1)];
        const std::vector<float> logits = head.last_logits();
        double largest = 0;
        for (const double x : expected) largest = std::max(largest, std::abs(x));
        const double tolerance = largest * double(count) * kRoundings;
        for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(logits[i], expected[i], tolerance) << "id " << i;
        ++all, equal += found.back() == want.ids[size_t(count - 1)];
        if (found.back() == want.ids[size_t(count - 1)]) continue;
        // A near tie, from which the guesses part.
        EXPECT_LE(expected[number_of(want.ids[size_t(count - 1)])] - expected[number_of(found.back())], 2 * tolerance);
        break;
      }
    }
  }
  EXPECT_GT(equal, all * 9 / 10);
}

TEST_F(DeviceHeadCuda, GuessesFollowFromTheTokensOfTheSlotAlone) {
  const Target target;
  const DeviceModel model(target.config, target.weights, {.context = kContext});
  for (const HeadCase& c : testing::head_cases()) {
    if (testing::kEmulated && c.head.own_embedding) continue;
    SCOPED_TRACE(c.name);
    const draft::DraftHead h = head_of(target, c.head, c.options);
    const DeviceHead::Sizes sizes{.context = kContext, .slots = 3, .rows = 16};
    DeviceHead head(h, model.model(), sizes, model.stream(), 0);
    const Text text(h.config), other(h.config, 2);
    const auto append = [&](const Text& of, int64_t begin, int64_t end) {
      of.append(begin, end, head, model.stream(), 8);
    };
    const auto expect_fresh = [&](int slot = 0) {
      const int64_t n = head.length(slot);
      head.truncate(2, 0);
      text.append(0, n, head, model.stream(), 16, 2);
      const Ids want = head.draft(2, text.ids[size_t(n)], 5);
      const std::vector<float> logits = head.last_logits();
      EXPECT_EQ(head.draft(slot, text.ids[size_t(n)], 5), want) << n << " tokens";
      EXPECT_EQ(head.last_logits(), logits) << n << " tokens";
    };
    append(text, 0, 6), expect_fresh();
    append(text, 6, 7), expect_fresh();
    // A step computes a draft, of which two tokens are accepted.
    append(text, 7, 10), append(other, 10, 14);
    head.truncate(0, 10), expect_fresh();
    // The same length again, after a draft behind another token.
    head.draft(0, (text.ids[10] + 1) % 37, 3), expect_fresh();
    head.draft(0, (text.ids[10] + 1) % 37, 3);
    append(text, 10, 12), expect_fresh();
    for (const int64_t length : {11, 5, 1}) head.truncate(0, length), expect_fresh();
    head.truncate(0, 0);
    append(other, 0, 8), head.draft(0, 3, 2);
    head.truncate(0, 0);
    append(text, 0, 16), head.compute_rows(0);
    for (const int64_t length : {16, 7, 1}) head.copy(0, 1, length), expect_fresh(1);
    expect_fresh();
  }
}

// The logits of the first guess compare the states that a path has kept of every token: through the features of the
// last token, and through the keys and values of the earlier ones.
TEST_F(DeviceHeadCuda, EveryPathOfTheTargetKeepsTheHiddenStates) {
  const Target target;
  RandomHead random;
  random.boundaries = {2, 0, 1};
  const draft::DraftHead h = head_of(target, random);
  const Ids ids = ids_of(3, 24, target.config.vocab);
  decode::CpuModel cpu(target.config, target.weights, {.batch = 24, .positions = kContext});
  decode::KeyValueCache cache(target.config, cpu.layers(), kContext, 24);
  draft::CpuHead cpu_head(h, target.weights, 24, kContext);
  draft::HeadCache of_cpu(h.config, kContext);
  const decode::CpuModel::Boundaries kept{h.config.boundaries, cpu_head.hidden_states()};
  cpu.extend(ids, cache, &kept);
  cpu_head.append(ids, of_cpu);

  DeviceModel gpu(target.config, target.weights, {.context = kContext, .slots = 2}, &h);
  if (gpu.draft_rows() < 8) GTEST_SKIP() << "an SM's memory has no room for small batches";
  ASSERT_TRUE(gpu.has_head());
  EXPECT_FALSE(gpu.use_megakernel(true));
  EXPECT_FALSE(gpu.use_row_kernel(decode::RowKernelUse::all));
  const auto expect_slot = [&](int slot, int64_t n) {
    ASSERT_EQ(gpu.length(slot), n);
    ASSERT_EQ(gpu.guess(slot, 1, 1).size(), 1u) << "the head knows all tokens of the slot";
    const std::vector<float> found = gpu.head()->last_logits();
    draft::HeadCache first(h.config, kContext);
    first.copy_from(of_cpu, n);
    cpu_head.draft(first, 1, 1);
    const Row want = testing::values(cpu_head.last_logits());
    double largest = 0;
    for (const double x : want) largest = std::max(largest, std::abs(x));
    // The target has two layers of some ten roundings before those of the head.
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_NEAR(found[i], want[i], 3 * kRoundings * largest) << "slot " << slot << ", " << n << " tokens, id " << i;
  };
  const auto part = [&](int64_t begin, int64_t end) {
    return std::span(ids).subspan(size_t(begin), size_t(end - begin));
  };
  {
    SCOPED_TRACE("single tokens and few tokens");
    for (const int64_t n : {1, 1, 5, 1, 8, 1}) {
      gpu.extend(part(gpu.length(), gpu.length() + n), 1);
      expect_slot(0, gpu.length());
    }
  }
  if (gpu.prompt_batch() > gpu.batch()) {
    SCOPED_TRACE("a prompt");
    gpu.rewind(0);
    gpu.extend(part(0, 20), 1);
    expect_slot(0, 20);
  }
  if (gpu.takes_parts()) {
    SCOPED_TRACE("parts of two prompts, and steps of two slots");
    gpu.rewind(0);
    const Decoder::Part parts[] = {{1, part(0, 9)}, {0, part(0, 13)}};
    gpu.extend_parts(parts);
    expect_slot(1, 9), expect_slot(0, 13);
    const int slots[] = {0, 1};
    const int32_t next[] = {ids[13], ids[9]};
    for (const int64_t small_batch : {16, 0}) {
      gpu.rewind(13, 0), gpu.rewind(9, 1);
      gpu.limit_small_batch(small_batch);
      gpu.extend_sequences(slots, next);
      expect_slot(0, 14), expect_slot(1, 10);
    }
  }
  {
    SCOPED_TRACE("draft steps");
    gpu.rewind(0), gpu.rewind(0, 1);
    gpu.extend(part(0, 6), 1), gpu.extend(part(0, 2), 1, 1);
    // Three rows of slot 1 beside five of slot 0; masks let all tokens but the last be accepted.
    std::vector<std::vector<uint32_t>> masks;
    std::vector<SampleOptions> options(8, {.sampling = {.temperature = 0}});
    const std::pair<int, int64_t> rows[] = {{1, 2}, {1, 3}, {1, 4}, {0, 6}, {0, 7}, {0, 8}, {0, 9}, {0, 10}};
    std::vector<SlotSample> samples;
    for (size_t i = 0; i < 8; ++i) {
      const int32_t next = ids[size_t(rows[i].second + 1)];
      masks.emplace_back(size_t(target.config.vocab + 31) / 32)[size_t(next / 32)] = 1u << (next % 32);
    }
    for (size_t i = 0; i < 8; ++i) {
      options[i].allowed = masks[i];
      samples.push_back({.slot = rows[i].first, .options = &options[i]});
    }
    const DraftStep steps[] = {{part(2, 5), std::span(samples).first(3)}, {part(6, 11), std::span(samples).subspan(3)}};
    gpu.sample_drafts(steps);
    expect_slot(1, 5), expect_slot(0, 11);
  }
}

}  // namespace
}  // namespace ingot
#endif
