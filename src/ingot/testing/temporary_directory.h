#pragma once
// A separate directory for tests that write files.
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "ingot/core/check.h"

namespace ingot::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const char* base = ::getenv("TMPDIR");
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/ingot-test-XXXXXX";
    INGOT_CHECK(::mkdtemp(name.data()) != nullptr, "cannot make a temporary directory ", name);
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The exception of a call as "<code>: <message>", or "" when the call returns.
template <class Call> std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return std::string(error_name(e.code)) + ": " + e.what(); }
  return "";
}

}  // namespace ingot::testing
