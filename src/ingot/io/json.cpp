#include "ingot/io/json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "ingot/io/file.h"

template class nlohmann::basic_json<>;

namespace ingot {
namespace {

// An iterator that reports the lexer's position to the handler below, for messages.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  const char* at;
  const char** furthest;
  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    *furthest = ++at;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator& o) const { return at == o.at; }
  bool operator!=(const CountingIterator& o) const { return at != o.at; }
};

std::string shortened(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size() && i < 40; ++i) out += text[i] < ' ' || text[i] == 127 ? '?' : text[i];
  return text.size() > 40 ? out + "..." : out;
}

// Builds the document, and refuses deviations that nlohmann's own builder accepts.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const std::string& where, const char* begin, const char* const* furthest, int max_depth)
      : where_(where), begin_(begin), furthest_(furthest), max_depth_(max_depth) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool v) override { return put(v); }
  bool number_integer(number_integer_t v) override { return put(v); }
  bool number_unsigned(number_unsigned_t v) override { return put(v); }
  bool number_float(number_float_t v, const string_t& text) override {
    // The lexer turns an integer beyond 64 bits into a double: a silent change of value.
    if (text.find_first_of(".eE") == std::string::npos)
      refuse("integer " + shortened(text) + ", expected one of 64 bits");
    return put(v);
  }
  bool string(string_t& v) override { return put(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }
  bool key(string_t& k) override {
    const auto [slot, added] = stack_.back()->get_ref<Json::object_t&>().emplace(k, nullptr);
    if (!added) refuse("duplicate key \"" + shortened(k) + "\"");
    slot_ = &slot->second;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing value - ..."
    // "[json.exception.out_of_range.406] number overflow parsing '1e400'"
    std::string text = e.what();
    if (const size_t its_name = text.find("] "); text.starts_with('[') && its_name != std::string::npos)
      text = text.substr(its_name + 2);
    if (const size_t colon = text.find(": "); text.starts_with("parse error at") && colon != std::string::npos)
      text = text.substr(colon + 2);
    constexpr size_t kShown = 200;  // the message ends with the last token, perhaps most of the text
    if (text.size() > kShown) text = text.substr(0, kShown) + "...";
    fail(ErrorCode::bad_data, where_, ": byte ", position > 0 ? position - 1 : 0, ": ", text);
  }
  Json result;

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail(ErrorCode::bad_data, where_, ": byte ", *furthest_ - begin_, ": found ", what);
  }
  template <class T> Json* put(T&& v) {
    Json* at;
    if (stack_.empty()) {
      result = Json(std::forward<T>(v));
      at = &result;
    } else if (stack_.back()->is_array()) {
      auto& array = stack_.back()->get_ref<Json::array_t&>();
      array.emplace_back(std::forward<T>(v));
      at = &array.back();
    } else {
      *slot_ = Json(std::forward<T>(v));
      at = slot_;
    }
    return at;
  }
  bool open(Json&& container) {
    if (int(stack_.size()) >= max_depth_) refuse(detail::concat("nesting deeper than ", max_depth_));
    stack_.push_back(put(std::move(container)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  const std::string& where_;
  const char* begin_;
  const char* const* furthest_;
  int max_depth_;
  // Open containers. A growing array never moves an open container, because this container is the last element.
  std::vector<Json*> stack_;
  Json* slot_ = nullptr;
};

template <class J> std::string dump(const J& value, int indent) {
  try {
    return value.dump(indent);
  } catch (const nlohmann::detail::exception&) {  // the parser throws no other exception
    fail(ErrorCode::bad_data, "json: found text that is not UTF-8, which JSON cannot hold");
  }
}

// dump() writes NaN as null, and null would be read back as a different value.
template <class J> void check_finite(const J& value) {
  if (value.is_number_float())
    INGOT_CHECK(std::isfinite(value.template get<double>()),
                "json: found a number that is not finite, expected finite");
  if (value.is_structured())
    for (const auto& item : value) check_finite(item);
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// The description of a field of type T, and whether a value fits.
template <class T> std::string expected_text() {
  if constexpr (std::is_same_v<T, bool>)
    return "true or false";
  else if constexpr (std::is_same_v<T, int64_t>)
    return "an integer";
  else if constexpr (std::is_integral_v<T>)
    return detail::concat("an integer in [", std::numeric_limits<T>::min(), ", ", std::numeric_limits<T>::max(), "]");
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else if constexpr (std::is_same_v<T, std::string>)
    return "a string";
  else
    return "an array, each element " + expected_text<typename T::value_type>();
}

template <class T> bool convert(const Json& value, T& into) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) return false;
    into = value.get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    if (value.is_number_unsigned()) {
      const uint64_t v = value.get<uint64_t>();
      if (v > uint64_t(std::numeric_limits<T>::max())) return false;
      into = T(v);
    } else if (value.is_number_integer()) {
      const int64_t v = value.get<int64_t>();
      if (v < 0 && std::is_unsigned_v<T>) return false;
      if (v < 0 && v < int64_t(std::numeric_limits<T>::min())) return false;
      if (v > 0 && uint64_t(v) > uint64_t(std::numeric_limits<T>::max())) return false;
      into = T(v);
    } else {
      return false;
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    if (!value.is_number()) return false;
    const T v = T(value.get<double>());
    if (!std::isfinite(v)) return false;
    into = v;
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.is_string()) return false;
    into = value.get_ref<const std::string&>();
  } else {
    if (!value.is_array()) return false;
    T all;
    for (const Json& item : value) {
      typename T::value_type one{};
      if (!convert(item, one)) return false;
      all.push_back(std::move(one));
    }
    into = std::move(all);
  }
  return true;
}

}  // namespace

