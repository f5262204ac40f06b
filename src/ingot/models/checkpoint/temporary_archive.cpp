#include "ingot/models/checkpoint/temporary_archive.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "ingot/core/check.h"

namespace ingot {
namespace {

std::string new_file() {
  std::error_code missing;
  const std::filesystem::path directory = std::filesystem::temp_directory_path(missing);
  if (missing) {
    const char* given = std::getenv("TMPDIR");
    fail(ErrorCode::not_found, "TMPDIR: found ", given == nullptr ? "no directory /tmp" : given,
         ", expected a directory for temporary files");
  }
  std::string path = (directory / "ingot-XXXXXX").string();
  const int made = mkstemp(path.data());
  if (made < 0) fail(ErrorCode::io, path, ": found ", std::strerror(errno), ", expected a new file");
  close(made);
  return path;
}

}  // namespace

TemporaryArchive::TemporaryArchive() : name_(new_file()) {}
TemporaryArchive::~TemporaryArchive() {
  std::error_code ignored;
  std::filesystem::remove(path(), ignored);
}

}  // namespace ingot
