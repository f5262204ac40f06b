// The promises of models/decoder.h, for every engine.
#include "ingot/models/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/device_decoder.h"
#include "ingot/models/fake_decoder.test.h"
#include "ingot/models/gpt/config/parameters.h"
#include "ingot/models/gpt/generate/decoder.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
constexpr int64_t kVocab = 37, kContext = 48;

const testing::RandomGptOss& gpt_oss() {
  static const testing::RandomGptOss m;
  return m;
}
struct GptModel {
  GptConfig config = gpt_preset("golf");
  std::vector<float> memory;
  Tensor weights;
  GptModel() {
    config.vocab = kVocab, config.dim = 24, config.layers = 4, config.heads = 4, config.kv_heads = 2;
    config.head_dim = 8, config.mlp_hidden = 32, config.context = kContext, config.rotary_dim = 4;
    config.xsa_layers = 2, config.lane_start = 3, config.loop_first = config.loop_last = 1;
    const ParameterLayout layout(config);
    memory.resize(size_t(layout.padded_count()));
    weights = Tensor(memory.data(), {layout.padded_count()});
    const Rng rng(4, Purpose::test);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = float(0.5 * rng.normal(i));
  }
};

// An engine that leaves logits on its own device, here the host's memory, and samples on this device for all slots at
// once.
class OnADevice final : public DeviceDecoder {
 public:
  explicit OnADevice(int64_t slots) : DeviceDecoder(slots), rows_(size_t(slots)), next_(size_t(slots)) {
    static const GptModel m;
    for (int64_t s = 0; s < slots; ++s) {
      inner_.push_back(make_decoder(m.config, m.weights, true, Products::fp32, 1));
      inner_.back()->open();
    }
  }
  int64_t vocab() const override { return inner_[0]->vocab(); }
  int64_t context() const override { return inner_[0]->context(); }
  int64_t batch() const override { return inner_[0]->batch(); }
  int64_t columns() const override { return 4; }
  bool extends_together() const override { return true; }
  int calls = 0, fails_at = 0;  // of sample_on_device()

 private:
  void clear(int slot) override { inner_[size_t(slot)]->rewind(0, 0); }
  int64_t cached_length(int slot) const override { return inner_[size_t(slot)]->length(0); }
  int64_t truncate(int slot, int64_t length) override { return inner_[size_t(slot)]->rewind(0, length); }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    inner_[size_t(slot)]->extend(0, ids, rows, take);
  }
  void extend_on_device(int slot, std::span<const int32_t> ids, const SlotSample* next) override {
    next_[size_t(slot)] = next != nullptr ? std::optional(*next) : std::nullopt;
    extend_slot(slot, ids, Rows::last, [&](int64_t, const Tensor& logits) {
      rows_[size_t(slot)].resize(size_t(vocab()));
      copy(logits, Tensor(rows_[size_t(slot)].data(), {1, vocab()}));
    });
  }
  bool feed_on_device(std::span<const PendingToken> pending) override {
    if (pending.size() < 3) return false;
    for (const PendingToken& p : pending) extend_on_device(p.next.slot, {&p.id, 1}, &p.next);
    return true;
  }
  void extend_parts_on_device(std::span<const Part> parts) override {
    for (const Part& part : parts) extend_on_device(part.slot, part.ids, nullptr);
  }
  Tensor row(int slot) { return Tensor(rows_[size_t(slot)].data(), {vocab()}); }
  bool samples_on_device(const SlotSample& s) const override { return s.options->bias.size() < 3; }
  std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> of) override {
    if (++calls == fails_at) fail(ErrorCode::interrupted, "the device gave up");
    std::vector<SlotSampled> found(of.size());
    for (size_t i = 0; i < of.size(); ++i) try {
        const SampleOptions& o = *of[i].options;
        // An announced token is requested next.
        if (const auto& next = next_[size_t(of[i].slot)]) {
          EXPECT_EQ(next->slot, of[i].slot);
          EXPECT_EQ(next->options, &o);
          EXPECT_EQ(next->step, of[i].step);
        }
        found[i].token.token = sample_from(row(of[i].slot), o, of[i].step);
        if (o.logprobs >= 0)
          found[i].token.logprobs =
              logprobs_of(row(of[i].slot), o.vocab > 0 ? o.vocab : vocab(), found[i].token.token, o.logprobs);
      } catch (...) { found[i].error = std::current_exception(); }
    return found;
  }
  void copy_logits_to_host(int slot, const Take& take) override {
    take(cached_length(slot) - 1, Tensor(rows_[size_t(slot)].data(), {1, vocab()}));
  }

  std::vector<std::unique_ptr<Decoder>> inner_;
  std::vector<std::vector<float>> rows_;
  std::vector<std::optional<SlotSample>> next_;
};

