#pragma once
// The log probabilities of an answer's tokens as OpenAI's chats and responses write them.
#include <vector>

#include "ingot/engines/serve/answer_text.h"
#include "ingot/io/json.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// JSON has no infinity; OpenAI's API writes -9999.
double finite_logprob(double logprob);

// [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}, ...]}, ...]
OrderedJson logprobs_json(const Tokenizer& tokenizer, const std::vector<TokenInfo>& tokens);

}  // namespace ingot
