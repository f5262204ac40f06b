#pragma once
// Strict JSON (RFC 8259) on nlohmann-json: deviations accepted by the library are refused here. No duplicate keys,
// byte-order mark, NUL, NaN, comments or trailing bytes; integers fit 64 bits or are errors; nesting and size are
// bounded. Include this in .cpp files; headers of other folders pass text.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/check.h"

// Compiled once, in json.cpp, not in every file with JSON.
extern template class nlohmann::basic_json<>;

namespace ingot {

using Json = nlohmann::json;                 // keys sorted
using OrderedJson = nlohmann::ordered_json;  // keys as inserted; for small objects with human readers

struct JsonLimits {
  int depth = 64;
  int64_t bytes = int64_t(256) << 20;
};

// Throws Error{bad_data}: "<where>: byte <offset>: <text found>".
Json parse_json(std::string_view bytes, const std::string& where, const JsonLimits& limits = {});
Json read_json_file(const std::string& path, const JsonLimits& limits = {});

// A single line, or indented. Refuses values without JSON form: NaN, infinities, strings that are not UTF-8.
std::string write_json(const Json& value, int indent = -1);
std::string write_json(const OrderedJson& value, int indent = -1);
// For readers: text that is not UTF-8, such as a file's name, is shown with U+FFFD.
std::string show_json(const OrderedJson& value, int indent = -1);

// A short description for messages: "string \"abc\"", "number 1.5", "array".
std::string describe_json(const Json& value);

// The name nearest to a mistyped `word`, or empty where no name is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& names);

// Reads the fields of an object by type. An unknown key is an error with the list of known keys.
//   Fields fields(json, "config.json");
//   fields.read("layers", config.layers);     // keeps the default when absent
//   fields.require("vocab", config.vocab);    // must be present
//   fields.finish();
class Fields {
 public:
  // `object` must outlive the reader. `code` is the code of its errors (a configuration uses ErrorCode::usage).
  Fields(const Json& object, std::string where, ErrorCode code = ErrorCode::bad_data);

  bool has(const char* key) const;
  // True when the key was there. Integers must be integers in range; floating fields accept integers.
  bool read(const char* key, bool& into);
  bool read(const char* key, int32_t& into);
  bool read(const char* key, uint32_t& into);
  bool read(const char* key, int64_t& into);
  bool read(const char* key, uint64_t& into);
  bool read(const char* key, float& into);
  bool read(const char* key, double& into);
  bool read(const char* key, std::string& into);
  bool read(const char* key, std::vector<int64_t>& into);
  bool read(const char* key, std::vector<double>& into);
  bool read(const char* key, std::vector<std::string>& into);
  template <class T> void require(const char* key, T& into) {
    if (!read(key, into)) missing(key);
  }
  // A nested value, for the caller to interpret; null when absent.
  const Json* take(const char* key);
  // An existing nested object; its errors name `where.key`.
  Fields object(const char* key);
  void ignore(const char* key) { known_.push_back(key); }
  void finish() const;
  [[noreturn]] void wrong(const char* key, const std::string& expected) const;
  const std::string& where() const { return where_; }

 private:
  template <class T> bool read_value(const char* key, T& into);
  [[noreturn]] void missing(const char* key) const;

  const Json* object_;
  std::string where_;
  ErrorCode code_;
  std::vector<std::string> known_;
};

}  // namespace ingot
