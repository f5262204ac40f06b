#pragma once
// The name of a new, empty file in the directory of temporary files, which is removed at the end of the object's life.
// An archive written there may be mapped and lives on until it is unmapped.
#include <string>

namespace ingot {

class TemporaryArchive {
 public:
  TemporaryArchive();
  ~TemporaryArchive();
  TemporaryArchive(const TemporaryArchive&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ingot