struct Engine {
  const char* name;
  std::function<std::unique_ptr<Decoder>(int64_t slots)> make;
  bool needs_gpu = false;
};
std::ostream& operator<<(std::ostream& out, const Engine& e) { return out << e.name; }
const Engine kEngines[] = {
    {"gpt",
     [](int64_t slots) {
       static const GptModel m;
       return make_decoder(m.config, m.weights, true, Products::fp32, slots);
     }},
    {"gpt_oss",
     [](int64_t slots) {
       return make_decoder(gpt_oss().config, gpt_oss().weights, {.context = kContext, .batch = 8, .slots = slots});
     }},
    {"several_slots_on_a_device", [](int64_t slots) { return std::make_unique<OnADevice>(slots); }},
#ifdef INGOT_HAS_CUDA_DECODE
    {"gpt_oss_on_a_gpu",
     [](int64_t slots) {
       return make_gpu_decoder(gpt_oss().config, gpt_oss().weights, {.context = kContext, .batch = 8, .slots = slots});
     },
     true},
    {"gpt_oss_on_a_gpu_together",
     [](int64_t slots) {
       return make_gpu_decoder(gpt_oss().config, gpt_oss().weights,
                               {.context = kContext, .batch = 8, .slots = slots, .batched_sequences = true});
     },
     true},
#endif
};
struct decoder : ::testing::TestWithParam<Engine> {
  void SetUp() override {
    if (GetParam().needs_gpu && gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  }
  std::unique_ptr<Decoder> make(int64_t slots = 1) const { return GetParam().make(slots); }
};
INSTANTIATE_TEST_SUITE_P(engines, decoder, ::testing::ValuesIn(kEngines),
                         [](const auto& info) { return std::string(info.param.name); });

std::vector<int32_t> ids_of(uint64_t seed, int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), seed, kVocab);
  return ids;
}
void feed(Sequence& s, const std::vector<int32_t>& ids) {
  for (size_t at = 0; at < ids.size(); at += 8)
    ASSERT_TRUE(s.extend(std::span(ids).subspan(at, std::min<size_t>(8, ids.size() - at))));
}
const SampleOptions kHot = {.sampling = {.temperature = 1.5, .top_p = 0.95}, .seed = 7};
const SampleOptions kGreedy = {.sampling = {.temperature = 0}};
std::vector<int32_t> alone(Decoder& d, const std::vector<int32_t>& prompt, const SampleOptions& o, int64_t n) {
  Sequence s(d);
  feed(s, prompt);
  return s.sample(o, n).tokens;
}
// The logits after `ids`, computed anew.
std::vector<double> logits_after(Decoder& d, const std::vector<int32_t>& ids) {
  Sequence s(d);
  std::vector<double> row;
  for (size_t at = 0; at < ids.size(); ++at)
    s.extend(std::span(ids).subspan(at, 1), Decoder::Rows::last,
             [&](int64_t, const Tensor& logits) { row = testing::values(logits); });
  return row;
}
std::vector<int32_t> join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_P(decoder, sampling_in_parts_equals_sampling_at_once_and_the_last_token_stays_pending) {
  const auto d = make();
  const std::vector<int32_t> want = alone(*d, ids_of(1, 11), kHot, 12);
  ASSERT_EQ(want.size(), 12u);
  Sequence s(*d);
  feed(s, ids_of(1, 11));
  std::vector<int32_t> found;
  SampleOptions o = kHot;
  for (const int64_t n : {1, 4, 1, 6}) {
    o.step = uint32_t(found.size());
    const Sampled sampled = s.sample(o, n);
    EXPECT_EQ(sampled.finish, Finish::length);
    EXPECT_EQ(sampled.stop_id, -1);
    found = join(found, sampled.tokens);
    EXPECT_EQ(s.length(), 11 + int64_t(found.size()) - 1);
  }
  EXPECT_EQ(found, want);
}

// A prompt of the decoder's largest batch, possibly computed by different kernels than a single token: of all rows, of
// the last one, and token by token.
TEST_P(decoder, a_long_prompt_gives_the_logits_of_its_tokens_in_order) {
  const auto d = make();
  const std::vector<int32_t> ids = ids_of(6, std::min<int64_t>(d->batch(), 40));
  std::vector<std::vector<double>> rows;
  const auto keep = [&](int64_t position, const Tensor& logits) {
    ASSERT_EQ(position, int64_t(rows.size()));
    const std::vector<double> all = testing::values(logits);
    for (size_t at = 0; at < all.size(); at += size_t(kVocab))
      rows.emplace_back(all.begin() + int64_t(at), all.begin() + int64_t(at) + kVocab);
  };
  Sequence all(*d);
  ASSERT_TRUE(all.extend(ids, Decoder::Rows::all, keep));
  ASSERT_EQ(rows.size(), ids.size());
  std::vector<double> last;
  {
    const auto other = make();
    Sequence s(*other);
    s.extend(ids, Decoder::Rows::last, [&](int64_t position, const Tensor& logits) {
      EXPECT_EQ(position, int64_t(ids.size()) - 1);
      last = testing::values(logits);
    });
  }
  const auto apart = [](const std::vector<double>& a, const std::vector<double>& b) {
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return std::sqrt(error / size);
  };
  // On a GPU activations are rounded to bf16, and different kernels add up in another order.
  const double most = d->device().kind == Device::cuda ? 0.02 : 1e-5;
  const auto fresh = make();
  EXPECT_LE(apart(rows.back(), last), most);
  EXPECT_LE(apart(rows.back(), logits_after(*fresh, ids)), 2 * most);
}

// The logprobs after `ids` by the definition of GPT-OSS in fp64, or by a chain of roundings to bf16
// (decode_cases.test.h).
std::vector<double> logprobs_of_definition(const std::vector<int32_t>& ids, bool rounded, uint64_t chain) {
  testing::DecodeReference reference(gpt_oss().config, gpt_oss().weights, rounded, chain);
  std::vector<double> row;
  for (const int32_t id : ids) row = reference.token(id);
  double sum = 0;
  for (const double logit : row) sum += std::exp(logit);
  for (double& logit : row) logit -= std::log(sum);
  return row;
}
struct LogprobError {
  double rms, largest;
};
// The most by which logprobs after `ids` may differ where an engine computes them in two ways, for example the prompt
// in batches and token by token. On the CPU both ways round to fp32. Both GPU engines compute GPT-OSS and round the
// same numbers to bf16, the inputs of products and the cache, but each kernel with errors of its own. A chain with
// random shifts of half a step has twice the variance of one rounding, and so have two kernels of one rounding each:
// the two ways differ as a chain differs from exact numbers. The largest of 32 chains bounds the difference, with the
// margins of check_decode() for a sample of chains.
LogprobError largest_difference(const Decoder& d, const std::vector<int32_t>& ids) {
  if (d.device().kind != Device::cuda) return {1e-5, 1e-5};
  const std::vector<double> exact = logprobs_of_definition(ids, false, 0);
  double rms = 0, largest = 0;
  for (uint64_t chain = 1; chain <= 32; ++chain) {
    testing::LogitError of_chain;
    of_chain.add(logprobs_of_definition(ids, true, chain), exact);
    rms = std::max(rms, of_chain.rms()), largest = std::max(largest, of_chain.largest);
  }
  return {1.5 * rms, 2 * largest};
}

