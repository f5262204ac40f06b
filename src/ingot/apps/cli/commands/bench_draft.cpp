// ingot bench draft: the time of a token with drafts of a given share of right guesses, and the time without drafts.
#include <algorithm>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/version.h"
#include "ingot/engines/generate/session.h"
#include "ingot/gpu/device.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

struct DraftBench {
  std::string model, device = "auto", lengths = "3,7", accepted = "80", head, head_dense;
  SyntheticOptions synthetic;
  DraftLengths policy;
  double temperature = 1;
  int64_t context = 1024, tokens = 256;
};

// Knows the answer, and guesses each of its tokens correctly with a given probability. Wrong guesses are the same in
// every run. The guesses are marked as guesses of a prediction, because guesses of a draft head do not replace these.
class Oracle final : public draft::Drafter {
 public:
  Oracle(const std::vector<int32_t>& answer, double right, int64_t prompt, int64_t vocab)
      : answer_(answer), right_(right), prompt_(prompt), vocab_(vocab) {}
  void append(std::span<const int32_t> ids) override { length_ += int64_t(ids.size()); }
  void truncate(int64_t length) override { length_ = std::min(length_, length); }
  int64_t length() const override { return length_; }
  draft::Draft draft(int64_t most) const override {
    draft::Draft d{.tokens = {}, .source = draft::Source::prediction};
    const int64_t begin = length_ - prompt_, end = std::min(begin + most, int64_t(answer_.size()));
    for (int64_t i = begin; i < end; ++i) {
      const bool right = Rng(1, Purpose::test).uniform(uint64_t(i)) < right_;
      d.tokens.push_back(int32_t((answer_[size_t(i)] + (right ? 0 : 1)) % vocab_));
    }
    return d;
  }

 private:
  const std::vector<int32_t>& answer_;
  double right_;
  int64_t prompt_, vocab_, length_ = 0;
};

struct Case {
  std::string name;
  double right = -1;    // the share of right guesses; -1: steps of single tokens, without drafts
  int64_t most = 0;     // tokens of a draft
  bool always = false;  // drafts always have `most` tokens; else the policy decides
  bool exact = true;    // draft::Options::exact
  bool head = false;    // guesses of the draft head in place of given ones
};
std::vector<Case> cases_of(const DraftBench& o) {
  std::vector<Case> all = {{.name = "no drafts"}, {.name = "draft steps without a draft", .right = 1}};
  for (const int64_t n : numbers_in("--lengths", o.lengths))
    all.push_back({.name = "drafts of " + std::to_string(n) + ", all accepted", .right = 1, .most = n, .always = true});
  for (const int64_t percent : numbers_in("--accepted", o.accepted, false, 0)) {
    if (percent > 100) fail(ErrorCode::usage, "--accepted: found ", percent, ", expected at most 100 %");
    all.push_back({.name = "each draft token accepted with " + std::to_string(percent) + " %",
                   .right = double(percent) / 100,
                   .most = o.policy.most});
  }
  all.push_back({.name = "no draft token accepted", .right = 0, .most = o.policy.most, .exact = false});
  all.push_back({.name = "no draft token accepted, --draft-exact", .right = 0, .most = o.policy.most});
  if (!o.head.empty())
    all.push_back(
        {.name = "guesses of the draft head", .right = 0, .most = o.policy.most, .exact = false, .head = true});
  return all;
}

struct Measured {
  Case of;
  double token_ms = 0;
  draft::Counts drafts;
  double steps = 0;
};