Json parse_json(std::string_view bytes, const std::string& where, const JsonLimits& limits) {
  if (int64_t(bytes.size()) > limits.bytes)
    fail(ErrorCode::bad_data, where, ": found ", bytes.size(), " bytes of JSON, expected at most ", limits.bytes);
  if (bytes.substr(0, 3) == "\xEF\xBB\xBF")
    fail(ErrorCode::bad_data, where, ": byte 0: found a byte-order mark, expected JSON without one");
  // The lexer takes NUL for the end of the input and would ignore the rest.
  if (const size_t nul = bytes.find('\0'); nul != std::string_view::npos)
    fail(ErrorCode::bad_data, where, ": byte ", nul, ": found a NUL byte, expected JSON text");
  const char* furthest = bytes.data();
  Builder builder(where, bytes.data(), &furthest, limits.depth);
  const CountingIterator begin{bytes.data(), &furthest}, end{bytes.data() + bytes.size(), &furthest};
  if (!Json::sax_parse(begin, end, &builder)) fail(ErrorCode::bad_data, where, ": not JSON");
  return std::move(builder.result);
}

Json read_json_file(const std::string& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.bytes), path, limits);
}

std::string write_json(const Json& value, int indent) {
  check_finite(value);
  return dump(value, indent);
}
std::string write_json(const OrderedJson& value, int indent) {
  check_finite(value);
  return dump(value, indent);
}
std::string show_json(const OrderedJson& value, int indent) {
  check_finite(value);
  return value.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string describe_json(const Json& value) {
  if (value.is_string()) return "string \"" + shortened(value.get_ref<const std::string&>()) + "\"";
  if (value.is_number()) return "number " + value.dump();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  return value.is_array() && value.empty() ? "empty array" : value.type_name();
}

Fields::Fields(const Json& object, std::string where, ErrorCode code)
    : object_(&object), where_(std::move(where)), code_(code) {
  if (!object.is_object()) fail(code_, where_, ": found ", describe_json(object), ", expected an object");
}

bool Fields::has(const char* key) const { return object_->contains(key); }

const Json* Fields::take(const char* key) {
  known_.push_back(key);
  const auto at = object_->find(key);
  return at == object_->end() ? nullptr : &*at;
}

Fields Fields::object(const char* key) {
  const Json* value = take(key);
  if (value == nullptr) missing(key);
  return Fields(*value, where_ + ": " + key, code_);
}

template <class T> bool Fields::read_value(const char* key, T& into) {
  const Json* value = take(key);
  if (value == nullptr) return false;
  if (!convert(*value, into)) wrong(key, expected_text<T>());
  return true;
}
bool Fields::read(const char* key, bool& into) { return read_value(key, into); }
bool Fields::read(const char* key, int32_t& into) { return read_value(key, into); }
bool Fields::read(const char* key, uint32_t& into) { return read_value(key, into); }
bool Fields::read(const char* key, int64_t& into) { return read_value(key, into); }
bool Fields::read(const char* key, uint64_t& into) { return read_value(key, into); }
bool Fields::read(const char* key, float& into) { return read_value(key, into); }
bool Fields::read(const char* key, double& into) { return read_value(key, into); }
bool Fields::read(const char* key, std::string& into) { return read_value(key, into); }
bool Fields::read(const char* key, std::vector<int64_t>& into) { return read_value(key, into); }
bool Fields::read(const char* key, std::vector<double>& into) { return read_value(key, into); }
bool Fields::read(const char* key, std::vector<std::string>& into) { return read_value(key, into); }

void Fields::wrong(const char* key, const std::string& expected) const {
  const auto at = object_->find(key);
  fail(code_, where_, ": key \"", key, "\": found ", at == object_->end() ? "nothing" : describe_json(*at),
       ", expected ", expected);
}

std::string nearest_name(std::string_view word, const std::vector<std::string>& names) {
  if (word.size() > 100) return "";  // no name is so long, and the time of a comparison grows with both lengths
  std::string near;
  size_t best = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& name : names)
    if (const size_t distance = edit_distance(word, name); distance < best) best = distance, near = name;
  return near;
}

void Fields::missing(const char* key) const { fail(code_, where_, ": key \"", key, "\" is missing"); }

void Fields::finish() const {
  for (const auto& [key, value] : object_->items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::string near = nearest_name(key, known_);
    std::string all;
    for (const std::string& name : known_) all += (all.empty() ? "" : ", ") + name;
    fail(code_, where_, ": found the unknown key \"", shortened(key), "\"",
         near.empty() ? "" : " (did you mean \"" + near + "\"?)", ", expected ",
         all.empty() ? "none" : "one of " + all);
  }
}

}  // namespace ingot
