#pragma once
// The keys of a config.json. Every key is read, known to be without effect on numbers, or refused by its name if the
// key has a value.
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
  bool has_key(const char* key) const { return json_.contains(key); }  // also with null
  int64_t integer(const char* key, int64_t otherwise);
  int64_t required_integer(const char* key, int64_t low, int64_t high);
  double number(const char* key, double otherwise);
  bool flag(const char* key, bool otherwise);
  std::string text(const char* key, const std::string& otherwise);
  std::vector<int64_t> ids(const char* key);  // a single id or a list of ids
  // A key that, if given, must have the expected value, because a different value describes a different model.
  void must_be(const char* key, const Json& expected);
  // Windows of `window` keys in the layers listed in layer_types, or, without this key, in the layers of `slides`.
  void read_windows(DecoderSpec& spec, int64_t window, const std::function<bool(int64_t layer)>& slides);
  // rope_theta and rope_scaling, or rope_parameters: a single table for all layers.
  RopeTable rope(double default_theta);
  // The table of an object of rope parameters; `theta` where the object has no theta.
  RopeTable rope_table(const Json& object, const std::string& where, double theta);
  // Refuses unread keys, unless their values are null, false, 0 or empty, or the keys are known to have no effect.
  void refuse_unknown() const;
  std::vector<std::string> unknown_keys() const;  // the keys that refuse_unknown() refuses
  [[noreturn]] void wrong(const char* key, const Json& found, const std::string& expected) const;

 private:
  const Json& json_;
  const std::string where_;
  std::set<std::string> used_;
};

}  // namespace ingot
