#pragma once
#include "ingot/io/json.h"

namespace ingot::json_schema {

// Whether two schemas may be alternatives of oneOf: no value of one alternative's grammar is valid under the other.
// `root` is the schema that their references are places in.
bool are_distinct(const OrderedJson& a, const OrderedJson& b, const OrderedJson& root);

}  // namespace ingot::json_schema
