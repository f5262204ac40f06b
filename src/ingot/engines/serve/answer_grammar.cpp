#include "ingot/engines/serve/answer_grammar.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/text/grammar/json_schema.h"

namespace ingot {
namespace {

using Node = Grammar::Node;
enum Control { kStart, kEndOfMessage, kMessage, kChannel, kConstrain, kReturn, kCall };

bool is_strict(const ApiRequest& r, const HarmonyFunction& f) {
  return std::find(r.strict.begin(), r.strict.end(), f.name) != r.strict.end();
}

class Answer {
 public:
  Answer(Grammar& g, const ApiRequest& r) : g_(g), request_(r), header_(g.either({})) {}

  Grammar::Rule rule() {
    add_message("analysis");
    if (request_.forced.empty()) add_final();
    // Text before a call is text of the answer, which must be JSON where a format is asked for.
    if (request_.forced.empty() && request_.format.kind == ApiFormat::Kind::text) add_message("commentary");
    for (const HarmonyFunction& f : request_.tools)
      if (request_.forced.empty() || request_.forced == kAnyFunction || request_.forced == f.name) add_call(f);
    return g_.rule(header_);
  }

 private:
  Node anything(Node next) {
    const Node more = g_.either({next});
    g_.add(more, g_.one_of(Grammar::range(0, 255), more));
    return more;
  }
  Node channel(const std::string& text, Node next) { return g_.control(kChannel, g_.text(text, next)); }
  // A message that another one follows.
  void add_message(const std::string& name) {
    const Node next = g_.control(kEndOfMessage, g_.control(kStart, g_.text("assistant", header_)));
    g_.add(header_, channel(name, g_.control(kMessage, anything(next))));
  }
  // As models were trained to say it, with and without the blank.
  Node typed(Node content) {
    const Node message = g_.control(kMessage, content);
    const Node type = g_.control(kConstrain, g_.text("json", message));
    return g_.either({message, type, g_.text(" ", type)});
  }
  void add_final() {
    const Node end = g_.control(kReturn, Grammar::kEnd);
    const ApiFormat& f = request_.format;
    if (f.kind == ApiFormat::Kind::text) return g_.add(header_, channel("final", g_.control(kMessage, anything(end))));
    const Grammar::Rule json =
        f.kind == ApiFormat::Kind::object ? any_json_object(g_) : json_of_schema(g_, f.schema, f.path);
    g_.add(header_, channel("final", typed(g_.call(json, end))));
  }
  // Who is called stands before the channel or behind it.
  void add_call(const HarmonyFunction& f) {
    const Node end = g_.control(kCall, Grammar::kEnd);
    const std::string to = " to=functions." + f.name;
    const Node arguments = typed(f.parameters.empty() ? g_.text("{}", end) : g_.call(arguments_of(f), end));
    g_.add(header_, g_.text(to, channel("commentary", arguments)));
    g_.add(header_, channel("commentary" + to, arguments));
  }
  Grammar::Rule arguments_of(const HarmonyFunction& f) {
    if (is_strict(request_, f)) return json_of_schema(g_, f.parameters, "tools." + f.name + ".parameters");
    return request_.forced.empty() ? any_json_object(g_) : json_object_like_schema(g_, f.parameters);
  }

  Grammar& g_;
  const ApiRequest& request_;
  const Node header_;  // behind the role
};

}  // namespace

bool has_grammar(const ApiRequest& r) {
  return r.chat && (r.format.kind != ApiFormat::Kind::text || !r.forced.empty() || !r.strict.empty());
}

Grammar::Rule answer_grammar(Grammar& grammar, const ApiRequest& r) {
  try {
    return Answer(grammar, r).rule();
  } catch (const Error& e) {
    const std::string what = e.what();
    throw ApiError(400, what, what.substr(0, what.find(": ")), "unsupported_schema");
  }
}

std::vector<int32_t> grammar_controls(const HarmonyTokens& t) {
  return {t.start, t.end, t.message, t.channel, t.constrain, t.answer_end, t.call};
}

std::string grammar_key(const ApiRequest& r) {
  std::string key = std::to_string(int(r.format.kind)) + r.format.schema + '\0' + r.forced;
  for (const HarmonyFunction& f : r.tools) key += '\0' + f.name + (is_strict(r, f) ? "!" : "?") + f.parameters;
  return key;
}

}  // namespace ingot
