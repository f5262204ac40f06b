#include "ingot/text/grammar/schema_alternatives.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ingot/io/json.h"
#include "ingot/text/grammar/schema_keywords.h"

namespace ingot::json_schema {

namespace {

class Distinguisher {
 public:
  explicit Distinguisher(const OrderedJson& root) : root_(root) {}

  bool distinguishes(const OrderedJson& a, const OrderedJson& b, int depth = 0) const {
    constexpr int kDeepest = 12;
    if (depth > kDeepest || !a.is_object() || !b.is_object()) return false;
    for (const auto& [s, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      if (const OrderedJson* ref = find(*s, "$ref")) return distinguishes(place_of(root_, *ref, ""), *other, depth + 1);
      for (const char* key : {"anyOf", "oneOf", "allOf"})
        if (const OrderedJson* list = find(*s, key))
          return list->is_array() &&
                 std::all_of(list->begin(), list->end(), [&, other = other](const OrderedJson& option) {
                   return distinguishes(option, *other, depth + 1);
                 });
    }
    const auto values_a = values_of(a), values_b = values_of(b);
    if (values_a && values_b)
      return std::none_of(values_a->begin(), values_a->end(), [&](const OrderedJson& v) {
        return std::any_of(values_b->begin(), values_b->end(),
                           [&](const OrderedJson& w) { return Json(v) == Json(w); });
      });
    if (values_a) return none_has_type(*values_a, b);
    if (values_b) return none_has_type(*values_b, a);
    return std::all_of(kTypes.begin(), kTypes.end(), [&](const std::string& type) {
      const bool both = (makes(a, type) && allows(b, type)) || (makes(b, type) && allows(a, type));
      return !both || (type == "object" && distinguishes_objects(a, b, depth));
    });
  }

 private:
  static std::optional<OrderedJson> values_of(const OrderedJson& s) {
    if (s.contains("const")) return OrderedJson::array({s["const"]});
    const OrderedJson* list = find(s, "enum");
    if (list == nullptr || !list->is_array()) return {};
    return *list;
  }
  static bool none_has_type(const OrderedJson& values, const OrderedJson& s) {
    const std::vector<std::string> types = types_of(s, "");
    return !types.empty() && std::none_of(values.begin(), values.end(), [&](const OrderedJson& v) {
      return std::any_of(types.begin(), types.end(), [&](const std::string& t) { return is_of(v, t); });
    });
  }
  static bool has(const std::vector<std::string>& types, const std::string& type) {
    return std::any_of(types.begin(), types.end(), [&](const std::string& t) {
      return t == type || (t == "number" && type == "integer") || (t == "integer" && type == "number");
    });
  }
  // Whether a value of this type may be valid under the schema.
  static bool allows(const OrderedJson& s, const std::string& type) {
    const auto types = types_of(s, "");
    return types.empty() || has(types, type);
  }
  // Whether the schema's grammar has values of this type.
  static bool makes(const OrderedJson& s, const std::string& type) {
    auto types = types_of(s, "");
    if (types.empty()) types = implied_types(s);
    return types.empty() || has(types, type);
  }
  bool distinguishes_objects(const OrderedJson& a, const OrderedJson& b, int depth) const {
    for (const auto& [s, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      const OrderedJson* required = find(*s, "required");
      if (required == nullptr || !required->is_array()) continue;
      for (const OrderedJson& name : *required) {
        const OrderedJson *mine = property(*s, name), *theirs = property(*other, name);
        if (mine != nullptr && theirs != nullptr && distinguishes(*mine, *theirs, depth + 1)) return true;
        const OrderedJson* more = find(*other, "additionalProperties");
        if (theirs == nullptr && more != nullptr && *more == false) return true;
      }
    }
    return false;
  }
  static const OrderedJson* property(const OrderedJson& s, const OrderedJson& name) {
    const OrderedJson* properties = find(s, "properties");
    if (properties == nullptr || !properties->is_object() || !name.is_string()) return nullptr;
    return find(*properties, name.get<std::string>().c_str());
  }
  const OrderedJson& root_;
};

}  // namespace

bool are_distinct(const OrderedJson& a, const OrderedJson& b, const OrderedJson& root) {
  return Distinguisher(root).distinguishes(a, b);
}

}  // namespace ingot::json_schema
