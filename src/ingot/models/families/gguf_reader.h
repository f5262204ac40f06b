#pragma once
// The metadata of a GGUF file, under its architecture's name.
#include <set>
#include <string>

#include "ingot/io/formats/gguf.h"
#include "ingot/models/spec.h"

namespace ingot {

class GgufReader {
 public:
  explicit GgufReader(const std::string& path);
  const GgufFile& file() const { return file_; }
  const std::string& architecture() const { return architecture_; }

  // The value of the key that consists of the architecture and `name`. Error{bad_data} if there is no such key.
  int64_t integer(const char* name) const;
  double number(const char* name) const;
  std::optional<int64_t> find_integer(const char* name) const { return file_.integer(key(name)); }
  std::optional<double> find_number(const char* name) const { return file_.number(key(name)); }
  // A key that, if given, must have the expected value.
  void must_be(const char* name, double expected) const;
  const SafetensorsEntry* tensor(const std::string& name) const;  // null when absent
  // Refuses keys under the architecture's name that nothing has asked for, unless their values are false, 0 or empty,
  // or the keys are known to have no effect.
  void refuse_unknown() const;

  // Sizes, norm, rotation and tokens, common to all architectures.
  DecoderSpec read_common() const;

 private:
  std::string key(const char* name) const { return *used_.insert(architecture_ + "." + name).first; }
  RopeTable read_rope(int64_t head_dim) const;
  void read_tokens(DecoderSpec& spec) const;
  const GgufSet set_;
  const GgufFile& file_;
  const std::string architecture_;
  mutable std::set<std::string> used_;
};

}  // namespace ingot
