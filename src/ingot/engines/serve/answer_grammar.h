#pragma once
// The form that a chat request prescribes for its answer, beyond plain text: JSON, JSON of a schema, calls of
// functions. The rule covers the whole answer in the model's chat format, control tokens included; thoughts stay free.
#include "ingot/engines/serve/api_request.h"
#include "ingot/text/grammar/grammar.h"

namespace ingot {

// Whether answers to the request are constrained by a grammar.
bool has_grammar(const ApiRequest& request);
// The rule for everything that follows the prompt, up to the token that ends the answer. A schema that json_schema.h
// does not support is an ApiError with the path of the unsupported part.
Grammar::Rule answer_grammar(Grammar& grammar, const ApiRequest& request, const ChatFormat& chat);
// Two requests with the same grammar have equal keys.
std::string grammar_key(const ApiRequest& request);

}  // namespace ingot
