#pragma once
// Turns a JSON schema into a grammar. schema_compiler.cpp handles references, alternatives and listed values,
// schema_objects.cpp objects and arrays, and schema_scalars.cpp strings and numbers.
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/text/grammar/dfa.h"
#include "ingot/text/grammar/grammar.h"
#include "ingot/text/grammar/json_parts.h"
#include "ingot/text/grammar/schema_keywords.h"

namespace ingot::json_schema {

class SchemaCompiler {
 public:
  using Node = Grammar::Node;
  using Rule = Grammar::Rule;

  // `where` names the schema in errors. `exact`: a keyword that the grammar cannot express is an error. Otherwise the
  // keyword is ignored.
  SchemaCompiler(Grammar& g, const OrderedJson& root, const std::string& where, bool exact)
      : g_(g), parts_(g), root_(root), where_(where), exact_(exact) {}
  Rule compile();

 private:
  struct Made {
    Rule rule;
    std::string path;
  };
  static constexpr Node kEnd = Grammar::kEnd;
  static constexpr size_t kMostNodes = 200000;
  static constexpr int64_t kMostItems = 256, kMostLength = 1024, kMostValues = 1000;

  // Runs the action for one keyword. In exact mode an Error passes on; otherwise the keyword is ignored.
  template <class Action> bool held(const Action& action) {
    if (exact_) return action(), true;
    try {
      action();
    } catch (const Error&) {
      check_size();
      return false;
    }
    return true;
  }
  // The same for actions whose errors lack the path.
  template <class Action> bool held(const std::string& path, const Action& action) {
    return held([&] {
      try {
        action();
      } catch (const Error& e) { refuse(path, e.what()); }
    });
  }

  Rule rule_of(const OrderedJson& schema, const std::string& path);
  void check_size() const;
  Node any();
  Node body(const OrderedJson& s, const std::string& path);
  Node any_of(const OrderedJson& list, const std::string& path, const std::string& key);
  Node all_of(const OrderedJson& list, const OrderedJson& s, const std::string& path);
  OrderedJson merged(const OrderedJson& s, int depth);
  Node values(const OrderedJson& list, const OrderedJson& s, const std::string& path);
  Node typed(const OrderedJson& s, const std::string& path);
  Node of_type(const std::string& type, const OrderedJson& s, const std::string& path);
  Rule target(const OrderedJson& ref, const std::string& path);
  void only(const OrderedJson& s, const std::string& path, const std::vector<const char*>& allowed);

  // schema_objects.cpp
  Node object(const OrderedJson& s, const std::string& path);
  std::pair<Node, Node> further(const OrderedJson& schema, const std::vector<std::string>& names, Node close,
                                const std::string& path);
  std::set<std::string> required_of(const OrderedJson& s, const std::string& path);
  int64_t count(const OrderedJson& s, const std::string& path, const char* key, int64_t otherwise, int64_t most);
  std::pair<int64_t, int64_t> counts(const OrderedJson& s, const std::string& path, const char* low_key,
                                     const char* high_key, int64_t most);
  Node array(const OrderedJson& s, const std::string& path);

  // schema_scalars.cpp
  Node text(const OrderedJson& s, const std::string& path);
  Node any_text(int64_t low, int64_t high);
  Node numbers(const OrderedJson& s, const std::string& path, bool integers);

  Grammar& g_;
  JsonParts parts_;
  const OrderedJson& root_;
  const std::string where_;
  const bool exact_;
  AutomatonBudget budget_;
  std::map<const OrderedJson*, Made> rules_;
  std::deque<OrderedJson> merged_;
};

}  // namespace ingot::json_schema
