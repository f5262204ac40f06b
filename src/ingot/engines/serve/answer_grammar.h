#pragma once
// What an answer to a chat must be, where the request says more than that it is text: JSON, JSON of a schema, calls of
// functions. The rule is that of the whole answer in the model's chat format, control tokens included; thoughts stay
// free.
#include "ingot/engines/serve/api_request.h"
#include "ingot/text/grammar/grammar.h"

namespace ingot {

// Whether answers to the request are held to a grammar.
bool has_grammar(const ApiRequest& request);
// What follows the prompt, to the token that ends the answer. A schema outside of what json_schema.h reads is an
// ApiError that names the place.
Grammar::Rule answer_grammar(Grammar& grammar, const ApiRequest& request, const ChatFormat& chat);
// Equal for requests of one grammar.
std::string grammar_key(const ApiRequest& request);

}  // namespace ingot