// T(k) of k = 1, 2, ... rows, and the time of a guess of the draft head: given, or measured, in milliseconds.
struct Costs {
  std::vector<double> of_drafts;  // T(1) is that of draft::Options::exact
  double of_single = 0;           // T(1) without it
  double of_guess = 0;
};
Costs costs_of(const std::vector<double>& given, Decoder& decoder) {
  if (!given.empty()) return {.of_drafts = given, .of_single = given[0]};
  Sequence slot(decoder);
  const auto measured = [&](int64_t most, bool exact) {
    return draft::measure_step_costs(decoder, slot.slot(), most, exact);
  };
  Costs costs;
  const draft::StepCosts all = measured(decoder.draft_rows() - 1, true);
  for (int64_t k = 1; k <= all.most_rows(); ++k) costs.of_drafts.push_back(1e3 * all(k));
  costs.of_single = 1e3 * measured(0, false)(1);
  if (all.most_rows() > 1) costs.of_guess = 1e3 * (all.of_drafts(draft::Source::head, 1) - all(2));
  return costs;
}

// The answers of all cases with exact draft steps must be equal.
std::vector<Measured> measure_cases(const DraftBench& o, const std::vector<Case>& cases, Decoder& decoder,
                                    const Costs& costs) {
  std::vector<int32_t> prompt, answer;
  for (int64_t i = 0; i < o.context; ++i) prompt.push_back(int32_t((i * 7919 + 13) % decoder.vocab()));
  Session session(decoder);
  std::vector<Measured> all;
  const int rounds = decoder.device().kind == Device::cuda ? 2 : 1;  // the first round records the CUDA graphs
  for (const Case& c : cases) {
    SessionOptions options{.tokens = o.tokens, .sampling = {.temperature = o.temperature}};
    if (c.right >= 0) {
      options.draft.make = [&](std::vector<int32_t>) {
        return std::make_unique<Oracle>(answer, c.right, o.context, decoder.vocab());
      };
      if (c.head) options.draft.make = draft::make_lookup;
      options.draft.most = c.most;
      options.draft.exact = c.exact;
      options.draft.step_costs = costs.of_drafts;
      if (!c.exact) options.draft.step_costs[0] = std::min(costs.of_single, costs.of_drafts[0]);
      if (c.always) options.draft.step_costs.assign(costs.of_drafts.size(), 1);
    }
    Answer found;
    for (int round = 0; round < rounds; ++round) {
      const std::vector<int32_t> known = answer;
      found = session.generate(prompt, options);
      if (c.right < 0 || !c.exact) continue;
      if (answer.empty()) answer = found.tokens;
      INGOT_CHECK(known.empty() || found.tokens == known, "bench draft: ", c.name,
                  ": found another answer than that of draft steps without a draft");
    }
    all.push_back({.of = c,
                   .token_ms = 1e3 * found.token_seconds / double(found.tokens.size()),
                   .drafts = found.drafts,
                   .steps = double(int64_t(found.tokens.size()) - found.drafts.accepted)});
  }
  return all;
}

