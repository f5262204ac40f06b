// The native half of tests/parity/parity_draft_head.py: answers prompts with drafts of a head. Arguments: a model, a
// head, a request and the output file, both JSON.
//   request: {"prompts": [[id, ...], ...], "tokens": n, "most": K, "temperature": t, "layers": [...], "window": n,
//             "dense": "" or the format of the head's matrices}
//   output:  for each prompt {"answer": [id, ...], "steps": [{"draft": [id, ...], "accepted": n}, ...]}
#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ingot/models/registry.h"

namespace {

using namespace ingot;
using Ids = std::vector<int32_t>;

void feed(Sequence& s, const Ids& prompt) {
  s.rewind(0);
  for (size_t at = 0; at < prompt.size();) {
    const size_t n = std::min(size_t(s.decoder().batch()), prompt.size() - at);
    s.extend(std::span(prompt).subspan(at, n));
    at += n;
  }
}

nlohmann::json answer(Sequence& s, const Ids& prompt, SampleOptions o, int64_t tokens, int64_t most) {
  feed(s, prompt);
  o.drafting = false, o.draft = {}, o.step = 0;
  const Ids alone = s.sample(o, tokens).tokens;
  feed(s, prompt);
  o.drafting = true;
  Ids told;
  auto steps = nlohmann::json::array();
  while (int64_t(told.size()) < tokens) {
    // The first token follows the prompt's logits, and has no draft.
    const Ids draft = s.decoder().guess(s.slot(), std::min(most, tokens - int64_t(told.size()) - 1));
    o.draft = draft, o.step = uint32_t(told.size());
    const Sampled step = s.sample(o, tokens - int64_t(told.size()));
    if (!draft.empty()) {
      INGOT_CHECK_EQ(step.drafted, int64_t(draft.size()), "tokens of a draft");
      steps.push_back({{"draft", draft}, {"accepted", step.accepted}});
    }
    told.insert(told.end(), step.tokens.begin(), step.tokens.end());
  }
  INGOT_CHECK(told == alone, "found an answer with drafts that differs from the answer without");
  return {{"answer", told}, {"steps", steps}};
}

void run(const std::string& model_path, const std::string& head, const nlohmann::json& request, const std::string& to) {
  const OpenedModel model = open_model(model_path, {.context = request.at("context"),
                                                    .batch = 64,
                                                    .device = DeviceChoice::cpu,
                                                    .draft_head = head,
                                                    .draft_layers = request.at("layers").get<std::vector<int64_t>>(),
                                                    .draft_window = request.at("window"),
                                                    .draft_dense = request.at("dense")});
  Sequence s(*model.decoder);
  const SampleOptions o{.sampling = {.temperature = request.at("temperature")}, .seed = 3};
  auto out = nlohmann::json::array();
  for (const auto& prompt : request.at("prompts"))
    out.push_back(answer(s, prompt.get<Ids>(), o, request.at("tokens"), request.at("most")));
  std::ofstream file(to);
  file << out;
  INGOT_CHECK(file.good(), "cannot write ", to);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    INGOT_CHECK(argc == 5, "found ", argc - 1, " arguments, expected MODEL HEAD REQUEST OUT");
    std::ifstream in(argv[3]);
    run(argv[1], argv[2], nlohmann::json::parse(in), argv[4]);
  } catch (const std::exception& e) {
    std::cerr << argv[1] << ": " << e.what() << "\n";
    return 1;
  }
  return 0;
}
