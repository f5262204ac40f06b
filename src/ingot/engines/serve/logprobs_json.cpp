#include "ingot/engines/serve/logprobs_json.h"

#include <algorithm>
#include <string>

namespace ingot {
namespace {

OrderedJson token_json(const Tokenizer& tokenizer, int32_t id, double logprob) {
  const std::string bytes = tokenizer.token_bytes(id);
  OrderedJson list = OrderedJson::array();
  for (const char c : bytes) list.push_back(int(uint8_t(c)));
  return {{"token", bytes}, {"logprob", finite_logprob(logprob)}, {"bytes", list}};
}

}  // namespace

double finite_logprob(double logprob) { return std::max(logprob, -9999.0); }

OrderedJson logprobs_json(const Tokenizer& tokenizer, const std::vector<TokenInfo>& tokens) {
  OrderedJson list = OrderedJson::array();
  for (const TokenInfo& t : tokens) {
    OrderedJson entry = token_json(tokenizer, t.id, t.logprobs.sampled);
    entry["top_logprobs"] = OrderedJson::array();
    for (const TokenLogprob& top : t.logprobs.top)
      entry["top_logprobs"].push_back(token_json(tokenizer, top.id, top.logprob));
    list.push_back(entry);
  }
  return list;
}

}  // namespace ingot