// On a GPU a prompt fed in batches and a prompt fed token by token are computed by different kernels, and each of two
// nearly equal logits may differ. On a CPU the likeliest token is the same.
TEST_P(decoder, greedy_tokens_are_the_likeliest_after_everything_before) {
  const auto d = make(2);
  std::vector<int32_t> all = ids_of(1, 11);
  for (const int32_t token : alone(*d, all, kGreedy, 10)) {
    const std::vector<double> row = logits_after(*d, all);
    const auto likeliest = std::max_element(row.begin(), row.end());
    if (token != likeliest - row.begin()) {
      EXPECT_EQ(d->device().kind, Device::cuda);
      EXPECT_LT(*likeliest - row[size_t(token)], largest_difference(*d, all).largest)
          << token << " for " << likeliest - row.begin();
    }
    all.push_back(token);
  }
}

// An engine may sample by itself unless logprobs are requested, which the host computes from logits.
TEST_P(decoder, the_same_tokens_are_sampled_with_logprobs_and_without) {
  const auto d = make();
  for (const SamplingOptions& sampling : {SamplingOptions{.temperature = 1.5, .top_p = 0.95},
                                          {.temperature = 0},
                                          {.temperature = 3, .top_k = 9, .min_p = 0.05}}) {
    SampleOptions o{.sampling = sampling, .seed = 21, .step = 4, .vocab = 30};
    const std::vector<int32_t> found = alone(*d, ids_of(1, 11), o, 10);
    o.logprobs = 0;
    EXPECT_EQ(found, alone(*d, ids_of(1, 11), o, 10)) << "temperature " << sampling.temperature;
  }
}

TEST_P(decoder, feeding_the_pending_token_by_extend_changes_nothing) {
  const auto d = make();
  const std::vector<int32_t> want = alone(*d, ids_of(1, 11), kHot, 9);
  Sequence s(*d);
  feed(s, ids_of(1, 11));
  SampleOptions o = kHot;
  for (uint32_t i = 0; i < 9; ++i) {
    o.step = i;
    const Sampled sampled = s.sample(o, 1);
    EXPECT_EQ(sampled.tokens, std::vector<int32_t>{want[i]});
    if (i % 3 == 1) ASSERT_TRUE(s.extend(sampled.tokens));
  }
}

// Bit for bit: logprobs are numbers of the logits.
TEST_P(decoder, two_slots_in_turn_give_the_results_of_each_alone) {
  SampleOptions o[2] = {kHot, kHot};
  o[0].logprobs = o[1].logprobs = 3;
  o[1].seed = 8, o[1].sampling.temperature = 0.7;
  const std::vector<int32_t> prompts[2] = {ids_of(1, 19), ids_of(2, 9)};
  Sampled want[2];
  for (const int i : {0, 1}) {
    const auto d = make();
    Sequence s(*d);
    feed(s, prompts[i]);
    want[i] = s.sample(o[i], 20);
  }
  const auto d = make(3);
  Sequence idle(*d), a(*d), b(*d);
  Sequence* both[2] = {&a, &b};
  feed(idle, ids_of(3, 30));
  ASSERT_TRUE(a.extend(std::span(prompts[0]).first(8)));
  feed(b, prompts[1]);
  ASSERT_TRUE(a.extend(std::span(prompts[0]).subspan(8, 8)));
  Sampled found[2];
  const auto sample = [&](int i, int64_t n) {
    o[i].step = uint32_t(found[i].tokens.size());
    const Sampled sampled = both[i]->sample(o[i], n);
    found[i].tokens = join(found[i].tokens, sampled.tokens);
    found[i].logprobs.insert(found[i].logprobs.end(), sampled.logprobs.begin(), sampled.logprobs.end());
  };
  sample(1, 3);
  ASSERT_TRUE(a.extend(std::span(prompts[0]).subspan(16)));
  for (int i = 0; i < 12; ++i) {
    sample(0, 1 + i % 3);
    sample(1, 1 + (i + 1) % 3);
  }
  for (const int i : {0, 1})
    for (size_t t = 0; t < 20; ++t) {
      ASSERT_LT(t, found[i].tokens.size());
      EXPECT_EQ(found[i].tokens[t], want[i].tokens[t]) << i << " " << t;
      EXPECT_EQ(found[i].logprobs[t].sampled, want[i].logprobs[t].sampled) << i << " " << t;
      for (size_t k = 0; k < 3; ++k) {
        EXPECT_EQ(found[i].logprobs[t].top[k].id, want[i].logprobs[t].top[k].id);
        EXPECT_EQ(found[i].logprobs[t].top[k].logprob, want[i].logprobs[t].top[k].logprob);
      }
    }
}

