#pragma once
// The keywords of a JSON schema: where they stand, and the types that they state or imply.
#include <string>
#include <utility>
#include <vector>

#include "ingot/io/json.h"

namespace ingot::json_schema {

// Throws Error{usage} with the path of the schema's part.
[[noreturn]] void refuse(const std::string& path, const std::string& what);

const OrderedJson* find(const OrderedJson& s, const char* key);  // null where the key is missing
// The part of the schema that a $ref names: "#", or "#/" and the keys of the path, with ~0 and ~1 for ~ and /.
const OrderedJson& place_of(const OrderedJson& root, const OrderedJson& ref, const std::string& path);

extern const std::vector<std::string> kTypes;
// The keywords of each type. An integer has the keywords of a number.
extern const std::vector<std::pair<std::string, std::vector<const char*>>> kKeywords;

bool is_of(const OrderedJson& value, const std::string& type);
std::vector<std::string> types_of(const OrderedJson& s, const std::string& path);  // empty without `type`
// The types whose keywords a schema without `type` has.
std::vector<std::string> implied_types(const OrderedJson& s);

}  // namespace ingot::json_schema
