#pragma once
// JSON as a grammar: any value, or the values of a JSON schema. Every text of the grammar is JSON (RFC 8259) and valid
// under the schema. The grammar excludes some texts that the schema allows, so that a model cannot continue without
// end: numbers have at most 15 digits on either side of the point, at most one blank or one indented line stands
// between two parts, and properties come in the schema's order, with further properties only where additionalProperties
// has a schema.
//
// Supported: type, properties, required, additionalProperties, items, minItems, maxItems, minLength, maxLength, pattern
// (pattern.h), format (formats.h), minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, enum, const,
// anyOf, oneOf whose alternatives differ in type or in a required property, allOf of one schema, $ref to a place in the
// same schema (including recursion), and annotations, which have no effect. Any other keyword is refused by its name.
#include <string>

#include "ingot/text/grammar/grammar.h"

namespace ingot {

// The deepest nesting of free values.
inline constexpr int kJsonNesting = 32;

Grammar::Rule any_json(Grammar& grammar);
Grammar::Rule any_json_object(Grammar& grammar);

// `schema` is JSON text, and `where` its name in errors. Throws Error{usage}, such as "<where>.uniqueItems: it is not
// supported here".
Grammar::Rule json_of_schema(Grammar& grammar, const std::string& schema, const std::string& where);

// Objects under the keywords above except `format`. A keyword that the grammar cannot express is ignored, schemas in
// allOf are merged, and a schema that does not describe objects gives any object. No schema is an error.
Grammar::Rule json_object_like_schema(Grammar& grammar, const std::string& schema);

}  // namespace ingot