TEST_P(decoder, slots_sampled_together_give_the_same_tokens_and_a_failing_slot_harms_no_other) {
  const auto d = make(3);
  Sequence a(*d), b(*d), empty(*d);
  feed(a, ids_of(1, 9));
  feed(b, ids_of(2, 14));
  SampleOptions other = kHot;
  other.seed = 99;
  const Decoder::Request requests[] = {
      {a.slot(), kHot, 6}, {empty.slot(), kHot, 6}, {b.slot(), other, 4}, {a.slot(), kHot, 1}, {17, kHot, 1}};
  const std::vector<Sampled> all = d->sample(requests);
  ASSERT_EQ(all.size(), 5u);
  const auto text = [](const Sampled& x) { return error_of([&] { std::rethrow_exception(x.error); }); };
  EXPECT_FALSE(all[0].error || all[2].error);
  EXPECT_NE(text(all[1]).find("without logits or a pending token"), std::string::npos) << text(all[1]);
  EXPECT_NE(text(all[3]).find("found slot " + std::to_string(a.slot()) + " twice"), std::string::npos);
  EXPECT_NE(text(all[4]).find("found slot 17, expected one that is open"), std::string::npos);
  const auto fresh = make();
  EXPECT_EQ(all[0].tokens, alone(*fresh, ids_of(1, 9), kHot, 6));
  EXPECT_EQ(all[2].tokens, alone(*fresh, ids_of(2, 14), other, 4));
}

// The logprob of each id after the slot's tokens, which has logits.
std::vector<double> logprobs_after(Sequence& s) {
  SampleOptions o = kGreedy;
  o.logprobs = kVocab;
  std::vector<double> all(kVocab);
  const Sampled sampled = s.sample(o, 1);
  for (const TokenLogprob& p : sampled.logprobs[0].top) all[size_t(p.id)] = p.logprob;
  return all;
}
void expect_near(const Decoder& d, const std::vector<double>& got, const std::vector<double>& want,
                 const std::vector<int32_t>& ids) {
  testing::LogitError found;
  found.add(got, want);
  const LogprobError most = largest_difference(d, ids);
  EXPECT_LE(found.rms(), most.rms);
  EXPECT_LE(found.largest, most.largest);
}

