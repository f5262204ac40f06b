#pragma once
// tests/data/text/golden.json: unusual texts, and their ids according to the reference implementations
// (tools/make_text_goldens.py).
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot::testing {

inline std::string text_data(const std::string& name) {
  return std::string(INGOT_SOURCE_DIR) + "/tests/data/text/" + name;
}

struct Golden {
  std::vector<std::string> texts;
  Json json;
  Golden() : json(read_json_file(text_data("golden.json"))) { texts = json["texts"].get<std::vector<std::string>>(); }
  std::vector<std::vector<int32_t>> ids(const char* name) const {
    return json[name].get<std::vector<std::vector<int32_t>>>();
  }
};

}  // namespace ingot::testing
