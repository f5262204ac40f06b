#include "ingot/apps/cli/framework/values.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "ingot/core/check.h"

namespace ingot::cli {
namespace {

// from_chars, because strtod follows the locale.
template <class T> bool parse_number(std::string_view word, T& into) {
  if (word.starts_with('+')) word.remove_prefix(1);
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), into);
  return error == std::errc() && end == word.data() + word.size() && !word.empty();
}

// Whether `text` holds `word` between characters that belong to no word.
bool mentions(const std::string& text, const std::string& word) {
  const auto in_word = [&](size_t at) {
    return at < text.size() && (std::isalnum(uint8_t(text[at])) || text[at] == '-');
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    if (!in_word(at + word.size()) && (at == 0 || !in_word(at - 1))) return true;
  return false;
}

[[noreturn]] void wrong(const Option& option, const Json& value, const Source& from, const std::string& expected) {
  fail(ErrorCode::usage, from.name.empty() ? option.path : from.name, ": found ",
       from.name.empty() ? describe_json(value) : "'" + from.word + "'", ", expected ", expected);
}

const char* const kUnsigned = "an integer from 0 to 18446744073709551615";

std::string range_of(const Option& option, const char* what) {
  const std::string kind = what;
  if (std::isinf(option.high)) return kind + " of at least " + plain(option.low);
  return kind + " from " + plain(option.low) + " to " + plain(option.high);
}

}  // namespace

// --- texts

std::string short_help(const std::string& help) {
  return help.substr(0, std::min({help.find(" (default"), help.find("; "), help.find(": ")}));
}
std::string plain(double value) {
  char text[64];
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;  // 1000000, not 1e+06
  const auto end = whole ? std::to_chars(text, text + sizeof text, int64_t(value)).ptr
                         : std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}
std::string listed(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}
std::string described(const Option& option) {
  const bool all_named = std::all_of(option.allowed.begin(), option.allowed.end(),
                                     [&](const std::string& word) { return mentions(option.help, word); });
  return all_named ? option.help : listed(option.allowed) + ": " + option.help;
}
std::string environment_name(const Option& option) {
  std::string name = "INGOT_" + option.name;
  std::transform(name.begin(), name.end(), name.begin(), [](char c) { return c == '-' ? '_' : char(std::toupper(c)); });
  return name;
}

// --- from words to JSON

const std::string& not_empty(const Option& option, const std::string& word, const std::string& where) {
  const std::string what = option.placeholder.empty() ? option.name : option.placeholder;
  if (word.empty() && !option.empty_allowed && option.allowed.empty())
    fail(ErrorCode::usage, where, ": found an empty word, expected ", what, " (", short_help(option.help), ")");
  return word;
}

Json value_of(const Option& option, const std::string& word, const std::string& where) {
  int64_t integer = 0;
  uint64_t unsigned_integer = 0;
  double number = 0;
  switch (option.kind) {
    case Kind::flag:
      if (word == "1" || word == "true") return true;
      if (word == "0" || word == "false") return false;
      fail(ErrorCode::usage, where, ": found '", word, "', expected true or false");
    case Kind::integer:
      if (parse_number(word, integer)) return integer;
      fail(ErrorCode::usage, where, ": found '", word, "', expected an integer");
    case Kind::unsigned_integer:
      if (parse_number(word, unsigned_integer)) return unsigned_integer;
      fail(ErrorCode::usage, where, ": found '", word, "', expected ", kUnsigned);
    case Kind::number:
      if (parse_number(word, number) && std::isfinite(number)) return number;
      fail(ErrorCode::usage, where, ": found '", word, "', expected a finite number");
    case Kind::text: return not_empty(option, word, where);
    case Kind::list: return Json::array({not_empty(option, word, where)});
  }
  return nullptr;
}

Json loose_value(const std::string& word) {
  Json value = Json::parse(word, nullptr, false);
  return value.is_discarded() ? Json(word) : value;
}

// --- paths

Json& at_path(Json& tree, const std::string& path, const std::string& where) {
  Json* node = &tree;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    if (key.empty()) fail(ErrorCode::usage, where, ": found the key '", path, "', expected names joined by dots");
    if (node->is_null()) *node = Json::object();
    if (!node->is_object())
      fail(ErrorCode::usage, where, ": '", path.substr(0, begin - 1), "' is a ", describe_json(*node),
           ", expected an object");
    node = &(*node)[key];
    begin = end + 1;
  }
  return *node;
}
const Json* find_path(const Json& tree, const std::string& path) {
  const Json* node = &tree;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto found = node->is_object() ? node->find(path.substr(begin, end - begin)) : node->end();
    if (!node->is_object() || found == node->end()) return nullptr;
    node = &*found;
    begin = end + 1;
  }
  return node;
}

// --- from JSON to the command's variables

void store_value(const Option& option, const Json& value, const Source& from) {
  switch (option.kind) {
    case Kind::flag:
      if (!value.is_boolean()) wrong(option, value, from, "true or false");
      *static_cast<bool*>(option.into) = value.get<bool>() != option.negative;
      return;
    case Kind::integer: {
      const bool in_range = value.is_number_integer() && double(value.get<int64_t>()) >= option.low &&
                            double(value.get<int64_t>()) <= option.high;
      if (!in_range) wrong(option, value, from, range_of(option, "an integer"));
      *static_cast<int64_t*>(option.into) = value.get<int64_t>();
      return;
    }
    case Kind::unsigned_integer:
      if (!value.is_number_unsigned()) wrong(option, value, from, kUnsigned);
      *static_cast<uint64_t*>(option.into) = value.get<uint64_t>();
      return;
    case Kind::number: {
      const bool in_range =
          value.is_number() && value.get<double>() >= option.low && value.get<double>() <= option.high;
      if (!in_range) wrong(option, value, from, range_of(option, "a number"));
      *static_cast<double*>(option.into) = value.get<double>();
      return;
    }
    case Kind::text: {
      if (!value.is_string()) wrong(option, value, from, "a string");
      const auto text = value.get<std::string>();
      not_empty(option, text, option.path);
      if (!option.allowed.empty() &&
          std::find(option.allowed.begin(), option.allowed.end(), text) == option.allowed.end()) {
        wrong(option, value, from, "one of " + listed(option.allowed));
      }
      *static_cast<std::string*>(option.into) = text;
      if (option.chosen) option.chosen(text);
      return;
    }
    case Kind::list: {
      auto& into = *static_cast<std::vector<std::string>*>(option.into);
      into.clear();
      for (const Json& item : value.is_array() ? value : Json::array({value})) {
        if (!item.is_string() && !(option.integers && item.is_number_integer()))
          wrong(option, item, from, option.integers ? "an integer" : "a string");
        into.push_back(not_empty(option, item.is_string() ? item.get<std::string>() : item.dump(), option.path));
      }
      return;
    }
  }
}

}  // namespace ingot::cli