TEST_P(decoder, parts_for_several_slots_give_the_results_of_each_alone) {
  const auto d = make(4);
  Sequence a(*d), b(*d), c(*d);
  const std::vector<std::vector<int32_t>> ids = {ids_of(2, 2), ids_of(3, 4), ids_of(4, 1)};
  const std::vector<int32_t> before = ids_of(1, 3);
  feed(a, before);
  std::vector<Decoder::Part> parts = {{a.slot(), ids[0]}, {b.slot(), ids[1]}, {c.slot(), ids[2]}};
  EXPECT_EQ(d->extend(parts), (std::vector<bool>{true, true, true}));
  const std::vector<std::vector<int32_t>> expected_ids = {join(before, ids[0]), ids[1], ids[2]};
  for (size_t i = 0; Sequence* const s : {&a, &b, &c}) {
    EXPECT_EQ(s->length(), int64_t(expected_ids[i].size()));
    Sequence alone(*d);
    feed(alone, expected_ids[i]);
    expect_near(*d, logprobs_after(*s), logprobs_after(alone), expected_ids[i++]);
  }
  d->cancel(b.slot());
  EXPECT_EQ(d->extend(parts), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(a.length(), 7);
  EXPECT_EQ(b.length(), 4);
  EXPECT_NE(error_of([&] { b.sample(kGreedy, 1); }), "");
  Sequence alone(*d);
  const std::vector<int32_t> twice = join(expected_ids[0], ids[0]);
  feed(alone, twice);
  expect_near(*d, logprobs_after(a), logprobs_after(alone), twice);
  parts[2].slot = a.slot();
  EXPECT_NE(error_of([&] { d->extend(parts); }).find("twice"), std::string::npos);
  EXPECT_EQ(a.length(), 7);
}

// As a server feeds the pending tokens of its answers together with prompts.
TEST_P(decoder, pending_tokens_are_parts_beside_a_prompt) {
  const auto d = make(5);
  Sequence a(*d), b(*d), c(*d), prompt(*d);
  std::vector<std::vector<int32_t>> ids;
  std::vector<Decoder::Part> parts = {{prompt.slot(), {}}};
  for (Sequence* const s : {&a, &b, &c}) {
    ids.push_back(ids_of(5 + ids.size(), int64_t(2 + ids.size())));
    feed(*s, ids.back());
    ids.back().push_back(s->sample(kGreedy, 1).tokens[0]);
    parts.push_back({s->slot(), {}});
  }
  ids.push_back(ids_of(9, 5));
  for (size_t i = 0; i < 3; ++i) parts[i + 1].ids = std::span(ids[i]).last(1);
  parts[0].ids = ids[3];
  EXPECT_EQ(d->extend(parts), (std::vector<bool>(4, true)));
  for (size_t i = 0; Sequence* const s : {&a, &b, &c, &prompt}) {
    EXPECT_EQ(s->length(), int64_t(ids[i].size()));
    Sequence alone(*d);
    feed(alone, ids[i]);
    expect_near(*d, logprobs_after(*s), logprobs_after(alone), ids[i++]);
  }
}

// A slot that holds `ids`, some of them copied from another slot, continues with `more` as a slot that computed `ids`.
void expect_continues(Decoder& d, Sequence& s, const std::vector<int32_t>& ids, const std::vector<int32_t>& more) {
  feed(s, more);
  Sequence computed(d);
  feed(computed, ids);
  feed(computed, more);
  expect_near(d, logprobs_after(s), logprobs_after(computed), join(ids, more));
}

TEST_P(decoder, tokens_copied_from_another_slot_continue_as_in_the_source) {
  const auto d = make(3);
  Sequence from(*d), to(*d);
  const std::vector<int32_t> ids = ids_of(1, 22), more = ids_of(3, 4);
  const std::vector<int32_t> want = alone(*d, ids, kGreedy, 6);
  feed(from, ids);
  feed(to, ids_of(2, 9));
  bool any = false;
  for (const int64_t length : {22, 15, 3, 21}) {
    const int64_t held = to.length(), copied = d->copy_prefix(from.slot(), to.slot(), length);
    EXPECT_EQ(to.length(), copied == 0 ? held : length);
    if (copied == 0) continue;
    any = true;
    EXPECT_EQ(copied, length);
    EXPECT_NE(error_of([&] { to.sample(kGreedy, 1); }), "") << "nothing is beyond what was copied";
    expect_continues(*d, to, {ids.begin(), ids.begin() + length}, more);
  }
  EXPECT_EQ(any, std::string(GetParam().name).starts_with("gpt_oss"));
  EXPECT_EQ(from.sample(kGreedy, 6).tokens, want) << "the slot that was copied from goes on";
}

// Windows of the source may have dropped keys that an earlier length needs, and the slot's own older keys are not those
// of the copied tokens.
TEST_P(decoder, a_slot_with_copied_tokens_goes_back_as_if_it_had_computed_them) {
  const auto d = make(3);
  Sequence from(*d), to(*d);
  const std::vector<int32_t> ids = ids_of(1, 22), more = ids_of(3, 4);
  feed(from, ids);
  feed(to, ids_of(2, 24));
  for (const int64_t length : {19, 17, 8}) {
    if (d->copy_prefix(from.slot(), to.slot(), 20) == 0) continue;
    const int64_t left = to.rewind(length);
    EXPECT_LE(left, length);
    feed(to, {ids.begin() + left, ids.begin() + length});
    expect_continues(*d, to, {ids.begin(), ids.begin() + length}, more);
  }
}

TEST_P(decoder, a_closed_slot_can_be_reused_like_a_new_slot) {
  const auto d = make(2);
  const auto fresh = make();
  const std::vector<int32_t> want = alone(*fresh, ids_of(5, 20), kHot, 8);
  const int first = d->open(), second = d->open();
  EXPECT_NE(first, second);
  EXPECT_EQ(d->open_slots(), 2);
  EXPECT_EQ(error_of([&] { d->open(); }), "busy: decoder: found all 2 slots in use, expected one to be free");
  for (size_t at = 0; at < 40; at += 8) d->extend(first, ids_of(6, 8));
  d->checkpoint(first);
  d->sample(first, kHot, 3);
  d->cancel(first);
  d->close(first);
  EXPECT_NE(error_of([&] { d->length(first); }).find("expected one that is open"), std::string::npos);
  EXPECT_NE(error_of([&] { d->close(first); }).find("expected one that is open"), std::string::npos);
  EXPECT_EQ(d->open(), first);
  EXPECT_EQ(d->length(first), 0);
  EXPECT_NE(error_of([&] { d->sample(first, kHot, 1); }).find("expected extend() before"), std::string::npos);
  d->close(first);
  EXPECT_EQ(alone(*d, ids_of(5, 20), kHot, 8), want);
  EXPECT_EQ(error_of([&] { make(0); }), "invalid argument: decoder: found 0 slots, expected at least 1");
}

TEST_P(decoder, a_full_context_ends_sampling_and_refuses_further_tokens) {
  const auto d = make();
  Sequence s(*d);
  feed(s, ids_of(1, kContext - 3));
  const Sampled sampled = s.sample(kHot, 100);
  EXPECT_EQ(sampled.finish, Finish::context);
  EXPECT_EQ(sampled.tokens.size(), 4u);  // three have space in the context, and the fourth needs none
  EXPECT_EQ(s.length(), kContext);
  const Sampled nothing = s.sample(kHot, 1);
  EXPECT_EQ(nothing.finish, Finish::context);
  EXPECT_TRUE(nothing.tokens.empty());
  const std::vector<int32_t> one = {1};
  EXPECT_EQ(error_of([&] { s.extend(one); }), "usage: found 49 tokens, expected at most 48, the context");
  EXPECT_EQ(s.length(), kContext);
  // A refusal has changed nothing: the pending token is still pending.
  EXPECT_EQ(s.sample(kHot, 1).finish, Finish::context);
  EXPECT_EQ(s.rewind(0), 0);
  feed(s, ids_of(1, kContext - 3));
  EXPECT_EQ(s.sample(kHot, 4).tokens, sampled.tokens);
}

TEST_P(decoder, a_cancelled_prompt_can_be_continued_or_dropped) {
  const auto d = make();
  const std::vector<int32_t> prompt = ids_of(1, 24);
  const std::vector<int32_t> want = alone(*d, prompt, kHot, 8);
  Sequence s(*d);
  const std::span<const int32_t> all = prompt;
  ASSERT_TRUE(s.extend(all.first(8)));
  s.cancel();
  EXPECT_FALSE(s.extend(all.subspan(8, 8)));
  EXPECT_EQ(s.length(), 8);
  EXPECT_NE(error_of([&] { s.sample(kHot, 1); }).find("without logits"), std::string::npos);
  ASSERT_TRUE(s.extend(all.subspan(8, 8)));  // the wish is used up
  ASSERT_TRUE(s.extend(all.subspan(16)));
  EXPECT_EQ(s.sample(kHot, 8).tokens, want);
  // given up
  s.rewind(0);
  ASSERT_TRUE(s.extend(all.first(8)));
  s.cancel();
  EXPECT_FALSE(s.extend(all.subspan(8, 8)));
  s.rewind(0);
  feed(s, prompt);
  EXPECT_EQ(s.sample(kHot, 8).tokens, want);
}

TEST_P(decoder, sampling_ends_by_its_callback_or_by_cancel_and_can_be_continued) {
  const auto d = make();
  const std::vector<int32_t> want = alone(*d, ids_of(1, 9), kHot, 10);
  Sequence s(*d);
  feed(s, ids_of(1, 9));
  SampleOptions o = kHot;
  std::vector<int32_t> heard;
  o.on_token = [&](int32_t id) {
    heard.push_back(id);
    return heard.size() < 3;
  };
  Sampled sampled = s.sample(o, 10);
  EXPECT_EQ(sampled.finish, Finish::cancelled);
  EXPECT_EQ(sampled.tokens, heard);
  o.step = 3;
  o.on_token = [&](int32_t id) {
    heard.push_back(id);
    std::thread([&] { s.cancel(); }).join();
    return true;
  };
  sampled = s.sample(o, 7);
  EXPECT_EQ(sampled.finish, Finish::cancelled);
  EXPECT_EQ(sampled.tokens.size(), 1u);
  s.cancel();  // before anything is sampled
  sampled = s.sample(o, 7);
  EXPECT_EQ(sampled.finish, Finish::cancelled);
  EXPECT_TRUE(sampled.tokens.empty());
  o.step = 4, o.on_token = {};
  EXPECT_EQ(join(heard, s.sample(o, 6).tokens), want);
}

TEST_P(decoder, a_stop_id_ends_the_call_and_the_slot_keeps_all_earlier_tokens) {
  const auto d = make();
  const std::vector<int32_t> prompt = ids_of(1, 9), free = alone(*d, prompt, kHot, 20);
  for (const size_t at : {size_t(0), size_t(6)}) {
    const size_t first = size_t(std::find(free.begin(), free.end(), free[at]) - free.begin());
    const int32_t stops[] = {-5, free[at], 1 << 30};  // ids outside the vocabulary never come
    SampleOptions o = kHot;
    o.stop_ids = stops;
    o.logprobs = 0;
    Sequence s(*d);
    feed(s, prompt);
    const Sampled sampled = s.sample(o, 20);
    EXPECT_EQ(sampled.finish, Finish::stop);
    EXPECT_EQ(sampled.stop_id, free[at]);
    EXPECT_EQ(sampled.tokens, std::vector<int32_t>(free.begin(), free.begin() + int64_t(first)));
    EXPECT_EQ(sampled.logprobs.size(), first);
    EXPECT_EQ(s.length(), 9 + int64_t(first));
    EXPECT_NE(error_of([&] { s.sample(o, 1); }).find("expected extend() before"), std::string::npos);
    const std::vector<int32_t> next = {3};
    EXPECT_TRUE(s.extend(next));
    EXPECT_EQ(s.sample(kHot, 2).tokens.size(), 2u);
  }
}

TEST_P(decoder, only_allowed_tokens_are_sampled_and_none_allowed_is_an_error) {
  const auto d = make(2);
  Sequence s(*d);
  feed(s, ids_of(1, 9));
  const std::vector<double> row = logits_after(*d, ids_of(1, 9));
  std::vector<uint32_t> allowed = {1u << 4 | 1u << 30, 1u << 4};  // 4, 30 and 36
  SampleOptions o = kGreedy;
  o.allowed = allowed;
  const int32_t best = row[4] > row[30] ? (row[4] > row[36] ? 4 : 36) : (row[30] > row[36] ? 30 : 36);
  EXPECT_EQ(s.sample(o, 1).tokens, std::vector<int32_t>{best});
  o = kHot;
  o.sampling.temperature = 100;
  o.allowed = allowed;
  std::map<int32_t, int> counts;
  for (const int32_t id : s.sample(o, 30).tokens) ++counts[id];
  EXPECT_EQ(counts.size(), 3u);
  EXPECT_TRUE(counts.contains(4) && counts.contains(30) && counts.contains(36));
  allowed = {0, ~0u << 5};  // beyond the vocabulary alone
  EXPECT_EQ(error_of([&] { s.sample(o, 1); }),
            "invalid argument: sample: found no token that is allowed, expected at least one");
  o.allowed = std::span(allowed).first(1);
  EXPECT_EQ(error_of([&] { s.sample(o, 1); }), "invalid argument: sample: found 1 words of allowed tokens, expected 2");
  o.allowed = {};
  EXPECT_EQ(s.sample(o, 1).tokens.size(), 1u);  // refusals have changed nothing
}

TEST_P(decoder, biases_are_added_to_the_logits_before_anything_else) {
  const auto d = make(2);
  const std::vector<int32_t> prompt = ids_of(1, 9);
  const auto sample_biased = [&](std::vector<LogitBias> bias, SampleOptions o, int64_t n) {
    o.bias = bias;
    return alone(*d, prompt, o, n);
  };
  EXPECT_EQ(sample_biased({{11, 1000}}, kHot, 5), std::vector<int32_t>(5, 11));
  EXPECT_EQ(sample_biased({{11, 1000}, {12, 600}, {12, 600}}, kHot, 5), std::vector<int32_t>(5, 12));
  const int32_t likeliest = sample_biased({}, kGreedy, 1)[0];
  EXPECT_NE(sample_biased({{likeliest, -HUGE_VALF}}, kGreedy, 1)[0], likeliest);
  for (const int32_t id : sample_biased({{likeliest, -HUGE_VALF}}, kHot, 30)) EXPECT_NE(id, likeliest);
  // A sample equals the sampler's result from the logits with the bias added.
  std::vector<float> row;
  Sequence s(*d);
  ASSERT_TRUE(s.extend(std::span(prompt).first(8)));
  ASSERT_TRUE(s.extend(std::span(prompt).subspan(8), Decoder::Rows::last,
                       [&](int64_t, const Tensor& t) { row.assign(t.ptr<float>(), t.ptr<float>() + kVocab); }));
  row[3] += 2.5f, row[20] -= 1.25f;
  for (uint32_t step = 0; step < 40; ++step) {
    int32_t want = -1;
    sample({.logits = Tensor(row.data(), {1, kVocab}),
            .tokens = Tensor(&want, {1}),
            .options = kHot.sampling,
            .seed = 3,
            .step = step},
           {});
    SampleOptions o = kHot;
    o.seed = 3, o.step = step;
    EXPECT_EQ(sample_biased({{3, 2.5f}, {20, -1.25f}}, o, 1)[0], want) << step;
  }
  EXPECT_NE(error_of([&] {
              sample_biased({{37, 1}}, kHot, 1);
            }).find("found a bias for id 37, expected 0 to 36"),
            std::string::npos);
  for (const float bad : {NAN, HUGE_VALF})
    EXPECT_NE(error_of([&] {
                sample_biased({{1, bad}}, kHot, 1);
              }).find("expected a finite number or -infinity"),
              std::string::npos);
}

TEST_P(decoder, logprobs_follow_the_logits_before_biases_masks_and_temperature) {
  const auto d = make(2);
  std::vector<int32_t> all = ids_of(1, 9);
  Sequence s(*d);
  feed(s, all);
  SampleOptions o = kHot;
  const LogitBias bias[] = {{5, 3}};
  const std::vector<uint32_t> allowed = {0xffff'0ff0, ~0u};
  o.bias = bias, o.allowed = allowed, o.vocab = 35, o.logprobs = 4;
  const Sampled sampled = s.sample(o, 12);
  ASSERT_EQ(sampled.logprobs.size(), 12u);
  for (size_t i = 0; i < 12; ++i) {
    const std::vector<double> row = logits_after(*d, all);
    long double sum = 0;
    for (int64_t v = 0; v < 35; ++v) sum += std::exp((long double)(row[size_t(v)]));
    const auto want = [&](int32_t id) { return double(row[size_t(id)] - std::log(sum)); };
    // One case fed the prompt in batches and the other token by token.
    const double near = largest_difference(*d, all).largest;
    EXPECT_NEAR(sampled.logprobs[i].sampled, want(sampled.tokens[i]), near);
    ASSERT_EQ(sampled.logprobs[i].top.size(), 4u);
    std::vector<int32_t> order(35);
    for (int32_t v = 0; v < 35; ++v) order[size_t(v)] = v;
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[size_t(a)] > row[size_t(b)]; });
    for (size_t k = 0; k < 4; ++k) {
      const auto& top = sampled.logprobs[i].top[k];
      EXPECT_TRUE(top.id == order[k] || std::abs(want(top.id) - want(order[k])) <= 2 * near)
          << top.id << ' ' << order[k];
      EXPECT_NEAR(top.logprob, want(top.id), near);
    }
    all.push_back(sampled.tokens[i]);
  }
  EXPECT_NE(error_of([&] { o.logprobs = 36, s.sample(o, 1); }).find("expected -1 (none) to 35"), std::string::npos);
}

