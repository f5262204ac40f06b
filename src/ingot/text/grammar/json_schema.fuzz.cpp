// A schema is refused with a usage error, or becomes a grammar whose complete texts are JSON.
#include "ingot/text/grammar/json_schema.h"

#include <nlohmann/json.hpp>
#include <string>

#include "ingot/testing/fuzz.h"

namespace {

// A random walk, seeded by the input; an independent parser checks each complete text on the way.
void say(ingot::GrammarWalk& walk, uint64_t seed) {
  std::string said;
  for (int32_t state = walk.start(); said.size() < 120;) {
    int32_t after = ingot::GrammarWalk::kDead;
    for (int tried = 0; tried < 300 && after == ingot::GrammarWalk::kDead; ++tried) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      // Half of the time closing characters are tried first, so that many texts are complete before they are too long.
      static constexpr char kEnds[] = {'"', '}', ']', ',', ':', '0', '"', '}'};
      const bool end = tried < 12 && (seed >> 32) % 2 == 0;
      const int symbol = end ? kEnds[(seed >> 40) % 8] : tried < 44 ? int((seed >> 33) % 256) : tried - 44;
      after = walk.next(state, symbol);
      if (after != ingot::GrammarWalk::kDead) said.push_back(char(symbol));
    }
    if (after == ingot::GrammarWalk::kDead) return;
    state = after;
    if (walk.complete(state)) FUZZ_REQUIRE(nlohmann::json::accept(said));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return ingot::testing::refuse_or_accept([&] {
    uint64_t seed = 1;
    for (size_t i = 0; i < size; ++i) seed = seed * 1099511628211u + data[i];
    ingot::Grammar grammar;
    const ingot::Grammar::Rule rule =
        ingot::json_of_schema(grammar, std::string(reinterpret_cast<const char*>(data), size), "schema");
    ingot::GrammarWalk walk(std::move(grammar), rule);
    for (int i = 0; i < 20; ++i) say(walk, seed + uint64_t(i));
  });
}
