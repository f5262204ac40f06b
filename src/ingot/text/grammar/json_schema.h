#pragma once
// JSON as a grammar: any value, or what a JSON schema allows. What the grammar says is always JSON (RFC 8259) and valid
// under the schema; it says less than the schema allows where that keeps a model from talking for ever: numbers of at
// most 15 digits on either side of the point, at most one blank or one indented line between two parts, properties in
// the schema's order and none beyond them.
//
// Read: type, properties, required, additionalProperties, items, minItems, maxItems, minLength, maxLength, pattern
// (pattern.h), format (formats.h), minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, enum, const,
// anyOf, oneOf whose alternatives differ in type or in a required property, allOf of one, $ref to a place in the same
// schema (recursion too), and annotations, which change nothing. Anything else is refused by its name.
#include <string>

#include "ingot/text/grammar/grammar.h"

namespace ingot {

// Free values nest at most so deep.
inline constexpr int kJsonNesting = 32;

Grammar::Rule any_json(Grammar& grammar);
Grammar::Rule any_json_object(Grammar& grammar);

// `schema`: JSON text, `where`: what errors call it. Error{usage}: "<where>.properties.a.pattern: it is not supported".
Grammar::Rule json_of_schema(Grammar& grammar, const std::string& schema, const std::string& where);

// An object that has what can be held of the schema: types, properties, required ones, enums, and of the other keywords
// those above. What cannot be held is left out, and so is `format`. Never an error: of a schema that says nothing of an
// object, any object.
Grammar::Rule json_object_like_schema(Grammar& grammar, const std::string& schema);

}  // namespace ingot