TEST_P(decoder, each_slot_rewinds_to_its_own_checkpoints) {
  const auto d = make(2);
  const auto fresh = make();
  Sequence a(*d), b(*d);
  const std::vector<int32_t> first = ids_of(1, 16), second = ids_of(2, 16);
  feed(a, first);
  a.checkpoint();
  feed(b, second);
  b.checkpoint();
  a.sample(kHot, 20);
  b.sample(kHot, 20);
  EXPECT_EQ(a.rewind(16), 16);
  EXPECT_EQ(b.rewind(16), 16);
  const std::vector<int32_t> more = ids_of(3, 5);
  feed(a, more);
  feed(b, more);
  EXPECT_EQ(a.sample(kHot, 6).tokens, alone(*fresh, join(first, more), kHot, 6));
  EXPECT_EQ(b.sample(kHot, 6).tokens, alone(*fresh, join(second, more), kHot, 6));
  EXPECT_NE(error_of([&] { a.rewind(200); }).find("found a length of 200 to go back to"), std::string::npos);
}

TEST_P(decoder, bad_requests_are_refused_and_change_nothing) {
  const auto d = make();
  const std::vector<int32_t> want = alone(*d, ids_of(1, 9), kHot, 4);
  Sequence s(*d);
  feed(s, ids_of(1, 9));
  const auto refused = [&](const SampleOptions& o, int64_t n) { return error_of([&] { s.sample(o, n); }); };
  EXPECT_EQ(refused(kHot, 0), "invalid argument: sample: found 0 tokens, expected at least 1");
  SampleOptions o = kHot;
  o.vocab = 38;
  EXPECT_EQ(refused(o, 1), "invalid argument: sample: found a vocabulary of 38, expected at most 37, the model's");
  o = kHot, o.sampling.top_p = 0;
  EXPECT_NE(refused(o, 1).find("found top_p 0"), std::string::npos);
  const std::vector<int32_t> bad = {3, 37}, none;
  EXPECT_NE(error_of([&] { s.extend(bad); }).find("found id 37 at position 10, expected 0 to 36"), std::string::npos);
  EXPECT_NE(error_of([&] { s.extend(none); }).find("found 0 tokens to append, expected 1 to"), std::string::npos);
  EXPECT_EQ(s.sample(kHot, 4).tokens, want);
}

