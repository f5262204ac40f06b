#include "ingot/engines/serve/answer_grammar.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/text/grammar/json_schema.h"

namespace ingot {
namespace {

bool is_strict(const ApiRequest& r, const ChatFunction& f) {
  return std::find(r.strict.begin(), r.strict.end(), f.name) != r.strict.end();
}

Grammar::Rule arguments_of(Grammar& g, const ApiRequest& r, const ChatFunction& f) {
  if (is_strict(r, f)) return json_of_schema(g, f.parameters, "tools." + f.name + ".parameters");
  return r.forced.empty() ? any_json_object(g) : json_object_like_schema(g, f.parameters);
}

ChatAnswerForm form_of(Grammar& g, const ApiRequest& r) {
  ChatAnswerForm form{.is_text = r.forced.empty()};
  if (form.is_text && r.format.kind == ApiFormat::Kind::object) form.text = any_json_object(g);
  if (form.is_text && r.format.kind == ApiFormat::Kind::schema)
    form.text = json_of_schema(g, r.format.schema, r.format.path);
  for (const ChatFunction& f : r.tools) {
    if (!r.forced.empty() && r.forced != kAnyFunction && r.forced != f.name) continue;
    form.calls.push_back({.name = f.name});
    if (!f.parameters.empty()) form.calls.back().arguments = arguments_of(g, r, f);
  }
  return form;
}

}  // namespace

bool has_grammar(const ApiRequest& r) {
  return r.chat && (r.format.kind != ApiFormat::Kind::text || !r.forced.empty() || !r.strict.empty());
}

Grammar::Rule answer_grammar(Grammar& grammar, const ApiRequest& r, const ChatFormat& chat) {
  try {
    return chat.answer_rule(grammar, form_of(grammar, r));
  } catch (const Error& e) {
    const std::string what = e.what();
    throw ApiError(400, what, what.substr(0, what.find(": ")), "unsupported_schema");
  }
}

std::string grammar_key(const ApiRequest& r) {
  std::string key = std::to_string(int(r.format.kind)) + r.format.schema + '\0' + r.forced;
  for (const ChatFunction& f : r.tools) key += '\0' + f.name + (is_strict(r, f) ? "!" : "?") + f.parameters;
  return key;
}

}  // namespace ingot