void bench_draft(const DraftBench& o, bool json) {
  if (o.model.empty() && o.synthetic.size.empty())
    fail(ErrorCode::usage, "found neither --model nor --synthetic, expected one of them");
  const std::string path = chosen_model("", o.model, o.synthetic);
  const std::vector<Case> cases = cases_of(o);
  const draft::Options given = draft_options(o.policy);
  const OpenedModel model = open_model(path, o.context + o.tokens, "--context and --tokens",
                                       {.device = device_named(o.device),
                                        .draft_head = o.head,
                                        .draft_dense = o.head_dense,
                                        .dense = dense_at_loading(o.synthetic)});
  Decoder& decoder = *model.decoder;
  if (decoder.draft_rows() <= 1)
    fail(ErrorCode::unsupported, path, ": found a model on ", decoder.device(),
         " whose engine computes no drafts, expected a published model, on a GPU one with at least 163 KB of shared "
         "memory per block");
  const Costs costs = costs_of(given.step_costs, decoder);
  const int64_t longest = std::min(decoder.draft_rows(), int64_t(costs.of_drafts.size())) - 1;
  for (const int64_t n : numbers_in("--lengths", o.lengths))
    if (n > longest)
      fail(ErrorCode::usage, "--lengths: found ", n, ", expected at most ", longest,
           ", the longest draft that a step of this engine checks and whose cost is known");
  const std::vector<Measured> all = measure_cases(o, cases, decoder, costs);
  const Device device = decoder.device();
  const std::string on = device.kind == Device::cuda ? gpu::device_info(device.index).name : "CPU";
  if (json) {
    OrderedJson list = OrderedJson::array();
    for (const Measured& m : all)
      list.push_back({{"name", m.of.name},
                      {"token_ms", m.token_ms},
                      {"tokens_per_step", double(o.tokens) / m.steps},
                      {"draft_tokens", m.drafts.tokens},
                      {"accepted_tokens", m.drafts.accepted}});
    return write_out(show_json(OrderedJson{{"version", version()},
                                           {"commit", commit()},
                                           {"device", on},
                                           {"model", path},
                                           {"context", o.context},
                                           {"tokens", o.tokens},
                                           {"temperature", o.temperature},
                                           {"step_costs", costs.of_drafts},
                                           {"single_step_cost", costs.of_single},
                                           {"guess_cost", costs.of_guess},
                                           {"cases", list}}) +
                     "\n");
  }
  write_out(path + ", " + on + ", " + with_commas(o.context) + " tokens of context, temperature " +
            fixed(o.temperature, 2) + "\n");
  std::string steps = o.policy.costs.empty() ? "a step of 1, 2, ... rows, ms:" : "given costs of steps:";
  for (const double t : costs.of_drafts) steps += " " + fixed(t, 3);
  write_out(steps + "; without drafts: " + fixed(costs.of_single, 3) + "\n");
  if (costs.of_guess > 0) write_out("a guess of the draft head: " + fixed(costs.of_guess, 3) + " ms\n");
  for (const Measured& m : all) {
    const std::string drafts = ", " + fixed(double(o.tokens) / m.steps, 2) + " tokens a step, " +
                               with_commas(m.drafts.accepted) + " of " + with_commas(m.drafts.tokens) +
                               " draft tokens accepted";
    write_out(m.of.name + ": " + fixed(m.token_ms, 3) + " ms a token" + (m.of.most > 0 ? drafts : "") + "\n");
  }
}

}  // namespace

void add_bench_draft(Command& bench_command) {
  Command& c = bench_command.add("draft",
                                 "Times a token without drafts, and with drafts of given shares of right guesses; the "
                                 "answers of all draft steps with --draft-exact must be equal");
  auto o = std::make_shared<DraftBench>();
  auto json = std::make_shared<bool>(false);
  c.text("--model PATH", o->model, "a published checkpoint, an archive or a GGUF file");
  add_synthetic(c, o->synthetic, "--model");
  add_device(c, o->device);
  c.integer("--context N", o->context, 1, 130000, "tokens of the prompt (default: 1024)");
  c.integer("--tokens N", o->tokens, 2, 100000, "tokens of the answer (default: 256)");
  c.number("--temperature X", o->temperature, 0, 100,
           "temperature of sampling; 0 takes the most likely token (default: 1)");
  c.text("--lengths LIST", o->lengths, "lengths of drafts that are accepted as a whole (default: 3,7)");
  c.text("--accepted LIST", o->accepted,
         "percentages of right draft tokens; the lengths of these drafts are chosen as in `generate` (default: 80)");
  add_options(c, o->policy);
  c.text("--draft PATH", o->head, "the directory of a draft head, whose guesses are timed as well");
  c.choice("--draft-dense FORM", o->head_dense, {"bf16", "fp8", "mxfp4"},
           "format in memory of the draft head's matrices (default: as stored)");
  c.flag("--json", *json, "print one JSON object");
  c.examples(R"(  ingot bench draft --synthetic 120b
  ingot bench draft --model model.gguf --device cpu --context 100 --tokens 50
  ingot bench draft --synthetic 20b --lengths 1,3,7 --accepted 60,80 --json)");
  c.run([o, json, &c] {
    if (o->head.empty()) c.refuse_given({"draft-dense"}, "a model without a draft head");
    bench_draft(*o, *json);
  });
}

}  // namespace ingot::cli