TEST_P(decoder, ids_beyond_the_requested_vocabulary_are_never_sampled) {
  const auto d = make();
  SampleOptions o = kHot;
  o.sampling = {.temperature = 50};
  o.vocab = 5;
  for (const int32_t id : alone(*d, ids_of(1, 9), o, 30)) EXPECT_LT(id, 5);
}

// A model that gives a NaN logit after more than five tokens.
class Breaks final : public testing::FakeDecoder {
 public:
  Breaks() : FakeDecoder({.vocab = 4, .context = 100, .batch = 8, .slots = 2}) {}

 private:
  void extend_slot(int slot, std::span<const int32_t> ids, Rows, const Take& take) override {
    append_ids(slot, ids);
    float row[4] = {0, 1, 2, fed(slot).size() > 5 ? NAN : 3};
    take(int64_t(fed(slot).size()) - 1, Tensor(row, {1, 4}));
  }
};

TEST(DeviceDecoder, tokens_of_several_slots_are_sampled_by_one_call) {
  for (const int64_t slots : {2, 4, 6}) {
    OnADevice d(slots);
    std::vector<Sequence> sequences;
    std::vector<Decoder::Request> requests;
    for (int64_t i = 0; i < slots; ++i) {
      sequences.emplace_back(d);
      feed(sequences.back(), ids_of(uint64_t(i), 3));
      SampleOptions o = kHot;
      o.seed = uint64_t(i), o.logprobs = i == 1 ? 2 : -1;
      requests.push_back({.slot = sequences.back().slot(), .options = o, .n = 5});
    }
    const std::vector<Sampled> found = d.sample(requests);
    EXPECT_EQ(d.calls, 5) << slots;
    for (int64_t i = 0; i < slots; ++i) {
      OnADevice one(1);
      EXPECT_EQ(found[size_t(i)].tokens, alone(one, ids_of(uint64_t(i), 3), requests[size_t(i)].options, 5)) << i;
    }
  }
}

