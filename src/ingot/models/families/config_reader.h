#pragma once
// The keys of a config.json. Every key is asked for, known to be without effect on numbers, or refused by its name
// where it has a value.
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "ingot/io/json.h"
#include "ingot/models/spec.h"

namespace ingot {

class ConfigReader {
 public:
  ConfigReader(const Json& json, std::string where);
  const std::string& where() const { return where_; }

  // The value; null counts as absent.
  const Json* find(const char* key);
  bool given(const char* key) { return find(key) != nullptr; }
  int64_t integer(const char* key, int64_t otherwise);
  int64_t required_integer(const char* key, int64_t low, int64_t high);
  double number(const char* key, double otherwise);
  bool flag(const char* key, bool otherwise);
  std::string text(const char* key, const std::string& otherwise);
  std::vector<int64_t> ids(const char* key);  // one id or a list of ids
  // A value that must be this one where it is given, because another would ask for another model.
  void must_be(const char* key, const Json& expected);
  // Windows of `window` keys in the layers that layer_types names, or without that key `slides`.
  void read_windows(DecoderSpec& spec, int64_t window, const std::function<bool(int64_t layer)>& slides);
  // rope_theta and rope_scaling, or rope_parameters: one table for all layers.
  RopeTable rope(double default_theta);
  // The table of one object of rope parameters; `theta` where it names none.
  RopeTable rope_table(const Json& object, const std::string& where, double theta);
  // The keys that nobody asked for: refused, unless they are null, false, 0 or empty or known to have no effect.
  void refuse_unknown() const;
  [[noreturn]] void wrong(const char* key, const Json& found, const std::string& expected) const;

 private:
  const Json& json_;
  const std::string where_;
  std::set<std::string> used_;
};

}  // namespace ingot
