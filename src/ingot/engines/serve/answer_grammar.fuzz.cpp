// A request that asks for a form is refused by name or has a grammar, and each complete answer of the grammar contains
// JSON where the request asks for JSON.
#include "ingot/engines/serve/answer_grammar.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ingot/testing/fuzz.h"
#include "ingot/text/chat/harmony_bytes.test.h"

namespace {

constexpr int kMessage = ingot::Grammar::kFirstControl + 2, kCall = ingot::Grammar::kFirstControl + 6;

void require_json(const ingot::ApiRequest& r, const std::vector<int>& said) {
  if (r.format.kind == ingot::ApiFormat::Kind::text && said.back() != kCall) return;
  size_t begin = said.size() - 1;
  while (begin > 0 && said[begin - 1] != kMessage) --begin;
  FUZZ_REQUIRE(begin > 0);
  FUZZ_REQUIRE(nlohmann::json::accept(said.begin() + int64_t(begin), said.end() - 1));
}

// A random walk, seeded by the input; half of the time control tokens and closing characters are tried first.
void answer(ingot::GrammarWalk& walk, const ingot::ApiRequest& r, uint64_t seed) {
  static const std::string kEnds = "\"}],:0\"}";
  std::vector<int> said;
  for (int32_t state = walk.start(); said.size() < 200;) {
    int32_t after = ingot::GrammarWalk::kDead;
    for (int tried = 0; tried < 32 + ingot::Grammar::kSymbols && after == ingot::GrammarWalk::kDead; ++tried) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      const int any = int((seed >> 33) % ingot::Grammar::kSymbols);
      const int control = ingot::Grammar::kFirstControl + any % ingot::Grammar::kControls;
      const int symbol = tried >= 32             ? tried - 32
                         : (seed >> 32) % 2 == 0 ? any
                         : tried < 16            ? control
                                                 : int(uint8_t(kEnds[size_t(any) % kEnds.size()]));
      after = walk.next(state, symbol);
      if (after != ingot::GrammarWalk::kDead) said.push_back(symbol);
    }
    if (after == ingot::GrammarWalk::kDead) return;
    state = after;
    if (walk.complete(state)) require_json(r, said);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  uint64_t seed = 1;
  for (size_t i = 0; i < size; ++i) seed = seed * 1099511628211u + data[i];
  for (const bool responses : {false, true}) try {
      const ingot::ApiRequest r =
          responses ? ingot::parse_responses_request(body) : ingot::parse_api_request(body, true);
      if (!ingot::has_grammar(r)) continue;
      ingot::Grammar grammar;
      const ingot::Grammar::Rule rule = ingot::answer_grammar(grammar, r, ingot::testing::harmony_format());
      ingot::GrammarWalk walk(std::move(grammar), rule);
      for (uint64_t i = 0; i < 12; ++i) answer(walk, r, seed + i);
    } catch (const ingot::ApiError& e) {
      FUZZ_REQUIRE(e.status == 400 && !e.param.empty());
    } catch (const ingot::Error& e) {
      // The grammar needs more states or ways to read the text than a request may cost.
      FUZZ_REQUIRE(e.code == ingot::ErrorCode::usage);
    }
  return 0;
}