TEST(decoder_errors, a_nan_logit_is_an_error_and_leaves_no_logits_to_sample_from) {
  Breaks d;
  Sequence a(d), b(d);
  const std::vector<int32_t> prompt = {1, 2};
  ASSERT_TRUE(a.extend(prompt) && b.extend(prompt));
  EXPECT_NE(error_of([&] { a.sample(kGreedy, 10); }).find("found a NaN logit in row 0 at token 3"), std::string::npos);
  EXPECT_NE(error_of([&] { a.sample(kGreedy, 1); }).find("expected extend() before"), std::string::npos);
  a.rewind(0);
  ASSERT_TRUE(a.extend(prompt));
  const Decoder::Request requests[] = {{a.slot(), kGreedy, 10}, {b.slot(), kGreedy, 3}};
  const std::vector<Sampled> all = d.sample(requests);
  EXPECT_TRUE(all[0].error);
  EXPECT_EQ(all[0].tokens, std::vector<int32_t>(4, 3));  // sampled before the error
  EXPECT_FALSE(all[1].error);
  EXPECT_EQ(all[1].tokens, std::vector<int32_t>(3, 3));
}

TEST(DeviceDecoder, options_of_the_host_and_of_the_device_in_one_step_give_the_results_of_each_alone) {
  const std::vector<LogitBias> bias = {{1, 2}, {2, -1}, {3, 1}};  // more than the device takes
  OnADevice d(4);
  std::vector<Sequence> sequences;
  std::vector<Decoder::Request> requests;
  for (int64_t i = 0; i < 4; ++i) {
    sequences.emplace_back(d);
    feed(sequences.back(), ids_of(uint64_t(i), 3));
    SampleOptions o = kHot;
    if (i % 2 == 1) o.bias = bias;
    requests.push_back({.slot = sequences.back().slot(), .options = o, .n = 5});
  }
  const std::vector<Sampled> found = d.sample(requests);
  EXPECT_EQ(d.calls, 5);
  for (int64_t i = 0; i < 4; ++i) {
    OnADevice one(1);
    EXPECT_EQ(found[size_t(i)].tokens, alone(one, ids_of(uint64_t(i), 3), requests[size_t(i)].options, 5)) << i;
    EXPECT_EQ(one.calls, i % 2 == 1 ? 0 : 5);
  }
}

TEST(DeviceDecoder, a_call_that_fails_ends_only_the_answers_sampled_by_this_call) {
  const std::vector<LogitBias> bias = {{1, 2}, {2, -1}, {3, 1}};
  OnADevice d(3);
  std::vector<Sequence> sequences;
  std::vector<Decoder::Request> requests;
  for (int64_t i = 0; i < 3; ++i) {
    sequences.emplace_back(d);
    feed(sequences.back(), ids_of(uint64_t(i), 3));
    SampleOptions o = kHot;
    if (i == 1) o.bias = bias;
    requests.push_back({.slot = sequences.back().slot(), .options = o, .n = 5});
  }
  d.fails_at = 3;
  const std::vector<Sampled> found = d.sample(requests);
  for (const size_t i : {0, 2}) {
    EXPECT_TRUE(found[i].error);
    EXPECT_EQ(found[i].tokens.size(), 2u);
    EXPECT_NE(error_of([&] { sequences[i].sample(kHot, 1); }).find("without logits"), std::string::npos);
  }
  EXPECT_FALSE(found[1].error);
  EXPECT_EQ(found[1].tokens.size(), 5u);
  EXPECT_EQ(sequences[1].sample(requests[1].options, 1).tokens.size(), 1u);
}

TEST(decoder_names, the_earlier_names_of_this_version_mean_the_same) {
  TokenLogprobs l{.sampled = -0.5, .top = {}};
  EXPECT_EQ(l.drawn, -0.5);
  l.drawn = -2;
  EXPECT_EQ(TokenLogprobs(l).sampled, -2);
  const float row[4] = {0, 3, 1, 2};
  EXPECT_EQ(draw_from(Tensor(row, {4}), kGreedy, 0), 1);
  Breaks d;
  Sequence s(d);
  const std::vector<int32_t> prompt = {1, 2};
  ASSERT_TRUE(s.extend(prompt));
  s.mark();
  d.mark(s.slot());
  const DrawOptions options = kGreedy;
  const Drawn sampled = s.draw(options, 1);
  EXPECT_EQ(sampled.tokens, std::vector<int32_t>{3});
  EXPECT_EQ(d.draw(s.slot(), options, 1).tokens, std::vector<int32_t>{3});
}

}  // namespace
}  // namespace ingot
