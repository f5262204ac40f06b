// The grammar of strings and numbers under a schema.
#include "ingot/io/json.h"
#include "ingot/text/grammar/decimals.h"
#include "ingot/text/grammar/formats.h"
#include "ingot/text/grammar/pattern.h"
#include "ingot/text/grammar/schema_compiler.h"

namespace ingot::json_schema {

SchemaCompiler::Node SchemaCompiler::text(const OrderedJson& s, const std::string& path) {
  const auto [low, high] = counts(s, path, "minLength", "maxLength", kMostLength);
  std::optional<Dfa> strings;
  const auto narrow = [&](const char* key, const auto& make) {
    held(path + "." + key, [&] {
      Dfa d = make();
      if (strings) d = intersect(*strings, d, budget_);
      if (d.states.empty()) fail(ErrorCode::usage, "found one that no string has");
      strings = std::move(d);
    });
  };
  if (const OrderedJson* pattern = find(s, "pattern")) {
    if (!pattern->is_string() && exact_) refuse(path + ".pattern", "expected a string");
    if (pattern->is_string()) narrow("pattern", [&] { return dfa_of_pattern(pattern->get<std::string>(), budget_); });
  }
  // Formats are enforced in exact mode only, because some authors of schemas mean something else by a format's name.
  if (const OrderedJson* format = find(s, "format"); format != nullptr && format->is_string() && exact_)
    if (const Dfa* dfa = dfa_of_format(format->get<std::string>())) narrow("format", [&] { return *dfa; });
  if (!strings) return any_text(low, high);
  if (low > 0 || high >= 0)
    held(path, [&, low = low, high = high] {  // clang before 16 does not capture the names of a structured binding
      Dfa d = intersect(*strings, strings_of_length(low, high), budget_);
      if (d.states.empty()) fail(ErrorCode::usage, "found no string of its length that has its pattern and format");
      strings = std::move(d);
    });
  const Node node = parts_.string_of(*strings, kEnd);
  check_size();
  return node;
}
SchemaCompiler::Node SchemaCompiler::any_text(int64_t low, int64_t high) {
  if (low == 0 && high < 0) return g_.call(parts_.text, kEnd);
  const Node close = parts_.mark('"', kEnd);
  Node rest = close;
  if (high < 0) {
    rest = g_.either({close});
    g_.add(rest, g_.call(parts_.character, rest));
  }
  for (int64_t i = high < 0 ? low : high; i > 0; --i) {
    const Node next = g_.call(parts_.character, rest);
    rest = i <= low ? next : g_.either({close, next});
  }
  return parts_.mark('"', rest);
}
SchemaCompiler::Node SchemaCompiler::numbers(const OrderedJson& s, const std::string& path, bool integers) {
  DecimalRange range{.integers = integers};
  const auto read = [&](const char* key, const auto& use) {
    const OrderedJson* value = find(s, key);
    if (value == nullptr) return;
    held(path + "." + key, [&] {
      if (!value->is_number()) fail(ErrorCode::usage, "expected a number");
      use(parse_decimal(write_json(*value)));
    });
  };
  // Of two bounds on one side the narrower counts; of two equal bounds the exclusive one counts.
  const auto bound = [&](std::optional<DecimalBound>& to, const char* closed, const char* open, bool low) {
    read(closed, [&](const Decimal& d) { to = {.value = d}; });
    read(open, [&](const Decimal& d) {
      const OrderedJson* other = to ? &s[closed] : nullptr;
      const double value = s[open].get<double>(), known = other == nullptr ? value : other->get<double>();
      if (low ? value >= known : value <= known) to = {.value = d, .open = true};
    });
  };
  bound(range.low, "minimum", "exclusiveMinimum", true);
  bound(range.high, "maximum", "exclusiveMaximum", false);
  read("multipleOf", [&](const Decimal& d) {
    if (d.negative || (d.whole.empty() && d.fraction.empty())) fail(ErrorCode::usage, "expected a number above 0");
    range.multiple = d;
  });
  Node node = g_.call(integers ? parts_.integer : parts_.number, kEnd);
  if (!range.low && !range.high && !range.multiple) return node;
  held(path, [&] {
    const Dfa d = dfa_of_decimals(range, budget_);
    if (d.states.empty())
      fail(ErrorCode::usage, "found no number of at most ", DecimalRange::kDigits, " digits within its bounds");
    node = parts_.number_of(d, kEnd);
    check_size();
  });
  return node;
}

}  // namespace ingot::json_schema
