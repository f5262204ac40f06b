#include "ingot/text/grammar/json_schema.h"

#include <utility>

#include "ingot/io/json.h"
#include "ingot/text/grammar/json_parts.h"
#include "ingot/text/grammar/schema_compiler.h"

namespace ingot {
namespace {

using json_schema::SchemaCompiler;

constexpr JsonLimits kSchemaLimits = {.depth = 64, .bytes = 1 << 20};

}  // namespace

Grammar::Rule any_json(Grammar& grammar) { return JsonParts(grammar).any; }
Grammar::Rule any_json_object(Grammar& grammar) { return JsonParts(grammar).any_object; }

Grammar::Rule json_of_schema(Grammar& grammar, const std::string& schema, const std::string& where) {
  parse_json(schema, where, kSchemaLimits);  // the strict reader; the next line keeps the order of keys
  const OrderedJson root = OrderedJson::parse(schema);
  return SchemaCompiler(grammar, root, where, true).compile();
}

Grammar::Rule json_object_like_schema(Grammar& grammar, const std::string& schema) {
  try {
    parse_json(schema, "schema", kSchemaLimits);
    const OrderedJson root = OrderedJson::parse(schema);
    Grammar trial = grammar;  // a copy, so that a schema that is too large leaves no nodes in `grammar`
    const Grammar::Rule rule = SchemaCompiler(trial, root, "schema", false).compile();
    GrammarWalk walk(trial, rule);
    bool is_object = true;
    for (int byte = 0; byte < 256; ++byte)
      if (byte != '{' && walk.next(walk.start(), byte) != GrammarWalk::kDead) is_object = false;
    if (is_object) {
      grammar = std::move(trial);
      return rule;
    }
  } catch (const Error&) {}
  return any_json_object(grammar);
}

}  // namespace ingot
